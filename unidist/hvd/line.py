"""How ranks talk to rank 0, which coordinates: a socket for each, and a thread on rank 0 that listens to all of them.

What travels are lists of the named tuples of ``negotiation`` and of those below. Tensors never come here.
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
from unidist.hvd.negotiation import Coordinator, told
from unidist.hvd.rounds import Begun

_log = logging.getLogger("unidist")
#: Seconds within which every rank must have found rank 0's socket, and within which one that leaves waits for the others to listen.
_CONNECT_S, _DRAIN_S = 60.0, 1.0
#: How often rank 0 looks for operations that wait too long.
_LOOK_S = 1.0


class Join(NamedTuple):
    """To rank 0: this rank has no more data. To a rank: another has none, so tell of your gradient rounds."""


class Leave(NamedTuple):
    """This rank shuts down."""


class Rounds(NamedTuple):
    """Gradient rounds that have begun, for those who have joined: which reducer, and its how-manieth."""

    begun: Begun


class End(NamedTuple):
    """To a rank that has joined: not all will."""

    why: str


class Patience(NamedTuple):
    """How long operations may wait for ranks, in seconds; 0 is for ever."""

    warn: float
    fail: float


class Line(Protocol):
    """One rank's end."""

    def send(self, items: Sequence[Any]) -> None:
        """Tell rank 0. Raises ``OSError`` where it is gone."""

    def receive(self) -> list[Any]:
        """What rank 0 says next; waits for it. Raises ``EOFError`` where it is gone. One thread at a time."""

    def listen(self, seconds: float | None) -> bool:
        """Wait until ``receive`` would not; whether it would not. Any thread."""

    def close(self) -> None:
        """Hang up."""


def open_line(backend: Backend, coordinator: Coordinator, patience: Patience) -> Line:
    """Connect every rank with rank 0. Collective.

    Args:
        backend: the running engine, by which rank 0's address travels.
        coordinator: rank 0's; the others' are not used.
        patience: of the coordinator.
    """
    place = backend.topology
    if place.world_size == 1:
        return Hub({}, coordinator, patience)
    server = socket.create_server(("", 0), backlog=place.world_size) if place.rank == 0 else None
    hosts = collectives.all_gather_object(socket.gethostname())
    offer: Any = None
    if server is not None:
        away = next((host for host in hosts if host != hosts[0]), None)
        offer = (local_address(away) if away else "127.0.0.1", server.getsockname()[1], os.urandom(16))
    address, port, key = collectives.broadcast_object(offer)
    if server is not None:
        return Hub(_accept(server, key, place.world_size), coordinator, patience)
    try:
        link = socket.create_connection((address, port), timeout=_CONNECT_S)
    except OSError as error:
        raise BackendError(
            f"rank {place.rank} of {place.world_size} cannot reach rank 0 at {address}:{port}: {error}. The hosts of a job must be "
            "able to open connections to each other on any port."
        ) from error
    line = Wire(link)
    line.connection.send_bytes(key + place.rank.to_bytes(4, "big"))
    return line


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
                    f"ranks {told(missing)} did not connect to rank 0 within {_CONNECT_S:.0f} s."
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


class Wire:
    """The line of a rank other than 0."""

    def __init__(self, link: socket.socket) -> None:
        self.connection = _connection(link)

    def send(self, items: Sequence[Any]) -> None:
        self.connection.send_bytes(pickle.dumps(items, pickle.HIGHEST_PROTOCOL))

    def receive(self) -> list[Any]:
        try:
            items: list[Any] = pickle.loads(self.connection.recv_bytes())
        except (OSError, TypeError) as error:  # TypeError: closed in the middle by another thread
            raise EOFError(str(error)) from None
        return items

    def listen(self, seconds: float | None) -> bool:
        try:
            return self.connection.poll(seconds)
        except OSError:
            return True  # receive() says why

    def close(self) -> None:
        with suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as link:
            link.shutdown(socket.SHUT_RDWR)  # whoever listens wakes up
        self.connection.close()


class Hub:
    """Rank 0's end: the coordinator, and the thread that listens to the others."""

    def __init__(self, connections: dict[int, Connection], coordinator: Coordinator, patience: Patience) -> None:
        self._connections = connections
        self._coordinator = coordinator
        self._patience = patience
        self._inbox: deque[list[Any] | None] = deque()
        self._posted = threading.Condition()
        # Answers go out in the order in which they were decided.
        self._lock = threading.Lock()
        self._warned: set[str] = set()
        self._closing = False
        self._thread = threading.Thread(target=self._listen, name="unidist-hvd-coordinator", daemon=True)
        if connections:
            self._thread.start()

    def send(self, items: Sequence[Any]) -> None:
        with self._lock:
            self._take(0, items)
            self._tell()

    def receive(self) -> list[Any]:
        self.listen(None)
        items = self._inbox.popleft()
        if items is None:
            self._inbox.append(None)
            raise EOFError
        return items

    def listen(self, seconds: float | None) -> bool:
        if self._inbox:
            return True
        with self._posted:
            return self._posted.wait_for(lambda: bool(self._inbox), seconds)

    def close(self) -> None:
        self._closing = True
        with suppress(RuntimeError):  # never started
            self._thread.join(_DRAIN_S)
        self._deliver(None)

    # --------------------------------------------------------------------------------
    def _take(self, rank: int, items: Sequence[Any]) -> None:
        requests = [item for item in items if type(item) is tuple]
        self._coordinator.receive(rank, requests, time.monotonic())
        if len(requests) == len(items):
            return
        for item in items:
            if isinstance(item, Join):
                self._coordinator.join(rank)
                if self._coordinator.end:
                    self._post(rank, [End(self._coordinator.end)])
                for other in range(len(self._connections) + 1):
                    self._post(other, [item])
            elif isinstance(item, Rounds):
                for other in self._coordinator.joined:
                    self._post(other, [item])
            elif isinstance(item, Leave):
                self._lose(rank, "has shut down")

    def _lose(self, rank: int, why: str) -> None:
        self._coordinator.lose(rank, why)
        for other in self._coordinator.joined:
            self._post(other, [End(self._coordinator.end)])

    def _tell(self) -> None:
        letters: dict[int, list[Any]] = {}
        for ranks, answer in self._coordinator.answers():
            for rank in ranks:
                letters.setdefault(rank, []).append(answer)
        blobs: dict[tuple[int, ...], bytes] = {}  # most ranks are told the same
        for rank, letter in letters.items():
            self._post(rank, letter, blobs)

    def _post(self, rank: int, letter: list[Any], blobs: dict[tuple[int, ...], bytes] | None = None) -> None:
        if rank == 0:
            self._deliver(letter)
        elif rank in self._connections:
            key = tuple(map(id, letter))
            blob = blobs.get(key) if blobs else None
            if blob is None:
                blob = pickle.dumps(letter, pickle.HIGHEST_PROTOCOL)
            if blobs is not None:
                blobs[key] = blob
            with suppress(OSError):  # gone; the listening thread hears of it
                self._connections[rank].send_bytes(blob)

    def _deliver(self, letter: list[Any] | None) -> None:
        with self._posted:
            self._inbox.append(letter)
            self._posted.notify_all()

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            look = 0.0
            while selector.get_map() and not self._closing:
                heard = selector.select(_LOOK_S)
                with self._lock:
                    for key, _ in heard:
                        if (items := self._read(selector, key)) is None:
                            self._lose(key.data, "is gone")
                        else:
                            self._take(key.data, items)
                    if time.monotonic() > look:
                        self._watch()
                        look = time.monotonic() + _LOOK_S
                    self._tell()
            self._hang_up(selector)

    def _read(self, selector: selectors.BaseSelector, key: selectors.SelectorKey) -> list[Any] | None:
        connection = self._connections[key.data]
        try:
            items: list[Any] = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            selector.unregister(connection)
            return None
        return items

    def _hang_up(self, selector: selectors.BaseSelector) -> None:
        """What was told must arrive: a socket that closes upon unread data takes it back."""
        for connection in self._connections.values():
            with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as link:
                link.shutdown(socket.SHUT_WR)
        end = time.monotonic() + _DRAIN_S
        while selector.get_map() and time.monotonic() < end:
            for key, _ in selector.select(0.1):
                self._read(selector, key)
        for connection in self._connections.values():
            connection.close()

    def _watch(self) -> None:
        now = time.monotonic()
        if self._patience.warn:
            stalled = self._coordinator.stalled(now, self._patience.warn)
            fresh = [entry for entry in stalled if entry[0] not in self._warned]
            self._warned = {entry[0] for entry in stalled}
            for name, seconds, there, missing in fresh:
                _log.warning(
                    "stalled: %s has waited %.0f s for ranks %s; ranks %s are ready. Have they taken another branch, or ended?",
                    name, seconds, told(missing), told(there),
                )  # fmt: skip
        if self._patience.fail:
            for name, seconds, _, missing in self._coordinator.stalled(now, self._patience.fail)[:1]:
                self._coordinator.fail_all(f"ranks {told(missing)} did not come to {name} within {seconds:.0f} s")
