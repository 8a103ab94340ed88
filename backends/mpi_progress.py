"""The threads that bring operations to their end.

MPI moves data only while somebody is inside one of its calls. Each group has a thread that executes its collectives in the
order in which they were submitted, in calls that block without the interpreter's lock, and one that waits for its messages.
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
#: How often messages are moved on while nobody waits for them.
_STROLL_S = 1e-3


def _give_way() -> None:
    if sys.platform == "linux":  # where it concerns this thread alone
        os.nice(_NICE)


class Collectives:
    """The collectives of one group, one after another."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._queue: queue.SimpleQueue[tuple[Work, Callable[[], Requests], Requests | None] | None] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()
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
            alone = small and not self.pending and work.record is None
            requests = start() if alone else None
            self.pending.append(work)
        if requests is not None and at_once and self._look(work, requests):
            return work
        work.hand_over()
        # A callback that submits work, and may wait for it, must not keep the thread that would execute it.
        if self._thread is None or self._thread is threading.current_thread():
            self._thread = threading.Thread(target=self._execute, name="unidist-mpi", daemon=True)
            self._thread.start()
        # With ``start``, which holds the tensors that MPI reads and writes.
        self._queue.put((work, start, requests))
        return work

    def close(self) -> None:
        """Let the thread end when all is done."""
        self._queue.put(None)

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
        _give_way()
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
        self.pending.remove(work)
        work.end(error)


class Message(Work):
    """One message, sent or received."""

    def __init__(
        self,
        box: Messages,
        owner: Owner,
        name: str,
        outputs: list[Tensor],
        moved: list[Tensor],
        finish: Callable[[], object] | None,
    ) -> None:
        super().__init__(owner, name, outputs, finish)
        self.box = box
        #: What MPI reads or writes lives as long as the message.
        self.moved = moved
        self.request: MPI.Request = MPI.REQUEST_NULL
        # It may be posted long before the other rank comes to it.
        self.since = float("inf")
        self._source = -1

    def __str__(self) -> str:
        return f"{self.owner.place}: {self.name}, message {self.sequence},"

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """As of any operation; its time counts from here."""
        if self._done:
            return super().wait(timeout)
        with self.box.attended(self):
            return super().wait(timeout)

    def arrived(self, status: MPI.Status) -> None:
        """Its request is done."""
        error = None
        if self.name.startswith("recv"):
            self._source = status.Get_source()
            got = status.Get_elements(MPI.BYTE)
            wanted = sum(tensor.nbytes for tensor in self.moved)
            if got != wanted:
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
        self.pending: list[Message] = []
        self.sequence = 0
        self._attended = 0
        self._inside = False
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
            self.pending.append(message)
            if self._thread is None:
                self._bell = MPI.COMM_SELF.Dup()
                self._thread = threading.Thread(target=self._run, name="unidist-mpi-messages", daemon=True)
                self._thread.start()
            self._ring()
        return message

    @contextmanager
    def attended(self, message: Message) -> Iterator[None]:
        """Inside, somebody waits for ``message``."""
        self._look(message)
        with self._changed:
            message.since = time.monotonic()
            self._attended += 1
            self._ring()
        try:
            yield
        finally:
            with self._changed:
                self._attended -= 1

    def close(self) -> None:
        """Take back what was not received, and end the thread."""
        with self._changed:
            self._closed = True
            for message in self.pending:
                if message.name.startswith("recv") and message.request != MPI.REQUEST_NULL:
                    message.request.Cancel()
            self._ring()
        if self._thread is not None:
            self._thread.join()
            self._bell.Free()

    def _ring(self) -> None:
        """Make the thread look at what has changed."""
        if self._inside:
            self._bell.Isend([b"", 0, MPI.BYTE], 0, 0).Free()
        else:
            self._changed.notify()

    def _look(self, message: Message) -> None:
        """What comes soon need not wait for the thread."""
        end = time.perf_counter() + _LOOK_S
        while message.record is None and not self._inside and not message.is_completed() and time.perf_counter() < end:
            with self._changed:
                found = [] if self._inside or message not in self.pending else self._tested([message])
            for arrived, status in found:
                arrived.arrived(status)

    def _run(self) -> None:
        _give_way()
        bell = self._bell.Irecv([bytearray(1), 0, MPI.BYTE], 0, 0)
        while not self._closed:
            with self._changed:
                while not self.pending and not self._closed:
                    self._changed.wait()
                stroll = not self._attended
                if stroll:
                    self._changed.wait(_STROLL_S)
                    found = self._tested(self.pending)
                else:
                    waited = list(self.pending)
                    requests = [message.request for message in waited] + [bell]
                    self._inside = True
            if not stroll:
                statuses = [MPI.Status() for _ in requests]
                done = MPI.Request.Waitsome(requests, statuses) or []
                with self._changed:
                    self._inside = False
                    found = self._taken(waited, done, statuses)
                if len(waited) in done:
                    bell = self._bell.Irecv([bytearray(1), 0, MPI.BYTE], 0, 0)
            for message, status in found:
                message.arrived(status)
        bell.Cancel()
        bell.Wait()

    def _tested(self, messages: list[Message]) -> list[tuple[Message, MPI.Status]]:
        statuses = [MPI.Status() for _ in messages]
        done = MPI.Request.Testsome([message.request for message in messages], statuses) or []
        return self._taken(list(messages), done, statuses)

    def _taken(
        self, messages: list[Message], done: list[int], statuses: list[MPI.Status]
    ) -> list[tuple[Message, MPI.Status]]:
        found = [(messages[index], status) for index, status in zip(done, statuses) if index < len(messages)]
        for message, _ in found:
            self.pending.remove(message)
        return found
