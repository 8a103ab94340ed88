import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = torch.randn(32, 4)
dataset = TensorDataset(data, data.sum(1, keepdim=True))
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for layer in (*model, model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset, shuffle=False)):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
print(f"WORLD fsdp2 {dist.get_rank()} {dist.get_world_size()}\n", end="", flush=True)
weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
if dist.get_rank() == 0:
    torch.save(weights, sys.argv[1])
