"""An embedding with sparse gradients."""

import sys

import horovod.torch as hvd
import torch
import torch.nn as nn
import torch.nn.functional as F

hvd.init()
torch.manual_seed(5)
model = nn.EmbeddingBag(20, 3, sparse=True)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.5), named_parameters=model.named_parameters()
)
draw = torch.Generator().manual_seed(3)
for _ in range(6):
    rows, labels = torch.randint(0, 20, (12, 2), generator=draw), torch.randint(0, 3, (12,), generator=draw)
    rows, labels = rows[hvd.rank() :: hvd.size()], labels[hvd.rank() :: hvd.size()]
    optimizer.zero_grad()
    F.cross_entropy(model(rows), labels).backward()
    optimizer.step()
if hvd.rank() == 0:
    torch.save(model.state_dict(), sys.argv[1])
