"""Rank 0 has the checkpoint; the others get it by broadcasts of a helper file."""

import sys

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from checkpoints import is_root, restore
from data import batches
from net import make_model

hvd.init()
model = make_model()
if hvd.rank() != 0:
    torch.nn.init.zeros_(model[0].weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
epoch = restore(model)
assert epoch == 3
losses = []
for x, y in batches(hvd.rank(), hvd.size()):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(hvd.allreduce(loss.detach(), name="loss").item())
if is_root():
    torch.save({**model.state_dict(), "losses": torch.tensor(losses)}, sys.argv[1])
