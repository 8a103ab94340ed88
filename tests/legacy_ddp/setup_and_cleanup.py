"""The shape of PyTorch's tutorial: setup, train, cleanup."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel as DDP


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def setup():
    # initialize the process group
    dist.init_process_group("gloo")


def cleanup():
    dist.destroy_process_group()


def demo_basic(path):
    setup()
    rank = dist.get_rank()
    print(f"Running basic DDP example on rank {rank}.")
    torch.manual_seed(rank)
    model = ToyModel()
    ddp_model = DDP(model)

    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.01)
    for step in range(5):
        optimizer.zero_grad()
        outputs = ddp_model(torch.randn(20, 10))
        labels = torch.randn(20, 5)
        loss_fn(outputs, labels).backward()
        optimizer.step()

    if rank == 0:
        torch.save(ddp_model.state_dict(), path)
    cleanup()


if __name__ == "__main__":
    demo_basic(sys.argv[1])
