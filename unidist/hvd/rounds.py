"""Gradient reductions after ``join()``.

Gradients are reduced in a fixed order, without negotiation. One reduction of all gradients of an optimizer is a round.
The rounds of a process set begin in one order on all its ranks. Once a rank has joined, the others announce those that
they begin, and the joined rank takes part in them with zeros.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from unidist.hvd.messages import Rounds

#: Rounds of a process set that are kept: more than one rank can be ahead of another.
_HISTORY = 8


class ReducerId(NamedTuple):
    """An optimizer's reducer: the same on every rank of its process set."""

    set_id: int
    #: From 0, in the order in which the reducers of the process set were made.
    number: int


class JoinableReducer(Protocol):
    """Reduces the gradients of one optimizer."""

    def reduce_zeros(self) -> None:
        """Make one whole round, with zeros in place of this rank's gradients. Collective."""


class _SetRounds:
    """The rounds that this rank has begun in a process set."""

    def __init__(self) -> None:
        self.count = 0
        #: The reducers of the last ones.
        self.last: deque[int] = deque(maxlen=_HISTORY)


class GradientRounds:
    """Counts the rounds of this rank's reducers.

    Args:
        send: sends rounds that have begun to the ranks that have joined.
    """

    def __init__(self, send: Callable[[Rounds], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._reducers: dict[ReducerId, weakref.ref[JoinableReducer]] = {}
        self._begun: dict[int, _SetRounds] = {}
        self._announcing = False
        #: For ``wait_for_join``: rounds of other ranks; the last rank to join; or why not all will.
        self._inbox: queue.SimpleQueue[Rounds | int | Exception] = queue.SimpleQueue()

    def add(self, reducer: JoinableReducer, set_id: int) -> ReducerId:
        """Return the id of a new reducer: the same on every rank that makes its optimizers in the same order."""
        with self._lock:
            key = ReducerId(set_id, sum(known.set_id == set_id for known in self._reducers))
            self._reducers[key] = weakref.ref(reducer)
            self._begun.setdefault(set_id, _SetRounds())
            return key

    def is_only_reducer(self, key: ReducerId) -> bool:
        """Return whether no other reducer of its process set is in use."""
        return not any(
            other.set_id == key.set_id and other != key and ref() is not None for other, ref in self._reducers.items()
        )

    def begin(self, key: ReducerId) -> None:
        """Begin a round of this rank; called before its first collective."""
        with self._lock:
            begun = self._begun[key.set_id]
            begun.count += 1
            begun.last.append(key.number)
            if self._announcing:
                self._send(Rounds(key.set_id, begun.count, (key.number,)))

    def announce(self) -> None:
        """Announce each round from now on, and the last ones, which a rank that has joined may have missed."""
        with self._lock:
            self._announcing = True
            for set_id, begun in self._begun.items():
                if begun.last:
                    self._send(Rounds(set_id, begun.count - len(begun.last) + 1, tuple(begun.last)))

    def receive(self, rounds: Rounds) -> None:
        """Queue rounds that another rank has begun."""
        self._inbox.put(rounds)

    def all_joined(self, last: int) -> None:
        """Record that rank ``last`` was the last to join."""
        with self._lock:
            self._announcing = False
        self._inbox.put(last)

    def fail(self, reason: str) -> None:
        """Record that not all ranks will join."""
        self._inbox.put(LookupError(reason))

    def wait_for_join(self) -> int:
        """Take part in the others' rounds until all have joined; the last rank to join.

        Raises:
            LookupError: in a round of an optimizer that is not there any more, or the reason that ``fail`` got.
        """
        while True:
            item = self._inbox.get()
            if isinstance(item, int):
                return item
            if isinstance(item, Exception):
                raise item
            for position, number in enumerate(item.reducers, item.first):
                begun = self._begun.get(item.set_id)
                if begun is not None and position > begun.count:
                    key = ReducerId(item.set_id, number)
                    reducer = self._reducers[key]() if key in self._reducers else None
                    if reducer is None:
                        raise LookupError(
                            "the other ranks reduce the gradients of an optimizer that this rank has dropped: keep it "
                            "until join() returns."
                        )
                    reducer.reduce_zeros()
