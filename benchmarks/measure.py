"""Paired measurements: contenders take turns within one world, so that a noisy machine affects all of them."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

import unidist

#: The contender that the others are compared with.
OURS = "unidist"
#: Seconds that one contender runs before the next one has its turn.
TURN_S = 0.02


@dataclass
class Case:
    """One row of a suite's table: what was measured, and each contender's figures."""

    suite: str
    #: Where: the backend and its launcher.
    world: str
    name: str
    #: Each contender's figures, one for each round, in ``unit``. A contender that could not run is not in it.
    samples: dict[str, list[float]]
    #: Bytes that one call moves over the slowest link, by nccl-tests' definition of bus bandwidth; 0: no such figure.
    bus_bytes: float = 0.0
    #: Of the samples: seconds or bytes.
    unit: Literal["s", "B"] = "s"

    def median(self, contender: str = OURS) -> float:
        """Return a contender's median."""
        return statistics.median(self.samples[contender])

    def spread(self, contender: str = OURS) -> float:
        """Return half the interquartile range, relative to the median."""
        values = self.samples[contender]
        if len(values) < 2:
            return 0.0
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return (high - low) / 2 / self.median(contender)

    def ratio(self, other: str) -> float:
        """Return our median over the other's: below 1, ours is faster."""
        return self.median() / self.median(other)

    def as_json(self) -> dict[str, Any]:
        """Return all samples, and the figures of the table."""
        figures = {
            name: {"median": self.median(name), "spread": self.spread(name), "ratio": self.ratio(name)}
            for name in self.samples
        }
        return {**asdict(self), "figures": figures}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Case:
        """Return the case that ``as_json`` wrote."""
        return cls(**{name: data[name] for name in cls.__dataclass_fields__})


def alternate(contenders: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of one call of each contender, measured in turns. Collective.

    Each round gives every contender one turn, in a random order that is the same on every rank. A turn is as many
    calls as fill ``TURN_S`` (at least 1), after a barrier. The figures are this rank's.
    """
    calls = {name: _calls(call) for name, call in contenders.items()}
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds):
            # Not in rotation: each would follow the same neighbour in nearly every round.
            for name in random.Random(turn).sample(names, len(names)):
                seconds[name].append(_turn(contenders[name], calls[name]))
    finally:
        if enabled:
            gc.enable()
    return seconds


def _calls(call: Callable[[], object]) -> int:
    """Warm up; rank 0's number of calls in a turn, on every rank."""
    for _ in range(3):
        once = _turn(call, 1)
    return unidist.broadcast_object(max(1, min(1000, int(TURN_S / once))))


def _turn(call: Callable[[], object], calls: int) -> float:
    wait = torch.cuda.synchronize if unidist.device().type == "cuda" else _nothing
    unidist.barrier()
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    wait()
    return (time.perf_counter() - start) / calls


def _nothing() -> None:
    pass
