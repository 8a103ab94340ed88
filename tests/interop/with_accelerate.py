import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
torch.manual_seed(0)
data = torch.randn(32, 4)
loader = DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), batch_size=4)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
    optimizer.step()
print(f"WORLD accelerate {accelerator.process_index} {accelerator.num_processes}\n", end="", flush=True)
accelerator.save(accelerator.unwrap_model(model).state_dict(), sys.argv[1])
