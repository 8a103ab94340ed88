"""A layer that the forward pass leaves out: its gradient is zero, and weight decay still shrinks it."""

import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from horovod import torch as hvd


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.used(x)


def batches(rank, size, steps=6, rows=12):
    draw = torch.Generator().manual_seed(11)
    for _ in range(steps):
        x, y = torch.randn(rows, 4, generator=draw), torch.randint(0, 3, (rows,), generator=draw)
        yield x[rank::size], y[rank::size]


def make_model():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


hvd.init()
torch.manual_seed(5)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for x, y in batches(hvd.rank(), hvd.size()):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
if hvd.rank() == 0:
    torch.save(model.state_dict(), sys.argv[1])
