"""Optimizer state that only rank 0 has loaded, broadcast after wrapping."""

import sys

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
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
state = None
if hvd.rank() == 0:
    twin = make_model()
    trained = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
    for x, y in batches(0, 1, steps=2):
        trained.zero_grad()
        F.cross_entropy(twin(x), y).backward()
        trained.step()
    state = trained.state_dict()
    model.load_state_dict(twin.state_dict())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
if hvd.rank() == 0:
    optimizer.load_state_dict(state)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
start = hvd.broadcast_object(2 if hvd.rank() == 0 else 0, root_rank=0, name="start")
assert optimizer.param_groups[0]["lr"] == 0.05 and start == 2
for x, y in batches(hvd.rank(), hvd.size()):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
if hvd.rank() == 0:
    torch.save(model.state_dict(), sys.argv[1])
