"""The operations of one ``hvd.init()``: what is pending on this rank, and the execution of what the coordinator says.

Three threads: that of the caller, which submits and waits; the control thread, which sends and receives; the executor,
which makes the collective calls.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch

from unidist import context, settings
from unidist.backends.base import START_TIMEOUT, Backend, Group
from unidist.diagnosis.operations import JOIN, OperationRecord
from unidist.diagnosis.watch.locations import here
from unidist.errors import CollectiveError
from unidist.hvd import execution
from unidist.hvd.bootstrap import open_control
from unidist.hvd.control import ControlOptions, StallTimeouts
from unidist.hvd.errors import HorovodInternalError
from unidist.hvd.messages import (
    AllJoined,
    AnnounceRounds,
    Complete,
    Execute,
    Failed,
    Failure,
    Join,
    Name,
    ProcessSetAdded,
    ProcessSetRemoved,
    Request,
    Rounds,
    Shutdown,
    Signature,
    Submit,
)
from unidist.hvd.negotiation import Coordinator, display_name
from unidist.hvd.operation import GLOBAL_SET, Operation
from unidist.hvd.response_cache import ResponseCache
from unidist.hvd.rounds import GradientRounds
from unidist.hvd.timeline import TensorTimeline
from unidist.world import Feature

#: How long a session that closes waits for the operation that is being executed.
_CLOSE_TIMEOUT_S = 5.0
#: Seconds without a sign of life after which a rank is lost that is stopped or whose host cannot be reached, and one of
#: another host, which may be in a call that keeps Python's lock; unless ``init`` has a timeout.
_DEADLINE_S, _SILENCE_S = 30.0, 600.0
#: How much later than a rank that has stopped one is lost that submits nothing, so that the better reason comes first.
_LATER_S = 2.0
#: How much later than a collective call fails the control thread may learn that a rank is lost.
_VERDICT_S = 3.0
#: Numbers of operations without a name, between two joins.
_NUMBERS = 2**32


class ProcessSetGroups:
    """The backend's groups of a process set."""

    def __init__(self, backend: Backend, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.included = backend.topology.rank in ranks
        # Two groups: gradients, which are not negotiated, must not wait for operations between them, nor these for
        # gradients.
        self.operations, self.gradients = (
            (backend.new_group(ranks), backend.new_group(ranks)) if ranks else (Group((), None), Group((), None))
        )


class _Task(NamedTuple):
    """Operations that execute together: the signature of each, and this rank's, None if it has joined."""

    set_id: int
    signatures: tuple[Signature, ...]
    operations: list[Operation | None]


class Session:
    """Everything between ``init`` and ``shutdown``.

    Args:
        backend: the running backend.
        fusion: fusion threshold in bytes.
        options: settings of the control plane.
        timeline: where operations are recorded.
    """

    def __init__(self, backend: Backend, fusion: int, options: ControlOptions, timeline: TensorTimeline) -> None:
        self.backend = backend
        self.topology = backend.topology
        self.pid = os.getpid()
        self.timeline = timeline
        size = self.topology.world_size
        self.process_sets: dict[int, ProcessSetGroups] = {GLOBAL_SET: ProcessSetGroups(backend, tuple(range(size)))}
        #: Signatures in use: equal ones are one object.
        self.signatures: dict[Hashable, Signature] = {}
        #: Operations that have been submitted, and not sent; that have been sent, and not executed; and those that are
        #: being executed. A caller writes to the first only, by calls that no signal handler can interrupt.
        self._submitted: dict[tuple[int, Name], Operation] = {}
        self._pending: dict[tuple[int, Name], Operation] = {}
        self._executing: Sequence[Operation | None] = ()
        self._cache = ResponseCache()
        self._handles: dict[int, Operation] = {}
        self._next_handle = count(1)
        self._unnamed: dict[int, count[int]] = {}
        self._joins = 0
        #: Why no operation can be submitted any more.
        self._closed = ""
        #: Whether ``close`` has been called.
        self.ended = False
        #: Whether a rank is lost that a collective call may wait for.
        self._lost = False
        self._timers: list[threading.Timer] = []
        #: Whether this rank has joined, and has not got the answer.
        self._joining = False
        #: How many operations of each process set have been executed: in the same order on all of its ranks.
        self._executed: Counter[int] = Counter()
        #: Signature, name and process set of the last operation that was executed, and when it began.
        self._last: tuple[Signature, Name, int, float] | None = None
        self._tasks: queue.SimpleQueue[_Task | ProcessSetAdded | ProcessSetRemoved | None] = queue.SimpleQueue()
        self._executor = threading.Thread(target=self._execute_all, name="unidist-hvd", daemon=True)
        self._control = open_control(backend, self, Coordinator(size, fusion, execution.reduce_values), options)
        self.rounds = GradientRounds(self._control.post)
        self._watch = context.watch()
        if self._watch is not None:
            self._watch.sources.append(self.records)
        self._executor.start()
        self._control.start()

    # -------------------------------------------------------------------------------- for the calls
    def next_name(self, set_id: int) -> int:
        """Return the number of an operation without a name: equal on all ranks that submit these in one order.

        All ranks count anew after a join, before which some have submitted more than others.
        """
        return self._joins * _NUMBERS + next(self._unnamed.setdefault(set_id, count()))

    def submit(self, operation: Operation, *, send_now: bool = False) -> int:
        """Begin the negotiation; a handle for ``wait``.

        Args:
            operation: a new one.
            send_now: whether the caller is about to wait.

        Raises:
            HorovodInternalError: no operation can execute any more.
            ValueError: an operation of that name is pending.
        """
        if self._closed:
            raise self._refuse(operation)
        if os.getpid() != self.pid:
            raise HorovodInternalError(f"{_row(operation)}: a process that was forked from a rank is no rank.")
        handle = next(self._next_handle)
        self._handles[handle] = operation
        if self.timeline.on:
            self.timeline.begin(_row(operation), f"NEGOTIATE_{operation.signature.kind.upper()}")
        key = (operation.set_id, operation.name)
        operation.executed = self._executed[operation.set_id]
        if key in self._pending or self._submitted.setdefault(key, operation) is not operation:
            del self._handles[handle]
            raise _already_pending(operation)
        if self._closed:  # in the meantime
            self._fail_pending()
        self._control.wake(urgent=send_now)
        return handle

    def wait(self, handle: int) -> Any:
        """Return the result of an operation; the handle cannot be used again. None for an unknown handle."""
        operation = self._handles.get(handle)
        if operation is None:
            return None
        if not operation.done and self._submitted:
            self._control.wake(urgent=True)
        try:
            return operation.wait()
        finally:
            if operation.done:  # else this thread was interrupted, and may wait again
                self._handles.pop(handle, None)

    def run(self, operation: Operation) -> Any:
        """Call ``submit`` and ``wait``."""
        return self.wait(self.submit(operation, send_now=True))

    def poll(self, handle: int) -> bool:
        """Return whether ``wait`` would return at once."""
        operation = self._handles.get(handle)
        if operation is None:
            raise ValueError(f"handle {handle} was not created by this session, or has been synchronized already.")
        return operation.done

    def why_failed(self, error: Exception) -> str:
        """Return why a collective call failed: a rank is lost, which the control thread may learn a little later."""
        end = time.monotonic() + _VERDICT_S
        while not self._closed and isinstance(error, CollectiveError) and time.monotonic() < end:
            time.sleep(0.01)
        return self._closed or str(error)

    def join(self) -> int:
        """Take part in the others' allreduces with zeros until all have joined; the last rank to join."""
        if self._closed:
            raise HorovodInternalError(f"join: {self._closed} (called at {here()})")
        if not self._joining:  # else the wait was interrupted
            self._joining = True
            self._control.post(Join())
        try:
            last = self.rounds.wait_for_join()
        except LookupError as error:  # the others will wait for this rank
            self.fail(f"join: {error}")
            raise HorovodInternalError(f"join: {error} (called at {here()})") from None
        self._joining = False
        return last

    def fail(self, reason: str) -> None:
        """End all operations, on all ranks: this one cannot make the collective calls that the others make."""
        if self.topology.world_size > 1 and not self._closed:
            self._control.post(Failure(reason))

    def close(self) -> None:
        """Shut down. Pending operations fail, here and on the other ranks."""
        self.ended = True
        if self._watch is not None:
            self._watch.sources.remove(self.records)
        self._control.close()
        self._close("Horovod has been shut down")
        for timer in self._timers:
            timer.cancel()
        # The backend must not end during an operation.
        self._executor.join(_CLOSE_TIMEOUT_S)
        self.timeline.close()

    # -------------------------------------------------------------------------------- for the control thread
    def count_submitted(self) -> int:
        """Return how many operations have been submitted since the last call of ``take_submitted``."""
        return len(self._submitted)

    def take_submitted(self) -> Submit | None:
        """Return these operations."""
        if not self._submitted or self._closed:
            return None
        requests = []
        for key in list(self._submitted):
            operation = self._submitted[key]
            # At any time it is in one of the two.
            other = self._pending.setdefault(key, operation)
            del self._submitted[key]
            if other is operation:
                requests.append(Request(*key, operation.signature, operation.value))
            else:
                operation.finish(error=_already_pending(operation))
        return self._cache.submit(requests)

    def process(self, message: Any) -> None:
        """Do what the coordinator says."""
        if isinstance(message, Execute):
            if self.timeline.on:
                self.timeline.cycle()
            for group in self._cache.groups(message):
                self._executed[message.set_id] += len(group)
                operations = [self._take_pending(message.set_id, name) for name, _ in group]
                self._tasks.put(_Task(message.set_id, tuple(signature for _, signature in group), operations))
        elif isinstance(message, Complete):
            (((name, _),),) = self._cache.groups(message)
            self._executed[message.set_id] += 1
            operation = self._take_pending(message.set_id, name)
            if operation is not None:
                with self._recorded([operation], operation.signature.kind):
                    if message.value:
                        execution.write_value(operation, message.value)
                operation.finish()
        elif isinstance(message, Failed):
            operation = self._take_pending(message.set_id, message.name)
            if operation is not None:
                operation.fail(message.reason)
        elif isinstance(message, (ProcessSetAdded, ProcessSetRemoved)):
            self._tasks.put(message)
        elif isinstance(message, AnnounceRounds):
            self.rounds.announce()
        elif isinstance(message, Rounds):
            self.rounds.receive(message)
        elif isinstance(message, AllJoined):
            self._joins += 1
            self._unnamed.clear()
            self.rounds.all_joined(message.last)
        elif isinstance(message, Shutdown):
            self._close(message.reason)
            self._abort_after(message.abort_after)

    def activity(self) -> str:
        """Return what this rank is doing, for the others' messages."""
        executing = next((each for each in self._executing if each is not None), None)
        if executing is not None:
            return f"in {_row(executing)}"
        for waiting in list(self._pending.values())[:1]:
            return f"waiting for other ranks in {_row(waiting)}"
        return f"after {display_name(*self._last[:2])}" if self._last else ""

    def report(self, title: str) -> None:
        """Report what all ranks do."""
        if self._watch is not None:
            self._watch.report_soon(f"unidist: {title}")

    def records(self) -> list[OperationRecord]:
        """Return the pending operations, and the last one that is done, for reports. Any thread."""
        now = time.monotonic()
        executing = [each for each in self._executing if each is not None]
        pending = [*executing, *list(self._pending.values()), *list(self._submitted.values())]
        found = [
            self._record(each.signature, each.name, each.set_id, now - each.started, each.executed) for each in pending
        ]
        if self._joining:
            found.append(OperationRecord(JOIN, group=_group(GLOBAL_SET)))
        if self._last is not None:
            signature, name, set_id, started = self._last
            last = self._record(signature, name, set_id, now - started, self._executed[set_id])
            found.append(last._replace(done=True))
        return found

    def _record(self, signature: Signature, name: Name, set_id: int, seconds: float, executed: int) -> OperationRecord:
        dtype, shape = (*signature.dtypes, "")[0], (*signature.shapes, None)[0]
        process_set = None if set_id == GLOBAL_SET else self.process_sets.get(set_id)
        ranks = () if process_set is None else process_set.ranks  # the last operation's may have been removed
        return OperationRecord(
            display_name(signature, name), 0, dtype, shape, ranks, _group(set_id), seconds, executed=executed
        )

    def _take_pending(self, set_id: int, name: Name) -> Operation | None:
        operation = self._pending.pop((set_id, name), None)
        if operation is not None:
            self._last = (operation.signature, operation.name, set_id, operation.started)
            if self.timeline.on:
                self.timeline.end(_row(operation))
        return operation

    def _close(self, why: str) -> None:
        """Fail all operations, and those to come."""
        self._closed = self._closed or why
        self._fail_pending()
        self.rounds.fail(self._closed)
        self._tasks.put(None)

    def _abort_after(self, seconds: float) -> None:
        """Abort the collective calls that wait for a rank which is lost, unless they end by themselves."""
        if seconds == 0.0:
            self._lost = True
            self._fail_pending()
            self.backend.abort()
        elif seconds < math.inf:
            timer = threading.Timer(seconds, self._abort_after, [0.0])
            timer.daemon = True
            timer.start()
            self._timers.append(timer)

    def _fail_pending(self) -> None:
        for operations in (self._submitted, self._pending):
            with suppress(KeyError):  # empty
                while True:
                    _, operation = operations.popitem()
                    self._refuse(operation)
        if self._lost:
            for executing in self._executing:
                if executing is not None:
                    self._refuse(executing)

    def _refuse(self, operation: Operation) -> HorovodInternalError:
        return operation.fail(f"{_row(operation)}: {self._closed}: no operation can begin any more")

    # -------------------------------------------------------------------------------- the executor
    def _execute_all(self) -> None:
        while (task := self._tasks.get()) is not None:
            if isinstance(task, (ProcessSetAdded, ProcessSetRemoved)):
                operation = self._take_pending(GLOBAL_SET, task.name)
                self._finish([operation], "process_set", partial(self._change_process_sets, task))
                del operation
            else:
                self._finish(task.operations, task.signatures[0].kind, partial(self._execute, task))
            del task  # its tensors must not be kept until there is another one
        while not self._tasks.empty():
            task = self._tasks.get()
            for operation in task.operations if isinstance(task, _Task) else ():
                if operation is not None:
                    self._refuse(operation)

    def _finish(self, operations: Sequence[Operation | None], kind: str, execute: Callable[[], Sequence[Any]]) -> None:
        self._executing = operations
        try:
            with self._recorded(operations, kind):
                results = execute()
        except Exception as error:
            rows = [_row(operation) for operation in operations if operation is not None]
            reason = f"{', '.join(rows[:3])}: {self.why_failed(error)}"
            for operation in operations:
                if operation is not None:
                    operation.fail(reason)
            # The others may have made calls that this rank has not: later ones would be mistaken for them.
            self.fail(reason)
            return
        finally:
            self._executing = ()
        for operation, result in zip(operations, results):
            if operation is not None:
                operation.finish(result)

    @contextmanager
    def _recorded(self, operations: Sequence[Operation | None], kind: str) -> Iterator[None]:
        """Inside, the operations are in the timeline."""
        rows = [_row(each) for each in operations if each is not None] if self.timeline.on else []
        for row in rows:
            self.timeline.begin(row, kind.upper())
        try:
            yield
        finally:
            for row in rows:
                self.timeline.end(row)

    def _execute(self, task: _Task) -> Sequence[Any]:
        kind, group = task.signatures[0].kind, self.process_sets[task.set_id].operations
        with _modes_of_submission(task.operations), _in_stream_order(task.signatures[0], task.operations):
            return execution.EXECUTE[kind](self.backend, group, task.signatures, task.operations)

    def _change_process_sets(self, change: ProcessSetAdded | ProcessSetRemoved) -> list[int | None]:
        if isinstance(change, ProcessSetAdded):
            self.process_sets[change.set_id] = ProcessSetGroups(self.backend, change.ranks)
            return [change.set_id]
        removed = self.process_sets.pop(change.set_id, None)
        if removed is not None and removed.included:
            self.backend.drop_group(removed.operations)
            self.backend.drop_group(removed.gradients)
        return [None]


def _group(set_id: int) -> str:
    return f"process set {set_id}"


def _row(operation: Operation) -> str:
    """Return an operation for messages, and its row of the timeline."""
    return display_name(operation.signature, operation.name)


def _already_pending(operation: Operation) -> ValueError:
    return ValueError(
        f"{_row(operation)} is pending already: an operation of that name has been submitted and is not done. Give "
        "each operation that runs at the same time a name of its own."
    )


@contextmanager
def _modes_of_submission(operations: Sequence[Operation | None]) -> Iterator[None]:
    """Independent of the modes of the thread that executes: inference mode for inference tensors, no autocast."""
    inference = any(
        tensor.is_inference()
        for each in operations
        if each is not None
        for tensor in (each.inputs if each.outputs is each.inputs else (*each.inputs, *(each.outputs or ())))
    )
    with torch.inference_mode(inference), torch.no_grad():
        if not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):
            yield
            return
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield


@contextmanager
def _in_stream_order(signature: Signature, operations: Sequence[Operation | None]) -> Iterator[None]:
    """On a GPU: run after the kernels that compute the inputs, and be complete at the end; the caller has another
    stream.
    """
    if signature.device != "cuda":
        yield
        return
    inputs = [tensor for operation in operations if operation is not None for tensor in operation.inputs]
    if not inputs:
        yield
        return
    with torch.cuda.device(inputs[0].device):
        stream = torch.cuda.current_stream()
        for operation in operations:
            if operation is not None and operation.inputs_ready is not None:
                stream.wait_event(operation.inputs_ready)
        yield
        stream.synchronize()


class _Open(Feature):
    """The session of the running world."""

    session: Session | None = None

    def close(self) -> None:
        ended, self.session = self.session, None
        # A forked child is not a rank: it leaves its parent's connections alone.
        if ended is not None and ended.pid == os.getpid():
            ended.close()


#: Of this process, on rank 0; it may be started and stopped at any time.
timeline = TensorTimeline()


def current_session() -> Session:
    """Return the running session; the first call after ``unidist.init()`` opens it, and is collective then.

    Raises:
        ValueError: neither ``init`` nor ``unidist.init`` has been called.
    """
    if not context.is_initialized():
        raise not_initialized()
    return context.of_world(_Open).session or open_session()


def not_initialized() -> ValueError:
    """Return the error of a call before ``init``."""
    return ValueError("Horovod has not been initialized; use hvd.init().")


def open_session() -> Session:
    """Open a session on the running backend, with the settings of the environment. Collective."""
    if not context.is_initialized():
        raise not_initialized()
    close_session()
    env = os.environ
    timeout = context.timeout()
    seconds = None if timeout is None else timeout.total_seconds()
    warn = settings.horovod_number(env, "HOROVOD_STALL_CHECK_TIME_SECONDS", settings.stall(env))
    stall = StallTimeouts(
        0.0 if settings.horovod_flag(env, "HOROVOD_STALL_CHECK_DISABLE") else warn,
        settings.horovod_number(env, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", seconds + _LATER_S if seconds else 0),
    )
    fusion = settings.horovod_number(env, "HOROVOD_FUSION_THRESHOLD", 64 * 2**20, whole=True)
    cycle = settings.horovod_number(env, "HOROVOD_CYCLE_TIME", 1) / 1000
    start = seconds or settings.horovod_number(env, "HOROVOD_GLOO_TIMEOUT_SECONDS", 0) or START_TIMEOUT.total_seconds()
    options = ControlOptions(cycle, stall, seconds or _DEADLINE_S, seconds or _SILENCE_S, start)
    session = context.of_world(_Open).session = Session(context.current(), fusion, options, timeline)
    # DYNAMIC means: at start_timeline(), which is always possible here.
    if session.topology.rank == 0 and (path := env.get("HOROVOD_TIMELINE", "")) not in ("", "DYNAMIC"):
        timeline.open(path, settings.horovod_flag(env, "HOROVOD_TIMELINE_MARK_CYCLES"))
    return session


def close_session() -> None:
    """Close it; no-op without one."""
    if context.is_initialized():
        context.of_world(_Open).close()


def is_open() -> bool:
    """Return whether there is one."""
    return context.is_initialized() and context.of_world(_Open).session is not None
