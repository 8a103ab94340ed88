"""What the ranks of a side have recorded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from unidist.compare.sketch import Sketch


@dataclass(frozen=True)
class Trained:
    """An optimizer with its parameters, and their weights before its first step."""

    kind: str
    names: Sequence[str]
    shapes: Sequence[Sequence[int]]
    start: Sequence[Sketch]
    #: Whether Horovod itself had been imported.
    horovod: bool = False


@dataclass(frozen=True)
class Step:
    """A step of the optimizer of that number: the losses of the backward passes before it, a sketch for each parameter."""

    optimizer: int
    losses: Sequence[float]
    gradients: Sequence[Sketch]
    weights: Sequence[Sketch]


@dataclass
class Rank:
    """The records of one process, in the order of its steps."""

    optimizers: list[Trained] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    #: Number of steps without backward pass and gradients.
    idle: int = 0


@dataclass
class Recording:
    """A side."""

    ranks: list[Rank]
    #: Rank 0's weights when the script ended, for each optimizer.
    final: Sequence[Sequence[Tensor]] = ()

    @property
    def steps(self) -> int:
        """Number of steps, of the rank that took most."""
        return max(len(rank.steps) for rank in self.ranks)

    def loss(self, number: int) -> float | None:
        """The mean over the ranks of a step's losses, those of one rank added; None if backward() got no scalar."""
        steps = [rank.steps[number] for rank in self.ranks if number < len(rank.steps)]
        sums = [sum(step.losses) for step in steps if step.losses]
        return fmean(sums) if sums else None


def read(folder: Path, ranks: int) -> Recording:
    """The records in a folder.

    Raises:
        ValueError: a rank has none; it says which, and why that may be.
    """
    paths = [folder / f"rank-{rank}.jsonl" for rank in range(ranks)]
    found = [_rank(path) if path.exists() else None for path in paths]
    whole = [rank for rank in found if rank is not None]
    if len(whole) < ranks:
        raise ValueError(
            f"{ranks} ranks were started, and those that said so of themselves are "
            f"{[number for number, rank in enumerate(found) if rank] or 'none'}"
        )
    idlers = [number for number, rank in enumerate(whole) if not rank.steps]
    if idlers:
        raise ValueError(
            f"no training step was seen on rank {', '.join(map(str, idlers))}: compare sees the step() of torch.optim.Optimizer "
            "outside of backward(), in the processes that the launcher starts"
        )
    return Recording(whole, torch.load(folder / "final.pt") if (folder / "final.pt").exists() else ())


def _rank(path: Path) -> Rank:
    rank = Rank()
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        if "idle" in entry:
            rank.idle += 1
        elif "kind" in entry:
            rank.optimizers.append(Trained(**entry))
        else:
            rank.steps.append(Step(**entry))
    return rank
