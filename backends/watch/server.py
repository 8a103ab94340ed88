"""The server of each rank, and asking those of other ranks.

A request is the job's key and a line of JSON; the answer is JSON, up to the end of the connection. Who sends another
key gets none.
"""

from __future__ import annotations

import hmac
import json
import logging
import math
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from unidist.backends import addresses
from unidist.backends.processes import Process

_log = logging.getLogger("unidist")
KEY_BYTES = 32
#: How long a connection may take to make its request, how long that may be, and how many may be open.
_REQUEST_S = 5.0
_LONGEST_REQUEST = 2**16
_MOST_LINKS = 512
#: Interval of checks that fail.
_PAUSE_S = 60.0
#: Time to send an answer.
_ANSWER_S = 0.5
#: Ranks that are asked at the same time.
_AT_ONCE = 128

#: In place of epoll, whose instances are looked at to find gloo's connections.
_Selector: type[selectors.BaseSelector] = getattr(selectors, "PollSelector", selectors.DefaultSelector)


class Peer(NamedTuple):
    """Where a rank's server is."""

    process: Process
    #: Empty: it has none.
    address: str
    port: int

    @classmethod
    def from_row(cls, row: Any) -> Peer:
        """The peer of a JSON list."""
        process, address, port = row
        return cls(Process.from_json(json.dumps(process)), address, port)


class Server:
    """Answers requests, in one thread, which sleeps while there are none.

    Args:
        listening: a socket that listens.
        key: what a request must begin with.
        answer: makes the answer to a request.
        check: called from time to time; the result is the number of seconds until the next call.
        first: seconds until the first of these calls; infinity: there is none.
    """

    def __init__(
        self,
        listening: socket.socket,
        key: bytes,
        answer: Callable[[Mapping[str, Any]], object],
        check: Callable[[], float],
        first: float,
    ) -> None:
        self._listening = listening
        self._key = key
        self._answer = answer
        self._check = check
        self._due = time.monotonic() + first
        #: What each connection has sent, and until when it has time for the rest.
        self._links: dict[socket.socket, tuple[bytearray, float]] = {}
        self._signals: dict[int, Callable[[], None]] = {}
        self._selector = _Selector()
        self._closing = False
        listening.setblocking(False)
        self._selector.register(listening, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="unidist-watch", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def call_when_readable(self, pipe: int, call: Callable[[], None]) -> None:
        """Call it when something can be read from a pipe. Before ``start``."""
        self._signals[pipe] = call
        self._selector.register(pipe, selectors.EVENT_READ)

    def close(self) -> None:
        """Answer no more; waits for the thread."""
        self._closing = True
        with suppress(OSError):  # wakes the thread up
            self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join(1.0)
        self.close_sockets()

    def close_sockets(self) -> None:
        """Only that: a forked child must not keep them open, which would hide that its parent has ended."""
        for link in (self._listening, *self._links):
            link.close()

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
        timeout = min(self._due - time.monotonic(), _REQUEST_S if self._links else math.inf)
        for ready, _ in self._selector.select(None if timeout == math.inf else max(0.0, timeout)):
            link: Any = ready.fileobj
            if link is self._listening:
                self._accept()
            elif link in self._signals:
                self._signals[link]()
            elif link in self._links:
                self._read(link)
        now = time.monotonic()
        for link in [link for link, (_, until) in self._links.items() if now > until]:
            self._drop(link)

    def _accept(self) -> None:
        try:
            link, _ = self._listening.accept()
        except OSError:  # it has gone already, or there are too many open files
            time.sleep(0.01)
            return
        link.setblocking(False)
        if len(self._links) >= _MOST_LINKS:
            self._drop(next(iter(self._links)))
        self._links[link] = bytearray(), time.monotonic() + _REQUEST_S
        self._selector.register(link, selectors.EVENT_READ)
        self._read(link)  # mostly it is there already

    def _read(self, link: socket.socket) -> None:
        request, _ = self._links[link]
        try:
            data = link.recv(_LONGEST_REQUEST)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        request += data
        is_whole = request.endswith(b"\n") and len(request) > KEY_BYTES
        if data and not is_whole and len(request) < _LONGEST_REQUEST:
            return
        if is_whole and hmac.compare_digest(request[:KEY_BYTES], self._key):
            with suppress(OSError):
                link.settimeout(_ANSWER_S)
                link.sendall(json.dumps(self._answer(json.loads(request[KEY_BYTES:]))).encode())
        self._drop(link)

    def _drop(self, link: socket.socket) -> None:
        self._selector.unregister(link)
        del self._links[link]
        link.close()


def listen(own: Process, processes: list[Process]) -> socket.socket:
    """A socket that listens for the other ranks. Raises ``BackendError`` or ``OSError``."""
    return addresses.create_server(addresses.listen_address(own.host, [each.host for each in processes]))


def new_key() -> bytes:
    """A secret that the ranks of one world share."""
    return os.urandom(KEY_BYTES)


def ask(peers: Mapping[int, Peer], key: bytes, request: Mapping[str, Any], seconds: float) -> dict[int, Any]:
    """The answers of some ranks, by rank: those that come in time.

    In place of an answer: ``ConnectionError``, if the process that had the port has ended; ``TimeoutError``.
    """
    return _Asking(peers, key + json.dumps(request).encode() + b"\n", seconds).run()


class _Asking:
    def __init__(self, peers: Mapping[int, Peer], request: bytes, seconds: float) -> None:
        self._waiting = list(peers.items())[::-1]
        self._request = request
        self._end = time.monotonic() + seconds
        self._selector = _Selector()
        self._received: dict[int, bytearray] = {}
        self.answers: dict[int, Any] = {rank: TimeoutError() for rank in peers}

    def run(self) -> dict[int, Any]:
        open_links: set[socket.socket] = set()
        try:
            while (self._waiting or open_links) and (left := self._end - time.monotonic()) > 0:
                while self._waiting and len(open_links) < _AT_ONCE:
                    link = self._connect(*self._waiting.pop())
                    if link is not None:
                        open_links.add(link)
                for ready, events in self._selector.select(left) if open_links else ():
                    link = ready.fileobj  # type: ignore[assignment]
                    assert link is not None
                    if self._is_over(link, ready.data, events):
                        self._selector.unregister(link)
                        open_links.discard(link)
                        link.close()
        finally:
            for each in open_links:
                each.close()
            self._selector.close()
        return self.answers

    def _connect(self, rank: int, peer: Peer) -> socket.socket | None:
        if not peer.address:
            self.answers[rank] = TimeoutError("it has no address in a network of the other hosts")
            return None
        try:
            link = socket.socket(socket.AF_INET6 if ":" in peer.address else socket.AF_INET)
        except OSError as error:  # too many open files
            self._fail(rank, error)
            return None
        link.setblocking(False)
        self._received[rank] = bytearray()
        try:
            with suppress(BlockingIOError):
                link.connect((peer.address, peer.port))
            self._selector.register(link, selectors.EVENT_WRITE, rank)
        except OSError as error:
            self._fail(rank, error)
            link.close()
            return None
        return link

    def _is_over(self, link: socket.socket, rank: int, events: int) -> bool:
        """Go on with a connection; whether it is done."""
        try:
            if events & selectors.EVENT_WRITE:
                if error := link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    raise OSError(error, os.strerror(error))
                link.send(self._request)  # a few bytes, which the kernel's buffer takes
                self._selector.modify(link, selectors.EVENT_READ, rank)
                return False
            data = link.recv(2**18)
            self._received[rank] += data
            if data:
                return False
            if not self._received[rank]:
                raise ConnectionResetError("it has closed the connection")
            self.answers[rank] = json.loads(self._received[rank])
        except BlockingIOError:
            return False
        except ValueError as error:
            self.answers[rank] = TimeoutError(f"its answer cannot be read: {error}")
        except OSError as error:
            self._fail(rank, error)
        return True

    def _fail(self, rank: int, error: OSError) -> None:
        ended = isinstance(error, (ConnectionRefusedError, ConnectionResetError, BrokenPipeError))
        self.answers[rank] = ConnectionError(str(error)) if ended else TimeoutError(str(error))
