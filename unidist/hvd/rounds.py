"""Gradient reductions after ``join()``.

Gradients are reduced in a fixed order, without negotiation. One reduction of all gradients of an optimizer is a round.
Once a rank has joined, the others announce each round that they begin, and the joined rank takes part in it with zeros.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

#: More rounds than one rank can be ahead of another.
_HISTORY = 1000


class ReducerId(NamedTuple):
    """An optimizer's reducer: the same on every rank of its process set."""

    set_id: int
    #: From 0, in the order in which the reducers of the process set were made.
    number: int


class Round(NamedTuple):
    """A round that has begun."""

    reducer: ReducerId
    #: From 1.
    number: int


class JoinableReducer(Protocol):
    """Reduces the gradients of one optimizer."""

    def reduce_zeros(self) -> None:
        """One whole round, with zeros in place of this rank's gradients. Collective."""


class GradientRounds:
    """Counts the rounds of this rank's reducers.

    Args:
        send: sends rounds that have begun to the ranks that have joined.
    """

    def __init__(self, send: Callable[[tuple[Round, ...]], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._reducers: dict[ReducerId, weakref.ref[JoinableReducer]] = {}
        self._counts: dict[ReducerId, int] = {}
        self._history: deque[Round] = deque(maxlen=_HISTORY)
        self._announcing = False
        #: For ``wait_for_join``: rounds of other ranks; the last rank to join; or why not all will.
        self._inbox: queue.SimpleQueue[tuple[Round, ...] | int | Exception] = queue.SimpleQueue()

    def add(self, reducer: JoinableReducer, set_id: int) -> ReducerId:
        """The id of a new reducer: the same on every rank that makes its optimizers in the same order."""
        with self._lock:
            key = ReducerId(set_id, sum(known.set_id == set_id for known in self._reducers))
            self._reducers[key] = weakref.ref(reducer)
            self._counts[key] = 0
            return key

    def is_only_reducer(self, key: ReducerId) -> bool:
        """Whether no other reducer of its process set is in use."""
        return not any(
            other.set_id == key.set_id and other != key and ref() is not None for other, ref in self._reducers.items()
        )

    def begin(self, key: ReducerId) -> None:
        """This rank begins a round; called before its first collective."""
        with self._lock:
            self._counts[key] += 1
            begun = Round(key, self._counts[key])
            self._history.append(begun)
            if self._announcing:
                self._send((begun,))

    def announce(self) -> None:
        """A rank has joined: announce each round from now on, and those before, which it may have missed."""
        with self._lock:
            self._announcing = True
            if self._history:
                self._send(tuple(self._history))

    def receive(self, begun: tuple[Round, ...]) -> None:
        """Another rank has begun rounds."""
        self._inbox.put(begun)

    def all_joined(self, last: int) -> None:
        """Rank ``last`` was the last to join."""
        with self._lock:
            self._announcing = False
        self._inbox.put(last)

    def fail(self, error: Exception) -> None:
        """Not all ranks will join."""
        self._inbox.put(error)

    def wait_for_join(self) -> int:
        """Take part in the others' rounds until all have joined; the last rank to join."""
        while True:
            item = self._inbox.get()
            if isinstance(item, int):
                return item
            if isinstance(item, Exception):
                raise item
            for key, number in item:
                reducer = self._reducers[key]() if key in self._reducers else None
                while reducer is not None and self._counts[key] < number:
                    reducer.reduce_zeros()
