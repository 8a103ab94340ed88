"""The records of a side's ranks, read back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from unidist.compare.encoding import decoded


@dataclass(frozen=True)
class OptimizerRecord:
    """An optimizer with its parameters, and sketches of their weights before its first step."""

    kind: str
    names: Sequence[str]
    shapes: Sequence[Sequence[int]]
    start: Tensor
    #: Whether Horovod itself had been imported.
    horovod: bool = False
    #: The rounding error of the coarsest dtype of its parameters and of what is sent of their gradients.
    precision: float = 0.0

    @cached_property
    def sizes(self) -> Tensor:
        """The parameters' numbers of elements."""
        return torch.tensor([math.prod(shape) for shape in self.shapes], dtype=torch.float64)


@dataclass(frozen=True)
class StepRecord:
    """A step: the number of its optimizer, the losses since the last step, and sketches for each parameter."""

    optimizer: int
    losses: Sequence[float]
    gradients: Tensor
    weights: Tensor


@dataclass
class RankRecord:
    """The records of one process."""

    optimizers: list[OptimizerRecord] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    #: Number of steps without backward pass and gradients.
    idle: int = 0


@dataclass
class Recording:
    """The records of a side."""

    ranks: list[RankRecord]
    #: Rank 0's weights when the script ended, for each optimizer.
    final: Sequence[Sequence[Tensor]] = ()

    @property
    def idle(self) -> list[int]:
        """The number of steps of each rank without backward pass and gradients."""
        return [rank.idle for rank in self.ranks]

    @property
    def precision(self) -> float:
        """The rounding error of the coarsest dtype."""
        return max(record.precision for rank in self.ranks for record in rank.optimizers)

    @property
    def steps(self) -> int:
        """The largest number of steps of a rank."""
        return max(len(rank.steps) for rank in self.ranks)

    def loss(self, number: int) -> float | None:
        """Return a step's loss, summed on each rank and averaged over the ranks; None if backward() got no scalar."""
        steps = [rank.steps[number] for rank in self.ranks if number < len(rank.steps)]
        sums = [sum(step.losses) for step in steps if step.losses]
        return fmean(sums) if sums else None


def read(directory: Path, ranks: int) -> Recording:
    """Return the records in a directory.

    Raises:
        ValueError: a rank has no records, or took no step.
    """
    paths = [directory / f"rank-{rank}.records" for rank in range(ranks)]
    found = [_rank(path) if path.exists() else None for path in paths]
    whole = [rank for rank in found if rank is not None]
    if len(whole) < ranks:
        raise ValueError(
            f"{ranks} ranks were started, and records exist of ranks "
            f"{[number for number, rank in enumerate(found) if rank]}: check that the launcher starts one world"
        )
    without_steps = [number for number, rank in enumerate(whole) if not rank.steps]
    if without_steps:
        raise ValueError(
            f"no training step was recorded on rank {', '.join(map(str, without_steps))}: compare records step() of "
            "torch.optim.Optimizer outside of backward(), in the processes that the launcher starts. Has the script "
            "resumed from the other side's checkpoint? Give each side a directory of its own: `-- --out runs/{side}`"
        )
    return Recording(whole, torch.load(directory / "final.pt") if (directory / "final.pt").exists() else ())


def _rank(path: Path) -> RankRecord:
    rank = RankRecord()
    for record, sketches in decoded(path):
        if sketches is None:
            rank.idle += 1
        elif "kind" in record:
            rank.optimizers.append(OptimizerRecord(start=sketches, **record))
        else:
            gradients, weights = sketches.chunk(2)
            rank.steps.append(StepRecord(gradients=gradients, weights=weights, **record))
    return rank
