"""Where two recordings first differ; pure functions of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from unidist.compare.recording import OptimizerRecord, RankRecord, Recording, StepRecord
from unidist.compare.sketch import distances, gap, norms, sketches

DifferenceKind = Literal["parameters", "start", "loss", "gradient", "weights", "order", "steps", "final"]


@dataclass(frozen=True)
class Tolerance:
    """How far two tensors may be apart: as a root mean square over the elements; a number is one element."""

    rtol: float
    atol: float

    def allows(self, left: float, right: float) -> float:
        """Return the largest allowed distance of two numbers."""
        larger = max(abs(left), abs(right))
        return self.atol + (self.rtol * larger if math.isfinite(larger) else 0.0)

    def allows_tensors(self, left: Tensor, right: Tensor, sizes: Tensor) -> Tensor:
        """Return the largest allowed distances of pairs of tensors, by their norms and numbers of elements."""
        larger = torch.where(right > left, right, left)
        return self.atol * sizes.sqrt() + self.rtol * torch.where(larger.isfinite(), larger, 0.0)


@dataclass(frozen=True)
class Difference:
    """Two values that are further apart than the tolerance allows."""

    kind: DifferenceKind
    #: From 1; 0 is before the first.
    step: int
    #: The two losses, norms of a gradient or of weights, numbers of steps, or (for ``order``) optimizers.
    left: float
    right: float
    distance: float = math.inf
    allowed: float = 0.0
    optimizer: int = 0
    parameter: str | None = None
    rank: int | None = None
    #: Number of parameters that differ in this step; this one differs most.
    parameters: int = 1


def differences(left: Recording, right: Recording, tolerance: Tolerance) -> Iterator[Difference]:
    """Yield all differences in the order of the training; within a step loss, gradients, weights."""
    pairs = list(enumerate(zip(left.ranks, right.ranks)))
    matched = [matches(a, b) for _, (a, b) in pairs]
    for rank, (a, b) in pairs:
        for optimizer, order in matched[rank].items():
            record, other = a.optimizers[optimizer], b.optimizers[optimizer]
            if order is None:
                yield _other_parameters(optimizer, record, other, rank)
            else:
                yield from _largest_difference(
                    "start", 0, optimizer, rank, record, order, record.start, other.start, tolerance
                )
    for step in range(min(left.steps, right.steps)):
        yield from _in_step(left, right, step, matched, tolerance)
    for rank, (a, b) in pairs:
        if len(a.steps) != len(b.steps):
            counts = len(a.steps), len(b.steps)
            yield Difference("steps", min(counts) + 1, counts[0], counts[1], rank=rank)
    for (optimizer, order), *weights in zip(matched[0].items(), left.final, right.final):
        if order is not None:
            left_values, right_values = (sketches(side) for side in weights)
            record = left.ranks[0].optimizers[optimizer]
            yield from _largest_difference(
                "final", left.steps, optimizer, 0, record, order, left_values, right_values, tolerance
            )


def matches(left: RankRecord, right: RankRecord) -> dict[int, list[int] | None]:
    """Return each optimizer's indices on the right of the parameters on the left; None if these do not match.
    Parameters match by name; if the names differ, by their order, as long as the shapes agree.
    """
    return {number: match(*pair) for number, pair in enumerate(zip(left.optimizers, right.optimizers))}


def match(left: OptimizerRecord, right: OptimizerRecord) -> list[int] | None:
    """As ``matches``, for one optimizer."""
    order = list(range(len(left.names)))
    if sorted(left.names) == sorted(right.names):
        order = [list(right.names).index(name) for name in left.names]
    elif len(left.names) != len(right.names):
        return None
    same = all(list(shape) == list(right.shapes[index]) for shape, index in zip(left.shapes, order))
    return order if same else None


def drift(side: Recording, tolerance: Tolerance) -> Difference | None:
    """Return where the weights of a rank first differ from rank 0's; in the result, ``left`` is rank 0."""
    first = side.ranks[0]
    for number in range(side.steps):
        for rank, other in enumerate(side.ranks[1:], 1):
            # The steps of a rank with more optimizers cannot be compared by number.
            if number >= min(len(first.steps), len(other.steps)) or len(first.optimizers) != len(other.optimizers):
                continue
            a, b = first.steps[number], other.steps[number]
            left_values = first.optimizers[a.optimizer]
            if a.optimizer == b.optimizer and len(a.weights) == len(b.weights):
                own = list(range(len(a.weights)))
                found = _largest_difference(
                    "weights", number + 1, a.optimizer, rank, left_values, own, a.weights, b.weights, tolerance
                )
                for difference in found:
                    return difference
    return None


def _in_step(
    left: Recording,
    right: Recording,
    step: int,
    matched: Sequence[Mapping[int, Sequence[int] | None]],
    tolerance: Tolerance,
) -> Iterator[Difference]:
    both = list(at(left, right, step))
    optimizer = both[0][1].optimizer if both else 0
    left_values, right_values = left.loss(step), right.loss(step)
    if left_values is not None and right_values is not None:
        between, allowed = gap(left_values, right_values), tolerance.allows(left_values, right_values)
        if between > allowed:
            yield Difference("loss", step + 1, left_values, right_values, between, allowed, optimizer)
    for rank, a, b in both:
        if a.optimizer != b.optimizer:
            yield Difference("order", step + 1, a.optimizer, b.optimizer, rank=rank)
            return
    kinds: tuple[DifferenceKind, DifferenceKind] = ("gradient", "weights")
    for kind in kinds:
        for rank, a, b in both:
            order = matched[rank].get(a.optimizer)
            if order is not None:
                record = left.ranks[rank].optimizers[a.optimizer]
                figures = (a.gradients, b.gradients) if kind == "gradient" else (a.weights, b.weights)
                yield from _largest_difference(kind, step + 1, a.optimizer, rank, record, order, *figures, tolerance)


def at(left: Recording, right: Recording, step: int) -> Iterator[tuple[int, StepRecord, StepRecord]]:
    """Yield a step, from 0, on each rank that took it on both sides."""
    for rank, (a, b) in enumerate(zip(left.ranks, right.ranks)):
        if step < min(len(a.steps), len(b.steps)):
            yield rank, a.steps[step], b.steps[step]


def _largest_difference(
    kind: DifferenceKind,
    step: int,
    optimizer: int,
    rank: int,
    record: OptimizerRecord,
    order: Sequence[int],
    left: Tensor,
    right: Tensor,
    tolerance: Tolerance,
) -> Iterator[Difference]:
    """Yield the parameter that differs most, if one does."""
    if not order:
        return
    left, right = left.double(), right.double()[list(order)]
    between, allowed = distances(left, right), tolerance.allows_tensors(norms(left), norms(right), record.sizes)
    numbers = (between > allowed).nonzero().flatten().tolist()
    if numbers:
        figures = torch.stack([norms(left), norms(right), between, allowed], dim=1)[numbers].tolist()
        number, (a, b, apart, limit) = max(
            zip(numbers, figures), key=lambda pair: pair[1][2] / pair[1][3] if pair[1][3] else math.inf
        )
        name = record.names[number]
        yield Difference(kind, step, a, b, apart, limit, optimizer, name, rank, parameters=len(numbers))


def _other_parameters(optimizer: int, left: OptimizerRecord, right: OptimizerRecord, rank: int) -> Difference:
    """Return the first parameter that the other side lacks or has in another shape; values are numbers of elements."""
    left_values, right_values = (
        {name: list(shape) for name, shape in zip(side.names, side.shapes)} for side in (left, right)
    )
    name = next(name for name in (*left.names, *right.names) if left_values.get(name) != right_values.get(name))
    sizes = [math.prod(shapes[name]) if name in shapes else 0 for shapes in (left_values, right_values)]
    return Difference("parameters", 0, sizes[0], sizes[1], optimizer=optimizer, parameter=name, rank=rank)
