"""The operations of one ``hvd.init()``: what is pending on this rank, and the execution of what the coordinator
responds.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

import torch

from unidist import context, knobs
from unidist.backends.base import Backend, Group
from unidist.hvd import execution
from unidist.hvd.common.exceptions import HorovodInternalError
from unidist.hvd.control import ControlChannel, Join, JoinFailed, Leave, Rounds, StallTimeouts, open_channel
from unidist.hvd.negotiation import Coordinator, Request, Response, Signature
from unidist.hvd.operation import GLOBAL_SET, Operation
from unidist.hvd.rounds import GradientRounds, Round
from unidist.hvd.timeline import Timeline

#: How long the executor thread pauses after a waiting thread has done its work, before it looks for work again.
_PAUSE_S = 1e-3
#: How long a session that closes waits for the operation that is being executed.
_CLOSE_TIMEOUT_S = 5.0


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


class Session:
    """Everything between ``init`` and ``shutdown``.

    Args:
        backend: the running backend.
        fusion: fusion threshold in bytes.
        cycle: seconds in which operations are collected before their requests are sent, unless a caller waits for one.
        stall: timeouts of operations that not all ranks submit.
        timeline: where operations are recorded.
    """

    def __init__(self, backend: Backend, fusion: int, cycle: float, stall: StallTimeouts, timeline: Timeline) -> None:
        self.backend = backend
        self.topology = backend.topology
        self.process = os.getpid()
        self.timeline = timeline
        self._cycle = cycle
        self.rounds = GradientRounds(self._send_rounds)
        size = self.topology.world_size
        self.process_sets: dict[int, ProcessSetGroups] = {GLOBAL_SET: ProcessSetGroups(backend, tuple(range(size)))}
        self._control: ControlChannel = open_channel(backend, Coordinator(size, fusion), stall)
        self._lock = threading.Lock()
        self._pending: dict[tuple[int, str], Operation] = {}
        #: Requests that have not been sent.
        self._outbox: list[Request] = []
        #: Signatures in use: equal ones are one object, which is pickled once in a batch.
        self.signatures: dict[Hashable, Signature] = {}
        self._sending = threading.Lock()
        self._wakeup = threading.Event()
        self._handles: dict[int, Operation] = {}
        self._next_handle = count(1)
        self._unnamed: dict[int, count[int]] = {}
        self._joins = 0
        #: Held by the thread that receives and executes responses.
        self._receiving = threading.Lock()
        #: Whether that thread waits for an operation, and how often one has done so.
        self._waiter_receives = False
        self._waiters = 0
        #: Why no operation can be submitted any more.
        self._closed = ""
        self._executor = threading.Thread(target=self._execute_in_background, name="unidist-hvd", daemon=True)
        self._executor.start()
        self._sender = threading.Thread(target=self._send_in_background, name="unidist-hvd-sender", daemon=True)
        self._sender.start()

    # -------------------------------------------------------------------------------- for the calls
    def next_name(self, set_id: int) -> str:
        """The name of an operation without one: equal on all ranks that submit such operations in the same order.

        All ranks count anew after a join, before which some have submitted more than others.
        """
        with self._lock:
            return f"noname.{self._joins}.{next(self._unnamed.setdefault(set_id, count()))}"

    def submit(self, operation: Operation, *, send_now: bool = False) -> int:
        """Begin the negotiation; a handle for ``wait``.

        Args:
            operation: a new one.
            send_now: whether the caller is about to wait.
        """
        key = (operation.set_id, operation.name)
        with self._lock:
            if self._closed:
                raise HorovodInternalError(self._closed)
            if key in self._pending:
                raise ValueError(
                    f"{operation.name} is pending already: an operation of that name has been submitted and is not "
                    "done. Give each operation that runs at the same time a name of its own."
                )
            self._pending[key] = operation
            handle = next(self._next_handle)
            self._handles[handle] = operation
            first = not self._outbox
            self._outbox.append((operation.set_id, operation.name, operation.signature, operation.payload))
        if self.timeline.on:
            self.timeline.begin(operation.name, f"NEGOTIATE_{operation.signature.kind.upper()}")
        if send_now:
            self._send_requests()
        elif first:
            self._wakeup.set()
        return handle

    def wait(self, handle: int) -> Any:
        """The result of an operation; the handle cannot be used again. None for an unknown handle."""
        operation = self._handles.get(handle)
        if operation is None:
            return None
        if self._outbox and not operation.done:
            self._send_requests()
        try:
            # The waiting thread itself receives and executes: to wake up another one would take longer.
            if not operation.done and self._receiving.acquire(blocking=False):
                try:
                    self._waiter_receives = True
                    while not operation.done:
                        self._process_messages()
                finally:
                    self._waiters += 1
                    self._waiter_receives = False
                    self._receiving.release()
            return operation.wait()
        finally:
            self._handles.pop(handle, None)

    def run(self, operation: Operation) -> Any:
        """``submit`` and ``wait``."""
        return self.wait(self.submit(operation, send_now=True))

    def poll(self, handle: int) -> bool:
        """Whether ``wait`` would return at once."""
        operation = self._handles.get(handle)
        if operation is None:
            raise ValueError(f"handle {handle} was not created by this session, or has been synchronized already.")
        return operation.done

    def join(self) -> int:
        """Take part in the others' allreduces with zeros until all have joined; the last rank to join."""
        self._send_requests()
        self._send([Join()])
        return self.rounds.wait_for_join()

    def close(self) -> None:
        """Shut down. Pending operations fail, here and on the other ranks."""
        with suppress(OSError):
            self._send_requests()
            self._control.send([Leave()])
        self._fail_pending("Horovod has been shut down")
        self._control.close()
        # The backend must not end during an operation.
        self._executor.join(_CLOSE_TIMEOUT_S)
        self.timeline.close()

    # -------------------------------------------------------------------------------- to rank 0
    def _send_rounds(self, begun: tuple[Round, ...]) -> None:
        with suppress(OSError):
            self._control.send([Rounds(begun)])

    def _send(self, batch: Sequence[Any]) -> None:
        try:
            self._control.send(batch)
        except OSError as error:
            self._fail_pending(f"rank 0 is gone ({error})")

    def _send_requests(self) -> None:
        with self._sending:
            with self._lock:
                requests, self._outbox = self._outbox, []
            if requests:
                self._send(requests)

    def _send_in_background(self) -> None:
        while True:
            self._wakeup.wait()
            self._wakeup.clear()
            if self._closed:
                return
            # What is submitted in one cycle goes in one batch.
            time.sleep(self._cycle)
            self._send_requests()

    # -------------------------------------------------------------------------------- from rank 0
    def _execute_in_background(self) -> None:
        """Receive and execute while no caller waits."""
        seen = 0
        while not self._closed:
            if self._waiter_receives or seen != self._waiters:
                # Two threads that wake up for each message would delay each other.
                seen = self._waiters
                time.sleep(_PAUSE_S)
            elif self._control.poll(None):
                with self._receiving:
                    if not self._waiter_receives and self._control.poll(0):
                        self._process_messages()

    def _process_messages(self) -> None:
        """Receive one batch, and do what it says."""
        try:
            batch = self._control.receive()
        except (EOFError, OSError):
            self._fail_pending("rank 0 is gone: it has ended, or shut Horovod down")
            return
        if self.timeline.on:
            self.timeline.cycle()
        for message in batch:
            if isinstance(message, Response):
                if message.names:
                    self._execute(message)
                else:
                    self._all_joined(message.number)
            elif isinstance(message, Join):
                self.rounds.announce()
            elif isinstance(message, Rounds):
                self.rounds.receive(message.begun)
            elif isinstance(message, JoinFailed):
                self.rounds.fail(HorovodInternalError(f"join: {message.reason}"))

    def _all_joined(self, last: int) -> None:
        with self._lock:
            self._joins += 1
            self._unnamed.pop(GLOBAL_SET, None)
        self.rounds.all_joined(last)

    def _execute(self, response: Response) -> None:
        with self._lock:
            operations = [self._pending.pop((response.set_id, name), None) for name in response.names]
        if response.error:
            _fail(operations, HorovodInternalError(response.error))
            return
        signature = response.signatures[0]
        if self.timeline.on:
            for name in response.names:
                self.timeline.end(name)
                self.timeline.begin(name, signature.kind.upper())
        try:
            if signature.kind in ("add_process_set", "remove_process_set"):
                results: Sequence[Any] = [self._change_process_sets(response)]
            else:
                group = self.process_sets[response.set_id].operations
                with _modes_of_submission(operations), _in_stream_order(signature, operations):
                    results = execution.EXECUTE[signature.kind](self.backend, group, response, operations)
        except Exception as error:
            _fail(operations, HorovodInternalError(f"{', '.join(response.names[:3])}: {error}"))
            return
        finally:
            if self.timeline.on:
                for name in response.names:
                    self.timeline.end(name)
        for operation, result in zip(operations, results):
            if operation is not None:
                operation.finish(result)

    def _change_process_sets(self, response: Response) -> int | None:
        signature = response.signatures[0]
        if signature.kind == "add_process_set":
            self.process_sets[response.number] = ProcessSetGroups(self.backend, signature.ranks)
            return response.number
        removed = self.process_sets.pop(signature.root, None)
        if removed is not None and removed.included:
            self.backend.drop_group(removed.operations)
            self.backend.drop_group(removed.gradients)
        return None

    def _fail_pending(self, why: str) -> None:
        with self._lock:
            self._closed = self._closed or f"{why}: no operation can begin any more."
            pending = list(self._pending.values())
            self._pending.clear()
        _fail(pending, HorovodInternalError(self._closed))
        self.rounds.fail(HorovodInternalError(self._closed))
        self._wakeup.set()


@contextmanager
def _modes_of_submission(operations: Sequence[Operation | None]) -> Iterator[None]:
    """Independent of the modes of the thread that executes: inference mode for inference tensors, no autocast."""
    inference = any(
        tensor.is_inference()
        for each in operations
        if each is not None
        for tensor in (*each.inputs, *(each.outputs or ()))
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


def _fail(operations: Sequence[Operation | None], error: Exception) -> None:
    for operation in operations:
        if operation is not None:
            operation.finish(error=error)


_session: Session | None = None
#: Of this process, on rank 0; it may be started and stopped at any time.
timeline = Timeline()


def current_session() -> Session:
    """The running session; the first call after ``unidist.init()`` opens it, and is collective then.

    Raises:
        ValueError: neither ``init`` nor ``unidist.init`` has been called.
    """
    if _session is None:
        open_session()
    assert _session is not None
    return _session


def not_initialized() -> ValueError:
    """The error of a call before ``init``."""
    return ValueError("Horovod has not been initialized; use hvd.init().")


def open_session() -> None:
    """Open a session on the running backend, with the settings of the environment. Collective."""
    global _session
    if not context.is_initialized():
        raise not_initialized()
    close_session()
    env = os.environ
    warn = knobs.horovod_number(env, "HOROVOD_STALL_CHECK_TIME_SECONDS", 60)
    stall = StallTimeouts(
        0.0 if knobs.horovod_flag(env, "HOROVOD_STALL_CHECK_DISABLE") else warn,
        knobs.horovod_number(env, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0),
    )
    fusion = knobs.horovod_number(env, "HOROVOD_FUSION_THRESHOLD", 64 * 2**20, whole=True)
    cycle = knobs.horovod_number(env, "HOROVOD_CYCLE_TIME", 1) / 1000
    _session = Session(context.current(), fusion, cycle, stall, timeline)
    # DYNAMIC means: at start_timeline(), which is always possible here.
    if _session.topology.rank == 0 and (path := env.get("HOROVOD_TIMELINE", "")) not in ("", "DYNAMIC"):
        timeline.open(path, knobs.horovod_flag(env, "HOROVOD_TIMELINE_MARK_CYCLES"))


@context.before_leaving
def close_session() -> None:
    """Close it; no-op without one."""
    global _session
    ended, _session = _session, None
    # A forked child is not a rank: it leaves its parent's connections alone.
    if ended is not None and ended.process == os.getpid():
        ended.close()


def is_open() -> bool:
    """Whether there is one."""
    return _session is not None
