"""Gradient reductions of ranks that have joined.

Gradients are reduced in a fixed order and not negotiated. So that a rank may still stop early, the others tell of each round of
reductions that they begin once somebody has joined, and who has joined takes part with zeros.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol

#: A reduction: its process set, and the how-manieth of that it is; the same on every rank of the set.
Number = tuple[int, int]
#: Reductions that have begun a round, and its how-manieth it is.
Begun = tuple[tuple[Number, int], ...]
#: More rounds than a rank can be ahead of another.
_REMEMBERED = 1000


class Reduction(Protocol):
    """What reduces one optimizer's gradients."""

    def with_nothing(self) -> None:
        """One whole round, with zeros of this rank. Collective."""


class GradientRounds:
    """Counts the rounds of this rank's reductions.

    Args:
        tell: sends rounds that have begun to those who have joined.
    """

    def __init__(self, tell: Callable[[Begun], None]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._reductions: dict[Number, weakref.ref[Reduction]] = {}
        self._counts: dict[Number, int] = {}
        self._history: deque[tuple[Number, int]] = deque(maxlen=_REMEMBERED)
        self._announcing = False
        self._heard: queue.SimpleQueue[Begun | int | Exception] = queue.SimpleQueue()

    def add(self, reduction: Reduction, set_id: int) -> Number:
        """Its number: the same on every rank that makes its optimizers in the same order."""
        with self._lock:
            number = (set_id, sum(known == set_id for known, _ in self._reductions))
            self._reductions[number] = weakref.ref(reduction)
            self._counts[number] = 0
            return number

    def alone(self, number: Number) -> bool:
        """Whether no other reduction of its process set is in use."""
        return not any(
            other[0] == number[0] and other != number and ref() is not None for other, ref in self._reductions.items()
        )

    def begin(self, number: Number) -> None:
        """This rank begins a round; called before its first collective."""
        with self._lock:
            self._counts[number] += 1
            entry = (number, self._counts[number])
            self._history.append(entry)
            if self._announcing:
                self._tell((entry,))

    def announce(self) -> None:
        """Somebody has joined: tell of each round from now on, and of those before that they may have missed."""
        with self._lock:
            self._announcing = True
            if self._history:
                self._tell(tuple(self._history))

    def hear(self, begun: Begun) -> None:
        """Another rank has begun rounds."""
        self._heard.put(begun)

    def all_joined(self, last: int) -> None:
        """The last rank has joined."""
        with self._lock:
            self._announcing = False
        self._heard.put(last)

    def fail(self, error: Exception) -> None:
        """Nothing more will be heard."""
        self._heard.put(error)

    def until_all_have_joined(self) -> int:
        """Take part in the others' rounds; the last rank to join."""
        while True:
            item = self._heard.get()
            if isinstance(item, int):
                return item
            if isinstance(item, Exception):
                raise item
            for number, count in item:
                reduction = self._reductions[number]() if number in self._reductions else None
                while reduction is not None and self._counts[number] < count:
                    reduction.with_nothing()
