"""The threads that bring operations to their end.

MPI moves data only while somebody is inside one of its calls. Each group has a thread that executes its collectives in the
order in which they were submitted, in calls that block without the interpreter's lock, and one that looks after its messages.
A small operation that finds its group idle is started by the caller itself, who looks for 30 us whether it is done already: no
thread could be woken in that time.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from mpi4py import MPI
from torch import Tensor

from unidist.backends.mpi_calls import Requests
from unidist.backends.mpi_work import Owner, Work

#: How long a caller looks for the end of what it has started.
_LOOK_S = 30e-6
#: The threads give way to the backward pass. Where it keeps all cores busy, one that takes turns with it waits in vain for a rank whose
#: thread has not its turn: a step on 12 big layers, 2 ranks on 2 cores, takes 66 ms instead of 60.
_NICE = 10
#: How often messages are moved on while somebody waits for one, and while nobody does.
_PACE_S, _STROLL_S = 5e-5, 1e-3
#: How long a group that closes waits for messages that nobody has received.
_LINGER_S = 5.0


def _thread(name: str, target: Callable[[], None]) -> threading.Thread:
    def run() -> None:
        if sys.platform == "linux":  # where it concerns this thread alone
            nice = os.getpriority(os.PRIO_PROCESS, os.getpid()) + _NICE
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
        target()

    return threading.Thread(target=run, name=name, daemon=True)


class Collectives:
    """The collectives of one group, one after another."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._queue: queue.SimpleQueue[tuple[Work, Callable[[], Requests], Requests | None] | None] = (
            queue.SimpleQueue()
        )
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        #: Submitted and not done, in order.
        self.pending: deque[Work] = deque()
        self.sequence = 0

    def submit(self, work: Work, start: Callable[[], Requests], *, small: bool, at_once: bool) -> Work:
        """Execute ``start``, and wait for its requests, when all that came before is done.

        Args:
            small: whether ``start`` never blocks.
            at_once: whether the caller will wait for it.
        """
        with self._lock:
            self._owner.check()
            self.sequence += 1
            work.sequence = self.sequence
            if not self.pending:
                work.since = time.monotonic()
            alone = small and not self.pending and work.record is None
            requests = start() if alone else None
            self.pending.append(work)
            if requests is None or not at_once:
                self._hand_over(work, start, requests)
                return work
        try:
            if self._look(work, requests):
                return work
        except BaseException:  # Ctrl-C, or another signal's
            self._hand_over(work, start, requests)
            raise
        self._hand_over(work, start, requests)
        return work

    def close(self) -> None:
        """Let the thread end when all is done."""
        self._queue.put(None)

    def _hand_over(self, work: Work, start: Callable[[], Requests], requests: Requests | None) -> None:
        work.hand_over()
        with self._lock:
            # A callback that submits work, and may wait for it, must not keep the thread that would execute it.
            if self._thread is None or self._thread is threading.current_thread():
                self._thread = _thread("unidist-mpi", self._execute)
                self._thread.start()
            # With ``start``, which holds the tensors that MPI reads and writes.
            self._queue.put((work, start, requests))

    def _look(self, work: Work, requests: Requests) -> bool:
        end = time.perf_counter() + _LOOK_S
        try:
            while not MPI.Request.Testall(requests):
                if time.perf_counter() > end:
                    return False
        except MPI.Exception as error:
            self._ended(work, error)
        else:
            self._ended(work)
        return True

    def _execute(self) -> None:
        while self._thread is threading.current_thread():
            item = self._queue.get()
            if item is None:
                return
            work, start, requests = item
            try:
                with torch.inference_mode():
                    MPI.Request.Waitall(start() if requests is None else requests)
            except Exception as error:
                self._ended(work, error)
            else:
                self._ended(work)
            del item, work, start, requests

    def _ended(self, work: Work, error: Exception | None = None) -> None:
        # First: who hears of the end may submit at once, and should find the group idle.
        with self._lock:
            if work in self.pending:  # a signal may have come between this and the work's end
                self.pending.remove(work)
            if self.pending:
                self.pending[0].since = time.monotonic()
        work.end(error)


class Message(Work):
    """One message, sent or received."""

    def __init__(
        self,
        box: Messages,
        owner: Owner,
        name: str,
        peer: int,
        outputs: list[Tensor],
        moved: list[Tensor],
        finish: Callable[[], object] | None,
    ) -> None:
        super().__init__(owner, name, outputs, finish)
        self.box = box
        #: The other rank, in the group.
        self.peer = peer
        #: What MPI reads or writes lives as long as the message.
        self.moved = moved
        self.request: MPI.Request = MPI.REQUEST_NULL
        self.attended = 0
        self._source = -1

    def __str__(self) -> str:
        return f"{self.owner.place}: {self.name}, message {self.sequence},"

    @property
    def receives(self) -> bool:
        """Whether it comes, and does not go."""
        return self.name.startswith("recv")

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """As of any operation; its time counts from here, for it may be posted long before the other rank comes to it."""
        if self._done:
            return super().wait(timeout)
        with self.box.attended(self):
            return super().wait(timeout)

    def arrived(self, status: MPI.Status) -> None:
        """Its request is done."""
        error = None
        if self.receives:
            self._source = status.Get_source()
            got, wanted = status.Get_elements(MPI.BYTE), sum(tensor.nbytes for tensor in self.moved)
            if status.Is_cancelled():
                error = ValueError("it was taken back, because the group was destroyed")
            elif got != wanted:
                error = ValueError(f"{got} bytes came from rank {self._source}, where {wanted} were expected")
        self.end(error)

    def source_rank(self) -> int:
        """The sender, in the group, of a message that was received."""
        return self._source

    _source_rank = source_rank


class Messages:
    """The messages of one group."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._changed = threading.Condition()
        #: Posted and not done.
        self.pending: dict[Message, None] = {}
        self.sequence = 0
        self._attended = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    def post(self, message: Message, start: Callable[[], MPI.Request]) -> Message:
        """Start a message."""
        with self._changed:
            self._owner.check()
            self.sequence += 1
            message.sequence = self.sequence
            message.hand_over()
            message.request = start()
            self.pending[message] = None
            self._wake()
        return message

    @contextmanager
    def attended(self, message: Message) -> Iterator[None]:
        """Inside, somebody waits for ``message``."""
        self._look(message)
        with self._changed:
            if not message.attended:
                message.since = time.monotonic()
            message.attended += 1
            self._attended += 1
            self._wake()
        try:
            yield
        finally:
            with self._changed:
                self._attended -= 1
                message.attended -= 1
                if not message.attended:
                    message.since = float("inf")

    def close(self) -> None:
        """Take back what was not received, and wait a little for what was sent; the thread stays until all of it has gone."""
        with self._changed:
            self._closed = True
            left = list(self.pending)
            for message in left:
                if message.receives:
                    message.request.Cancel()
            if self._thread is not None:
                self._attended += 1
                self._wake()
        end = time.monotonic() + _LINGER_S
        for message in left:
            message.join(end - time.monotonic())

    def _wake(self) -> None:
        # A callback that waits for another message must not keep the thread that would bring it.
        if self._thread is None or self._thread is threading.current_thread():
            self._thread = _thread("unidist-mpi-messages", self._run)
            self._thread.start()
        self._changed.notify()

    def _look(self, message: Message) -> None:
        """What comes soon need not wait for the thread."""
        end = time.perf_counter() + _LOOK_S
        while message.record is None and not message.is_completed() and time.perf_counter() < end:
            self._test([message])

    def _run(self) -> None:
        while self._thread is threading.current_thread():
            with self._changed:
                while not self.pending and not self._closed:
                    self._changed.wait()
                if not self.pending:
                    return
                self._changed.wait(_PACE_S if self._attended else _STROLL_S)
                messages = list(self.pending)
            self._test(messages)
            del messages

    def _test(self, messages: list[Message]) -> None:
        """End those that are done."""
        for message in messages:
            status, error = MPI.Status(), None
            with self._changed:
                if message not in self.pending:
                    continue
                try:
                    if not message.request.Test(status):
                        continue
                except MPI.Exception as failure:  # a message that does not fit
                    error = failure
                del self.pending[message]
            # Outside the lock: callbacks may wait for other messages.
            if error is None:
                message.arrived(status)
            else:
                message.end(error)
