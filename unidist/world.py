"""A world, from ``init`` to ``shutdown``: its backend and all that belongs to it; its excepthook."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from unidist.backends.base import Backend
from unidist.backends.mpi import launch as mpi
from unidist.diagnosis.watch.watch import Watch

if TYPE_CHECKING:
    from unidist.diagnosis.timeline.recorder import Timeline

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]
#: The excepthook of the last world, and the one before it.
_hook: Hook | None = None
_hook_before: Hook = sys.excepthook


class Feature:
    """What a feature keeps for the running world, made at its first use."""

    def finish(self) -> None:
        """End what it does while ``shutdown`` waits for the other ranks. Collective."""

    def close(self) -> None:
        """Close it before the backend is shut down. Not collective."""


class World:
    """A world that has been started.

    Args:
        backend: started.
        arguments: those of ``init``.
        again: the keyword arguments of ``context._init`` by which a worker joins the next generation of an elastic run.
        hook_before: the excepthook before the backend was started.
    """

    def __init__(
        self, backend: Backend, arguments: dict[str, object], again: dict[str, Any], hook_before: Hook
    ) -> None:
        #: What makes the calls: the backend itself, or a layer on top of it.
        self.current = backend
        self.arguments = arguments
        self.again = again
        #: What features keep for this world; see ``context.of_world``.
        self.features: dict[type[Feature], Feature] = {}
        self.watch: Watch | None = None
        self.timeline: Timeline | None = None
        #: Restores the variables that ``init(export_env=True)`` has set.
        self.restore_env: Callable[[], None] = _nothing
        #: Whether the others wait in MPI for a rank that ends by an error.
        self.ends_mpi = False
        self._backend: Backend | None = backend
        self._process = os.getpid()
        self._install_hook(hook_before)

    def close(self, *, alone: bool) -> None:
        """Leave it; ``alone``: the other ranks may go on."""
        if self.timeline is not None:
            self.timeline.close()
        backend, watch, self._backend, self.watch = self._backend, self.watch, None, None
        del self.current  # the excepthook may live longer
        # A forked child is not a rank: it leaves its parent's backend alone.
        if backend is None or os.getpid() != self._process:
            return
        if watch is not None and alone:
            watch.announce_end()
        backend.shutdown()
        if watch is not None:
            watch.close()
        self.restore_env()
        if not (self.ends_mpi and mpi.is_started()):
            hook_of_no_world()

    # -------------------------------------------------------------------------------- uncaught errors
    def _install_hook(self, before: Hook) -> None:
        global _hook, _hook_before
        show = sys.excepthook  # torch.distributed has installed one

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if os.getpid() != self._process:  # a forked child
                show(kind, error, trace)
                return
            tell_later = _nothing
            with suppress(Exception):  # whatever happens here, the error itself is shown
                tell_later = _nothing if self.watch is None else self.watch.failing(error, trace)
            explained = None if self._backend is None else self._backend.explained(error, trace)
            if explained is None:
                show(kind, error, trace)
            else:
                show(type(explained), explained, None)
            with suppress(Exception):
                tell_later()
            if self.ends_mpi and hook is _hook:
                mpi.abort_if_running()

        sys.excepthook = _hook = hook
        _hook_before = before


def hook_of_no_world() -> Hook:
    """Return the excepthook without that of a world; it is installed."""
    if sys.excepthook is _hook:
        sys.excepthook = _hook_before
    return sys.excepthook


def _nothing() -> None:
    pass
