"""Two models and their optimizers, in lists."""

import sys

import horovod.torch as hvd
import torch
from data import batches
from players import Critic, Generator
from steps import critic_step, generator_step

hvd.init()
torch.manual_seed(5)
models = [Generator(), Critic()]
optimizers = [
    hvd.DistributedOptimizer(
        torch.optim.RMSprop(models[0].parameters(), lr=0.01), named_parameters=models[0].named_parameters(prefix="g")
    ),
    hvd.DistributedOptimizer(
        torch.optim.RMSprop(models[1].parameters(), lr=0.01), named_parameters=models[1].named_parameters(prefix="c")
    ),
]
for model in models:
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for x, _ in batches(hvd.rank(), hvd.size()):
    critic_step(models, optimizers[1], x)
    generator_step(models, optimizers[0], x)
if hvd.rank() == 0:
    torch.save({"g": models[0].state_dict(), "c": models[1].state_dict()}, sys.argv[1])
