"""What this machine can move, beside which the collectives are measured."""

from __future__ import annotations

import socket
import threading
import time

import torch

#: Bytes moved at a time; larger than the caches.
NBYTES = 128 * 2**20


def limits() -> dict[str, float]:
    """Return the bytes a second of a copy in memory, and of one TCP connection over loopback, each the best of 3."""
    return {"memory copy": max(_copy() for _ in range(3)), "loopback": max(_loopback() for _ in range(3))}


def _copy() -> float:
    source, target = torch.ones(NBYTES, dtype=torch.uint8), torch.ones(NBYTES, dtype=torch.uint8)
    start = time.perf_counter()
    target.copy_(source)
    return NBYTES / (time.perf_counter() - start)


def _loopback() -> float:
    data = memoryview(bytearray(NBYTES))
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        connection, _ = server.accept()
    with client, connection:
        sender = threading.Thread(target=client.sendall, args=(data,))
        buffer, remaining = memoryview(bytearray(2**20)), NBYTES
        start = time.perf_counter()
        sender.start()
        while remaining:
            remaining -= connection.recv_into(buffer)
        seconds = time.perf_counter() - start
        sender.join()
    return NBYTES / seconds
