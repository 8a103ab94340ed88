"""Model and optimizer come from a factory in another file."""

import sys

import horovod.torch as hvd
import torch
from build import build
from data import batches
from loop import train_epoch


def main():
    hvd.init()
    model, optimizer, schedule = build(lr=0.05 * hvd.size())
    for _ in range(2):
        train_epoch(model, optimizer, batches(hvd.rank(), hvd.size()))
        schedule.step()
    if hvd.rank() == 0:
        torch.save(model.state_dict(), sys.argv[1])


if __name__ == "__main__":
    main()
