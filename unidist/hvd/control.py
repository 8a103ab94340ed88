"""The control channel between the ranks and the coordinator on rank 0: a socket per rank, and a thread on rank 0 that
reads all.

Messages are lists (batches) of the named tuples of ``negotiation`` and of those below. Tensors are never sent here.
"""

from __future__ import annotations

import hmac
import logging
import os
import pickle
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

from unidist import collectives
from unidist.backends.base import Backend
from unidist.backends.rendezvous import local_address
from unidist.errors import BackendError
from unidist.hvd.negotiation import Coordinator, format_ranks
from unidist.hvd.rounds import Round

_log = logging.getLogger("unidist")
#: Timeout in seconds of a rank's connection to rank 0.
_CONNECT_S = 60.0
#: How long a rank 0 that closes waits for the others to read what was sent.
_DRAIN_S = 1.0
#: Interval of the checks for stalled operations.
_STALL_CHECK_S = 1.0


class Join(NamedTuple):
    """To rank 0: this rank has no more data. To a rank: another one has joined, so announce your gradient rounds."""


class Leave(NamedTuple):
    """To rank 0: this rank shuts down."""


class Rounds(NamedTuple):
    """Gradient rounds that a rank has begun, for the ranks that have joined."""

    begun: tuple[Round, ...]


class JoinFailed(NamedTuple):
    """To a rank that has joined: not all ranks will."""

    reason: str


class StallTimeouts(NamedTuple):
    """How long an operation may wait for ranks before a warning, and before it fails; seconds, 0: for ever."""

    warn: float
    fail: float


class ControlChannel(Protocol):
    """One rank's end."""

    def send(self, batch: Sequence[Any]) -> None:
        """Send messages to rank 0. Raises ``OSError`` if it is gone. Any thread."""

    def receive(self) -> list[Any]:
        """Wait for the next messages of rank 0. Raises ``EOFError`` if it is gone. One thread at a time."""

    def poll(self, seconds: float | None) -> bool:
        """Whether ``receive`` would return at once; waits for it at most so long. Any thread."""

    def close(self) -> None:
        """Disconnect."""


def open_channel(backend: Backend, coordinator: Coordinator, stall: StallTimeouts) -> ControlChannel:
    """Connect every rank with rank 0. Collective.

    Args:
        backend: the running backend, which broadcasts rank 0's address.
        coordinator: used on rank 0 only.
        stall: the coordinator's timeouts.
    """
    topology = backend.topology
    if topology.world_size == 1:
        return ControlServer({}, coordinator, stall)
    server = socket.create_server(("", 0), backlog=topology.world_size) if topology.rank == 0 else None
    hosts = collectives.all_gather_object(socket.gethostname())
    offer: Any = None
    if server is not None:
        other = next((host for host in hosts if host != hosts[0]), None)
        offer = (local_address(other) if other else "127.0.0.1", server.getsockname()[1], os.urandom(16))
    address, port, key = collectives.broadcast_object(offer)
    if server is not None:
        return ControlServer(_accept(server, key, topology.world_size), coordinator, stall)
    try:
        link = socket.create_connection((address, port), timeout=_CONNECT_S)
    except OSError as error:
        raise BackendError(
            f"rank {topology.rank} of {topology.world_size} cannot connect to rank 0 at {address}:{port}: {error}. The "
            "hosts of a job must be able to open connections to each other on any port."
        ) from error
    client = ControlClient(link)
    client.connection.send_bytes(key + topology.rank.to_bytes(4, "big"))
    return client


def _accept(server: socket.socket, key: bytes, size: int) -> dict[int, Connection]:
    server.settimeout(_CONNECT_S)
    found: dict[int, Connection] = {}
    with server:
        while len(found) < size - 1:
            try:
                link, _ = server.accept()
            except TimeoutError:
                missing = [rank for rank in range(1, size) if rank not in found]
                raise BackendError(
                    f"ranks {format_ranks(missing)} did not connect to rank 0 within {_CONNECT_S:.0f} s."
                ) from None
            connection = _connection(link)
            hello = connection.recv_bytes(1024) if connection.poll(_CONNECT_S) else b""
            if hmac.compare_digest(hello[: len(key)], key):
                found[int.from_bytes(hello[len(key) :], "big")] = connection
    return found


def _connection(link: socket.socket) -> Connection:
    link.settimeout(None)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # small messages must not wait for more
    return Connection(link.detach())


class ControlClient:
    """The end of a rank other than 0."""

    def __init__(self, link: socket.socket) -> None:
        self.connection = _connection(link)

    def send(self, batch: Sequence[Any]) -> None:
        self.connection.send_bytes(pickle.dumps(batch, pickle.HIGHEST_PROTOCOL))

    def receive(self) -> list[Any]:
        try:
            batch: list[Any] = pickle.loads(self.connection.recv_bytes())
        except (OSError, TypeError) as error:  # TypeError: closed in the middle by another thread
            raise EOFError(str(error)) from None
        return batch

    def poll(self, seconds: float | None) -> bool:
        try:
            return self.connection.poll(seconds)
        except OSError:
            return True  # receive() raises the error

    def close(self) -> None:
        with suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as link:
            link.shutdown(socket.SHUT_RDWR)  # wakes up a thread that waits in receive()
        self.connection.close()


class ControlServer:
    """Rank 0's end: the coordinator, and the thread that reads the other ranks' messages."""

    def __init__(self, connections: dict[int, Connection], coordinator: Coordinator, stall: StallTimeouts) -> None:
        self._connections = connections
        self._coordinator = coordinator
        self._stall = stall
        #: Batches for rank 0 itself; None: closed.
        self._inbox: deque[list[Any] | None] = deque()
        self._received = threading.Condition()
        # Responses are sent in the order in which the coordinator decided them.
        self._lock = threading.Lock()
        self._warned: set[str] = set()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="unidist-hvd-coordinator", daemon=True)
        if connections:
            self._thread.start()

    def send(self, batch: Sequence[Any]) -> None:
        with self._lock:
            self._process(0, batch)
            self._send_responses()

    def receive(self) -> list[Any]:
        self.poll(None)
        batch = self._inbox.popleft()
        if batch is None:
            self._inbox.append(None)
            raise EOFError
        return batch

    def poll(self, seconds: float | None) -> bool:
        if self._inbox:
            return True
        with self._received:
            return self._received.wait_for(lambda: bool(self._inbox), seconds)

    def close(self) -> None:
        self._closing = True
        with suppress(RuntimeError):  # never started
            self._thread.join(_DRAIN_S)
        self._deliver(None)

    # --------------------------------------------------------------------------------
    def _process(self, rank: int, batch: Sequence[Any]) -> None:
        requests = [message for message in batch if type(message) is tuple]
        self._coordinator.receive(rank, requests, time.monotonic())
        if len(requests) == len(batch):
            return
        for message in batch:
            if isinstance(message, Join):
                self._coordinator.join(rank)
                if self._coordinator.shutdown_reason:
                    self._send(rank, [JoinFailed(self._coordinator.shutdown_reason)])
                for other in range(len(self._connections) + 1):
                    self._send(other, [message])
            elif isinstance(message, Rounds):
                for other in self._coordinator.joined:
                    self._send(other, [message])
            elif isinstance(message, Leave):
                self._rank_lost(rank, "has shut down")

    def _rank_lost(self, rank: int, reason: str) -> None:
        self._coordinator.rank_lost(rank, reason)
        for other in self._coordinator.joined:
            self._send(other, [JoinFailed(self._coordinator.shutdown_reason)])

    def _send_responses(self) -> None:
        batches: dict[int, list[Any]] = {}
        for ranks, response in self._coordinator.responses():
            for rank in ranks:
                batches.setdefault(rank, []).append(response)
        pickled: dict[tuple[int, ...], bytes] = {}  # most ranks get the same batch
        for rank, batch in batches.items():
            self._send(rank, batch, pickled)

    def _send(self, rank: int, batch: list[Any], pickled: dict[tuple[int, ...], bytes] | None = None) -> None:
        if rank == 0:
            self._deliver(batch)
        elif rank in self._connections:
            key = tuple(map(id, batch))
            data = pickled.get(key) if pickled else None
            if data is None:
                data = pickle.dumps(batch, pickle.HIGHEST_PROTOCOL)
            if pickled is not None:
                pickled[key] = data
            with suppress(OSError):  # gone; the serving thread notices
                self._connections[rank].send_bytes(data)

    def _deliver(self, batch: list[Any] | None) -> None:
        with self._received:
            self._inbox.append(batch)
            self._received.notify_all()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            next_check = 0.0
            while selector.get_map() and not self._closing:
                readable = selector.select(_STALL_CHECK_S)
                with self._lock:
                    for key, _ in readable:
                        if (batch := self._read(selector, key)) is None:
                            self._rank_lost(key.data, "is gone")
                        else:
                            self._process(key.data, batch)
                    if time.monotonic() > next_check:
                        self._check_stalls()
                        next_check = time.monotonic() + _STALL_CHECK_S
                    self._send_responses()
            self._drain(selector)

    def _read(self, selector: selectors.BaseSelector, key: selectors.SelectorKey) -> list[Any] | None:
        connection = self._connections[key.data]
        try:
            batch: list[Any] = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            selector.unregister(connection)
            return None
        return batch

    def _drain(self, selector: selectors.BaseSelector) -> None:
        """Let what was sent arrive: a socket that is closed with unread input drops its output."""
        for connection in self._connections.values():
            with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as link:
                link.shutdown(socket.SHUT_WR)
        end = time.monotonic() + _DRAIN_S
        while selector.get_map() and time.monotonic() < end:
            for key, _ in selector.select(0.1):
                self._read(selector, key)
        for connection in self._connections.values():
            connection.close()

    def _check_stalls(self) -> None:
        now = time.monotonic()
        if self._stall.warn:
            stalled = self._coordinator.stalled(now, self._stall.warn)
            new = [entry for entry in stalled if entry[0] not in self._warned]
            self._warned = {entry[0] for entry in stalled}
            for name, seconds, submitted, missing in new:
                _log.warning(
                    "stalled: %s has waited %.0f s for ranks %s; ranks %s are ready. Have they taken another branch, "
                    "or ended?",
                    name,
                    seconds,
                    format_ranks(missing),
                    format_ranks(submitted),
                )
        if self._stall.fail:
            for name, seconds, _, missing in self._coordinator.stalled(now, self._stall.fail)[:1]:
                self._coordinator.fail_all(
                    f"ranks {format_ranks(missing)} did not submit {name} within {seconds:.0f} s"
                )
