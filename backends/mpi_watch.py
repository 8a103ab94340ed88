"""A watch over what does not end: who is missing, and the end of the job."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
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
#: How long the store may take to answer.
_ANSWER_S = 1.0


class Watched(Protocol):
    """A group whose operations are watched."""

    def look(self) -> None:
        """Deal with what is late or overdue."""

    def leave(self) -> None:
        """Tell the other ranks that this one goes."""


_groups: WeakSet[Watched] = WeakSet()
_lock = threading.Lock()
_started = threading.Lock()
_doom: list[Exception] = []
#: Children that were forked off have copies of all this, and no part in it.
_process = os.getpid()


def watch(group: Watched) -> None:
    """Look after a group as long as it lives."""
    with _lock:
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
        for group in _all():
            try:
                group.look()
            except Exception as error:
                sys.stderr.write(f"unidist: the watch over {group} failed: {error!r}\n")


def _all() -> list[Watched]:
    with _lock:
        return list(_groups)


def _end_later() -> None:
    time.sleep(_GRACE_S)
    sys.stderr.write(f"{_doom[0]}\nThe job ends now.\n")
    mpi.abort()


def _at_exit() -> None:
    if os.getpid() != _process:
        return
    if _doom:
        mpi.abort()
    for group in _all():
        group.leave()


class Attendance:
    """Where the ranks of a group stand, as far as they have told through its store.

    The store may not answer, if its rank has stopped. So nothing here waits for it: a thread asks.
    """

    def __init__(self, store: dist.Store, rank: int, ranks: Sequence[int]) -> None:
        self._store = store
        self._rank = rank
        #: Their global ranks, in the group's order.
        self._ranks = ranks
        self._asking: threading.Thread | None = None
        #: Of the ranks that have gone, by rank in the group: the last collective that they submitted.
        self.gone: dict[int, int] = {}

    def tell(self, where: str) -> None:
        """This rank waits there; and ask who has gone."""

        def ask() -> None:
            self._store.set(f"waits/{self._rank}", where)
            if self._store.add("left", 0):
                keys = {i: f"left/{i}" for i in self._others()}
                self.gone = {i: int(self._store.get(key)) for i, key in keys.items() if self._store.check([key])}

        if self._asking is None or not self._asking.is_alive():
            self._asking = _start(ask)

    def leave(self, sequence: int) -> None:
        """This rank goes, and takes part in no collective after that one."""

        def tell() -> None:
            self._store.set(f"left/{self._rank}", str(sequence))
            self._store.add("left", 1)

        if os.getpid() == _process:
            _start(tell).join(_ANSWER_S)

    def account(self, where: str) -> str:
        """What is known of the ranks that are elsewhere, for an error."""
        found: list[str] = []

        def ask() -> None:
            self._store.set(f"waits/{self._rank}", where)
            elsewhere: dict[str, list[int]] = {}
            for i in self._others():
                key = f"waits/{i}"
                place = self._store.get(key).decode() if self._store.check([key]) else ""
                elsewhere.setdefault(place, []).append(self._ranks[i])
            elsewhere.pop(where, None)
            found.extend(
                f"{_named(ranks)} in {place}" if place else f"{_named(ranks)} not there"
                for place, ranks in elsewhere.items()
            )
            found.append("" if found else "all ranks are in it, and it does not end")

        _start(ask).join(_ANSWER_S)
        return "; ".join(filter(None, found)) or "the store, which rank 0 keeps, does not answer"

    def _others(self) -> list[int]:
        return [i for i in range(len(self._ranks)) if i != self._rank]


def _start(ask: Callable[[], None]) -> threading.Thread:
    def run() -> None:
        with suppress(Exception):  # the store has gone
            ask()

    thread = threading.Thread(target=run, name="unidist-mpi-store", daemon=True)
    thread.start()
    return thread


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} {'are' if len(ranks) > 1 else 'is'}"
