"""The result of a comparison: verdict, notes and tables for people, JSON for programs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from unidist.compare.difference import Difference, Tolerance, differences, drift
from unidist.compare.recording import OptimizerRecord, Recording, StepRecord
from unidist.compare.series import Final, Point, final, largest, points
from unidist.compare.sketch import norms

#: What the kind of the first difference means.
WHY = {
    "parameters": "the optimizers have other parameters",
    "start": "the weights differ before the first step: the models are initialized differently",
    "loss": "the weights agree before this step and the loss differs: other data, another order of it, or dropout",
    "gradient": "the loss agrees and the gradients at the update differ: averaging, accumulation or clipping",
    "weights": "the gradients agree and the updated weights differ: learning rate, weight decay, momentum, another "
    "optimizer or its state",
    "order": "the optimizers step in another order",
    "steps": "one side takes more steps than the other",
    "final": "all steps agree: something changes the weights after the last one",
}
SERIES = {"loss": "loss", "gradient": "gradients", "weights": "weights"}


@dataclass
class Side:
    """How a side was run, and its recording."""

    script: str
    backend: str
    launcher: str
    seconds: float
    recording: Recording


class Comparison:
    """Two sides and the differences between them."""

    def __init__(
        self, left: Side, right: Side, rtol: float | None, atol: float, with_idle_steps: Comparison | None = None
    ) -> None:
        """
        Args:
            rtol: None: by the coarsest dtype.
            with_idle_steps: the comparison before the steps that do not train were undone on one side.
        """
        a, b = left.recording, right.recording
        self.sides = {"left": left, "right": right}
        self.with_idle_steps = with_idle_steps
        rtol = max(1e-4, 2 * max(a.precision, b.precision)) if rtol is None else rtol
        self.tolerance = tolerance = Tolerance(rtol, atol)
        self.first: Difference | None = next(differences(a, b, tolerance), None)
        self.drifts = {name: drift(side.recording, tolerance) for name, side in self.sides.items()}
        self.points: list[Point] = points(a, b)
        self.final: Final | None = final(a, b)

    @property
    def side_with_more_idle_steps(self) -> str | None:
        """The side on which ranks take more steps without backward pass and gradients; None if neither does."""
        left, right = (side.recording.idle for side in self.sides.values())
        return None if left == right else "left" if sum(left) > sum(right) else "right"

    def as_json(self) -> dict[str, Any]:
        """Return all figures: of each step, and rank 0's of each parameter. ``inf`` and ``nan`` are strings."""
        first = self.first
        with_them = self.with_idle_steps and self.with_idle_steps.first
        found: dict[str, Any] = _strict(
            {
                "agree": first is None,
                "idle_steps_undone": self.with_idle_steps and self.with_idle_steps.side_with_more_idle_steps,
                "first_difference_with_them": with_them and asdict(with_them),
                "first_difference": first and {**asdict(first), "why": WHY[first.kind]},
                "tolerance": asdict(self.tolerance),
                "final": self.final and asdict(self.final),
                "steps": [asdict(point) for point in self.points],
                "sides": {name: _side(side, self.drifts[name]) for name, side in self.sides.items()},
            }
        )
        return found


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _side(side: Side, apart: Difference | None) -> dict[str, Any]:
    recording = side.recording
    return {
        "script": side.script,
        "backend": side.backend,
        "launcher": side.launcher,
        "seconds": side.seconds,
        "drift": apart and asdict(apart),
        "idle_steps": recording.idle,
        "losses": [[list(step.losses) for step in rank.steps] for rank in recording.ranks],
        "optimizers": [
            {
                "kind": record.kind,
                "parameters": {
                    name: {
                        "shape": list(record.shapes[index]),
                        "gradient": gradient,
                        "weights": weights,
                    }
                    for index, (name, gradient, weights) in enumerate(zip(record.names, *_norms(record, steps)))
                },
            }
            for number, record in enumerate(recording.ranks[0].optimizers)
            for steps in [[step for step in recording.ranks[0].steps if step.optimizer == number]]
        ],
    }


def _norms(record: OptimizerRecord, steps: Sequence[StepRecord]) -> tuple[list[list[float]], list[list[float]]]:
    """For each parameter the norms of its gradients, and of its weights before the first step and after each."""
    gradients = torch.stack([norms(step.gradients) for step in steps], dim=1)
    weights = torch.stack([norms(record.start), *(norms(step.weights) for step in steps)], dim=1)
    return gradients.tolist(), weights.tolist()


def tables(found: Comparison) -> Iterator[Table]:
    """Yield the sides, and the distances between them."""
    sides = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("", *found.sides):
        sides.add_column(name, overflow="fold")
    rows = [_facts(side) for side in found.sides.values()]
    for name in rows[0]:
        sides.add_row(name, *(row[name] for row in rows))
    yield sides
    distances = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("largest relative difference", "", "step"):
        distances.add_column(name, justify="left" if name.startswith("largest") else "right")
    for key, name in SERIES.items():
        most = largest(found.points, key)
        distances.add_row(name, *((f"{most[0]:.2g}", str(most[1]) if most[0] else "-") if most else ("-", "-")))
    if found.final:
        distances.add_row("weights at the end", f"{found.final.relative:.2g}", "-")
    yield distances


def _facts(side: Side) -> dict[str, str]:
    recording = side.recording
    losses = [loss for step in range(recording.steps) if (loss := recording.loss(step)) is not None]
    steps = list(dict.fromkeys(len(rank.steps) for rank in recording.ranks))
    return {
        "script": side.script,
        "backend": side.backend,
        "launcher": side.launcher,
        "steps": " or ".join(map(str, steps)),
        "seconds": f"{side.seconds:.1f}",
        "first loss": f"{losses[0]:.6g}" if losses else "-",
        "last loss": f"{losses[-1]:.6g}" if losses else "-",
    }


def notes(found: Comparison) -> Iterator[str]:
    """Yield notes for the report."""
    if found.final and found.final.most:
        yield f"at the end, weights differ by at most {found.final.most:.2g} ({found.final.parameter})"
    for name, side in found.sides.items():
        if apart := found.drifts[name]:
            yield (
                f"the ranks of the {name} side drift apart: after step {apart.step}, "
                f"{_parameter_of(apart, side.recording)} has the norm {apart.left:.9g} on rank 0 and "
                f"{apart.right:.9g} on rank {apart.rank}"
            )
        if side.backend != "horovod" and any(t.horovod for rank in side.recording.ranks for t in rank.optimizers):
            yield (
                f"the {name} script used Horovod itself, which this launcher does not start: each rank may have been a "
                f"world of size 1; --{name} drop-in:{side.backend} runs the script on the drop-in"
            )
    first = found.first
    if found.with_idle_steps is not None:
        more = found.with_idle_steps.side_with_more_idle_steps
        counts = [max(side.recording.idle) for side in found.with_idle_steps.sides.values()]
        most = found.with_idle_steps.final
        yield (
            "steps with zero gradients and no backward pass, as Horovod's broadcast_optimizer_state() takes on a new "
            f"optimizer: {counts[0]} on the left, {counts[1]} on the right; they are undone on the {more} side. They "
            "advance Adam's step count and decay weights: with them, "
            f"{verdict(found.with_idle_steps).splitlines()[0]}"
            + (f"; weights at the end {most.relative:.2g} apart" if most else "")
        )
    if first and first.step > 1 and len(found.sides["left"].recording.ranks) > 2:
        yield (
            "with more than 2 ranks, backends sum in different orders, and training amplifies the rounding: "
            "compare on 2 ranks (-np 2), where the order has no effect"
        )


def verdict(found: Comparison) -> str:
    """Return whether the sides agree, and if not, where they first differ and why that may be."""
    first, tolerance = found.first, found.tolerance
    within = f"rtol {tolerance.rtol:g}, atol {tolerance.atol:g}"
    if first is None:
        steps = found.sides["left"].recording.steps
        but = "" if found.with_idle_steps is None else " BUT FOR A STEP WITH ZERO GRADIENTS"
        return f"THE SAME{but}: {steps} steps, each loss, gradient and weight ({within})"
    when = (
        "before the first step"
        if first.step == 0
        else "at the end"
        if first.kind == "final"
        else f"at step {first.step}"
    )
    values = f"left {first.left:.9g}, right {first.right:.9g}"
    if first.step > 1:
        before = [
            value
            for point in found.points
            if point.step < first.step
            for value in point.apart.values()
            if value is not None
        ]
        when += f" (before it, no more than {max(before, default=0):.2g} apart)"
    if first.parameter is None:
        what = {"loss": "the loss", "order": "the optimizer", "steps": f"the number of steps of rank {first.rank}"}[
            first.kind
        ]
        return f"DIFFERENT {when}: {what}: {values} ({within})\n{WHY[first.kind]}"
    what = {"gradient": "gradient of ", "parameters": "elements of "}.get(first.kind, "weights of ")
    rank = f" on rank {first.rank}" if first.rank else ""
    others = f"; {first.parameters - 1} more parameters differ in this step" if first.parameters > 1 else ""
    norms = (
        ""
        if first.kind == "parameters"
        else f"norms: {values}; {first.distance:.3g} apart, {first.allowed:.3g} allowed"
    )
    return (
        f"DIFFERENT {when}: {what}{_parameter_of(first, found.sides['left'].recording)}{rank}: "
        f"{norms or values}{others} ({within})\n{WHY[first.kind]}"
    )


def _parameter_of(difference: Difference, recording: Recording) -> str:
    """Return the name of the parameter, with its optimizer if there are several."""
    several = len(recording.ranks[0].optimizers) > 1
    return f"{difference.parameter}" + (f" (optimizer {difference.optimizer + 1})" if several else "")
