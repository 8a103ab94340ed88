"""Several backward passes a step, as in the ImageNet example."""

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
    torch.optim.SGD(model.parameters(), lr=0.1),
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.none,
    backward_passes_per_step=2,
    op=hvd.Average,
    gradient_predivide_factor=1.0,
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for x, y in batches(hvd.rank(), hvd.size()):
    optimizer.zero_grad()
    half = len(x) // 2
    for part in (slice(0, half), slice(half, None)):
        (F.cross_entropy(model(x[part]), y[part]) / 2).backward()
    optimizer.step()
if hvd.rank() == 0:
    torch.save(model.state_dict(), sys.argv[1])
