"""Where the time of this rank goes, while a timeline records it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter_ns
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

T = TypeVar("T")


class Span(NamedTuple):
    """Something that took time; times are those of ``time.perf_counter_ns``."""

    #: ``all_reduce``, ``backward``, ``next batch``.
    name: str
    #: ``collective`` or ``data``.
    category: str
    begin: int
    end: int
    #: When this rank began to wait for it: ``begin`` of a blocking call, ``end`` where it never waited.
    blocked: int
    #: What viewers show of it. ``group`` and ``number`` are the same on all ranks of one operation; ``ranks`` is how
    #: many they are.
    arguments: dict[str, Any]


class Spans:
    """Passes spans to the timeline that is on. While none is, ``on`` is False, and callers add nothing."""

    def __init__(self) -> None:
        self.on = False
        self._add: Callable[[Span], None] | None = None
        self._numbers: Counter[str] = Counter()

    def start(self, add: Callable[[Span], None]) -> None:
        """Pass spans to ``add`` from now on; operations are numbered from 0."""
        self._numbers.clear()
        self._add = add
        self.on = True

    def stop(self) -> None:
        """Drop spans from now on."""
        self.on = False
        self._add = None

    def number(self, group: str) -> int:
        """Return the number of a group's next operation: the same on all its ranks, which call in one order."""
        number = self._numbers[group]
        self._numbers[group] = number + 1
        return number

    def collective(self, name: str, ranks: Sequence[int], tensor: Tensor | None) -> Collective | None:
        """Record that this rank comes to a collective now; None while no timeline is on."""
        return Collective(self, name, ranks, tensor) if self.on else None

    def data(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield the batches of a loader, and how long each took to come."""
        while True:
            begin = perf_counter_ns()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self.add(Span("next batch", "data", begin, perf_counter_ns(), begin, {}))
            yield batch

    def add(self, span: Span) -> None:
        """Record a span; any thread."""
        add = self._add
        if add is not None:
            add(span)


class Collective:
    """A collective that has begun."""

    def __init__(self, spans: Spans, name: str, ranks: Sequence[int], tensor: Tensor | None) -> None:
        self._spans = spans
        self._name = name
        group = ",".join(map(str, ranks))
        self._arguments = {"group": group, "number": spans.number(group), "ranks": len(ranks)}
        if tensor is not None:
            self._arguments["bytes"] = tensor.numel() * tensor.element_size()
        self._begin = perf_counter_ns()
        #: When this rank began to wait for it.
        self.blocked = self._begin

    def wait(self) -> None:
        """Record that this rank begins to wait for it, which it has not until now."""
        self.blocked = perf_counter_ns()

    def end(self) -> None:
        """Record that it has ended."""
        end = perf_counter_ns()
        self._spans.add(Span(self._name, "collective", self._begin, end, min(self.blocked, end), self._arguments))


#: For ``Collective.blocked``: this rank does not wait for it.
NEVER = sys.maxsize
#: Of this process.
spans = Spans()
