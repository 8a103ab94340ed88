"""The server of each rank, and asking those of other ranks: a request is a connection's hello, answered once."""

from __future__ import annotations

import logging
import math
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from unidist.network import addresses
from unidist.network.connection import Acceptor, Connection, Hello, Selector
from unidist.network.processes import Process

_log = logging.getLogger("unidist")
_PURPOSE = "watch"
#: Requests that may wait at the same time.
_MOST_REQUESTS = 256
#: Time to send an answer.
_ANSWER_S = 0.5
#: Interval of checks that fail.
_PAUSE_S = 60.0
#: How long a connection to another rank may take to fail, and ranks that are asked at the same time.
_DEAD_S = 5.0
_AT_ONCE = 128


class Peer(NamedTuple):
    """Where a rank's server is."""

    process: Process
    #: Empty: it has none.
    address: str
    port: int

    @classmethod
    def from_row(cls, row: Any) -> Peer:
        """Return the peer of a JSON list."""
        process, address, port = row
        return cls(Process.from_row(process), address, port)


class Server:
    """Answers requests, in one thread, which sleeps while there are none.

    Args:
        listening: a socket that listens.
        secret: the job's.
        answer: makes the answer to a request.
        check: called from time to time; the result is the number of seconds until the next call.
        first: seconds until the first of these calls; infinity: there is none.
    """

    def __init__(
        self,
        listening: socket.socket,
        secret: bytes,
        answer: Callable[[Mapping[str, Any]], object],
        check: Callable[[], float],
        first: float,
    ) -> None:
        self._listening = listening
        self._acceptor = Acceptor(listening, secret, _PURPOSE, _MOST_REQUESTS, logging.DEBUG)
        self._answer = answer
        self._check = check
        self._due = time.monotonic() + first
        self._closing = False
        self.call_when_readable = self._acceptor.call_when_readable
        self._thread = threading.Thread(target=self._run, name="unidist-watch", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """Answer no more; waits for the thread."""
        self._closing = True
        with suppress(OSError):  # wakes the thread up
            self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join(1.0)
        self.close_sockets()

    def close_sockets(self) -> None:
        """Close only these: a forked child must not keep them open, which would hide that its parent has ended."""
        self._listening.close()
        self._acceptor.close()

    # --------------------------------------------------------------------------------
    def _run(self) -> None:
        while not self._closing:
            try:
                if time.monotonic() >= self._due:
                    self._due = time.monotonic() + _PAUSE_S  # if the check fails
                    self._due = time.monotonic() + self._check()
                self._serve()
            except Exception:  # one request must not end the answers to others
                _log.debug("the watch could not answer", exc_info=True)
                time.sleep(0.05)

    def _serve(self) -> None:
        left = max(0.0, self._due - time.monotonic())
        for request in self._acceptor.wait(None if left == math.inf else left):
            try:
                request.answer(self._answer(request.content))
            finally:
                request.connection.close(_ANSWER_S)


def listen(own: Process, processes: list[Process]) -> socket.socket:
    """Return a socket that listens for the other ranks. Raises ``BackendError`` or ``OSError``."""
    return addresses.create_server(addresses.listen_address(own.host, [each.host for each in processes]))


def ask(peers: Mapping[int, Peer], secret: bytes, request: Mapping[str, Any], seconds: float) -> dict[int, Any]:
    """Return the answers of some ranks, by rank: those that come in time.

    In place of an answer: ``ConnectionError``, if the process that had the port has ended; ``TimeoutError``.
    """
    return _Asking(peers, secret, request, seconds).run()


class _Pending(NamedTuple):
    rank: int
    connection: Connection
    hello: Hello


class _Asking:
    def __init__(self, peers: Mapping[int, Peer], secret: bytes, request: Mapping[str, Any], seconds: float) -> None:
        self._left = list(peers.items())[::-1]
        self._secret = secret
        self._request = request
        self._end = time.monotonic() + seconds
        self._selector = Selector()
        self._pending: set[_Pending] = set()
        self.answers: dict[int, Any] = {rank: TimeoutError() for rank in peers}

    def run(self) -> dict[int, Any]:
        try:
            while (self._left or self._pending) and (left := self._end - time.monotonic()) > 0:
                while self._left and len(self._pending) < _AT_ONCE:
                    self._connect(*self._left.pop())
                for key, events in self._selector.select(left) if self._pending else ():
                    if self._is_over(key.data, events):
                        self._selector.unregister(key.fileobj)
                        self._pending.discard(key.data)
                        key.data.connection.close()
        finally:
            for each in self._pending:
                each.connection.close()
            self._selector.close()
        return self.answers

    def _connect(self, rank: int, peer: Peer) -> None:
        if not peer.address:
            self.answers[rank] = TimeoutError("it has no address in a network of the other hosts")
            return
        try:
            link = socket.socket(socket.AF_INET6 if ":" in peer.address else socket.AF_INET)
        except OSError as error:  # too many open files
            self._fail(rank, error)
            return
        address = (peer.address, peer.port)
        connection = Connection(link, _DEAD_S)
        try:
            with suppress(BlockingIOError):
                link.connect(address)
        except OSError as error:
            self._fail(rank, error)
            connection.close()
            return
        found = _Pending(rank, connection, Hello(self._secret, _PURPOSE, address, self._request))
        self._selector.register(connection, selectors.EVENT_WRITE, found)
        self._pending.add(found)

    def _is_over(self, pending: _Pending, events: int) -> bool:
        """Go on with a connection; whether it is done."""
        rank, connection, hello = pending
        try:
            if events & selectors.EVENT_WRITE:
                connection.raise_error()
                connection.send(hello.framed)  # a few bytes, which the kernel's buffer takes
                self._selector.modify(connection, selectors.EVENT_READ, pending)
                return False
            messages = connection.receive()
            if messages:
                self.answers[rank] = hello.answer(messages[0])
            return bool(messages)
        except EOFError:
            self._fail(rank, ConnectionResetError("it has closed the connection"))
        except ValueError as error:
            self.answers[rank] = TimeoutError(f"its answer cannot be read: {error}")
        except OSError as error:
            self._fail(rank, error)
        return True

    def _fail(self, rank: int, error: OSError) -> None:
        ended = isinstance(error, (ConnectionRefusedError, ConnectionResetError, BrokenPipeError))
        self.answers[rank] = ConnectionError(str(error)) if ended else TimeoutError(str(error))
