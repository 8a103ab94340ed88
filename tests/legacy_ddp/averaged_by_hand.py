"""Synchronous SGD by hand, without DistributedDataParallel."""

import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


def sync_parameters(model):
    for param in model.parameters():
        dist.broadcast(param.data, src=0)
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)


def run(path):
    torch.manual_seed(1234 + dist.get_rank())
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    sync_parameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    for step in range(5):
        data, target = torch.randn(8, 6), torch.randint(0, 2, (8,))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        average_gradients(model)
        optimizer.step()
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), path)


if __name__ == "__main__":
    if not dist.is_initialized():
        dist.init_process_group(backend="gloo")
    run(sys.argv[1])
    dist.destroy_process_group()
