"""The control plane: on each rank a thread that sends what the rank submits and receives what it executes. Rank 0's
runs the coordinator, too; the others have a connection to it.

A rank that sends nothing for too long is lost: stopped, or its host cannot be reached. All threads send heartbeats.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from unidist import collectives, open_files
from unidist.backends import addresses
from unidist.backends.base import Backend
from unidist.errors import BackendError
from unidist.hvd.connection import Connection, accept, frame, introduce, new_key, welcomed
from unidist.hvd.messages import Failure, Heartbeat, Join, Leave, Rounds, Shutdown, Submit, decode, encode
from unidist.hvd.negotiation import Coordinator, format_ranks
from unidist.topology import Topology

_log = logging.getLogger("unidist")
#: How long a thread that ends waits for the others to receive what was sent.
_DRAIN_S = 1.0
#: Longest interval of heartbeats, and of the checks for ranks that are silent and for stalled operations.
_TICK_S = 1.0
#: How long collective calls may end by themselves after a rank has ended.
_GRACE_S = 3.0
#: Submissions are gathered for so many cycles at most, while more of them come.
_MAX_CYCLES = 5


class StallTimeouts(NamedTuple):
    """How long an operation may wait for ranks before a warning, and before it fails; seconds, 0: for ever."""

    warn: float
    fail: float


class ControlOptions(NamedTuple):
    """Settings of the control plane."""

    #: Seconds for which submissions are gathered before they are sent, unless a caller waits for one.
    cycle: float
    stall: StallTimeouts
    #: Seconds without a sign of life after which a rank is lost.
    deadline: float


class Endpoint(Protocol):
    """What a control thread serves; all calls come from that thread."""

    def count_submitted(self) -> int:
        """How many operations have been submitted since the last call of ``take_submitted``."""

    def take_submitted(self) -> Submit | None:
        """These operations."""

    def process(self, message: Any) -> None:
        """Do what the coordinator says."""

    def activity(self) -> str:
        """What this rank is doing."""


class Process(NamedTuple):
    """Where a rank runs."""

    host: addresses.Host
    pid: int
    #: Processes of one namespace see each other by their pids.
    pid_namespace: int

    @classmethod
    def current(cls) -> Process:
        """This process."""
        namespace = 0
        with suppress(OSError):
            namespace = os.stat("/proc/self/ns/pid").st_ino
        return cls(addresses.this_host(), os.getpid(), namespace)

    def is_running(self) -> bool | None:
        """Whether a process is neither stopped nor ended (one in a debugger is not); None: it cannot be seen."""
        here = Process.current()
        if not self.pid_namespace or (self.host.id, self.pid_namespace) != (here.host.id, here.pid_namespace):
            return None
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return False
        return state not in "TZX"


def open_control(
    backend: Backend, endpoint: Endpoint, coordinator: Coordinator, options: ControlOptions
) -> ControlThread:
    """Connect every rank with rank 0, and start the threads. Collective.

    Args:
        backend: the running backend, which exchanges the addresses.
        endpoint: this rank's session.
        coordinator: used on rank 0 only.
        options: settings, the same on every rank.

    Raises:
        BackendError: not all ranks connected.
    """
    topology = backend.topology
    if topology.world_size == 1:
        return _CoordinatorThread(endpoint, options, {}, [Process.current()], coordinator)
    processes: list[Process] = collectives.all_gather_object(Process.current())
    hosts = [process.host for process in processes]
    server: socket.socket | None = None
    offer: Any = None
    try:
        if topology.rank == 0:
            address = addresses.listen_address(hosts[0], hosts[1:])
            server = addresses.create_server(address, max(topology.world_size, 128))
            offer = (address, server.getsockname()[1], new_key())
    except Exception as error:
        offer = str(error)  # the others wait for it
    offer = collectives.broadcast_object(offer)
    if isinstance(offer, str):
        raise BackendError(f"rank 0 (host {hosts[0].name}) cannot accept the other ranks' connections: {offer}")
    address, port, key = offer
    timeout = max(options.deadline, 30.0)
    if server is not None:
        with server, _explained_errors(topology, f"{address}:{port}"):
            connections = accept(server, key, topology.world_size, timeout, options.deadline)
        return _CoordinatorThread(endpoint, options, connections, processes, coordinator)
    with _explained_errors(topology, f"{address}:{port}"):
        link = introduce(address, port, key, topology.rank, timeout)
        connection = welcomed(link, topology.rank, options.deadline)
    return _RankThread(endpoint, options, connection, processes[0])


@contextmanager
def _explained_errors(topology: Topology, where: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = " The hosts of a job must be able to open connections to each other on any port."
        if error.errno in (errno.EMFILE, errno.ENFILE):
            remedy = open_files.advice(topology.world_size)
        rank = f"rank {topology.rank} of {topology.world_size}"
        raise BackendError(f"{rank} cannot connect at rank 0's address {where}: {error}.{remedy}") from error


class ControlThread(ABC):
    """A rank's control thread.

    Args:
        endpoint: this rank's session.
        options: settings.
    """

    def __init__(self, endpoint: Endpoint, options: ControlOptions) -> None:
        self._endpoint = endpoint
        self._options = options
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
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="unidist-hvd-control", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def wake(self, *, urgent: bool) -> None:
        """There is something to send: now, if a caller waits for it. Any thread, not blocking."""
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
        """Send a message to the coordinator."""

    @abstractmethod
    def _receive(self, key: selectors.SelectorKey, events: int) -> None:
        """A connection can be read or written."""

    @abstractmethod
    def _check(self, now: float, *, delayed: bool) -> None:
        """Send heartbeats, and look for ranks that are silent; ``delayed``: this thread could not run."""

    @abstractmethod
    def _after_events(self) -> None:
        """All that has arrived has been received."""

    @abstractmethod
    def _fail(self, reason: str) -> None:
        """This thread ends by an error: end all operations."""

    @abstractmethod
    def _leave(self) -> None:
        """Tell the others that this rank leaves, and close the connections."""

    def _run(self) -> None:
        try:
            checked = time.monotonic()
            while not self._closing:
                now = time.monotonic()
                until = min(checked + self._tick, self._send_at) if self._gathered else checked + self._tick
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
        """Whether submissions, which nobody waits for, are not sent yet: for a cycle, and while more of them come."""
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


class _RankThread(ControlThread):
    """Of a rank other than 0."""

    def __init__(self, endpoint: Endpoint, options: ControlOptions, connection: Connection, process: Process) -> None:
        super().__init__(endpoint, options)
        self._connection: Connection | None = connection
        self._rank_0 = process
        self._heard = time.monotonic()
        self._selector.register(connection, selectors.EVENT_READ)

    def _send(self, message: Any) -> None:
        if self._connection is None:
            return
        try:
            self._connection.send(frame(encode(message)))
            if self._connection.has_unsent:
                _watch(self._selector, self._connection)
        except OSError as error:
            self._lose(*_why_lost(error))

    def _receive(self, key: selectors.SelectorKey, events: int) -> None:
        if self._connection is None:
            return
        try:
            if events & selectors.EVENT_WRITE:
                self._connection.flush()
                _watch(self._selector, self._connection)
            messages = self._connection.receive() if events & selectors.EVENT_READ else []
        except EOFError:
            self._lose("is gone: it has ended, or shut Horovod down")
            return
        except OSError as error:
            self._lose(*_why_lost(error))
            return
        self._heard = time.monotonic()
        for data in messages:
            message = decode(data)
            if not isinstance(message, Heartbeat):
                self._endpoint.process(message)

    def _check(self, now: float, *, delayed: bool) -> None:
        self._send(Heartbeat(self._endpoint.activity()))
        if delayed or self._connection is None:
            self._heard = now
        elif now - self._heard > self._options.deadline:
            if self._rank_0.is_running():
                self._heard = now
            else:
                self._lose(f"has given no sign of life for {self._options.deadline:.0f} s", 0.0)

    def _after_events(self) -> None:
        pass

    def _lose(self, why: str, abort_after: float = _GRACE_S) -> None:
        self._disconnect()
        self._endpoint.process(Shutdown(f"rank 0 (host {self._rank_0.host.name}) {why}", abort_after))

    def _fail(self, reason: str) -> None:
        self._send(Failure(reason))
        self._disconnect()
        self._endpoint.process(Shutdown(reason, 0.0))

    def _leave(self) -> None:
        self._send(Leave())
        if self._connection is not None:
            _drain(self._selector, {0: self._connection})
            self._connection = None

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._selector.unregister(self._connection)
            self._connection.close()
            self._connection = None


class _CoordinatorThread(ControlThread):
    """Of rank 0."""

    def __init__(
        self,
        endpoint: Endpoint,
        options: ControlOptions,
        connections: dict[int, Connection],
        processes: Sequence[Process],
        coordinator: Coordinator,
    ) -> None:
        super().__init__(endpoint, options)
        self._connections = connections
        self._processes = processes
        self._coordinator = coordinator
        self._heard = dict.fromkeys(connections, time.monotonic())
        self._activity: dict[int, str] = {}
        self._stalls_checked = time.monotonic()
        self._warned: set[str] = set()
        for rank, connection in connections.items():
            self._selector.register(connection, selectors.EVENT_READ, rank)

    def _send(self, message: Any) -> None:
        self._process(0, message)
        self._after_events()

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
            self._lose(rank, "is gone")
            return
        except OSError as error:
            self._lose(rank, *_why_lost(error))
            return
        self._heard[rank] = time.monotonic()
        for data in messages:
            try:
                self._process(rank, decode(data))
            except ValueError as error:
                self._lose(rank, f"has sent a message that cannot be read: {error}", 0.0)
                return

    def _process(self, rank: int, message: Any) -> None:
        if isinstance(message, Submit):
            self._coordinator.submit(rank, message, time.monotonic())
        elif isinstance(message, Heartbeat):
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
        else:
            raise ValueError(f"a {type(message).__name__} is none for the coordinator")

    def _after_events(self) -> None:
        """Send what the coordinator has decided."""
        while outgoing := self._coordinator.outgoing():
            for ranks, message in outgoing:
                framed = frame(encode(message)) if self._connections else b""
                for rank in ranks:
                    if rank in self._connections:
                        self._send_to(rank, framed)
                if 0 in ranks:
                    self._endpoint.process(message)

    def _send_to(self, rank: int, framed: bytes) -> None:
        connection = self._connections[rank]
        try:
            connection.send(framed)
            if connection.has_unsent:
                _watch(self._selector, connection, rank)
        except OSError as error:
            self._lose(rank, *_why_lost(error))

    def _check(self, now: float, *, delayed: bool) -> None:
        heartbeat = frame(encode(Heartbeat()))
        for rank in list(self._connections):
            if rank in self._connections:
                self._send_to(rank, heartbeat)
        if delayed:
            self._heard = dict.fromkeys(self._connections, now)
        for rank in [rank for rank in self._connections if now - self._heard[rank] > self._options.deadline]:
            if self._processes[rank].is_running():
                self._heard[rank] = now
            else:
                self._lose(rank, f"has given no sign of life for {self._options.deadline:.0f} s", 0.0)
        if now - self._stalls_checked >= _TICK_S:
            self._stalls_checked = now
            self._check_stalls(now)

    def _check_stalls(self, now: float) -> None:
        warn, fail = self._options.stall
        stalled = self._coordinator.stalled(now, min(warn or math.inf, fail or math.inf))
        late = [entry for entry in stalled if warn and entry.seconds >= warn]
        for entry in late:
            if entry.name not in self._warned:
                _log.warning(
                    "stalled: %s has waited %.0f s for ranks %s; ranks %s are ready. Have they taken another branch, "
                    "or ended?%s",
                    entry.name,
                    entry.seconds,
                    format_ranks(entry.missing),
                    format_ranks(entry.submitted),
                    "".join(
                        f" Rank {rank} (host {self._processes[rank].host.name}): {self._activity[rank]}."
                        for rank in entry.missing[:8]
                        if self._activity.get(rank)
                    ),
                )
        self._warned = {entry.name for entry in late}
        for entry in stalled:
            if fail and entry.seconds >= fail:
                missing = format_ranks(entry.missing)
                self._coordinator.shutdown(
                    f"ranks {missing} did not submit {entry.name} within {entry.seconds:.0f} s", abort_after=0.0
                )

    def _lose(self, rank: int, why: str, abort_after: float = _GRACE_S) -> None:
        self._disconnect(rank)
        host, activity = self._processes[rank].host.name, self._activity.get(rank, "")
        seen = f"; last seen {activity}" if activity else ""
        self._coordinator.shutdown(f"rank {rank} (host {host}) {why}{seen}", abort_after=abort_after)

    def _disconnect(self, rank: int) -> None:
        connection = self._connections.pop(rank, None)
        if connection is not None:
            self._selector.unregister(connection)
            connection.close()

    def _fail(self, reason: str) -> None:
        message = Shutdown(f"rank 0: {reason}", 0.0)
        for connection in self._connections.values():
            with suppress(OSError):
                connection.send(frame(encode(message)))
        self._endpoint.process(message)
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
    """What to say of a connection that has failed, and after how many seconds calls that wait are aborted."""
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
