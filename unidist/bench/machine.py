"""This machine: what it is, for the head of a report, and what it can move, for the collectives."""

from __future__ import annotations

import socket
import threading
import time
from datetime import datetime
from pathlib import Path

import torch

import unidist
from unidist.launchers.world import usable_cores

#: Bytes moved at a time; larger than the caches.
NBYTES = 128 * 2**20


def describe() -> dict[str, str]:
    """The machine and the versions."""
    cpu = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), "unknown CPU")
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "date": datetime.now().strftime("%Y-%m-%d %H:%M"),
        "cores": f"{usable_cores()} x {cpu}",
        "gpus": ", ".join(gpus) or "none",
        "torch": torch.__version__,
        "unidist": unidist.__version__,
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def limits() -> dict[str, float]:
    """Bytes a second of a copy in memory, and of one TCP connection over loopback, each the best of 3."""
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
