"""Code that looks at the class of its optimizer, and a schedule."""

import sys

import horovod
import horovod.torch as hvd
import torch
import torch.nn as nn
import torch.nn.functional as F


def batches(rank, size, steps=6, rows=12):
    draw = torch.Generator().manual_seed(11)
    for _ in range(steps):
        x, y = torch.randn(rows, 4, generator=draw), torch.randint(0, 3, (rows,), generator=draw)
        yield x[rank::size], y[rank::size]


def make_model():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


hvd.init()
assert horovod.__version__
model = make_model()
plain = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters(), op=hvd.mpi_ops.Sum)
assert isinstance(optimizer, torch.optim.AdamW) and optimizer.__class__.__name__ == "AdamW"
assert issubclass(optimizer.__class__, plain.__class__) and optimizer.__class__ is not plain.__class__
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for x, y in batches(hvd.rank(), hvd.size()):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    schedule.step()
if hvd.rank() == 0:
    torch.save(model.state_dict(), sys.argv[1])
