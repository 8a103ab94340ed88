"""A preconditioner keeps the model and changes gradients between synchronize() and step()."""

import sys

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from data import batches
from net import make_model
from preconditioner import Preconditioner

hvd.init()
model = make_model()
preconditioner = Preconditioner(model, damping=0.5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.none, op=hvd.Average
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
for x, y in batches(hvd.rank(), hvd.size()):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.synchronize()
    preconditioner.step()
    with optimizer.skip_synchronize():
        optimizer.step()
if hvd.rank() == 0:
    torch.save(model.state_dict(), sys.argv[1])
