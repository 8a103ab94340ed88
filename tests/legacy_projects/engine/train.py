"""A trainer in another file gets model and optimizer."""

import argparse

import horovod.torch as hvd
import torch
from data import batches
from engine import Engine
from models import Net

parser = argparse.ArgumentParser()
parser.add_argument("output")
parser.add_argument("--fp16-allreduce", action="store_true", default=False)
args = parser.parse_args()

hvd.init()
torch.manual_seed(5)
net = Net()
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(net.parameters(), lr=0.1), named_parameters=net.named_parameters(), compression=compression
)
hvd.broadcast_parameters(net.state_dict(), root_rank=0)
engine = Engine(net, optimizer, clip=0.5)
engine.fit(batches(hvd.rank(), hvd.size()))
if hvd.rank() == 0:
    torch.save(net.state_dict(), args.output)
