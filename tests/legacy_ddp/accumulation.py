import datetime
import sys

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=5))
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 1))
model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1, gradient_as_bucket_view=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
data = torch.randn(24, 5)[rank::size]
seen = torch.zeros(1)
for step in range(4):
    with model.no_sync():
        (model(data[:3]).pow(2).mean() / 2).backward()
    (model(data[3:6]).pow(2).mean() / 2).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    seen += 6
dist.all_reduce(seen)
norm = norm.detach()
dist.all_reduce(norm, op=dist.ReduceOp.MAX)
dist.barrier()
if rank == 0:
    torch.save({"seen": seen, "norm": norm, **model.state_dict()}, sys.argv[1])
dist.destroy_process_group()
