import sys

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

deepspeed.init_distributed("gloo")
torch.manual_seed(0)
data = torch.randn(32, 4)
dataset = TensorDataset(data, data.sum(1, keepdim=True))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config={"train_micro_batch_size_per_gpu": 4})
for x, y in DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset, shuffle=False)):
    engine.backward(torch.nn.functional.mse_loss(engine(x), y))
    engine.step()
print(f"WORLD deepspeed {dist.get_rank()} {dist.get_world_size()}\n", end="", flush=True)
if dist.get_rank() == 0:
    torch.save(engine.module.state_dict(), sys.argv[1])
