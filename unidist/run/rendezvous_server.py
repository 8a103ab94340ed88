"""The key-value server by which the ranks of Horovod itself find each other: what horovodrun serves.

Horovod's Gloo controller puts and gets ``/scope/key`` by HTTP, and asks again for a key that is not there (404).
"""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from unidist.network.addresses import create_server


class _Handler(BaseHTTPRequestHandler):
    server: RendezvousServer
    timeout = 60

    def do_GET(self) -> None:
        self._answer(self.server.values.get(self.path))

    def do_PUT(self) -> None:
        self.server.values[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(b"")

    def do_DELETE(self) -> None:
        self.server.values.pop(self.path, None)
        self._answer(b"")

    def _answer(self, value: bytes | None) -> None:
        self.send_response(404 if value is None else 200)
        self.send_header("Content-Length", str(len(value or b"")))
        self.end_headers()
        self.wfile.write(value or b"")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: one line for each request helps nobody."""


class RendezvousServer(ThreadingHTTPServer):
    """Serves in a thread of its own until the process ends; ``.server_port`` is its port.

    Args:
        address: the address of this host on which it listens.
    """

    daemon_threads = True

    def __init__(self, address: str) -> None:
        super().__init__((address, 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = create_server(address)
        self.server_address = self.socket.getsockname()
        self.server_port = self.server_address[1]
        self.values: dict[str, bytes] = {}
        threading.Thread(target=self.serve_forever, name="unidist-rendezvous", daemon=True).start()
