"""Framed messages over one TCP connection."""

from __future__ import annotations

import os
import socket
import struct
import weakref
from contextlib import suppress

_LENGTH = struct.Struct("<I")
_CHUNK = 2**18
#: Bytes that may wait to be sent to a process that reads nothing.
_MAX_UNSENT = 2**28
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

    def answer(self, data: bytes) -> None:
        """Send a few bytes before all messages; nothing to a process that is gone."""
        with suppress(OSError):  # this will be noticed
            self._link.send(data)

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
