"""The operations of one process group on this rank: submission, timeouts, errors, shutdown."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from unidist.backends.mpi import collectives, watch
from unidist.backends.mpi.call import Call
from unidist.backends.mpi.collectives import Requests
from unidist.backends.mpi.progress import CollectiveQueue, Message, MessageQueue
from unidist.backends.mpi.work import Work
from unidist.diagnosis.operations import OperationRecord, dtype_name, format_ranks
from unidist.diagnosis.watch.watch import running_watch

#: Collectives that are remembered.
_REMEMBERED = 32


class Channel:
    """Two communicators, for collectives and for point-to-point messages, and their pending operations."""

    def __init__(
        self, comm: MPI.Comm, store: dist.Store, timeout: timedelta, ranks: Sequence[int], title: str, group: str
    ) -> None:
        self.timeout = timeout.total_seconds()
        world = MPI.COMM_WORLD
        #: This rank and group, for error messages.
        self.label = f"rank {ranks[comm.rank]} of {world.size} (mpi)"
        if comm.size < world.size:
            self.label += f", group of {', '.join(map(str, ranks))}"
        self.collectives = CollectiveQueue(self)
        self.comm = comm
        # A communicator of its own: a user's tags must not match the messages of collectives.
        self.p2p_comm = comm.Dup()
        self._title = title
        #: Global ranks, by rank in the group.
        self._ranks = ranks
        self._messages = MessageQueue(self)
        self._presence = watch.Presence(store, comm.rank, comm.size)
        #: Number, name, dtype, shape and start of the last collectives.
        self._last: deque[tuple[int, str, torch.dtype | None, torch.Size | None, float]] = deque(maxlen=_REMEMBERED)
        #: The same on all ranks.
        self._group = group
        self._broken: Exception | None = None
        self._closed = False
        #: The operations since ``start_coalescing``; None outside.
        self._coalescing: list[dist.Work] | None = None
        watch.watch(self)

    def submit(self, call: Call, start: Callable[[], Requests]) -> dist.Work:
        """Queue a collective; ``start`` makes the MPI call."""
        work = Work(self, call.name, call.outputs, call.finish())
        if call.timeout > timedelta(0):
            work.limit = call.timeout.total_seconds()
        self._record(work, call)
        small = call.may_be_nonblocking and collectives.is_small(*call.buffers)
        dtype, shape = (call.inputs[0].dtype, call.inputs[0].shape) if call.inputs else (None, None)
        self._last.append((self.collectives.sequence + 1, call.name, dtype, shape, time.monotonic()))
        self.collectives.submit(work, start, small=small, synchronous=call.synchronous and self._coalescing is None)
        return self._tracked(work)

    def post(self, call: Call, peer: int, start: Callable[[], MPI.Request]) -> dist.Work:
        """Post a send to, or a receive from, rank ``peer`` of the group; ``start`` makes the MPI call."""
        message = Message(self._messages, self, call.name, peer, call.outputs, call.buffers, call.finish())
        self._record(message, call)
        self._messages.post(message, start)
        return self._tracked(message)

    def start_coalescing(self) -> None:
        """Collect the operations that are submitted until ``end_coalescing``."""
        self._coalescing = []

    def end_coalescing(self) -> dist.Work:
        """Return the operations since ``start_coalescing``, as one work."""
        works, self._coalescing = self._coalescing or [], None
        return _Coalesced(works)

    def close(self) -> None:
        """Wait for pending operations, and free the communicators."""
        if self._closed:
            return
        for work in list(self.collectives.pending):
            with suppress(Exception):  # its submitter sees the error in work.wait()
                work.wait()
        self.leave()
        self._closed = True
        if self._broken is None:
            self.collectives.close()
            self._messages.close()
            self.p2p_comm.Free()
            self.comm.Free()

    def abort(self) -> None:
        """Fail pending operations, and end the job."""
        if not self._closed and self._broken is None:
            self._break(f"{self.label} was aborted.")

    # -------------------------------------------------------------------------------- for the threads
    def check(self) -> None:
        """Raise if the group is closed, or an operation of it has failed."""
        if self._broken is not None:
            raise _explained_error(f"{self.label}: an earlier operation has failed: {self._broken}")
        if self._closed:
            raise dist.DistBackendError(f"{self.label}: this process group was destroyed.")

    def leave(self) -> None:
        """Tell the other ranks that this one leaves the group."""
        if not self._closed and self.comm.size > 1:
            self._presence.leave(self.collectives.sequence)

    def timed_out(self, work: Work) -> None:
        """Fail the group: ``work`` did not complete within its timeout."""
        reason = self._explained(work, f"hit its timeout of {work.limit:g} s")
        if not work.is_completed():  # not even while the others were asked
            self._break(f"{reason} Did a rank fail, or make another call?")

    def check_progress(self) -> None:
        """Report operations that are late, and fail those that timed out or cannot complete."""
        if self._broken is not None or self._closed:
            return
        for work in [*list(self.collectives.pending)[:1], *list(self._messages.pending)]:
            age = time.monotonic() - work.started_at
            if age > work.limit:
                self.timed_out(work)
            elif age > watch.LATE_S:
                self._presence.look()
                missing = self._missing(work)
                if missing and age > 2 * watch.LATE_S:
                    ranks = format_ranks([self._ranks[i] for i in missing])
                    self._break(self._explained(work, f"cannot complete, because these ranks have left: {ranks}"))

    def records(self) -> list[OperationRecord]:
        """Return the pending operations, and the last ones that are done."""
        now = time.monotonic()
        pending = {work.sequence: work for work in list(self.collectives.pending)}
        ranks = () if self.comm.size == MPI.COMM_WORLD.size else tuple(self._ranks)
        return [
            *(
                OperationRecord(
                    name, number, "" if dtype is None else dtype_name(dtype), None if shape is None else tuple(shape),
                    ranks, self._group, now - started, number not in pending,
                )
                for number, name, dtype, shape, started in list(self._last)
            ),
            *(_message(message, now, self._group) for message in list(self._messages.pending)),
        ]  # fmt: skip

    # ---------------------------------------------------------------------------------------------
    def _missing(self, work: Work) -> list[int]:
        """Return the ranks, in the group, that an operation needs and that have left."""
        left = self._presence.left
        if not isinstance(work, Message):
            return [i for i, last in left.items() if last < work.sequence]
        if work.peer != MPI.ANY_SOURCE:
            return [work.peer] if work.peer in left else []
        return list(left) if len(left) == self.comm.size - 1 else []

    def _explained(self, work: Work, what: str) -> str:
        """Return a failure of an operation, with what the other ranks do."""
        running = running_watch()
        if running is None:
            return f"{work} {what}."
        same = (each for each in self.records() if each.is_message is isinstance(work, Message))
        operation = next((each for each in same if each.number == work.sequence), None)
        call, others = running.explain(work.name, TimeoutError(what), operation)
        return f"{self.label}: {call}, {what}{': ' * bool(others)}{others}."

    def _record(self, work: Work, call: Call) -> None:
        if torch.autograd._profiler_enabled():
            work.record = torch.autograd._record_function_with_args_enter(f"{self._title}:{call.name}", *call.inputs)

    def _tracked(self, work: dist.Work) -> dist.Work:
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _break(self, reason: str) -> None:
        """Fail all pending operations, and soon end the job: the threads may be in calls that never return."""
        error = _explained_error(reason)
        self._broken = self._broken or error
        watch.abort_job_soon(error)
        for pending in [*self.collectives.pending, *self._messages.pending]:
            pending.complete(error)


class _Coalesced(dist.Work):
    """Several operations as one work."""

    def __init__(self, works: list[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return all(work.wait(timeout) for work in self._works)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> Any:
        return torch.futures.collect_all([work.get_future() for work in self._works])


def _explained_error(reason: str) -> dist.DistBackendError:
    """Return an error that says what the other ranks do; ``Backend.failure`` asks them no more."""
    error = dist.DistBackendError(reason)
    error.is_explained = True  # type: ignore[attr-defined]
    return error


def _message(message: Message, now: float, group: str) -> OperationRecord:
    """Return a pending message; its time counts from when it is waited for."""
    (tensor,) = message.result()
    return OperationRecord(
        message.name, message.sequence, dtype_name(tensor.dtype), tuple(tensor.shape), group=group,
        seconds=max(0.0, now - message.started_at), is_message=True,
    )  # fmt: skip
