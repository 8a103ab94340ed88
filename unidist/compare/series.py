"""The distance of two recordings at each step; pure functions of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from unidist.compare.difference import at, matches
from unidist.compare.recording import Recording
from unidist.compare.sketch import distances, gap, norms


@dataclass(frozen=True)
class Point:
    """A step that both sides took; pairs are left and right."""

    #: From 1.
    step: int
    optimizer: int
    #: Averaged over the ranks.
    loss: tuple[float | None, float | None]
    #: The norms of rank 0's gradient, and of its weights after the step.
    gradient: tuple[float, float]
    weights: tuple[float, float]
    #: For each of loss, gradient and weights the relative distance, on the rank where it is largest; None without data.
    apart: dict[str, float | None]


def points(left: Recording, right: Recording) -> list[Point]:
    """Return the steps that both sides took."""
    matched = [matches(a, b) for a, b in zip(left.ranks, right.ranks)]
    found = []
    for step in range(min(left.steps, right.steps)):
        both = list(at(left, right, step))
        if not both:
            continue
        left_values, right_values = left.loss(step), right.loss(step)
        _, a, b = both[0]
        orders = [matched[rank].get(x.optimizer) if x.optimizer == y.optimizer else None for rank, x, y in both]
        known = [(order, x, y) for order, (_, x, y) in zip(orders, both) if order is not None]
        apart: dict[str, float | None] = dict.fromkeys(("loss", "gradient", "weights"))
        if left_values is not None and right_values is not None:
            apart["loss"] = _relative_to_larger(gap(left_values, right_values), left_values, right_values)
        if len(known) == len(both):
            apart["gradient"] = max(_relative_distance(x.gradients, y.gradients, order) for order, x, y in known)
            apart["weights"] = max(_relative_distance(x.weights, y.weights, order) for order, x, y in known)
        gradients, weights = (whole(a.gradients), whole(b.gradients)), (whole(a.weights), whole(b.weights))
        found.append(Point(step + 1, a.optimizer, (left_values, right_values), gradients, weights, apart))
    return found


def largest(found: Sequence[Point], name: str) -> tuple[float, int] | None:
    """Return the largest relative distance of that name, and its first step."""
    known = [(value, -point.step) for point in found if (value := point.apart[name]) is not None]
    if not known:
        return None
    value, step = max(known)
    return value, -step


@dataclass(frozen=True)
class Final:
    """The exact distance of rank 0's weights when the scripts ended."""

    #: The largest difference of two elements, and their parameter.
    most: float
    parameter: str
    #: The norm of the difference over the norm of the left's weights.
    relative: float


def final(left: Recording, right: Recording) -> Final | None:
    """Return the distance of the weights after the last step; None if the sides trained other parameters."""
    found: list[tuple[float, str]] = []
    squares = [0.0, 0.0]
    for (optimizer, order), left_values, right_values in zip(
        matches(left.ranks[0], right.ranks[0]).items(), left.final, right.final
    ):
        if order is None:
            return None
        for name, a, index in zip(left.ranks[0].optimizers[optimizer].names, left_values, order):
            between = (a - right_values[index]).abs().double()
            found.append((between.max().item() if between.numel() else 0.0, name))
            squares = [squares[0] + between.square().sum().item(), squares[1] + a.abs().double().square().sum().item()]
    if not found:
        return None
    return Final(*max(found), math.sqrt(squares[0] / squares[1]) if squares[1] else math.sqrt(squares[0]))


def whole(sketches: Tensor) -> float:
    """Return the norm of all tensors, taken as one."""
    return math.hypot(*norms(sketches).tolist())


def _relative_distance(left: Tensor, right: Tensor, order: Sequence[int]) -> float:
    between = math.hypot(*distances(left.double(), right.double()[list(order)]).tolist())
    return _relative_to_larger(between, whole(left), whole(right))


def _relative_to_larger(between: float, left: float, right: float) -> float:
    larger = max(abs(left), abs(right))
    return between / larger if between and math.isfinite(larger) and larger else between
