"""Gradients clipped between synchronize() and a step that skips it."""

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
optimizer = hvd.DistributedOptimizer(
    torch.optim.Adam(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for x, y in batches(hvd.rank(), hvd.size()):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    with optimizer.skip_synchronize():
        optimizer.step()
if hvd.rank() == 0:
    torch.save(model.state_dict(), sys.argv[1])
