"""Hostile bytes on every port of a running job: random ones, and beginnings of what is spoken there."""

from __future__ import annotations

import random
import socket
import struct
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.support.worlds import PYTHON, ROOT, environment
from unidist.network.connection import Hello, frame, new_secret

PROGRAM = str(ROOT / "tests/programs/steady.py")
#: How a job is started, and what it calls.
JOBS = {
    "unidist run, gloo": (["-np", "2"], "gloo"),
    "unidist run, drop-in": (["-np", "2"], "hvd"),
    "unidist run, Horovod": (["-np", "2"], "horovod"),
    "unidist run, elastic": (["-np", "2", "--min-np", "1"], "gloo"),
}
#: Seconds of attacks.
_ATTACK_S = 3.0
#: Megabytes of a process of a job, of which torch takes some 300.
_MOST_MB = 700


def payload(draw: random.Random, port: int) -> bytes:
    """What is sent to a port."""
    number = draw.randrange(2**32)
    kinds = [
        draw.randbytes(draw.choice([0, 1, 4, 8, 100, 5000])),
        b"GET / HTTP/1.1\r\n\r\n",
        f"PUT /global/0 HTTP/1.1\r\nContent-Length: {draw.choice([-1, 2**40, 2**30])}\r\n\r\n".encode(),
        b"\x16\x03\x01\x02\x00\x01" + draw.randbytes(200),
        struct.pack("<I", number) + draw.randbytes(60),
        frame(draw.randbytes(draw.randrange(200))),
        frame(b"\x80\x05cposix\nsystem\n(S'true'\ntR."),
        b'{"key": "0", "worker": 0}\n{"worker": []}\n',
        Hello(new_secret(), draw.choice(["hvd", "watch", "elastic"]), ("127.0.0.1", port), {"rank": 1}).framed,
    ]
    return draw.choice(kinds)


def attack(draw: random.Random, processes: list[psutil.Process], end: float) -> int:
    """Connect to the ports of some processes until a time; how often."""
    count, idle = 0, list[socket.socket]()
    while time.monotonic() < end:
        ports = set()
        for process in processes:
            with suppress(psutil.Error):
                found = process.net_connections("tcp")
                ports |= {each.laddr[:2] for each in found if each.status == psutil.CONN_LISTEN}
        for address, port in sorted(ports):
            with suppress(OSError):
                link = socket.create_connection((address, port), 1.0)
                link.settimeout(0.2)
                idle.append(link)
                count += 1
                link.sendall(payload(draw, port))
                if draw.random() < 0.7:
                    idle.pop().close()
        time.sleep(0.02)
    for link in idle:
        link.close()
    return count


def hostile_to_ports(draw: random.Random, directory: Path) -> str:
    """Attack a job; what was wrong, or an empty text."""
    name = draw.choice(list(JOBS))
    options, what = JOBS[name]
    stop = directory / "stop"
    argv = [PYTHON, "-m", "unidist", "run", *options, PYTHON, PROGRAM, str(stop), what]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    job = subprocess.Popen(argv, env=environment("unidist-run", {}), cwd=ROOT, **pipes)
    printed: list[str] = []
    errors: list[str] = []
    readers = [
        threading.Thread(target=lambda stream=stream, to=to: to.extend(stream), daemon=True)
        for stream, to in ((job.stdout, printed), (job.stderr, errors))
    ]
    for reader in readers:
        reader.start()

    def wait_for_ranks() -> None:
        while sum("up" in line for line in list(printed)) < 2 and job.poll() is None:
            time.sleep(0.05)

    try:
        if draw.random() < 0.7:  # else while the ranks start
            wait_for_ranks()
        processes = [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]
        count = attack(draw, processes, time.monotonic() + _ATTACK_S)
        wait_for_ranks()
        largest = max(map(_megabytes, processes))
        stop.touch()
        status = job.wait(60)
    except subprocess.TimeoutExpired:
        return f"{name}: hangs\n{''.join(errors)}"
    finally:
        job.kill()  # the ranks end with it
    for reader in readers:
        reader.join(10)
    text = "".join(errors)
    if status != 0 or "Traceback" in text:
        return f"{name}: status {status} after {count} connections\n{text}"
    return f"{name}: a process has {largest} MB" if largest > _MOST_MB else ""


def _megabytes(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        return int(process.memory_info().rss >> 20)
    return 0
