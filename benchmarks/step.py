"""A whole training step: zero_grad, forward, backward with its reduction, optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unidist
from benchmarks import peers
from benchmarks.measure import OURS, Case, alternate
from benchmarks.models import WORKLOADS

Step = Callable[[], object]


def cases(world: str, rounds: int, quick: bool) -> Iterator[Case]:
    """Yield one case for each model."""
    for name, workload in WORKLOADS.items():
        contenders: dict[str, Step] = {}
        batch = workload.batch()
        for contender, prepare in {OURS: _ours, "replicate": _in_place, **peers.trainers()}.items():
            torch.manual_seed(0)
            model = workload.make().to(unidist.device())
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
            contenders[contender] = training_step(
                *prepare(model, optimizer), *(part.to(unidist.device()) for part in batch)
            )
        yield Case("step", world, name, alternate(contenders, rounds))


def _ours(model: nn.Module, optimizer: torch.optim.Optimizer) -> peers.Prepared:
    return unidist.wrap_model(model), optimizer, Tensor.backward


def _in_place(model: nn.Module, optimizer: torch.optim.Optimizer) -> peers.Prepared:
    return unidist.replicate(model), optimizer, Tensor.backward


def training_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, backward: peers.Backward, inputs: Tensor, labels: Tensor
) -> Step:
    """Return what is measured."""

    def step() -> None:
        optimizer.zero_grad()
        backward(F.cross_entropy(model(inputs), labels))
        optimizer.step()

    return step
