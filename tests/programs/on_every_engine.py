"""Train the same on each backend that is named, one after the other, in one world; prints where each rank was and the
weights. ``drop-in`` is unidist.hvd, ``hvd`` what ``horovod`` means.
"""

import importlib
import json
import socket
import sys
from collections.abc import Iterable

import torch
from torch import nn

import unidist


def data(rank: int, size: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's part of the step's 12 samples."""
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(step))
    return x[rank::size], (x @ torch.arange(6.0).unsqueeze(1))[rank::size]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, size: int) -> None:
    for step in range(6):
        x, y = data(rank, size, step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def new_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def report(name: str, place: Iterable[object], model: nn.Module) -> None:
    weights = [round(value, 6) for p in model.parameters() for value in p.flatten().tolist()]
    line = {"engine": name, "place": [*place, socket.gethostname()], "weights": weights}
    # One write, so that the ranks' lines stay whole.
    sys.stdout.write(f"TRAINED {json.dumps(line)}\n")
    sys.stdout.flush()


def main() -> None:
    for name in sys.argv[1:]:
        model = new_model()
        if name in ("hvd", "drop-in"):
            hvd = importlib.import_module("horovod.torch" if name == "hvd" else "unidist.hvd")
            hvd.init()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            train(model, optimizer, hvd.rank(), hvd.size())
            report(
                f"{name} is {hvd.__name__}" if name == "hvd" else name,
                (hvd.rank(), hvd.size(), hvd.local_rank()),
                model,
            )
            hvd.shutdown()
            continue
        unidist.init(name)
        wrapped = unidist.wrap_model(model)
        train(wrapped, torch.optim.SGD(model.parameters(), lr=0.05), unidist.rank(), unidist.world_size())
        report(unidist.backend_name(), (unidist.rank(), unidist.world_size(), unidist.local_rank()), model)
        unidist.shutdown()


if __name__ == "__main__":
    main()
