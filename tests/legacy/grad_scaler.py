"""The dance of mixed precision."""

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
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for x, y in batches(hvd.rank(), hvd.size()):
    optimizer.zero_grad()
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()
if hvd.rank() == 0:
    torch.save(model.state_dict(), sys.argv[1])
