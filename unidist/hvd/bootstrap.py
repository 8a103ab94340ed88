"""How the control plane starts: which rank listens where, who may connect, and who has not come."""

from __future__ import annotations

import errno
import json
import socket
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from unidist.backends.base import Backend
from unidist.diagnosis.operations import format_ranks
from unidist.errors import BackendError
from unidist.hvd.control import (
    ControlOptions,
    ControlThread,
    CoordinatorThread,
    Endpoint,
    LeaderThread,
    RankThread,
    parents,
)
from unidist.hvd.negotiation import Coordinator
from unidist.launch import membership
from unidist.network import addresses, open_files
from unidist.network.connection import Accepted, Acceptor, Connection, Hello, connect, refuse
from unidist.network.processes import Process

#: How much longer a rank waits than those that connect to it wait for theirs, so that it learns whom they miss.
_LONGER_S = 2.0
#: See ``connection.Hello``; its content: the rank, and those that have not come to it.
PURPOSE = "hvd"


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
    processes = backend.processes
    if len(processes) < size:
        raise BackendError(f"unidist.hvd needs a process for each rank, and backend {backend.name!r} has threads.")
    hosts = [process.host for process in processes]
    parent = parents(processes)
    children = [child for child in range(1, size) if parent[child] == rank]
    server, offer = _listen(rank, children, hosts)
    accepted: dict[int, Accepted] = {}
    connections: dict[int, Connection] = {}
    missing: list[int] = []
    with server or nullcontext(), _explained_errors(rank, size, "cannot accept the other ranks' connections"):
        offers = [json.loads(text) for text in backend.exchange(json.dumps(offer), options.start)]
        for other, text in enumerate(offers):
            if isinstance(text, str):
                remedy = f".{open_files.advice(size)}" if open_files.EXHAUSTED in text else ""
                raise BackendError(f"rank {other} (host {hosts[other].name}) cannot accept connections: {text}{remedy}")
        if server is not None:
            # Leaders wait for those of their host first.
            longer = _LONGER_S if rank == 0 and any(parent) else 0.0
            accepted, missing = accept(server, backend.secret, children, options.start + longer)
    try:
        if rank == 0:
            if missing:
                raise BackendError(_not_connected(missing, hosts, options.start))
        else:
            address, port = offers[parent[rank]]
            what = f"cannot connect to rank {parent[rank]} (host {hosts[parent[rank]].name}) at {address}:{port}"
            with _explained_errors(rank, size, what):
                seconds = options.start + 2 * _LONGER_S
                own = {"rank": rank, "missing": missing}
                connection, hello = connect((address, port), backend.secret, PURPOSE, own, seconds)
                connections[parent[rank]] = welcomed(connection, hello, rank, seconds)
    except BaseException as error:
        for each in accepted.values():
            each.answer({"error": str(error)})
            each.connection.close()
        raise
    for child, each in accepted.items():  # heartbeats are expected from now on
        connections[child] = each.connection
        each.answer({})
    for connection in connections.values():
        connection.fail_after(options.deadline)
    with _explained_errors(rank, size, "cannot start its control thread"):
        if rank == 0:
            return CoordinatorThread(endpoint, options, connections, processes, coordinator)
        if children:
            return LeaderThread(endpoint, options, connections, processes, rank)
        return RankThread(endpoint, options, connections, processes)


def _listen(
    rank: int, children: Sequence[int], hosts: Sequence[addresses.Host]
) -> tuple[socket.socket | None, tuple[str, int] | str | None]:
    """Return where ranks connect to this one: the socket, and its address and port for the others, or an error."""
    if not children:
        return None, None
    try:
        address = addresses.LOOPBACK if rank else addresses.listen_address(hosts[0], hosts)
        server = addresses.create_server(address, max(len(children), 128))
        return server, (address, server.getsockname()[1])
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
def welcomed(connection: Connection, hello: Hello, rank: int, seconds: float) -> Connection:
    """Wait until another rank has heard of all ranks that connect to it; return the connection.

    Args:
        connection, hello: of ``connect``.
        rank: this rank.
        seconds: for the answer.

    Raises:
        BackendError: not all of them have come.
        OSError: the other rank does not answer in time, or refuses this one.
    """
    try:
        try:
            answer = hello.answer(connection.receive_one(seconds))
        except (EOFError, ConnectionError) as error:
            raise ConnectionRefusedError(f"rank {rank} was refused: {error}") from error
        if "error" in answer:
            raise BackendError(answer["error"])
    except BaseException:
        connection.close()
        raise
    return connection


def accept(
    server: socket.socket, secret: bytes, ranks: Collection[int], seconds: float
) -> tuple[dict[int, Accepted], list[int]]:
    """Return the connections of some ranks that come in time, and the ranks that do not, or that others miss.

    Other processes, and ranks that are there already, are refused and logged.

    Raises:
        BackendError: a worker of an elastic run is lost meanwhile.
    """
    found: dict[int, Accepted] = {}
    missed: set[int] = set()
    end = time.monotonic() + seconds
    acceptor = Acceptor(server, secret, PURPOSE, len(ranks))
    try:
        while len(found) < len(ranks) and (left := end - time.monotonic()) > 0:
            if (member := membership.current()) is not None and (lost := member.lost()):
                raise BackendError(lost)  # it will not come
            for each in acceptor.wait(min(1.0, left)):
                rank = each.content["rank"]
                if rank in found or rank not in ranks:
                    refuse(each.connection, each.host, f"it says that it is rank {rank}")
                    continue
                found[rank] = each
                missed.update(each.content["missing"])
    except BaseException:
        for each in found.values():
            each.connection.close()
        raise
    finally:
        acceptor.close()
    return found, sorted(missed | {rank for rank in ranks if rank not in found})
