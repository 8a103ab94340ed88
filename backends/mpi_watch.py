"""A watch over what does not end: who is missing, and the end of the job."""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Protocol
from weakref import WeakSet

import torch.distributed as dist

from unidist.backends import mpi

#: How often the watch looks.
_PERIOD_S = 0.25
#: From here on an operation is late: its rank tells the others where it is.
LATE_S = 1.0
#: What is left to a process that has caught the error of its broken group, before the job ends.
_GRACE_S = 10.0


class Watched(Protocol):
    """A group whose operations are watched."""

    def look(self) -> None:
        """Deal with what is late or overdue."""

    def leave(self) -> None:
        """Tell the other ranks that this one goes."""


_groups: WeakSet[Watched] = WeakSet()
_started = threading.Lock()
_doom: list[Exception] = []


def watch(group: Watched) -> None:
    """Look after a group as long as it lives."""
    _groups.add(group)
    if _started.acquire(blocking=False):
        threading.Thread(target=_look, name="unidist-mpi-watch", daemon=True).start()
        atexit.register(_at_exit)


def end_job_soon(error: Exception) -> None:
    """End all ranks of the job: a rank in a call that never returns could neither go on nor finish."""
    if not _doom:
        _doom.append(error)
        threading.Thread(target=_end_later, name="unidist-mpi-end", daemon=True).start()


def _look() -> None:
    while True:
        time.sleep(_PERIOD_S)
        for group in list(_groups):
            group.look()


def _end_later() -> None:
    time.sleep(_GRACE_S)
    sys.stderr.write(f"{_doom[0]}\nThe job ends now.\n")
    mpi.abort()


def _at_exit() -> None:
    if _doom:
        mpi.abort()
    for group in list(_groups):
        group.leave()


class Attendance:
    """Where the ranks of a group stand, as far as they have told through its store."""

    def __init__(self, store: dist.Store, rank: int, ranks: Sequence[int]) -> None:
        self._store = store
        self._rank = rank
        #: Their global ranks, in the group's order.
        self._ranks = ranks
        self._told = ""

    def tell(self, where: str) -> None:
        """This rank waits there."""
        if where != self._told:
            self._told = where
            with suppress(Exception):
                self._store.set(f"waits/{self._rank}", where)

    def leave(self) -> None:
        """This rank goes."""
        with suppress(Exception):
            self._store.set(f"left/{self._rank}", "")
            self._store.add("left", 1)

    def gone(self) -> list[int]:
        """The global ranks that have gone; all but this one if nobody keeps the store any more."""
        try:
            if self._store.add("left", 0) == 0:
                return []
            return [self._ranks[i] for i in self._others() if self._store.check([f"left/{i}"])]
        except Exception:
            return [self._ranks[i] for i in self._others()]

    def account(self, where: str) -> str:
        """What is known of the ranks that are elsewhere, for an error."""
        elsewhere: dict[str, list[int]] = {}
        for i in self._others():
            elsewhere.setdefault(self._whereabouts(i), []).append(self._ranks[i])
        told = [
            f"{_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} not come"
            if not place
            else f"{_ranks(ranks)} in {place}"
            for place, ranks in elsewhere.items()
            if place != where
        ]
        return "; ".join(told) or "all ranks are in it, and it does not end"

    def _others(self) -> Iterator[int]:
        return (i for i in range(len(self._ranks)) if i != self._rank)

    def _whereabouts(self, i: int) -> str:
        key = f"waits/{i}"
        with suppress(Exception):
            return self._store.get(key).decode() if self._store.check([key]) else ""
        return ""


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
