"""The control plane: on each rank a thread that sends what the rank submits and receives what it executes. Rank 0's
runs the coordinator, too.

The ranks of rank 0's host have a connection to it. Of each other host one rank has, the leader; the others are
connected to their leader, which passes messages on, and sends what all of them submit once.

A rank that sends nothing for too long is lost: stopped, or its host cannot be reached. All threads send heartbeats.
"""

from __future__ import annotations

import errno
import logging
import math
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from unidist.diagnosis.operations import format_ranks
from unidist.hvd.host_submissions import Forwarded, HostSubmissions
from unidist.hvd.messages import Failure, Forward, Heartbeat, Join, Leave, Rounds, Shutdown, Submit, decode, encode
from unidist.hvd.negotiation import Coordinator, among
from unidist.network.connection import Connection, frame
from unidist.network.processes import Process

_log = logging.getLogger("unidist")
#: How long a thread that ends waits for the others to receive what was sent.
_DRAIN_S = 1.0
#: Longest interval of heartbeats, and of the checks for ranks that are silent and for stalled operations.
_TICK_S = 1.0
#: How long collective calls may end by themselves after a rank has ended.
_GRACE_S = 3.0
#: Submissions are gathered for so many cycles at most, while more of them come.
_MAX_CYCLES = 5
#: How long a leader keeps what not all ranks of its host have submitted.
_HOLD_S = 0.005
#: Stalled operations that a report names.
_MAX_STALLS = 8
#: Sets of ranks to which the way is remembered.
_MAX_ROUTES = 256


class StallTimeouts(NamedTuple):
    """How long an operation may wait for ranks before a warning, and before it fails; seconds, 0: for ever."""

    warn: float
    fail: float


class ControlOptions(NamedTuple):
    """Settings of the control plane."""

    #: Seconds for which submissions are gathered before they are sent, unless a caller waits for one.
    cycle: float
    stall: StallTimeouts
    #: Seconds without a sign of life after which a rank is lost that is stopped, and a host that cannot be reached.
    deadline: float
    #: The same of a rank whose process cannot be seen from here: it may be in a call that keeps Python's lock.
    silence: float
    #: Seconds that ranks may take to come to the start.
    start: float


class Endpoint(Protocol):
    """What a control thread serves; all calls come from that thread."""

    def count_submitted(self) -> int:
        """Return how many operations have been submitted since the last call of ``take_submitted``."""

    def take_submitted(self) -> Submit | None:
        """Return these operations."""

    def process(self, message: Any) -> None:
        """Do what the coordinator says."""

    def activity(self) -> str:
        """Return what this rank is doing."""

    def report(self, title: str) -> None:
        """Report what all ranks are doing. Returns at once."""


def parents(processes: Sequence[Process]) -> list[int]:
    """Return the rank that each rank connects to: its host's lowest one, the leader, and a leader to rank 0."""
    leaders: dict[str, int] = {}
    lowest = [leaders.setdefault(process.host.id, rank) for rank, process in enumerate(processes)]
    return [leader if leader != rank else 0 for rank, leader in enumerate(lowest)]


class ControlThread(ABC):
    """A rank's control thread.

    Args:
        endpoint: this rank's session.
        options: settings.
        connections: to other ranks, by rank.
        processes: where all ranks run.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        options: ControlOptions,
        connections: dict[int, Connection],
        processes: Sequence[Process],
    ) -> None:
        self._endpoint = endpoint
        self._options = options
        self._connections = connections
        self._processes = processes
        #: When something was received from each connection, and what each rank was doing then.
        self._heard = dict.fromkeys(connections, time.monotonic())
        self._activity: dict[int, str] = {}
        self._posted: deque[Any] = deque()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        #: Whether it will look for submissions without being woken up.
        self._awake = False
        self._urgent = False
        self._closing = False
        #: Submissions that are gathered: how many, when they are sent, and when at the latest.
        self._gathered = 0
        self._send_at = self._send_by = 0.0
        self._tick = min(_TICK_S, options.deadline / 6)
        #: When ``_after_events`` has something to do though nothing has arrived.
        self._due = math.inf
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        for rank, connection in connections.items():
            self._selector.register(connection, selectors.EVENT_READ, rank)
        self._thread = threading.Thread(target=self._run, name="unidist-hvd-control", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def wake(self, *, urgent: bool) -> None:
        """Send what there is: now, if a caller waits for it. Any thread, not blocking."""
        if urgent:
            self._urgent = True
        elif self._awake:
            return
        self._awake = True
        with suppress(OSError):  # full: it is awake
            self._wake_writer.send(b"\0")

    def post(self, message: Any) -> None:
        """Send a message, after what was submitted before. Any thread, not blocking."""
        self._posted.append(message)
        self.wake(urgent=True)

    def close(self) -> None:
        """Leave: all operations fail, here and on the other ranks. Waits for the thread."""
        self._closing = True
        self.wake(urgent=True)
        self._thread.join(2 * _DRAIN_S)

    # --------------------------------------------------------------------------------
    @abstractmethod
    def _send(self, message: Any) -> None:
        """Send a message of this rank to the coordinator."""

    @abstractmethod
    def _process(self, rank: int, message: Any, data: bytes) -> None:
        """Do what a message says; ``data`` is the message as it was received from ``rank``."""

    @abstractmethod
    def _lose(self, rank: int, why: str, abort_after: float = _GRACE_S) -> None:
        """Handle a connection to a rank that has failed; calls that wait for it are aborted after some seconds."""

    def _after_events(self) -> None:  # noqa: B027 - a rank may have nothing to do
        """Go on after all that has arrived has been received."""

    @abstractmethod
    def _fail(self, reason: str) -> None:
        """End all operations: this thread ends by an error."""

    @abstractmethod
    def _leave(self) -> None:
        """Tell the others that this rank leaves, and close the connections."""

    def _run(self) -> None:
        try:
            checked = time.monotonic()
            while not self._closing:
                now = time.monotonic()
                until = min(checked + self._tick, self._due, self._send_at if self._gathered else math.inf)
                for key, events in self._selector.select(max(until - now, 0.0)):
                    if key.fileobj is self._wake_reader:
                        with suppress(BlockingIOError):
                            self._wake_reader.recv(4096)
                    else:
                        self._receive(key, events)
                self._send_submitted()
                now = time.monotonic()
                if now - checked >= self._tick:
                    self._check(now, delayed=now - checked > 3 * self._tick)
                    checked = now
                self._after_events()
            self._urgent = True
            self._send_submitted()
            self._leave()
        except Exception as error:
            _log.exception("the control thread of unidist.hvd failed")
            self._fail(f"its control thread failed: {type(error).__name__}: {error}")
        finally:
            self._selector.close()
            self._wake_reader.close()
            self._wake_writer.close()

    def _send_submitted(self) -> None:
        if not self._urgent and self._is_gathering():
            return
        # In this order: who submits after these lines wakes this thread up again.
        self._urgent = self._awake = False
        self._gathered = 0
        posted = [self._posted.popleft() for _ in range(len(self._posted))]
        submitted = self._endpoint.take_submitted()
        if submitted is not None:
            self._send(submitted)
        for message in posted:
            self._send(message)

    def _is_gathering(self) -> bool:
        """Return whether submissions, which nobody waits for, are not sent yet: for a cycle, and while more come."""
        now, cycle = time.monotonic(), self._options.cycle
        if not self._endpoint.count_submitted():
            self._awake = False  # who submits after this line wakes this thread up again
        count = self._endpoint.count_submitted()
        if not self._gathered:
            self._send_at, self._send_by = now + cycle, now + _MAX_CYCLES * cycle
        elif now >= self._send_at:
            if count == self._gathered or now >= self._send_by:
                return False
            self._send_at = now + cycle
        self._gathered = count
        return True

    # -------------------------------------------------------------------------------- connections
    def _receive(self, key: selectors.SelectorKey, events: int) -> None:
        rank = key.data
        connection = self._connections.get(rank)
        if connection is None:
            return
        try:
            if events & selectors.EVENT_WRITE:
                connection.flush()
                _watch(self._selector, connection, rank)
            messages = connection.receive() if events & selectors.EVENT_READ else []
        except EOFError:
            self._lose(rank, "is gone: it has ended, or shut Horovod down")
            return
        except OSError as error:
            self._lose(rank, *_why_lost(error))
            return
        self._heard[rank] = time.monotonic()
        for data in messages:
            try:
                message = decode(data)
            except ValueError as error:
                self._lose_unreadable(rank, error)
                return
            if isinstance(message, Heartbeat):
                self._activity[rank] = message.activity
            else:
                self._process(rank, message, data)

    def _send_to(self, rank: int, framed: bytes) -> None:
        """Send messages of ``frame``; nothing to a rank that is lost."""
        connection = self._connections.get(rank)
        if connection is None:
            return
        try:
            connection.send(framed)
            if connection.has_unsent:
                _watch(self._selector, connection, rank)
        except OSError as error:
            self._lose(rank, *_why_lost(error))

    def _check(self, now: float, *, delayed: bool) -> None:
        """Send heartbeats, and look for ranks that are silent; ``delayed``: this thread could not run."""
        heartbeat = frame(encode(Heartbeat(self._endpoint.activity())))
        for rank in list(self._connections):
            self._send_to(rank, heartbeat)
        if delayed:
            self._heard = dict.fromkeys(self._connections, now)
        for rank in [rank for rank in self._connections if now - self._heard[rank] > self._options.deadline]:
            running = self._processes[rank].is_running()
            limit = self._options.silence if running is None else self._options.deadline
            if running:
                self._heard[rank] = now
            elif now - self._heard[rank] > limit:
                self._lose(rank, f"has given no sign of life for {limit:.0f} s", 0.0)

    def _lose_unreadable(self, rank: int, error: ValueError) -> None:
        self._lose(rank, f"has sent a message that cannot be read: {error}", 0.0)

    def _describe_loss(self, rank: int, why: str) -> str:
        activity = self._activity.get(rank, "")
        return f"rank {rank} (host {self._processes[rank].host.name}) {why}" + f"; last seen {activity}" * bool(
            activity
        )

    def _disconnect(self, rank: int) -> None:
        connection = self._connections.pop(rank, None)
        if connection is not None:
            self._selector.unregister(connection)
            connection.close()


class RankThread(ControlThread):
    """Of a rank that has one connection: to its leader, or to rank 0."""

    def _send(self, message: Any) -> None:
        framed = frame(encode(message))
        for rank in list(self._connections):
            self._send_to(rank, framed)

    def _process(self, rank: int, message: Any, data: bytes) -> None:
        self._endpoint.process(message)

    def _lose(self, rank: int, why: str, abort_after: float = _GRACE_S) -> None:
        self._disconnect(rank)
        self._endpoint.process(Shutdown(self._describe_loss(rank, why), abort_after))

    def _fail(self, reason: str) -> None:
        self._endpoint.process(Shutdown(reason, 0.0))
        self._send(Failure(reason))
        _drain(self._selector, self._connections)

    def _leave(self) -> None:
        self._send(Leave())
        _drain(self._selector, self._connections)


class LeaderThread(ControlThread):
    """Of a leader: it has connections to rank 0 and to the other ranks of its host.

    Args:
        rank: the leader's own.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        options: ControlOptions,
        connections: dict[int, Connection],
        processes: Sequence[Process],
        rank: int,
    ) -> None:
        super().__init__(endpoint, options, connections, processes)
        self._rank = rank
        self._submissions = HostSubmissions((rank, *self._others()))
        #: Messages for rank 0, and the state of the other ranks, as rank 0 reports it.
        self._outgoing = bytearray()
        self._reported: dict[int, str] = {}

    def _others(self) -> list[int]:
        """Return the ranks of this host that are connected."""
        return [rank for rank in self._connections if rank != 0]

    def _send(self, message: Any) -> None:
        self._forward(self._submissions.forward(self._rank, message))

    def _process(self, rank: int, message: Any, data: bytes) -> None:
        if rank != 0:
            self._forward(self._submissions.forward(rank, message))
            if isinstance(message, Leave):
                self._disconnect(rank)
            return
        ranks = -1  # all
        if isinstance(message, Forward):
            ranks, data = message
        framed = frame(data)
        for other in self._others():
            if ranks >> other & 1:
                self._send_to(other, framed)
        if ranks >> self._rank & 1:
            self._endpoint.process(decode(data))

    def _forward(self, forwarded: Forwarded) -> None:
        for ranks, message in forwarded:
            self._outgoing += frame(encode(Forward(sum(1 << rank for rank in ranks), encode(message))))

    def _after_events(self) -> None:
        now = time.monotonic()
        if now >= self._due:
            self._forward(self._submissions.take((self._rank, *self._others())))
        if not self._submissions.holds:
            self._due = math.inf
        elif self._due == math.inf:
            self._due = now + _HOLD_S
        self._flush()

    def _flush(self) -> None:
        if self._outgoing:
            framed, self._outgoing = bytes(self._outgoing), bytearray()
            self._send_to(0, framed)

    def _check(self, now: float, *, delayed: bool) -> None:
        super()._check(now, delayed=delayed)
        self._submissions.forget()
        changed: dict[str, int] = {}
        for rank in self._others():
            activity = self._activity.get(rank, "")
            if activity != self._reported.get(rank, ""):
                self._reported[rank] = activity
                changed[activity] = changed.get(activity, 0) | 1 << rank
        for activity, mask in changed.items():
            self._outgoing += frame(encode(Forward(mask, encode(Heartbeat(activity)))))

    def _lose(self, rank: int, why: str, abort_after: float = _GRACE_S) -> None:
        self._disconnect(rank)
        shutdown = Shutdown(self._describe_loss(rank, why), abort_after)
        if rank != 0:
            self._outgoing += frame(encode(shutdown))
            return
        self._tell_others(shutdown)
        self._endpoint.process(shutdown)

    def _tell_others(self, message: Any) -> None:
        framed = frame(encode(message))
        for rank in self._others():
            self._send_to(rank, framed)

    def _fail(self, reason: str) -> None:
        self._endpoint.process(Shutdown(reason, 0.0))
        self._send_to(0, frame(encode(Failure(reason))))
        self._tell_others(Shutdown(f"rank {self._rank}: {reason}", 0.0))
        _drain(self._selector, self._connections)

    def _leave(self) -> None:
        self._forward([((self._rank,), Leave())])
        self._flush()
        self._tell_others(Shutdown(f"rank {self._rank} has shut down"))
        _drain(self._selector, self._connections)


class CoordinatorThread(ControlThread):
    """Of rank 0.

    Args:
        coordinator: decides what executes.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        options: ControlOptions,
        connections: dict[int, Connection],
        processes: Sequence[Process],
        coordinator: Coordinator,
    ) -> None:
        super().__init__(endpoint, options, connections, processes)
        self._coordinator = coordinator
        #: The ranks that each connection reaches, and a bit for each of them.
        self._behind = {rank: [rank] for rank in connections}
        for rank, parent in enumerate(parents(processes)):
            if parent != 0:
                self._behind[parent].append(rank)
        self._masks = {rank: sum(1 << each for each in ranks) for rank, ranks in self._behind.items()}
        self._routes = lru_cache(_MAX_ROUTES)(self._find_routes)
        self._stalls_checked = time.monotonic()
        self._warned: set[str] = set()

    def _send(self, message: Any) -> None:
        self._process(0, message, b"")
        self._after_events()

    def _process(self, rank: int, message: Any, data: bytes) -> None:
        try:
            ranks = [rank]
            if isinstance(message, Forward):
                ranks = among(self._behind[rank], message.ranks)
                message = decode(message.message)
            if isinstance(message, Submit):
                self._coordinator.submit(ranks, message, time.monotonic())
            else:
                for each in ranks:
                    self._process_one(each, message)
        except ValueError as error:
            self._lose_unreadable(rank, error)

    def _process_one(self, rank: int, message: Any) -> None:
        if isinstance(message, Heartbeat):
            self._activity[rank] = message.activity
        elif isinstance(message, Rounds):
            self._coordinator.begin_rounds(message)
        elif isinstance(message, Join):
            self._coordinator.join(rank, time.monotonic())
        elif isinstance(message, Leave):
            self._disconnect(rank)
            self._coordinator.shutdown(f"rank {rank} has shut down")
        elif isinstance(message, Failure):
            self._coordinator.shutdown(f"rank {rank}: {message.reason}", abort_after=0.0)
        elif isinstance(message, Shutdown):
            self._coordinator.shutdown(message.reason, abort_after=message.abort_after)
        else:
            raise ValueError(f"a {type(message).__name__} is none for the coordinator")

    def _after_events(self) -> None:
        """Send what the coordinator has decided."""
        while outgoing := self._coordinator.outgoing():
            for ranks, message in outgoing:
                mask, whole, partly = self._routes(tuple(ranks))
                data = encode(message) if whole or partly else b""
                framed = frame(data)
                for rank in whole:
                    self._send_to(rank, framed)
                framed = frame(encode(Forward(mask, data))) if partly else b""
                for rank in partly:
                    self._send_to(rank, framed)
                if mask & 1:
                    self._endpoint.process(message)

    def _find_routes(self, ranks: tuple[int, ...]) -> tuple[int, list[int], list[int]]:
        """Return a bit for each of some ranks; the connections that reach no other ranks, and those that do."""
        mask = sum(1 << rank for rank in ranks)
        reached = {rank: behind & mask for rank, behind in self._masks.items() if behind & mask}
        whole = [rank for rank, found in reached.items() if found == self._masks[rank]]
        return mask, whole, [rank for rank, found in reached.items() if found != self._masks[rank]]

    def _check(self, now: float, *, delayed: bool) -> None:
        super()._check(now, delayed=delayed)
        if now - self._stalls_checked >= _TICK_S:
            self._stalls_checked = now
            self._check_stalls(now)

    def _check_stalls(self, now: float) -> None:
        warn, fail = self._options.stall
        stalled = self._coordinator.stalled(now, min(warn or math.inf, fail or math.inf))
        late = [entry for entry in stalled if warn and entry.seconds >= warn]
        new = [entry for entry in late if entry.name not in self._warned]
        if new:
            waiting = "; ".join(
                f"{entry.name} has waited {entry.seconds:.0f} s for ranks {format_ranks(entry.missing)}; ranks "
                f"{format_ranks(entry.submitted)} are ready"
                for entry in new[:_MAX_STALLS]
            )
            self._endpoint.report(f"stalled: {waiting}. Have they taken another branch, or ended?")
        self._warned = {entry.name for entry in late}
        for entry in stalled:
            if fail and entry.seconds >= fail:
                missing, others = format_ranks(entry.missing), format_ranks(entry.submitted)
                what = f"ranks {missing} did not submit {entry.name} within {entry.seconds:.0f} s"
                self._coordinator.shutdown(f"{what}, which ranks {others} did", abort_after=0.0)

    def _lose(self, rank: int, why: str, abort_after: float = _GRACE_S) -> None:
        self._disconnect(rank)
        self._coordinator.shutdown(self._describe_loss(rank, why), abort_after=abort_after)

    def _fail(self, reason: str) -> None:
        message = Shutdown(f"rank 0: {reason}", 0.0)
        self._endpoint.process(message)
        for connection in self._connections.values():
            with suppress(OSError):
                connection.send(frame(encode(message)))
        _drain(self._selector, self._connections)

    def _leave(self) -> None:
        self._coordinator.shutdown("rank 0 has shut down")
        self._after_events()
        _drain(self._selector, self._connections)


def _watch(selector: selectors.BaseSelector, connection: Connection, data: Any = None) -> None:
    """Watch a connection for what it has to receive and to send."""
    events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.has_unsent else 0)
    selector.modify(connection, events, data)


def _why_lost(error: OSError) -> tuple[str, float]:
    """Return what to say of a connection that has failed, and after how many seconds calls that wait are aborted."""
    if error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN):
        return f"cannot be reached any more: {error}", 0.0
    return f"is gone: {error}", _GRACE_S


def _drain(selector: selectors.BaseSelector, connections: dict[int, Connection]) -> None:
    """Close connections after what was sent has arrived: one that has unread input would drop its output."""
    end = time.monotonic() + _DRAIN_S
    waiting = dict.fromkeys(connections.values(), False)  # whether its end has been sent
    for key in [key for key in selector.get_map().values() if key.fileobj not in waiting]:
        selector.unregister(key.fileobj)  # what wakes the thread up
    while waiting and (left := end - time.monotonic()) > 0:
        for connection, ended in list(waiting.items()):
            try:
                connection.flush()
                if not connection.has_unsent and not ended:
                    connection.end_of_messages()
                    waiting[connection] = True
                selector.modify(connection, selectors.EVENT_READ | selectors.EVENT_WRITE * connection.has_unsent)
            except OSError:
                selector.unregister(connection)
                del waiting[connection]
        for key, events in selector.select(left) if waiting else ():
            if events & selectors.EVENT_READ:
                connection = next(each for each in waiting if each is key.fileobj)
                try:
                    connection.receive()
                except (EOFError, OSError):
                    selector.unregister(connection)
                    del waiting[connection]
    for connection in connections.values():
        connection.close()
    connections.clear()
