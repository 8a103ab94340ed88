"""How far two recordings are apart, step by step; pure functions of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from unidist.compare.difference import at, matches
from unidist.compare.recording import Recording
from unidist.compare.sketch import Sketch, distance, gap, norm


@dataclass(frozen=True)
class Point:
    """A step that both sides took. Figures of two are the left's and the right's."""

    #: From 1.
    step: int
    optimizer: int
    #: The mean over the ranks.
    loss: tuple[float | None, float | None]
    #: The norm of rank 0's whole gradient, and of its weights after the step.
    gradient: tuple[float, float]
    weights: tuple[float, float]
    #: The distance over the larger of the two, by name, of the ranks' that is greatest; None if there is nothing to compare.
    apart: dict[str, float | None]


def points(left: Recording, right: Recording) -> list[Point]:
    """All steps that both sides took."""
    matched = [matches(a, b) for a, b in zip(left.ranks, right.ranks)]
    found = []
    for step in range(min(left.steps, right.steps)):
        both = list(at(left, right, step))
        if not both:
            continue
        ours, theirs = left.loss(step), right.loss(step)
        _, a, b = both[0]
        orders = [matched[rank].get(x.optimizer) if x.optimizer == y.optimizer else None for rank, x, y in both]
        known = [(order, x, y) for order, (_, x, y) in zip(orders, both) if order is not None]
        apart: dict[str, float | None] = dict.fromkeys(("loss", "gradient", "weights"))
        if ours is not None and theirs is not None:
            apart["loss"] = _relative(gap(ours, theirs), ours, theirs)
        if len(known) == len(both):
            apart["gradient"] = max(_apart(x.gradients, y.gradients, order) for order, x, y in known)
            apart["weights"] = max(_apart(x.weights, y.weights, order) for order, x, y in known)
        gradients, weights = (whole(a.gradients), whole(b.gradients)), (whole(a.weights), whole(b.weights))
        found.append(Point(step + 1, a.optimizer, (ours, theirs), gradients, weights, apart))
    return found


def largest(found: Sequence[Point], name: str) -> tuple[float, int] | None:
    """The greatest of the relative distances of that name, and its first step."""
    known = [(value, -point.step) for point in found if (value := point.apart[name]) is not None]
    if not known:
        return None
    value, step = max(known)
    return value, -step


@dataclass(frozen=True)
class Final:
    """The weights of rank 0 when the scripts ended: exactly how far they are apart."""

    #: The greatest distance of two elements, and whose it is.
    most: float
    parameter: str
    #: The norm of all differences over that of the left's weights.
    relative: float


def final(left: Recording, right: Recording) -> Final | None:
    """None if the sides trained other parameters."""
    found: list[tuple[float, str]] = []
    squares = [0.0, 0.0]
    for (optimizer, order), ours, theirs in zip(
        matches(left.ranks[0], right.ranks[0]).items(), left.final, right.final
    ):
        if order is None:
            return None
        for name, a, place in zip(left.ranks[0].optimizers[optimizer].names, ours, order):
            between = (a - theirs[place]).abs().double()
            found.append((between.max().item() if between.numel() else 0.0, name))
            squares = [squares[0] + between.square().sum().item(), squares[1] + a.abs().double().square().sum().item()]
    if not found:
        return None
    return Final(*max(found), math.sqrt(squares[0] / squares[1]) if squares[1] else math.sqrt(squares[0]))


def whole(sketches: Sequence[Sketch]) -> float:
    """The norm of all tensors together."""
    return math.hypot(*map(norm, sketches))


def _apart(left: Sequence[Sketch], right: Sequence[Sketch], order: Sequence[int]) -> float:
    between = math.hypot(*(distance(a, right[place]) for a, place in zip(left, order)))
    return _relative(between, whole(left), whole(right))


def _relative(between: float, left: float, right: float) -> float:
    larger = max(abs(left), abs(right))
    return between / larger if between and math.isfinite(larger) and larger else between
