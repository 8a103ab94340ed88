"""Gradients are accumulated in a loop of another file."""

import sys

import horovod.torch as hvd
import torch
from config import Config
from data import batches
from loop import Accumulator
from net import make_model

hvd.init()
config = Config()
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=config.passes
)
hvd.broadcast_parameters(model.state_dict(), 0)
accumulator = Accumulator(model, optimizer, config.passes)
for x, y in batches(hvd.rank(), hvd.size()):
    accumulator.micro_step(x, y)
if hvd.rank() == 0:
    torch.save(model.state_dict(), sys.argv[1])
