"""One rank's end of a process group over MPI: what it submits, how long that may take, and what happens when it does not end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from unidist.backends import mpi_calls, mpi_watch
from unidist.backends.mpi_calls import Requests
from unidist.backends.mpi_progress import Collectives, Message, Messages
from unidist.backends.mpi_tensors import Call, named
from unidist.backends.mpi_work import Work


class Channel:
    """A pair of communicators, and the operations under way on them."""

    def __init__(self, comm: MPI.Comm, store: dist.Store, timeout: timedelta, ranks: Sequence[int], title: str) -> None:
        self.timeout = timeout.total_seconds()
        world = MPI.COMM_WORLD
        #: For errors.
        self.place = f"rank {ranks[comm.rank]} of {world.size} (mpi)"
        if comm.size < world.size:
            self.place += f", group of {', '.join(map(str, ranks))}"
        self.collectives = Collectives(self)
        self.comm = comm
        # A user's tags must not meet our own messages.
        self.mail = comm.Dup()
        self._title = title
        #: Global ranks, in the group's order.
        self._ranks = ranks
        self._messages = Messages(self)
        self._attendance = mpi_watch.Attendance(store, comm.rank, ranks)
        self._broken: Exception | None = None
        self._closed = False
        #: The operations since ``start_together``.
        self._together: list[dist.Work] | None = None
        mpi_watch.watch(self)

    def submit(self, call: Call, start: Callable[[], Requests]) -> dist.Work:
        """Queue a collective that ``start`` begins."""
        work = Work(self, call.name, call.outputs, call.finish())
        if call.timeout > timedelta(0):
            work.limit = call.timeout.total_seconds()
        self._record(work, call)
        small = call.may_be_small and mpi_calls.small(*call.moved)
        self.collectives.submit(work, start, small=small, at_once=call.at_once and self._together is None)
        return self._kept(work)

    def post(self, call: Call, peer: int, start: Callable[[], MPI.Request]) -> dist.Work:
        """Send a message to a rank of the group, or receive one from it, by ``start``."""
        message = Message(self._messages, self, call.name, peer, call.outputs, call.moved, call.finish())
        self._record(message, call)
        self._messages.post(message, start)
        return self._kept(message)

    def start_together(self) -> None:
        """Collect the operations that come."""
        self._together = []

    def end_together(self) -> dist.Work:
        """All that came since ``start_together``, as one."""
        works, self._together = self._together or [], None
        return _Together(works)

    def close(self) -> None:
        """Wait for what is under way, and free the communicators."""
        if self._closed:
            return
        for work in list(self.collectives.pending):
            with suppress(Exception):  # who submitted it can ask for its error
                work.wait()
        self.leave()
        self._closed = True
        if self._broken is None:
            self.collectives.close()
            self._messages.close()
            self.mail.Free()
            self.comm.Free()

    def abort(self) -> None:
        """End what is under way with an error, and the job."""
        if not self._closed and self._broken is None:
            self._break(f"{self.place} was aborted.")

    # -------------------------------------------------------------------------------- for the threads
    def check(self) -> None:
        """Raise if nothing can be submitted any more."""
        if self._broken is not None:
            raise dist.DistBackendError(f"{self.place}: an earlier operation has failed: {self._broken}")
        if self._closed:
            raise dist.DistBackendError(f"{self.place}: this process group was destroyed.")

    def leave(self) -> None:
        """Tell the other ranks that this one goes."""
        if not self._closed and self.comm.size > 1:
            self._attendance.leave(self.collectives.sequence)

    def overdue(self, work: Work) -> None:
        """``work`` did not end within its timeout."""
        account = self._attendance.account(_where(work))
        if not work.is_completed():  # not even while the others were asked
            self._break(
                f"{work} ran into its timeout of {work.limit:g} s: {account}. Did a rank fail, or make another call?"
            )

    def look(self) -> None:
        """Deal with what is late, or will never end."""
        if self._broken is not None or self._closed:
            return
        for work in [*list(self.collectives.pending)[:1], *list(self._messages.pending)]:
            age = time.monotonic() - work.since
            if age > work.limit:
                self.overdue(work)
            elif age > mpi_watch.LATE_S:
                self._attendance.tell(_where(work))
                missing = self._missing(work)
                if missing and age > 2 * mpi_watch.LATE_S:
                    told = ", ".join(str(self._ranks[i]) for i in missing)
                    self._break(
                        f"{work} cannot end: of the ranks that it needs, these have left: {told}. Look for their errors."
                    )

    # ---------------------------------------------------------------------------------------------
    def _missing(self, work: Work) -> list[int]:
        """The ranks in the group without which an operation cannot end, and that have left."""
        gone = self._attendance.gone
        if not isinstance(work, Message):
            return [i for i, last in gone.items() if last < work.sequence]
        if work.peer != MPI.ANY_SOURCE:
            return [work.peer] if work.peer in gone else []
        return list(gone) if len(gone) == self.comm.size - 1 else []

    def _record(self, work: Work, call: Call) -> None:
        if torch.autograd._profiler_enabled():
            work.record = torch.autograd._record_function_with_args_enter(f"{self._title}:{call.name}", *call.inputs)

    def _kept(self, work: dist.Work) -> dist.Work:
        if self._together is not None:
            self._together.append(work)
        return work

    def _break(self, reason: str) -> None:
        """End all that is under way, and soon the job: the threads may be in calls that never return."""
        error = dist.DistBackendError(reason)
        self._broken = self._broken or error
        mpi_watch.end_job_soon(error)
        for pending in [*self.collectives.pending, *self._messages.pending]:
            pending.end(error)


class _Together(dist.Work):
    """Several operations, as one."""

    def __init__(self, works: list[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return all(work.wait(timeout) for work in self._works)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> Any:
        return torch.futures.collect_all([work.get_future() for work in self._works])


def _where(work: Work) -> str:
    """Which operation it is; of all ranks the same, if they are in the same one."""
    kind = "message" if isinstance(work, Message) else "operation"
    alike = work.name in ("all_reduce", "broadcast", "reduce") and len(work.result()) == 1
    of = f" of {named(work.result()[0])}" if alike else ""
    return f"{work.name}{of}, {kind} {work.sequence}"
