"""What is known of a rank's collective operations: the pending ones, and the last that are done."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

#: How many operations are remembered.
_LENGTH = 32
#: The name of the operation in which a rank takes part in all others.
JOIN = "join"
#: Ranks that are listed in a message.
_LISTED = 8


class OperationRecord(NamedTuple):
    """One collective operation of a rank."""

    name: str
    #: Its place among the operations of its group, from 1; 0 where operations are matched by name.
    number: int = 0
    dtype: str = ""
    #: None: it has no tensor, or its shape is not known.
    shape: tuple[int, ...] | None = None
    #: The global ranks that take part; empty: all.
    ranks: tuple[int, ...] = ()
    #: Tells groups of the same ranks apart; equal on all ranks.
    group: str = ""
    #: How long ago it began.
    seconds: float = 0.0
    done: bool = False
    #: Whether it is one message between two ranks.
    is_message: bool = False
    #: Where operations are matched by name: how many of its group had been executed when it began; of one that is done,
    #: how many with it. Equal on all ranks then, while times are not.
    executed: int = 0

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for one operation on all of its ranks."""
        return self.group, self.ranks, self.is_message, self.number or self.name

    def __str__(self) -> str:
        of = f" of {self.dtype} {list(self.shape)}" if self.dtype and self.shape is not None else ""
        kind = "message" if self.is_message else "operation"
        among = f" of ranks {format_ranks(self.ranks)}" if self.ranks else ""
        return f"{self.name}{of}" + (f", {kind} {self.number}{among}" if self.number else among)


class Entry:
    """An operation of ``RecentOperations``."""

    __slots__ = ("done", "dtype", "name", "number", "ranks", "shape", "started")

    def __init__(self, name: str, number: int, ranks: tuple[int, ...], tensor: torch.Tensor) -> None:
        self.name = name
        self.number = number
        self.ranks = ranks
        # Not the tensor itself: it would stay alive.
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.started = time.monotonic()
        self.done = False

    def record(self, now: float) -> OperationRecord:
        """Return what is known of it now."""
        is_barrier = self.name == "barrier"  # its tensor is not the user's
        return OperationRecord(
            self.name,
            self.number,
            "" if is_barrier else dtype_name(self.dtype),
            None if is_barrier else tuple(self.shape),
            self.ranks,
            seconds=now - self.started,
            done=self.done,
        )


class RecentOperations:
    """The last operations of this rank, where the library keeps no record of them."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque(maxlen=_LENGTH)
        self._numbers: dict[tuple[int, ...], int] = {}

    def begin(self, name: str, ranks: tuple[int, ...], tensor: torch.Tensor) -> Entry:
        """Record the beginning of an operation; of all ranks if ``ranks`` is empty."""
        number = self._numbers[ranks] = self._numbers.get(ranks, 0) + 1
        entry = Entry(name, number, ranks, tensor)
        self._entries.append(entry)
        return entry

    def records(self) -> list[OperationRecord]:
        """Return the operations, the newest last."""
        now = time.monotonic()
        return [entry.record(now) for entry in list(self._entries)]


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name: ``float32``."""
    return str(dtype).removeprefix("torch.")


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks for a message: ``0, 2 to 5``; of many parts the first."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][-1] == rank - 1:
            parts[-1] = [parts[-1][0], rank]
        else:
            parts.append([rank])
    # Two neighbours are two ranks.
    flat = [part for one in parts for part in ([[n] for n in one] if one[-1] - one[0] == 1 else [one])]
    texts = [" to ".join(map(str, one)) for one in flat]
    more = f", ... ({len(ranks)} in all)" if len(texts) > _LISTED else ""
    return ", ".join(texts[:_LISTED]) + more
