"""Connections between the processes of a job: messages of limited length, after a handshake with the job's secret.

The process that connects sends a hello: a nonce and a JSON object, with an HMAC under the secret over the purpose of
the connection and the address to which it has connected. The answer is a JSON object with an HMAC over the nonce. So
each side knows that the other one has the secret, which is never sent, and a hello is of no use to a server at another
address. Messages after the handshake are neither authenticated nor encrypted.
"""

from __future__ import annotations

import errno
import hmac
import json
import logging
import math
import os
import selectors
import socket
import struct
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

_log = logging.getLogger("unidist")
_LENGTH = struct.Struct("<I")
_CHUNK = 2**18
#: Bytes of a message, and those that may wait to be sent to a process that reads nothing.
_MAX_MESSAGE = 2**28
#: The kernel's options take no more than 9 hours.
_LONGEST_KEEPALIVE_S = 3600.0
SECRET_BYTES = 32
_NONCE_BYTES, _MAC_BYTES = 16, 32
#: Bytes of a hello, how long a connection may take for it, and how many that are not expected may wait.
_MAX_HELLO = 2**16
_HELLO_S = 10.0
_MAX_UNEXPECTED = 256
_MOST_LOGGED = 1000

#: Not epoll: its instances are looked at to find gloo's connections.
Selector: type[selectors.BaseSelector] = getattr(selectors, "PollSelector", selectors.DefaultSelector)
_open_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def new_secret() -> bytes:
    """Return a secret for the processes of one job."""
    return os.urandom(SECRET_BYTES)


def frame(data: bytes) -> bytes:
    """Return a message as ``Connection.send`` takes it."""
    return _LENGTH.pack(len(data)) + data


class Connection:
    """Messages of bytes to and from one process. No call blocks, but ``receive_some``. For one thread.

    Args:
        link: connected.
        dead_after: seconds without a response of the other host's TCP after which the connection fails.
        max_message: bytes of the longest message that is received.
    """

    def __init__(self, link: socket.socket, dead_after: float, max_message: int = _MAX_MESSAGE) -> None:
        link.setblocking(False)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # small messages must not wait for more
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.max_message = max_message
        self._link = link
        self._unsent = bytearray()
        self._received = bytearray()
        self.fail_after(dead_after)
        _open_connections.add(self)

    def fail_after(self, seconds: float) -> None:
        """Let the connection fail after so many seconds without a response of the other host's TCP."""
        whole = int(min(max(seconds, 1), _LONGEST_KEEPALIVE_S))
        for option, value in (
            ("TCP_KEEPIDLE", max(1, whole // 3)),
            ("TCP_KEEPINTVL", max(1, whole // 6)),
            ("TCP_KEEPCNT", 4),
            ("TCP_USER_TIMEOUT", 1000 * whole),
        ):
            if hasattr(socket, option):  # Linux
                self._link.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def raise_error(self) -> None:
        """Raise the ``OSError`` with which a connection that was started without waiting has failed, if it has."""
        if error := self._link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(error, os.strerror(error))

    def fileno(self) -> int:
        """Return the descriptor for ``select``; -1: closed."""
        return self._link.fileno()

    def send(self, framed: bytes) -> None:
        """Send a message of ``frame``, or keep it until ``flush``.

        Raises:
            OSError: the other process is gone, or has read nothing for too long.
        """
        sent = 0
        if not self._unsent:
            with suppress(BlockingIOError):
                sent = self._link.send(framed)
        if sent < len(framed):
            if len(self._unsent) > _MAX_MESSAGE:
                raise TimeoutError(f"it has not read {len(self._unsent) >> 20} MiB")
            self._unsent += framed[sent:]

    def flush(self) -> None:
        """Send what was kept, as far as that is possible now. Raises ``OSError`` as ``send``."""
        with suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: self._link.send(memoryview(self._unsent)[:_CHUNK])]

    @property
    def has_unsent(self) -> bool:
        """Whether ``flush`` has something to send."""
        return bool(self._unsent)

    def receive(self) -> list[bytes]:
        """Return the messages that have arrived.

        Raises:
            EOFError: the other process has closed the connection, and all its messages have been received.
            OSError: the connection has failed, or a message is longer than ``max_message``.
        """
        ended = False
        with suppress(BlockingIOError):
            while True:
                data = self._link.recv(_CHUNK)
                if not self._received and len(data) >= _LENGTH.size:  # mostly it is one message
                    (length,) = _LENGTH.unpack_from(data)
                    if len(data) == _LENGTH.size + length <= self.max_message:
                        return [data[_LENGTH.size :]]
                self._received += data
                ended = not data
                if len(data) < _CHUNK or len(self._received) > self.max_message:
                    break
        messages = []
        at = 0
        while len(self._received) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received, at)
            if length > self.max_message:
                raise OSError(errno.EMSGSIZE, f"a message of {length} bytes is longer than {self.max_message}")
            if len(self._received) - at - _LENGTH.size < length:
                break
            at += _LENGTH.size
            messages.append(bytes(self._received[at : at + length]))
            at += length
        del self._received[:at]
        if ended and not messages:
            raise EOFError("the connection was closed")
        return messages

    def receive_some(self, seconds: float = math.inf) -> list[bytes]:
        """Wait for messages; return those that have arrived, one or more.

        Raises:
            EOFError, OSError: as ``receive``; ``TimeoutError`` after so many seconds.
        """
        end = time.monotonic() + seconds
        with Selector() as selector:
            selector.register(self, selectors.EVENT_READ)
            while (left := end - time.monotonic()) > 0:
                if selector.select(None if left == math.inf else left) and (messages := self.receive()):
                    return messages
        raise TimeoutError(f"no message within {seconds:.0f} s")

    def receive_one(self, seconds: float) -> bytes:
        """Wait for the next message, of a process that sends no second one before it is answered. Raises as
        ``receive_some``.
        """
        return self.receive_some(seconds)[0]

    def end_of_messages(self) -> None:
        """Tell the other process that no message follows; it can be received from still."""
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_WR)

    def close(self, seconds: float = 0.0) -> None:
        """Close it; what was sent arrives, and what can be sent within some seconds of what was kept."""
        if self._unsent and seconds:
            with suppress(OSError):
                self._link.settimeout(seconds)
                self._link.sendall(self._unsent)
        self._link.close()


def _close_in_child() -> None:
    # A forked child that kept them open would hide that its parent has ended.
    for connection in list(_open_connections):
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)


# ------------------------------------------------------------------------------------ the handshake
class Hello:
    """The hello of the process that connects, for one connection.

    Args:
        secret: the job's.
        purpose: of the connection; both sides name the same one.
        address: (address, port) to which this process has connected.
        content: a JSON object.
    """

    def __init__(self, secret: bytes, purpose: str, address: tuple[str, int], content: Mapping[str, Any]) -> None:
        self._secret = secret
        self._nonce = os.urandom(_NONCE_BYTES)
        data = json.dumps(content).encode()
        #: To be sent.
        self.framed = frame(self._nonce + _mac(secret, _of(purpose, address), self._nonce, data) + data)

    def answer(self, message: bytes) -> Any:
        """Return the JSON object of the answer.

        Raises:
            ConnectionError: who answers does not know the secret.
        """
        mac, data = message[:_MAC_BYTES], message[_MAC_BYTES:]
        if not hmac.compare_digest(mac, _mac(self._secret, b"answer", self._nonce, data)):
            raise ConnectionRefusedError("what answers there does not belong to this job")
        return json.loads(data)


def connect(
    address: tuple[str, int], secret: bytes, purpose: str, content: Mapping[str, Any], seconds: float
) -> tuple[Connection, Hello]:
    """Connect to an ``Acceptor`` and send the hello, whose answer comes as the next message.

    Args:
        address: address and port.
        secret, purpose, content: see ``Hello``.
        seconds: for the connection, and afterwards for a host that does not respond.

    Raises:
        OSError: it cannot be reached.
    """
    connection = Connection(socket.create_connection(address, seconds), seconds)
    try:
        hello = Hello(secret, purpose, address, content)
        connection.send(hello.framed)
    except BaseException:
        connection.close()
        raise
    return connection, hello


class Accepted(NamedTuple):
    """A connection of a process that knows the secret, and waits for an answer."""

    connection: Connection
    content: dict[str, Any]
    #: Its host, for messages.
    host: str
    answer: Callable[[object], None]


class Acceptor:
    """Accepts connections of processes that know the job's secret; others are refused and logged.

    Args:
        server: a socket that listens; it stays the caller's.
        secret, purpose: see ``Hello``.
        expected: how many processes may connect at the same time.
        log_level: of the messages about connections that are refused.
    """

    def __init__(
        self, server: socket.socket, secret: bytes, purpose: str, expected: int, log_level: int = logging.WARNING
    ) -> None:
        server.setblocking(False)
        self._server = server
        self._secret = secret
        self._purpose = _of(purpose, server.getsockname()[:2])
        self._most = expected + _MAX_UNEXPECTED
        self._log_level = log_level
        #: The hosts and reasons that have been logged; later ones of them are for debugging.
        self._logged: set[tuple[str, str]] = set()
        #: Connections whose hello has not come, until when they have time, and their hosts.
        self._waiting: dict[Connection, tuple[float, str]] = {}
        self._calls: dict[int, Callable[[], None]] = {}
        self.selector = Selector()
        self.selector.register(server, selectors.EVENT_READ)

    def call_when_readable(self, pipe: int, call: Callable[[], None]) -> None:
        """Let ``wait`` call a function when something can be read from a pipe."""
        self._calls[pipe] = call
        self.selector.register(pipe, selectors.EVENT_READ)

    def wait(self, seconds: float | None) -> list[Accepted]:
        """Wait for connections, at most so many seconds; return those whose hello has come.

        Raises:
            OSError: too many open files.
        """
        if self._waiting:
            seconds = min(_HELLO_S if seconds is None else seconds, _HELLO_S)
        accepted = []
        for key, _ in self.selector.select(seconds):
            ready: Any = key.fileobj
            if ready is self._server:
                if (connection := self._accept()) is not None and (found := self._read(connection)) is not None:
                    accepted.append(found)  # mostly the hello is there already
            elif ready in self._calls:
                self._calls[ready]()
            elif ready in self._waiting and (found := self._read(ready)) is not None:
                accepted.append(found)
        now = time.monotonic()
        for late in [connection for connection, (until, _) in self._waiting.items() if now > until]:
            self._refuse(late, f"it has sent no hello within {_HELLO_S:.0f} s")
        return accepted

    def close(self) -> None:
        """Close what is not accepted yet."""
        self.selector.close()
        for connection in self._waiting:
            connection.close()

    def _accept(self) -> Connection | None:
        try:
            link, peer = self._server.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            return None  # it has gone already
        if len(self._waiting) >= self._most:
            self._refuse(next(iter(self._waiting)), "too many have sent no hello")
        connection = Connection(link, _HELLO_S, _MAX_HELLO)
        self._waiting[connection] = (time.monotonic() + _HELLO_S, str(peer[0]))
        self.selector.register(connection, selectors.EVENT_READ)
        return connection

    def _read(self, connection: Connection) -> Accepted | None:
        """Return the connection if its hello is there; it is refused if that is wrong."""
        try:
            messages = connection.receive()
        except (EOFError, OSError):
            refuse(
                connection, self._forget(connection)[1], "it has sent no hello", logging.DEBUG
            )  # a probe of the port
            return None
        if not messages:
            return None
        nonce, mac = messages[0][:_NONCE_BYTES], messages[0][_NONCE_BYTES:][:_MAC_BYTES]
        data = messages[0][_NONCE_BYTES + _MAC_BYTES :]
        if not hmac.compare_digest(mac, _mac(self._secret, self._purpose, nonce, data)):
            self._refuse(connection, "it does not know this job's secret")
            return None

        def answer(content: object) -> None:
            text = json.dumps(content).encode()
            with suppress(OSError):  # it is gone, which will be noticed
                connection.send(frame(_mac(self._secret, b"answer", nonce, text) + text))

        _, host = self._forget(connection)
        connection.max_message = _MAX_MESSAGE
        return Accepted(connection, json.loads(data), host, answer)

    def _refuse(self, connection: Connection, why: str) -> None:
        _, host = self._forget(connection)
        is_known = (host, why) in self._logged or len(self._logged) >= _MOST_LOGGED
        refuse(connection, host, why, logging.DEBUG if is_known else self._log_level)
        if not is_known:
            self._logged.add((host, why))

    def _forget(self, connection: Connection) -> tuple[float, str]:
        self.selector.unregister(connection)
        return self._waiting.pop(connection)


def refuse(connection: Connection, host: str, why: str, log_level: int = logging.WARNING) -> None:
    """Close a connection, and log the reason."""
    _log.log(log_level, "a connection from %s to this job's port was refused: %s.", host, why)
    connection.close()


def _of(purpose: str, address: tuple[str, int]) -> bytes:
    return f"{purpose} {address[0]} {address[1]}".encode()


def _mac(secret: bytes, purpose: bytes, nonce: bytes, data: bytes) -> bytes:
    return hmac.digest(secret, b"%s\0%s%s" % (purpose, nonce, data), "sha256")
