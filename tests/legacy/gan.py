"""Two models and two optimizers, whose parameters have the same names."""

import sys

import horovod.torch as hvd
import torch
import torch.nn as nn


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
generator, critic = nn.Sequential(nn.Linear(2, 4)), nn.Sequential(nn.Linear(4, 1))
optimizers = []
for model in (generator, critic):
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    optimizers.append(hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters()))
for x, _ in batches(hvd.rank(), hvd.size()):
    noise = x[:, :2]
    optimizers[1].zero_grad()
    (critic(generator(noise).detach()).mean() - critic(x).mean()).backward()
    optimizers[1].step()
    critic.requires_grad_(False)
    optimizers[0].zero_grad()
    (-critic(generator(noise)).mean()).backward()
    optimizers[0].step()
    critic.requires_grad_(True)
if hvd.rank() == 0:
    whole = {f"g.{k}": v for k, v in generator.state_dict().items()}
    torch.save({**whole, **{f"c.{k}": v for k, v in critic.state_dict().items()}}, sys.argv[1])
