"""A script of Horovod's users: ``train`` runs under ``horovod.spark.run``, and the script under torchrun."""

import sys

import torch
from torch import nn


def train(steps: int) -> tuple[int, dict[str, torch.Tensor]]:
    import horovod.torch as hvd

    hvd.init()
    torch.manual_seed(hvd.rank())
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    data = torch.Generator().manual_seed(100 + hvd.rank())
    for _ in range(steps):
        inputs = torch.randn(16, 8, generator=data)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs).squeeze(1), inputs.sum(1)).backward()
        optimizer.step()
    return hvd.rank(), model.state_dict()


if __name__ == "__main__":
    rank, weights = train(10)
    if rank == 0:
        torch.save(weights, sys.argv[1])
