"""One of several heads per batch, another one on each rank; the others get no gradient there."""

import sys

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from data import batches
from model import MultiTask

hvd.init()
torch.manual_seed(5)
model = MultiTask(tasks=4)
named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
optimizer = torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9, weight_decay=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for step, (x, y) in enumerate(batches(hvd.rank(), hvd.size())):
    optimizer.zero_grad()
    task = (step + hvd.rank()) % 3  # the last head is never used
    F.cross_entropy(model(x, task), y).backward()
    optimizer.step()
if hvd.rank() == 0:
    torch.save(model.state_dict(), sys.argv[1])
