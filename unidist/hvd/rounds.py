"""Gradient reductions of ranks that have joined.

Gradients are reduced in a fixed order and not negotiated. So that a rank may still stop early, the others tell of each round of
reductions that they begin once somebody has joined, and who has joined takes part with zeros.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

Begun = tuple[tuple[int, int], ...]
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
        self._reductions: list[Reduction] = []
        self._counts: list[int] = []
        self._history: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)
        self._announcing = False
        self._heard: queue.SimpleQueue[Begun | int | Exception] = queue.SimpleQueue()

    def add(self, reduction: Reduction) -> int:
        """Its number: the same on every rank that makes its optimizers in the same order."""
        with self._lock:
            self._reductions.append(reduction)
            self._counts.append(0)
            return len(self._counts) - 1

    def begin(self, number: int) -> None:
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
            if not self._announcing:
                self._announcing = True
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

    def follow(self) -> None:
        """Forget what was heard before this rank joined."""
        while not self._heard.empty():
            item = self._heard.get()
            if isinstance(item, Exception):
                raise item

    def until_all_have_joined(self) -> int:
        """Take part in the others' rounds; the last rank to join."""
        while True:
            item = self._heard.get()
            if isinstance(item, int):
                return item
            if isinstance(item, Exception):
                raise item
            for number, count in item:
                while number < len(self._counts) and self._counts[number] < count:
                    self._reductions[number].with_nothing()
