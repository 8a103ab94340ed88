"""One world of Horovod's calls: what is under way on this rank, and the thread that executes what rank 0 lets begin."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

import torch
from torch import Tensor

from unidist import context, knobs
from unidist.backends.base import Backend, Group
from unidist.hvd import execution
from unidist.hvd.common.exceptions import HorovodInternalError
from unidist.hvd.line import End, Join, Leave, Line, Patience, Rounds, open_line
from unidist.hvd.negotiation import Answer, Coordinator, Form, Own, Request
from unidist.hvd.rounds import Begun, GradientRounds
from unidist.hvd.timeline import Timeline

#: How long the thread leaves the work to those that wait for an operation, before it looks again whether there are any.
_REST_S = 1e-3
#: How long a session that closes waits for the operation that is being executed.
_LINGER_S = 5.0
#: The number of the process set of all ranks.
GLOBAL = 0


class Operation:
    """An operation under way: its tensors, and where its result comes."""

    __slots__ = (
        "_gate",
        "computed",
        "done",
        "error",
        "form",
        "inputs",
        "name",
        "outputs",
        "own",
        "result",
        "set_id",
        "shape",
    )

    def __init__(
        self,
        name: str,
        form: Form,
        inputs: Sequence[Tensor] = (),
        outputs: Sequence[Tensor] | None = None,
        own: Own = (),
        set_id: int = GLOBAL,
        shape: Callable[[Any], Any] | None = None,
        returns: Any = None,
    ) -> None:
        self.name = name
        self.form = form
        self.inputs = inputs
        #: Where results go that have the inputs' shapes; None where they are made when their shapes are known.
        self.outputs = outputs
        self.own = own
        self.set_id = set_id
        #: What ``synchronize`` returns: made of what was computed, or known before.
        self.shape = shape
        self.result = returns
        self.error: Exception | None = None
        #: When a GPU has computed the inputs.
        self.computed: torch.cuda.Event | None = None
        if form.device == "cuda":
            self.computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.computed.record()
        self.done = False
        self._gate = threading.Lock()
        self._gate.acquire()

    def finish(self, result: Any = None, error: Exception | None = None) -> None:
        if result is not None:
            self.result = result
        self.error, self.done = error, True
        self._gate.release()

    def wait(self) -> Any:
        """Its result, when it is there."""
        if not self.done:
            with self._gate:
                pass
        if self.error is not None:
            raise self.error
        return self.result if self.shape is None else self.shape(self.result)


class ProcessGroup:
    """What a process set has in the engine."""

    def __init__(self, backend: Backend, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.included = backend.topology.rank in ranks
        # Gradients do not wait for the operations between them, nor these for gradients.
        self.operations, self.gradients = (
            (backend.new_group(ranks), backend.new_group(ranks)) if ranks else (Group((), None), Group((), None))
        )


class Session:
    """Everything between ``init`` and ``shutdown``.

    Args:
        backend: the running engine.
        fusion: bytes up to which sums travel together.
        cycle: seconds in which operations are gathered before they are told, unless somebody waits for one.
        patience: with ranks that do not come to an operation.
        timeline: where operations are recorded.
    """

    def __init__(self, backend: Backend, fusion: int, cycle: float, patience: Patience, timeline: Timeline) -> None:
        self.backend = backend
        self.place = backend.topology
        self.process = os.getpid()
        self.timeline = timeline
        self._cycle = cycle
        self.rounds = GradientRounds(self._announce)
        self.groups: dict[int, ProcessGroup] = {GLOBAL: ProcessGroup(backend, tuple(range(self.place.world_size)))}
        self._line: Line = open_line(backend, Coordinator(self.place.world_size, fusion), patience)
        self._lock = threading.Lock()
        self._under_way: dict[tuple[int, str], Operation] = {}
        self._outbox: list[Request] = []
        #: Forms in use: one object for equal ones travels once in a letter.
        self.forms: dict[Hashable, Form] = {}
        self._sending = threading.Lock()
        self._wakeup = threading.Event()
        self._handles: dict[int, Operation] = {}
        self._numbers = count(1)
        self._unnamed: dict[int, count[int]] = {}
        self._joins = 0
        #: Held by the thread that listens to rank 0 and executes what it says; whether that is one that waits for an operation.
        self._reading = threading.Lock()
        self._attended = False
        self._attentions = 0
        self._closed = ""
        self._executor = threading.Thread(target=self._execute, name="unidist-hvd", daemon=True)
        self._executor.start()
        self._sender = threading.Thread(target=self._send, name="unidist-hvd-sender", daemon=True)
        self._sender.start()

    # -------------------------------------------------------------------------------- for the calls
    def unnamed(self, set_id: int) -> str:
        """The next name for an operation that has none: equal on all ranks whose operations come in the same order.

        After a join all ranks count anew: until then some have made more of them than others.
        """
        with self._lock:
            return f"noname.{self._joins}.{next(self._unnamed.setdefault(set_id, count()))}"

    def start(self, operation: Operation, *, at_once: bool = False) -> int:
        """Begin to negotiate; a handle for ``synchronize``.

        Args:
            operation: not under way yet.
            at_once: whether the caller goes on to wait.
        """
        key = (operation.set_id, operation.name)
        with self._lock:
            if self._closed:
                raise HorovodInternalError(self._closed)
            if key in self._under_way:
                raise ValueError(
                    f"{operation.name} is under way already: an operation of that name has been submitted and is not done. Give each "
                    "operation that runs at the same time a name of its own."
                )
            self._under_way[key] = operation
            number = next(self._numbers)
            self._handles[number] = operation
            first = not self._outbox
            self._outbox.append((operation.set_id, operation.name, operation.form, operation.own))
        if self.timeline.on:
            self.timeline.begin(operation.name, f"NEGOTIATE_{operation.form.kind.upper()}")
        if at_once:
            self._flush()
        elif first:
            self._wakeup.set()
        return number

    def wait(self, handle: int) -> Any:
        """The result of an operation; its handle is used up."""
        operation = self._handles.get(handle)
        if operation is None:
            return None
        if self._outbox and not operation.done:
            self._flush()
        try:
            if not operation.done:
                self._attend(operation)
            return operation.wait()
        finally:
            self._handles.pop(handle, None)

    def run(self, operation: Operation) -> Any:
        """``start`` and ``wait``."""
        return self.wait(self.start(operation, at_once=True))

    def poll(self, handle: int) -> bool:
        """Whether ``wait`` would return at once."""
        operation = self._handles.get(handle)
        if operation is None:
            raise ValueError(f"handle {handle} was not created by this session, or has been synchronized already.")
        return operation.done

    def join(self) -> int:
        """Take part in the others' sums with nothing, until all have joined; the last rank to join."""
        self._flush()
        self._tell([Join()])
        return self.rounds.until_all_have_joined()

    def close(self) -> None:
        """Leave. What is under way fails, here and elsewhere."""
        with suppress(OSError):
            self._flush()
            self._line.send([Leave()])
        self._end("Horovod has been shut down")
        self._line.close()
        # The engine must not end under an operation.
        self._executor.join(_LINGER_S)
        self.timeline.close()

    # -------------------------------------------------------------------------------- towards rank 0
    def _announce(self, begun: Begun) -> None:
        with suppress(OSError):
            self._line.send([Rounds(begun)])

    def _tell(self, items: Sequence[Any]) -> None:
        try:
            self._line.send(items)
        except OSError as error:
            self._end(f"rank 0 is gone ({error})")

    def _flush(self) -> None:
        with self._sending:
            with self._lock:
                requests, self._outbox = self._outbox, []
            if requests:
                self._tell(requests)

    def _send(self) -> None:
        while True:
            self._wakeup.wait()
            self._wakeup.clear()
            if self._closed:
                return
            # Those that follow at once go in one letter, and their thread is left alone.
            time.sleep(self._cycle)
            self._flush()

    # -------------------------------------------------------------------------------- from rank 0
    def _execute(self) -> None:
        """Execute what nobody waits for."""
        seen = 0
        while not self._closed:
            if self._attended or seen != self._attentions:
                # Two threads that wake up for each answer would be in each other's way.
                seen = self._attentions
                time.sleep(_REST_S)
            elif self._line.listen(None):
                with self._reading:
                    if not self._attended and self._line.listen(0):
                        self._hear()

    def _attend(self, operation: Operation) -> None:
        """Execute what comes until an operation is done: to wake a thread for it would take longer than to do it."""
        if not self._reading.acquire(blocking=False):
            return
        try:
            self._attended = True
            while not operation.done:
                self._hear()
        finally:
            self._attentions += 1
            self._attended = False
            self._reading.release()

    def _hear(self) -> None:
        try:
            items = self._line.receive()
        except (EOFError, OSError):
            self._end("rank 0 is gone: it has ended, or shut Horovod down")
            return
        if self.timeline.on:
            self.timeline.cycle()
        for item in items:
            if isinstance(item, Answer):
                self._begin(item)
            elif isinstance(item, Join):
                self.rounds.announce()
            elif isinstance(item, Rounds):
                self.rounds.hear(item.begun)
            elif isinstance(item, End):
                self.rounds.fail(HorovodInternalError(f"join: {item.why}"))

    def _begin(self, answer: Answer) -> None:
        if not answer.names:  # the last rank has joined
            with self._lock:
                self._joins += 1
                self._unnamed.pop(GLOBAL, None)
            self.rounds.all_joined(answer.number)
            return
        with self._lock:
            operations = [self._under_way.pop((answer.set_id, name), None) for name in answer.names]
        if answer.error:
            _fail(operations, HorovodInternalError(answer.error))
            return
        form = answer.forms[0]
        if self.timeline.on:
            self._record(answer, form.kind)
        try:
            if form.kind == "add_process_set":
                self.groups[answer.number] = ProcessGroup(self.backend, form.ranks)
                results: Sequence[Any] = [answer.number]
            elif form.kind == "remove_process_set":
                removed = self.groups.pop(form.root, None)
                if removed is not None and removed.included:
                    self.backend.drop_group(removed.operations)
                    self.backend.drop_group(removed.gradients)
                results = [None]
            else:
                group = self.groups[answer.set_id]
                with _as_submitted(operations), _in_turn(form, operations):
                    results = execution.execute(self.backend, group.operations, answer, operations)
        except Exception as error:
            _fail(operations, HorovodInternalError(f"{', '.join(answer.names[:3])}: {error}"))
            return
        finally:
            if self.timeline.on:
                for name in answer.names:
                    self.timeline.end(name)
        for operation, result in zip(operations, results):
            if operation is not None:
                operation.finish(result)

    def _record(self, answer: Answer, kind: str) -> None:
        for name in answer.names:
            self.timeline.end(name)
            self.timeline.begin(name, kind.upper())

    def _end(self, why: str) -> None:
        with self._lock:
            self._closed = self._closed or f"{why}: no operation can begin any more."
            left = list(self._under_way.values())
            self._under_way.clear()
        _fail(left, HorovodInternalError(self._closed))
        self.rounds.fail(HorovodInternalError(self._closed))
        self._wakeup.set()


@contextmanager
def _as_submitted(operations: Sequence[Operation | None]) -> Iterator[None]:
    """Whatever the modes of the thread that happens to execute: inference tensors for operations on such, no autocast."""
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
def _in_turn(form: Form, operations: Sequence[Operation | None]) -> Iterator[None]:
    """On a GPU: after what its inputs wait for, and done when it is left; another thread's stream is not this one's."""
    if form.device != "cuda":
        yield
        return
    inputs = [tensor for operation in operations if operation is not None for tensor in operation.inputs]
    if not inputs:
        yield
        return
    with torch.cuda.device(inputs[0].device):
        stream = torch.cuda.current_stream()
        for operation in operations:
            if operation is not None and operation.computed is not None:
                stream.wait_event(operation.computed)
        yield
        stream.synchronize()


def _fail(operations: Sequence[Operation | None], error: Exception) -> None:
    for operation in operations:
        if operation is not None:
            operation.finish(error=error)


_session: Session | None = None
#: Of this process, on rank 0; it may be begun and ended at any time.
timeline = Timeline()


def session() -> Session:
    """The running one; the first call after ``unidist.init()`` opens it, and is collective then.

    Raises:
        ValueError: neither ``init`` nor ``unidist.init`` has been called.
    """
    if _session is None:
        open_session()
    assert _session is not None
    return _session


def uninitialized() -> ValueError:
    """What a call before ``init`` raises."""
    return ValueError("Horovod has not been initialized; use hvd.init().")


def open_session() -> None:
    """Start one on the running engine, by the settings in the environment. Collective."""
    global _session
    if not context.is_initialized():
        raise uninitialized()
    close_session()
    env = os.environ
    patience = Patience(
        0.0 if knobs.horovod_flag(env, "HOROVOD_STALL_CHECK_DISABLE")
        else knobs.horovod_number(env, "HOROVOD_STALL_CHECK_TIME_SECONDS", 60),
        knobs.horovod_number(env, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0),
    )  # fmt: skip
    fusion = knobs.horovod_number(env, "HOROVOD_FUSION_THRESHOLD", 64 * 2**20, whole=True)
    cycle = knobs.horovod_number(env, "HOROVOD_CYCLE_TIME", 1) / 1000
    _session = Session(context.current(), fusion, cycle, patience, timeline)
    # DYNAMIC: when start_timeline() says so, which is so anyway.
    if _session.place.rank == 0 and (path := env.get("HOROVOD_TIMELINE", "")) not in ("", "DYNAMIC"):
        timeline.open(path, knobs.horovod_flag(env, "HOROVOD_TIMELINE_MARK_CYCLES"))


@context.before_leaving
def close_session() -> None:
    """End it; no-op without one."""
    global _session
    ended, _session = _session, None
    # A child that was forked off is no rank: it leaves its parent's line alone.
    if ended is not None and ended.process == os.getpid():
        ended.close()


def is_open() -> bool:
    """Whether there is one."""
    return _session is not None
