import sys

import torch
from lightning_fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="cpu", strategy="ddp", devices=2)
fabric.launch()
torch.manual_seed(0)
data = torch.randn(32, 4)
loader = DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), batch_size=4)
model = torch.nn.Linear(4, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
for x, y in fabric.setup_dataloaders(loader):
    optimizer.zero_grad()
    fabric.backward(torch.nn.functional.mse_loss(model(x), y))
    optimizer.step()
print(f"WORLD fabric {fabric.global_rank} {fabric.world_size}\n", end="", flush=True)
fabric.save(sys.argv[1], {"model": model})
