"""The connections of a job's processes: who is refused, ranks that come twice, and whole messages."""

from __future__ import annotations

import logging
import os
import random
import selectors
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

import pytest

from unidist.errors import BackendError
from unidist.hvd.bootstrap import PURPOSE, accept, welcomed
from unidist.network.connection import Connection, Hello, connect, frame, new_secret

pytestmark = pytest.mark.unit
SECRET = new_secret()
#: Closed at the end of each test.
_opened: list[socket.socket | Connection] = []


@pytest.fixture(autouse=True)
def close_all() -> Iterator[None]:
    yield
    while _opened:
        _opened.pop().close()


def serve(size: int, timeout: float = 10.0) -> tuple[socket.socket, Callable[[], dict[int, Connection]]]:
    """A server whose ``accept`` runs in a thread, and what waits for its result."""
    server = socket.create_server(("127.0.0.1", 0))
    found: list[tuple[dict[int, Connection], list[int]]] = []

    def run() -> None:
        accepted, missing = accept(server, SECRET, range(1, size), timeout)
        for each in accepted.values():
            each.answer({"error": f"missing: {missing}"} if missing else {})
            if missing:
                each.connection.close()
        found.append(({rank: each.connection for rank, each in accepted.items()}, missing))

    thread = threading.Thread(target=run)
    thread.start()

    def result() -> dict[int, Connection]:
        thread.join(20)
        server.close()
        ((connections, missing),) = found
        _opened.extend(connections.values())
        assert not missing
        return connections

    return server, result


def begin(server: socket.socket, number: int, secret: bytes = SECRET, missing: Sequence[int] = ()) -> tuple[Any, Any]:
    return connect(server.getsockname(), secret, PURPOSE, {"rank": number, "missing": missing}, 10.0)


def rank(server: socket.socket, number: int, secret: bytes = SECRET) -> Connection:
    connection = welcomed(*begin(server, number, secret), number, 30.0)
    _opened.append(connection)
    return connection


def reset(link: socket.socket) -> None:
    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    link.close()


def hello(secret: bytes, number: int, purpose: str = PURPOSE) -> Callable[[socket.socket], object]:
    content = {"rank": number, "missing": []}
    return lambda link: link.sendall(Hello(secret, purpose, link.getpeername(), content).framed)


STRANGERS: dict[str, Callable[[socket.socket], object]] = {
    "silent": lambda link: None,
    "closes at once": lambda link: link.close(),
    "resets": reset,
    "asks for a page": lambda link: link.sendall(b"GET / HTTP/1.0\r\n\r\n"),
    "half a hello": lambda link: link.sendall(frame(b"12345")[:6]),
    "a short hello": lambda link: link.sendall(frame(b"12345")),
    "an endless hello": lambda link: link.sendall(struct.pack("<I", 2**31)),
    "another secret": hello(new_secret(), 1),
    "another purpose": hello(SECRET, 1, "watch"),
    "for another address": lambda link: link.sendall(
        Hello(SECRET, PURPOSE, ("127.0.0.1", 9), {"rank": 1, "missing": []}).framed
    ),
    "no such rank": hello(SECRET, 7),
    "rank 0": hello(SECRET, 0),
}


def test_strangers_do_not_stop_the_start(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "unidist")
    server, result = serve(3)
    for stranger in STRANGERS.values():
        link = socket.create_connection(server.getsockname())
        stranger(link)
        _opened.append(link)
    start = time.monotonic()
    while len(caplog.records) < len(STRANGERS) - 2:  # two wait still
        assert time.monotonic() - start < 10
        time.sleep(0.01)
    start = time.monotonic()
    with ThreadPoolExecutor() as pool:  # ranks are welcome when all have come
        ranks = dict(zip((2, 1), pool.map(lambda number: rank(server, number), (2, 1))))
    connections = result()
    assert time.monotonic() - start < 5 and connections.keys() == ranks.keys()
    refused = [record.getMessage() for record in caplog.records]
    assert all("was refused" in message and "127.0.0.1" in message for message in refused)
    levels = [record.levelno for record in caplog.records if "it has sent no hello" in record.getMessage()]
    assert levels == [logging.DEBUG] * 4  # probes of the port
    strangers = [each.levelno for each in caplog.records if "does not know this job's secret" in each.getMessage()]
    assert strangers == [logging.WARNING] + [logging.DEBUG] * 3  # once for each host
    assert sum("it says that it is rank" in message for message in refused) == 2
    for number, connection in ranks.items():
        connection.send(frame(b"here"))
        assert receive(connections[number], 1) == [b"here"]


def test_a_rank_that_is_there_already_is_refused() -> None:
    server, result = serve(3)
    with ThreadPoolExecutor() as pool:
        twins = {pool.submit(rank, server, 1), pool.submit(rank, server, 1)}
        refused, waiting = wait(twins, return_when=FIRST_COMPLETED)  # who is accepted waits for rank 2
        with pytest.raises(ConnectionRefusedError, match="rank 1 was refused"):
            refused.pop().result()
        with pytest.raises(OSError):
            rank(server, 2, new_secret())
        second = rank(server, 2)
    assert result().keys() == {1, 2} and waiting.pop().result().fileno() > 0 and second.fileno() > 0


def test_ranks_that_do_not_come_are_named() -> None:
    server, result = serve(4, timeout=1.0)
    with pytest.raises(BackendError, match=r"missing: \[1, 3\]"):  # the ranks that came learn it
        rank(server, 2)
    with pytest.raises(AssertionError):
        result()


def test_a_leader_says_whom_it_misses() -> None:
    server, result = serve(3)
    _opened.append(begin(server, 1)[0])
    with pytest.raises(BackendError, match=r"missing: \[7, 8\]"):
        welcomed(*begin(server, 2, missing=[7, 8]), 2, 30.0)
    with pytest.raises(AssertionError):
        result()


def pair() -> tuple[Connection, Connection]:
    server, result = serve(2)
    mine = rank(server, 1)
    return mine, result()[1]


def receive(connection: Connection, count: int) -> list[bytes]:
    found: list[bytes] = []
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        while len(found) < count:
            assert selector.select(10)
            found += connection.receive()
    return found


def test_who_does_not_know_the_secret_gives_no_answer() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    connection, greeting = connect(server.getsockname(), SECRET, PURPOSE, {"rank": 1, "missing": []}, 10.0)
    stranger = Connection(server.accept()[0], 10.0)
    _opened.extend([server, connection, stranger])
    assert SECRET not in stranger.receive_one(10.0)
    stranger.send(frame(bytes(32) + b"{}"))
    with pytest.raises(ConnectionRefusedError, match="does not belong to this job"):
        welcomed(connection, greeting, 1, 10.0)


def test_messages_of_any_size_arrive_whole_and_in_order() -> None:
    draw = random.Random(3)
    here, there = pair()
    sent = [draw.randbytes(draw.choice([0, 1, 7, 300, 70_000, 2_000_000])) for _ in range(60)]
    thread = threading.Thread(target=lambda: found.extend(receive(there, len(sent))))
    found: list[bytes] = []
    thread.start()
    for message in sent:
        here.send(frame(message))  # never blocks
    while here.has_unsent:
        here.flush()
    thread.join(20)
    assert found == sent


def test_a_process_that_reads_nothing_blocks_nobody() -> None:
    here, _there = pair()
    start = time.monotonic()
    with pytest.raises(OSError, match=r"it has not read 2\d\d MiB"):
        for _ in range(400):
            here.send(frame(bytes(2**20)))
    assert time.monotonic() - start < 20


def test_what_was_sent_before_the_end_is_received() -> None:
    here, there = pair()
    here.send(frame(b"last words"))
    here.close()
    assert receive(there, 1) == [b"last words"]
    time.sleep(0.05)
    with pytest.raises(EOFError):
        there.receive()


def test_a_forked_child_does_not_keep_the_connection() -> None:
    here, there = pair()
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    try:
        here.close()
        with selectors.DefaultSelector() as selector:
            selector.register(there, selectors.EVENT_READ)
            assert selector.select(5), "the child holds the connection"
        with pytest.raises(EOFError):
            there.receive()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
