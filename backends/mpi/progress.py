"""The threads that drive MPI's progress.

MPI moves data only while a thread is inside one of its calls. Each group has a thread that executes its collectives in
the order of their submission, in blocking calls that release the GIL, and one that tests its point-to-point messages. A
small operation on an idle group is started by the caller itself, which polls it for 30 us: no thread could be woken in
that time.
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
from typing import TYPE_CHECKING

import torch
from mpi4py import MPI
from torch import Tensor

from unidist.backends.mpi.collectives import Requests
from unidist.backends.mpi.work import Work

if TYPE_CHECKING:
    from unidist.backends.mpi.channel import Channel

#: How long a caller polls the operation that it has started.
_SPIN_S = 30e-6
#: The threads run at a lower priority than the backward pass. Where that keeps all cores busy, threads of equal
#: priority wait for those of other ranks that are not scheduled: a step on 12 big layers, 2 ranks on 2 cores, takes 66
#: ms instead of 60.
_NICE = 10
#: Interval at which messages are tested while a caller waits for one, and while none does.
_POLL_S, _IDLE_POLL_S = 5e-5, 1e-3
#: How long a group that closes waits for messages that have not been received.
_CLOSE_TIMEOUT_S = 5.0


def _thread(name: str, target: Callable[[], None]) -> threading.Thread:
    def run() -> None:
        if sys.platform == "linux":  # where it is a property of the thread, not of the process
            nice = os.getpriority(os.PRIO_PROCESS, os.getpid()) + _NICE
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
        target()

    return threading.Thread(target=run, name=name, daemon=True)


class CollectiveQueue:
    """The collectives of one group, executed one after another."""

    def __init__(self, owner: Channel) -> None:
        self._owner = owner
        self._queue: queue.SimpleQueue[tuple[Work, Callable[[], Requests], Requests | None] | None] = (
            queue.SimpleQueue()
        )
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        #: Submitted and not done, in order.
        self.pending: deque[Work] = deque()
        self.sequence = 0

    def submit(self, work: Work, start: Callable[[], Requests], *, small: bool, synchronous: bool) -> Work:
        """Call ``start``, and wait for its requests, after all that was submitted before.

        Args:
            small: whether ``start`` never blocks.
            synchronous: whether the caller waits for it at once.
        """
        with self._lock:
            self._owner.check()
            self.sequence += 1
            work.sequence = self.sequence
            if not self.pending:
                work.started_at = time.monotonic()
            alone = small and not self.pending and work.record is None
            requests = start() if alone else None
            self.pending.append(work)
            if requests is None or not synchronous:
                self._submit_to_thread(work, start, requests)
                return work
        try:
            if self._poll(work, requests):
                return work
        except BaseException:  # Ctrl-C, or another signal's
            self._submit_to_thread(work, start, requests)
            raise
        self._submit_to_thread(work, start, requests)
        return work

    def close(self) -> None:
        """Let the thread end after the pending operations."""
        self._queue.put(None)

    def _submit_to_thread(self, work: Work, start: Callable[[], Requests], requests: Requests | None) -> None:
        work.move_to_thread()
        with self._lock:
            # A callback that submits work, and may wait for it, must not occupy the thread that would execute it.
            if self._thread is None or self._thread is threading.current_thread():
                self._thread = _thread("unidist-mpi", self._execute)
                self._thread.start()
            # With ``start``, which keeps the tensors alive that MPI reads and writes.
            self._queue.put((work, start, requests))

    def _poll(self, work: Work, requests: Requests) -> bool:
        end = time.perf_counter() + _SPIN_S
        try:
            while not MPI.Request.Testall(requests):
                if time.perf_counter() > end:
                    return False
        except MPI.Exception as error:
            self._complete(work, error)
        else:
            self._complete(work)
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
                self._complete(work, error)
            else:
                self._complete(work)
            del item, work, start, requests

    def _complete(self, work: Work, error: Exception | None = None) -> None:
        # Before complete(): a caller that it wakes may submit at once, and should find the group idle.
        with self._lock:
            if work in self.pending:  # not if a signal came between this and complete()
                self.pending.remove(work)
            if self.pending:
                self.pending[0].started_at = time.monotonic()
        work.complete(error)


class Message(Work):
    """One point-to-point message, sent or received."""

    def __init__(
        self,
        messages: MessageQueue,
        owner: Channel,
        name: str,
        peer: int,
        outputs: list[Tensor],
        buffers: list[Tensor],
        finish: Callable[[], object] | None,
    ) -> None:
        super().__init__(owner, name, outputs, finish)
        self.messages = messages
        #: The other rank, in the group.
        self.peer = peer
        #: What MPI reads or writes stays alive as long as the message.
        self.buffers = buffers
        self.request: MPI.Request = MPI.REQUEST_NULL
        self.waiters = 0
        self._source = -1

    def __str__(self) -> str:
        return f"{self.owner.label}: {self.name}, message {self.sequence},"

    @property
    def receives(self) -> bool:
        """Whether this rank receives it."""
        return self.name.startswith("recv")

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """As of any operation; its timeout counts from here, since it may be posted long before the other rank's
        call.
        """
        if self._done:
            return super().wait(timeout)
        with self.messages.waited_for(self):
            return super().wait(timeout)

    def request_done(self, status: MPI.Status) -> None:
        """Complete: its request is done."""
        error = None
        if self.receives:
            self._source = status.Get_source()
            got, wanted = status.Get_elements(MPI.BYTE), sum(tensor.nbytes for tensor in self.buffers)
            if status.Is_cancelled():
                error = ValueError("it was cancelled, because the group was destroyed")
            elif got != wanted:
                error = ValueError(f"rank {self._source} sent {got} bytes, where {wanted} were expected")
        self.complete(error)

    def source_rank(self) -> int:
        """Return the sender, in the group, of a message that was received."""
        return self._source

    _source_rank = source_rank


class MessageQueue:
    """The point-to-point messages of one group."""

    def __init__(self, owner: Channel) -> None:
        self._owner = owner
        self._condition = threading.Condition()
        #: Posted and not completed.
        self.pending: dict[Message, None] = {}
        self.sequence = 0
        self._waiters = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    def post(self, message: Message, start: Callable[[], MPI.Request]) -> Message:
        """Start a message."""
        with self._condition:
            self._owner.check()
            self.sequence += 1
            message.sequence = self.sequence
            message.move_to_thread()
            message.request = start()
            self.pending[message] = None
            self._wake()
        return message

    @contextmanager
    def waited_for(self, message: Message) -> Iterator[None]:
        """Record that a caller waits for ``message`` inside."""
        self._poll(message)
        with self._condition:
            if not message.waiters:
                message.started_at = time.monotonic()
            message.waiters += 1
            self._waiters += 1
            self._wake()
        try:
            yield
        finally:
            with self._condition:
                self._waiters -= 1
                message.waiters -= 1
                if not message.waiters:
                    message.started_at = float("inf")

    def close(self) -> None:
        """Cancel receives, and wait a little for sends; the thread goes on until all are completed."""
        with self._condition:
            self._closed = True
            remaining = list(self.pending)
            for message in remaining:
                if message.receives:
                    message.request.Cancel()
            if self._thread is not None:
                self._waiters += 1
                self._wake()
        end = time.monotonic() + _CLOSE_TIMEOUT_S
        for message in remaining:
            message.wait_until_done(end - time.monotonic())

    def _wake(self) -> None:
        # A callback that waits for another message must not occupy the thread that would complete it.
        if self._thread is None or self._thread is threading.current_thread():
            self._thread = _thread("unidist-mpi-messages", self._run)
            self._thread.start()
        self._condition.notify()

    def _poll(self, message: Message) -> None:
        """Test the messages for a while: one that arrives soon need not wait for the thread."""
        end = time.perf_counter() + _SPIN_S
        while message.record is None and not message.is_completed() and time.perf_counter() < end:
            self._test([message])

    def _run(self) -> None:
        while self._thread is threading.current_thread():
            with self._condition:
                while not self.pending and not self._closed:
                    self._condition.wait()
                if not self.pending:
                    return
                self._condition.wait(_POLL_S if self._waiters else _IDLE_POLL_S)
                messages = list(self.pending)
            self._test(messages)
            del messages

    def _test(self, messages: list[Message]) -> None:
        """Complete those that are done."""
        for message in messages:
            status, error = MPI.Status(), None
            with self._condition:
                if message not in self.pending:
                    continue
                try:
                    if not message.request.Test(status):
                        continue
                except MPI.Exception as failure:  # a message that is longer than the buffer
                    error = failure
                del self.pending[message]
            # Outside the lock: callbacks may wait for other messages.
            if error is None:
                message.request_done(status)
            else:
                message.complete(error)
