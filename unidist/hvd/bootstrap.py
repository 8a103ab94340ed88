"""How the control plane starts: which rank listens where, who may connect, and who has not come."""

from __future__ import annotations

import errno
import hmac
import json
import logging
import os
import selectors
import socket
import struct
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from unidist import membership, open_files
from unidist.backends import addresses
from unidist.backends.base import Backend
from unidist.backends.processes import Process
from unidist.errors import BackendError
from unidist.hvd.connection import Connection
from unidist.hvd.control import (
    ControlOptions,
    ControlThread,
    CoordinatorThread,
    Endpoint,
    LeaderThread,
    RankThread,
    parents,
)
from unidist.hvd.negotiation import Coordinator, format_ranks

_log = logging.getLogger("unidist")
_KEY_BYTES = 32
#: After the key: the rank, and one of its host that has not come to it, or itself.
_RANKS = struct.Struct("<II")
_HELLO_BYTES = _KEY_BYTES + _RANKS.size
#: The response to a hello: either this, or why the start has failed.
WELCOME = b"\x01"
#: How much longer a rank waits than those that connect to it wait for theirs, so that it learns whom they miss.
_LONGER_S = 2.0
#: How long an unknown client may take for its hello, and how many may wait beside the ranks.
_HELLO_S = 10.0
_MAX_STRANGERS = 256


def open_control(
    backend: Backend, endpoint: Endpoint, coordinator: Coordinator, options: ControlOptions
) -> ControlThread:
    """Connect the ranks as ``parents`` says. Collective. The result is to be started.

    Args:
        backend: the running backend, which exchanges the addresses.
        endpoint: this rank's session.
        coordinator: used on rank 0 only.
        options: settings, the same on every rank.

    Raises:
        BackendError: not all ranks came and connected within ``options.start``; the error names them.
    """
    rank, size = backend.topology.rank, backend.topology.world_size
    if size == 1:
        return CoordinatorThread(endpoint, options, {}, [Process.current()], coordinator)
    processes = [Process.from_json(text) for text in backend.exchange(Process.current().to_json(), options.start)]
    hosts = [process.host for process in processes]
    parent = parents(processes)
    children = [child for child in range(1, size) if parent[child] == rank]
    server, offer = _listen(rank, children, hosts)
    connections: dict[int, Connection] = {}
    missing: list[int] = []
    with server or nullcontext(), _explained_errors(rank, size, "cannot accept the other ranks' connections"):
        offers = [json.loads(text) for text in backend.exchange(json.dumps(offer), options.start)]
        for other, text in enumerate(offers):
            if isinstance(text, str):
                remedy = f".{open_files.advice(size)}" if open_files.EXHAUSTED in text else ""
                raise BackendError(f"rank {other} (host {hosts[other].name}) cannot accept connections: {text}{remedy}")
        key = bytes.fromhex(offers[0][2])
        if server is not None:
            # Leaders wait for those of their host first.
            longer = _LONGER_S if rank == 0 and any(parent) else 0.0
            connections, missing = accept(server, key, children, options.start + longer, options.deadline)
    try:
        if rank == 0:
            if missing:
                raise BackendError(_not_connected(missing, hosts, options.start))
        else:
            address, port, _ = offers[parent[rank]]
            what = f"cannot connect to rank {parent[rank]} (host {hosts[parent[rank]].name}) at {address}:{port}"
            with _explained_errors(rank, size, what):
                link = introduce(address, port, key, rank, options.start + 2 * _LONGER_S, missing)
                connections[parent[rank]] = welcomed(link, rank, options.deadline)
    except BaseException as error:
        for connection in connections.values():
            connection.answer(str(error).encode())
            connection.close()
        raise
    for child in children:  # heartbeats are expected from now on
        connections[child].answer(WELCOME)
    with _explained_errors(rank, size, "cannot start its control thread"):
        if rank == 0:
            return CoordinatorThread(endpoint, options, connections, processes, coordinator)
        if children:
            return LeaderThread(endpoint, options, connections, processes, rank)
        return RankThread(endpoint, options, connections, processes)


def _listen(
    rank: int, children: Sequence[int], hosts: Sequence[addresses.Host]
) -> tuple[socket.socket | None, tuple[str, int, str] | str | None]:
    """Where ranks connect to this one: the socket, and its address, port and key for the others, or an error."""
    if not children:
        return None, None
    try:
        # The key is rank 0's.
        address = addresses.LOOPBACK if rank else addresses.listen_address(hosts[0], hosts)
        server = addresses.create_server(address, max(len(children), 128))
        return server, (address, server.getsockname()[1], "" if rank else new_key().hex())
    except Exception as error:
        return None, str(error)  # the others wait for it


def _not_connected(ranks: Sequence[int], hosts: Sequence[addresses.Host], seconds: float) -> str:
    where = ", ".join(dict.fromkeys(hosts[rank].name for rank in ranks[:8]))
    return (
        f"ranks {format_ranks(ranks)} (host {where}) have come to hvd.init(), and did not connect within {seconds:.0f} "
        "s: have they stopped or ended? The hosts of a job must be able to open connections to each other on any port."
    )


@contextmanager
def _explained_errors(rank: int, size: int, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = " The hosts of a job must be able to open connections to each other on any port."
        if isinstance(error, TimeoutError):
            remedy = f" Has it stopped?{remedy}"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            remedy = open_files.advice(size)
        raise BackendError(f"rank {rank} of {size} {what}: {error}.{remedy}") from error


# ------------------------------------------------------------------------------------ who connects
def new_key() -> bytes:
    """A secret that the ranks of one world share."""
    return os.urandom(_KEY_BYTES)


def introduce(
    address: str, port: int, key: bytes, rank: int, timeout: float, missing: Sequence[int] = ()
) -> socket.socket:
    """Say to another rank who this is; ``welcomed`` waits for its answer.

    Args:
        missing: ranks that have not come to this one.

    Raises:
        OSError: it cannot be reached.
    """
    link = socket.create_connection((address, port), timeout)
    try:
        link.sendall(key + _RANKS.pack(rank, (*missing, rank)[0]))
    except BaseException:
        link.close()
        raise
    return link


def welcomed(link: socket.socket, rank: int, dead_after: float) -> Connection:
    """A rank's connection, once all ranks have introduced themselves.

    Raises:
        BackendError: not all of them have come.
        OSError: the rank is refused, or there is no answer in time.
    """
    try:
        answer = link.recv(len(WELCOME))
        if not answer:
            raise ConnectionRefusedError(f"rank {rank} was refused")
        if answer != WELCOME:
            while data := link.recv(2**16):
                answer += data
            raise BackendError(answer.decode(errors="replace"))
    except BaseException:
        link.close()
        raise
    return Connection(link, dead_after)


def accept(
    server: socket.socket, key: bytes, ranks: Collection[int], timeout: float, dead_after: float
) -> tuple[dict[int, Connection], list[int]]:
    """The connections to some ranks that come in time, and those that do not, or that others miss.

    Strangers, and ranks that are there already, are refused and logged.

    Raises:
        BackendError: a worker of an elastic run is lost meanwhile.
    """
    server.setblocking(False)
    found: dict[int, Connection] = {}
    missed: set[int] = set()
    end = time.monotonic() + timeout
    handshakes = _Handshakes(server, key, len(ranks))
    try:
        while len(found) < len(ranks) and (left := end - time.monotonic()) > 0:
            if (member := membership.current()) is not None and (lost := member.lost()):
                raise BackendError(lost)  # it will not come
            for link, rank, missing in handshakes.introduced(min(1.0, left)):
                if rank in found or rank not in ranks:
                    handshakes.refuse(link, f"it says that it is rank {rank}")
                    continue
                handshakes.leave(link)
                found[rank] = Connection(link, dead_after)
                missed |= {missing} - {rank}
    except BaseException:
        for connection in found.values():
            connection.close()
        raise
    finally:
        handshakes.close()
    return found, sorted(missed | {rank for rank in ranks if rank not in found})


class _Handshakes:
    """Connections that have not said who they are.

    Args:
        server: where they come from.
        key: what they must know.
        ranks: how many ranks come.
    """

    def __init__(self, server: socket.socket, key: bytes, ranks: int) -> None:
        self._server = server
        self._key = key
        self._most = ranks + _MAX_STRANGERS
        #: What each has sent, until when it has time, and its address.
        self._links: dict[socket.socket, tuple[bytearray, float, str]] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)

    def introduced(self, timeout: float) -> Iterable[tuple[socket.socket, int, int]]:
        """Wait once; those that have sent the key, with the ranks of their hello."""
        now = time.monotonic()
        for late in [link for link, (_, until, _) in self._links.items() if now > until]:
            self.refuse(late, f"it has sent no key within {_HELLO_S:.0f} s")
        for ready, _ in self._selector.select(timeout):
            link: Any = ready.fileobj
            if link is self._server:
                self._accept(now)
            elif link in self._links and (hello := self._read(link)) is not None:
                yield link, *hello

    def _accept(self, now: float) -> None:
        try:
            link, peer = self._server.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            return  # it has gone already
        link.setblocking(False)
        if len(self._links) >= self._most:
            self.refuse(next(iter(self._links)), "too many have sent no key")
        self._links[link] = (bytearray(), now + _HELLO_S, str(peer[0]))
        self._selector.register(link, selectors.EVENT_READ)

    def _read(self, link: socket.socket) -> tuple[int, int] | None:
        """Its ranks, if its hello is there; it is refused if it cannot be one."""
        hello = self._links[link][0]
        try:
            data = link.recv(_HELLO_BYTES - len(hello))
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        hello += data
        if not data:
            self.refuse(link, "it has sent no key")
        elif len(hello) == _HELLO_BYTES:  # its answer must not depend on a part of the key
            if hmac.compare_digest(hello[:_KEY_BYTES], self._key):
                rank, missing = _RANKS.unpack_from(hello, _KEY_BYTES)
                return rank, missing
            self.refuse(link, "its key is not that of this job")
        return None

    def refuse(self, link: socket.socket, why: str) -> None:
        """Close it, and say so."""
        _log.warning("a connection from %s to this job's port was refused: %s.", self._links[link][2], why)
        self.leave(link)
        link.close()

    def leave(self, link: socket.socket) -> None:
        """The handshake of a connection is over."""
        self._selector.unregister(link)
        del self._links[link]

    def close(self) -> None:
        """Close all."""
        self._selector.close()
        for link in self._links:
            with suppress(OSError):
                link.close()
