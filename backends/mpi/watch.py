"""A thread that looks for operations that do not complete, and the end of the job where one cannot."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch.distributed as dist

from unidist.backends.mpi import launch
from unidist.diagnosis.operations import OperationRecord

if TYPE_CHECKING:
    from unidist.backends.mpi.channel import Channel

#: Interval of the checks.
_PERIOD_S = 0.25
#: Age from which an operation is late: its rank looks for others that have left.
LATE_S = 1.0
#: Time that a process has to handle the error of its broken group before the job ends.
_GRACE_S = 10.0
#: Timeout of requests to the store.
_STORE_TIMEOUT_S = 1.0

_groups: WeakSet[Channel] = WeakSet()
_lock = threading.Lock()
_started = threading.Lock()
_fatal: list[Exception] = []
#: A forked child has copies of all this, and must do nothing with them.
_process = os.getpid()


def watch(group: Channel) -> None:
    """Check a group's operations as long as it lives."""
    with _lock:
        _groups.add(group)
    if _started.acquire(blocking=False):
        threading.Thread(target=_run, name="unidist-mpi-watch", daemon=True).start()
        atexit.register(_at_exit)


def operations() -> list[OperationRecord]:
    """Return the operations of all groups of this rank."""
    return [record for group in _all() for record in group.records()]


def abort_job_soon(error: Exception) -> None:
    """Abort all ranks of the job: a rank inside an MPI call that never returns could neither go on nor finalize."""
    if not _fatal:
        _fatal.append(error)
        threading.Thread(target=_abort_later, name="unidist-mpi-end", daemon=True).start()


def _run() -> None:
    while True:
        time.sleep(_PERIOD_S)
        for group in _all():
            try:
                group.check_progress()
            except Exception as error:
                sys.stderr.write(f"unidist: the watch over {group} failed: {error!r}\n")


def _all() -> list[Channel]:
    with _lock:
        return list(_groups)


def _abort_later() -> None:
    time.sleep(_GRACE_S)
    sys.stderr.write(f"{_fatal[0]}\nThe job ends now.\n")
    launch.abort()


def _at_exit() -> None:
    if os.getpid() != _process:
        return
    if _fatal:
        launch.abort()
    for group in _all():
        group.leave()


class Presence:
    """Which ranks have left a group, as reported through the group's store.

    The store does not answer if its rank has stopped, so a thread of its own makes each request.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._request: threading.Thread | None = None
        #: Ranks (in the group) that have left, with the sequence number of the last collective that they submitted.
        self.left: dict[int, int] = {}

    def look(self) -> None:
        """Read which ranks have left. Returns at once."""

        def request() -> None:
            if self._store.add("left", 0):
                keys = {i: f"left/{i}" for i in range(self._size) if i != self._rank}
                self.left = {i: int(self._store.get(key)) for i, key in keys.items() if self._store.check([key])}

        if self._request is None or not self._request.is_alive():
            self._request = _start(request)

    def leave(self, sequence: int) -> None:
        """Report that this rank leaves, and takes part in no collective after that one."""

        def request() -> None:
            self._store.set(f"left/{self._rank}", str(sequence))
            self._store.add("left", 1)

        if os.getpid() == _process:
            _start(request).join(_STORE_TIMEOUT_S)


def _start(request: Callable[[], None]) -> threading.Thread:
    def run() -> None:
        with suppress(Exception):  # the store is gone
            request()

    thread = threading.Thread(target=run, name="unidist-mpi-store", daemon=True)
    thread.start()
    return thread
