"""The key-value server by which the ranks of Horovod itself find each other: what horovodrun serves.

Horovod's Gloo controller puts and gets ``/scope/key`` by HTTP, and asks again for a key that is not there (404). Who
reaches the port can do so, too: what the server takes is limited.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from unidist.network.addresses import create_server

#: Of a connection: seconds without data, and seconds in all.
_SILENCE_S = 10.0
_CONNECTION_S = 60.0
#: Bytes of a value, and how many more for each rank: a rank publishes an address for each other one.
_VALUE_BYTES, _VALUE_BYTES_OF_RANK = 2**16, 2**10
#: Bytes of all values, beside one of each rank in some scopes.
_ALL_BYTES, _SCOPES = 2**26, 8


class _Handler(BaseHTTPRequestHandler):
    server: RendezvousServer
    timeout = _SILENCE_S

    def do_GET(self) -> None:
        value = self.server.values.get(self.path)
        self._answer(404 if value is None else 200, value or b"")

    def do_PUT(self) -> None:
        text = self.headers["Content-Length"] or ""
        length = int(text) if text.isascii() and text.isdigit() else -1
        if not self.server.put(self.path, length, self.rfile.read):
            self.close_connection = True
            self._answer(413, b"")
        else:
            self._answer(200, b"")

    def do_DELETE(self) -> None:
        self.server.delete(self.path)
        self._answer(200, b"")

    def _answer(self, status: int, value: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(value)))
        self.end_headers()
        self.wfile.write(value)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: one line for each request helps nobody."""


class RendezvousServer(ThreadingHTTPServer):
    """Serves in a thread of its own until ``stop``, or the end of the process; ``.server_port`` is its port.

    Args:
        address: the address of this host on which it listens.
        ranks: how many ranks find each other here.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: str, ranks: int) -> None:
        super().__init__((address, 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = create_server(address)
        self.server_address = self.socket.getsockname()
        self.server_port = self.server_address[1]
        self.values: dict[str, bytes] = {}
        self._largest = _VALUE_BYTES + _VALUE_BYTES_OF_RANK * ranks
        self._free = _ALL_BYTES + _SCOPES * ranks * self._largest
        self._most = 256 + 2 * ranks
        #: The open connections, and since when.
        self._open: dict[Any, float] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self.serve_forever, name="unidist-rendezvous", daemon=True).start()

    def put(self, key: str, length: int, read: Callable[[int], bytes]) -> bool:
        """Store a value that is still to be read; whether that is within the limits."""
        if not 0 <= length <= self._largest or not self._take(length + len(key)):
            return False
        value = b""
        try:
            value = read(length)
        finally:
            if len(value) < length:
                self._take(-length - len(key))
        if len(value) == length:
            self.delete(key)
            self.values[key] = value
        return len(value) == length

    def delete(self, key: str) -> None:
        """Forget a value, if there is one."""
        if (value := self.values.pop(key, None)) is not None:
            self._take(-len(value) - len(key))

    def stop(self) -> None:
        """Serve no more."""
        self.shutdown()
        self.server_close()

    def _take(self, count: int) -> bool:
        with self._lock:
            if count > self._free:
                return False
            self._free -= count
            return True

    # -------------------------------------------------------------------------------- connections
    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection; the oldest one goes where there are too many."""
        try:
            link, peer = super().get_request()
        except OSError:
            time.sleep(0.1)  # too many open files: the system would report the connection again at once
            raise
        with self._lock:
            self._open[link] = time.monotonic()
            if len(self._open) > self._most:
                self._shut(next(iter(self._open)))
        return link, peer

    def service_actions(self) -> None:
        """Close connections that last too long; called about twice a second."""
        with self._lock:
            end = time.monotonic() - _CONNECTION_S
            for link in [link for link, since in self._open.items() if since < end]:
                self._shut(link)

    def shutdown_request(self, request: Any) -> None:
        """Forget a connection, which is over."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore it: who connects may send anything, and leave."""

    def _shut(self, link: socket.socket) -> None:
        """Let the thread of a connection end."""
        del self._open[link]
        with suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)
