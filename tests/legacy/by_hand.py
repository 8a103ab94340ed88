"""Gradients reduced by hand, in place, with a plain optimizer."""

import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from horovod.torch import broadcast_parameters
from horovod.torch.mpi_ops import Sum, allreduce_, allreduce_async_, init, rank, size, synchronize


def batches(rank, size, steps=6, rows=12):
    draw = torch.Generator().manual_seed(11)
    for _ in range(steps):
        x, y = torch.randn(rows, 4, generator=draw), torch.randint(0, 3, (rows,), generator=draw)
        yield x[rank::size], y[rank::size]


def make_model():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


init()
model = make_model()
broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step, (x, y) in enumerate(batches(rank(), size())):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    if step % 2:
        for name, param in model.named_parameters():
            allreduce_(param.grad, name=name)
    else:
        named = reversed(list(model.named_parameters())) if rank() % 2 else model.named_parameters()
        handles = [(p, allreduce_async_(p.grad, name=name, op=Sum)) for name, p in named]
        for param, handle in handles:
            synchronize(handle)
            param.grad /= size()
    optimizer.step()
if rank() == 0:
    torch.save(model.state_dict(), sys.argv[1])
