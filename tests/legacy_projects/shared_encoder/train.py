"""A model with methods that other files call, trained by two losses in two backward passes."""

import sys

import horovod.torch as hvd
import torch
from data import batches
from losses import contrast, reconstruct
from twins import Twins


def main():
    hvd.init()
    torch.manual_seed(5)
    twins = Twins()
    hvd.broadcast_parameters(twins.state_dict(), root_rank=0)
    adam = torch.optim.Adam(list(twins.parameters()), lr=0.02, betas=(0.5, 0.9))
    opt = hvd.DistributedOptimizer(adam, named_parameters=list(twins.named_parameters()), backward_passes_per_step=2)
    for x, _ in batches(hvd.rank(), hvd.size()):
        opt.zero_grad()
        contrast(twins, x).backward()
        reconstruct(twins, x).backward()
        opt.step()
    if hvd.rank() == 0:
        torch.save(twins.state_dict(), sys.argv[1])


main()
