"""Framed messages over one TCP connection, and how the ranks open theirs to rank 0."""

from __future__ import annotations

import errno
import hmac
import logging
import os
import selectors
import socket
import struct
import time
import weakref
from contextlib import suppress

from unidist.errors import BackendError
from unidist.hvd.negotiation import format_ranks

_log = logging.getLogger("unidist")
_LENGTH = struct.Struct("<I")
_RANK = struct.Struct("<I")
_KEY_BYTES = 32
_HELLO_BYTES = _KEY_BYTES + _RANK.size
_WELCOME = b"\x01"
_CHUNK = 2**18
#: Bytes that may wait to be sent to a process that reads nothing.
_MAX_UNSENT = 2**28
#: How long a stranger may take for a hello, and how many may wait beside the ranks.
_HELLO_S = 10.0
_MAX_STRANGERS = 256
#: The kernel's options take no more than 9 hours.
_LONGEST_KEEPALIVE_S = 3600.0

_open_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def frame(data: bytes) -> bytes:
    """A message as ``Connection.send`` takes it."""
    return _LENGTH.pack(len(data)) + data


class Connection:
    """Messages of bytes to and from one process. No call blocks. For one thread.

    Args:
        link: connected.
        dead_after: seconds without a response of the other host's TCP after which the connection fails.
    """

    def __init__(self, link: socket.socket, dead_after: float) -> None:
        link.setblocking(False)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # small messages must not wait for more
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        seconds = int(min(max(dead_after, 1), _LONGEST_KEEPALIVE_S))
        for option, value in (
            ("TCP_KEEPIDLE", max(1, seconds // 3)),
            ("TCP_KEEPINTVL", max(1, seconds // 6)),
            ("TCP_KEEPCNT", 4),
            ("TCP_USER_TIMEOUT", 1000 * seconds),
        ):
            if hasattr(socket, option):  # Linux
                link.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._link = link
        self._unsent = bytearray()
        self._received = bytearray()
        _open_connections.add(self)

    def fileno(self) -> int:
        """For ``select``; -1: closed."""
        return self._link.fileno()

    def welcome(self) -> None:
        """Accept a rank; the first thing that is sent."""
        with suppress(OSError):  # the coordinator will notice
            self._link.send(_WELCOME)

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
            if len(self._unsent) > _MAX_UNSENT:
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
        """The messages that have arrived.

        Raises:
            EOFError: the other process has closed the connection, and all its messages have been received.
            OSError: the connection has failed.
        """
        ended = False
        with suppress(BlockingIOError):
            while True:
                data = self._link.recv(_CHUNK)
                if not self._received and len(data) >= _LENGTH.size:  # mostly it is one message
                    (length,) = _LENGTH.unpack_from(data)
                    if len(data) == _LENGTH.size + length:
                        return [data[_LENGTH.size :]]
                self._received += data
                ended = not data
                if len(data) < _CHUNK:
                    break
        messages = []
        at = 0
        while len(self._received) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received, at)
            if len(self._received) - at - _LENGTH.size < length:
                break
            at += _LENGTH.size
            messages.append(bytes(self._received[at : at + length]))
            at += length
        del self._received[:at]
        if ended and not messages:
            raise EOFError
        return messages

    def end_of_messages(self) -> None:
        """Tell the other process that no message follows; it can be received from still."""
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close it; what was sent arrives."""
        self._link.close()


def _close_in_child() -> None:
    # A forked child that kept them open would hide that its parent has ended.
    for connection in list(_open_connections):
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)


# ------------------------------------------------------------------------------------ opening
def new_key() -> bytes:
    """A secret that the ranks of one world share."""
    return os.urandom(_KEY_BYTES)


def introduce(address: str, port: int, key: bytes, rank: int, timeout: float) -> socket.socket:
    """Say to rank 0 who this is; ``welcomed`` waits for its answer.

    Raises:
        OSError: rank 0 cannot be reached.
    """
    link = socket.create_connection((address, port), timeout)
    try:
        link.sendall(key + _RANK.pack(rank))
    except BaseException:
        link.close()
        raise
    return link


def welcomed(link: socket.socket, rank: int, dead_after: float) -> Connection:
    """A rank's connection to rank 0, once all ranks have introduced themselves.

    Raises:
        OSError: rank 0 refuses this rank, or does not answer in time.
    """
    try:
        if link.recv(1) != _WELCOME:
            raise ConnectionRefusedError(f"rank 0 has refused rank {rank}")
    except BaseException:
        link.close()
        raise
    return Connection(link, dead_after)


def accept(server: socket.socket, key: bytes, size: int, timeout: float, dead_after: float) -> dict[int, Connection]:
    """Rank 0's connections to all others. Strangers, and ranks that are there already, are refused and logged.

    Raises:
        BackendError: not all ranks connected in time.
    """
    server.setblocking(False)
    found: dict[int, Connection] = {}
    hellos: dict[socket.socket, tuple[bytearray, float, str]] = {}
    end = time.monotonic() + timeout
    with selectors.DefaultSelector() as selector:

        def refuse(link: socket.socket, why: str) -> None:
            selector.unregister(link)
            _log.warning("a connection from %s to rank 0's port was refused: %s.", hellos.pop(link)[2], why)
            link.close()

        selector.register(server, selectors.EVENT_READ)
        try:
            while len(found) < size - 1:
                now = time.monotonic()
                for link in [link for link, hello in hellos.items() if now > hello[1]]:
                    refuse(link, f"it has sent no key within {_HELLO_S:.0f} s")
                if now > end:
                    missing = [rank for rank in range(1, size) if rank not in found]
                    raise BackendError(
                        f"ranks {format_ranks(missing)} did not connect to rank 0 at port {server.getsockname()[1]} "
                        f"within {timeout:.0f} s. The hosts of a job must be able to open connections to each other."
                    )
                for ready, _ in selector.select(min(1.0, end - now)):
                    if ready.fileobj is server:
                        try:
                            link, peer = server.accept()
                        except OSError as error:
                            if error.errno in (errno.EMFILE, errno.ENFILE):
                                raise
                            continue  # it has gone already
                        link.setblocking(False)
                        if len(hellos) > size + _MAX_STRANGERS:
                            refuse(next(iter(hellos)), "too many have sent no key")
                        hellos[link] = (bytearray(), now + _HELLO_S, str(peer[0]))
                        selector.register(link, selectors.EVENT_READ)
                        continue
                    link = ready.fileobj  # type: ignore[assignment]
                    hello = hellos[link][0]
                    try:
                        data = link.recv(_HELLO_BYTES - len(hello))
                    except BlockingIOError:
                        continue
                    except OSError:
                        data = b""
                    hello += data
                    if not data:
                        refuse(link, "it has sent no key")
                    elif len(hello) < _HELLO_BYTES:
                        continue  # its answer must not depend on a part of the key
                    elif not hmac.compare_digest(hello[:_KEY_BYTES], key):
                        refuse(link, "its key is not that of this job")
                    else:
                        (rank,) = _RANK.unpack_from(hello, _KEY_BYTES)
                        if rank in found or not 0 < rank < size:
                            refuse(link, f"it says that it is rank {rank}")
                            continue
                        selector.unregister(link)
                        del hellos[link]
                        found[rank] = Connection(link, dead_after)
        except BaseException:
            for connection in found.values():
                connection.close()
            raise
        finally:
            for link in hellos:
                link.close()
    for connection in found.values():  # heartbeats are expected from now on
        connection.welcome()
    return found
