"""What the drop-in's coordinator costs rank 0: the real one, and the connections of many ranks that one process plays.

As a program (``python -m benchmarks.control``) it is that process.
"""

from __future__ import annotations

import json
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from benchmarks.measure import OURS, Case
from unidist.hvd.bootstrap import PURPOSE, accept, welcomed
from unidist.hvd.control import ControlOptions, CoordinatorThread, StallTimeouts, parents
from unidist.hvd.messages import (
    AnnounceRounds,
    Complete,
    Execute,
    Forward,
    Heartbeat,
    Join,
    Leave,
    Request,
    Rounds,
    Signature,
    Submit,
    decode,
    encode,
)
from unidist.hvd.negotiation import Coordinator
from unidist.hvd.response_cache import ResponseCache
from unidist.network.connection import Connection, connect, frame, new_secret
from unidist.network.processes import Process

RANKS = (8, 32, 128, 512, 1024)
QUICK_RANKS = (8, 128)
PER_HOST = 8
#: Operations of a training step: the parameters of a ResNet-50 have 161 gradients.
OPERATIONS = 160
_SHAPES = ((64, 3, 7, 7), (64,), (64, 64, 1, 1), (256,), (128, 256, 1, 1), (512, 512, 3, 3), (2048,), (1000, 2048))
_LOOPBACK = "127.0.0.1"
_NO_DEADLINE = 3600.0


def _requests(kind: str) -> list[Request]:
    if kind == "alltoall":
        return [Request(0, "alltoall.rows", Signature("alltoall", ("float32",), ((-1, 8),)))]
    return [
        Request(
            0,
            f"allreduce.layer{i % 7}.{i // 7}.conv.weight",
            Signature("allreduce", ("float32",), (_SHAPES[i % len(_SHAPES)],), "average"),
        )
        for i in range(OPERATIONS)
    ]


#: What the ranks submit, and in how many messages.
ROWS = {
    f"{OPERATIONS} operations, one message a rank": ("allreduce", 1),
    f"{OPERATIONS} operations, a message each": ("allreduce", OPERATIONS),
    "one alltoall": ("alltoall", 1),
}


def cases(
    rounds: int, quick: bool, ranks: Sequence[int], backends: Collection[str], per_host: int = PER_HOST
) -> Iterator[Case]:
    """Yield the CPU time of rank 0 in one turn of each row, and the bytes that it sends while all ranks join: with all
    ranks on its host, and with ``per_host`` on each.
    """
    for size in ranks or (QUICK_RANKS if quick else RANKS):
        yield from _cases_of(rounds, size, size, f"{size} ranks")
        if size > per_host:
            yield from _cases_of(rounds, size, per_host, f"{size} ranks, {per_host} per host")


def _cases_of(rounds: int, size: int, per_host: int, world: str) -> Iterator[Case]:
    with _World(size, per_host) as simulated:
        for row, (kind, messages) in ROWS.items():
            seconds = [simulated.turn(kind, messages) for _ in range(rounds + 3)][3:]
            yield Case("control", world, row, {OURS: seconds})
        yield Case("control", world, "join, one after another", {OURS: [float(simulated.join())]}, unit="B")


def _processes(size: int, per_host: int) -> list[Process]:
    here = Process.current()
    return [here._replace(host=here.host._replace(id=str(rank // per_host))) for rank in range(size)]


def _reached(processes: Sequence[Process]) -> dict[int, list[int]]:
    """By each rank that connects to rank 0: those that it speaks for."""
    reached: dict[int, list[int]] = {}
    for rank, parent in enumerate(parents(processes)):
        if rank != 0:
            reached.setdefault(parent or rank, []).append(rank)
    return reached


class _World:
    """Rank 0 and its control thread here, the other ranks in another process."""

    def __init__(self, size: int, per_host: int) -> None:
        self.size = size
        self._per_host = per_host
        self._cache = ResponseCache()
        self._submitted: list[Request] = []
        self._left = 0
        self._done = threading.Event()

    def __enter__(self) -> _World:
        secret = new_secret()
        with socket.create_server((_LOOPBACK, 0), backlog=self.size) as server:
            self._ranks = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.control"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self._tell([self.size, self._per_host, server.getsockname()[1], secret.hex()])
            processes = _processes(self.size, self._per_host)
            accepted, _ = accept(server, secret, _reached(processes).keys(), 60.0)
            for each in accepted.values():
                each.answer({})
            connections = {rank: each.connection for rank, each in accepted.items()}
        options = ControlOptions(1e-3, StallTimeouts(0, 0), _NO_DEADLINE, _NO_DEADLINE, _NO_DEADLINE)
        coordinator = Coordinator(self.size, 64 * 2**20, lambda signature, values, size: values[0])
        self._control = CoordinatorThread(self, options, connections, processes, coordinator)
        self._control.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._control.close()
        self._ranks.communicate(timeout=60)

    def turn(self, kind: str, messages: int) -> float:
        """Return the seconds of CPU until all ranks have received what executes."""
        requests = _requests(kind)
        self._left = len(requests)
        self._done.clear()
        start = time.process_time()
        self._tell([kind, messages])
        self._submitted = requests
        self._control.wake(urgent=True)
        self._done.wait()
        self._answer()
        return time.process_time() - start

    def join(self) -> int:
        """Return the bytes that the other ranks have received until all have joined."""
        self._tell(["join", 0])
        return int(self._answer())

    def _tell(self, what: object) -> None:
        assert self._ranks.stdin is not None
        print(json.dumps(what), file=self._ranks.stdin, flush=True)

    def _answer(self) -> str:
        assert self._ranks.stdout is not None
        line = self._ranks.stdout.readline()
        if not line:
            raise RuntimeError("the process of the other ranks has ended")
        return line

    # ---------------------------------------------------------------- the endpoint of the control thread
    def count_submitted(self) -> int:
        return len(self._submitted)

    def take_submitted(self) -> Submit | None:
        submitted, self._submitted = self._submitted, []
        return self._cache.submit(submitted) if submitted else None

    def process(self, message: Any) -> None:
        if isinstance(message, Execute | Complete):
            self._left -= sum(map(len, self._cache.groups(message)))
            if self._left == 0:
                self._done.set()
        elif isinstance(message, AnnounceRounds):
            self._control.post(Join())

    def report(self, title: str) -> None:
        """See ``Endpoint``."""

    def activity(self) -> str:
        return ""


class _Ranks:
    """All ranks but 0, and their leaders. They receive and submit the same, so one cache serves them."""

    def __init__(self, size: int, per_host: int, port: int, secret: bytes) -> None:
        reached = _reached(_processes(size, per_host))
        address = (_LOOPBACK, port)
        links = {rank: connect(address, secret, PURPOSE, {"rank": rank, "missing": []}, 60.0) for rank in reached}
        self.connections = {welcomed(*links[rank], rank, 60.0): ranks for rank, ranks in reached.items()}
        self.cache = ResponseCache()
        self.selector = selectors.DefaultSelector()
        for connection in self.connections:
            self.selector.register(connection, selectors.EVENT_READ)

    def send(self, message: Any, but: int = 0) -> None:
        """Send a message from each rank but one; a leader sends what all of its host submit by ids as one."""
        data = encode(message)
        for connection, ranks in self.connections.items():
            if len(ranks) == 1:
                framed = frame(data) * (ranks[0] != but)
            elif isinstance(message, Submit) and message == Submit(message.cached):
                framed = frame(encode(Forward(sum(1 << rank for rank in ranks), data)))
            else:
                framed = b"".join(frame(encode(Forward(1 << rank, data))) for rank in ranks if rank != but)
            connection.send(framed)

    def turn(self, kind: str, messages: int) -> None:
        requests = _requests(kind)
        each = len(requests) // messages
        for message in [self.cache.submit(requests[at : at + each]) for at in range(0, len(requests), each)]:
            self.send(message)
        left = dict.fromkeys(self.connections, len(requests))
        first = next(iter(left))

        def received(connection: Connection, data: bytes) -> None:
            message = decode(data)
            if isinstance(message, Execute | Complete):
                groups = message.groups if isinstance(message, Execute) else ((message.operation,),)
                if connection is first:
                    self.cache.groups(message)
                left[connection] -= sum(map(len, groups))
                if left[connection] == 0:
                    del left[connection]

        self.receive(received, lambda: not left)

    def join(self) -> int:
        """Let each rank join after the one before it; the others answer with the rounds that they have begun."""
        total = 0
        announced: set[Connection] = set()
        joined = set()

        def received(connection: Connection, data: bytes) -> None:
            nonlocal total
            total += len(data)
            message = decode(data)
            if isinstance(message, AnnounceRounds):
                announced.add(connection)
            elif not isinstance(message, Heartbeat | Rounds | Forward):
                joined.add(connection)

        next(iter(self.connections)).send(frame(encode(Join())))  # rank 1, or the first leader
        self.receive(received, lambda: len(announced) == len(self.connections))
        first = next(iter(self.connections.values()))[0]
        self.send(Rounds(0, 1, (0,) * 8), but=first)
        self.send(Join(), but=first)
        self.receive(received, lambda: len(joined) == len(self.connections))
        return total

    def receive(self, received: Callable[[Connection, bytes], None], done: Callable[[], bool]) -> None:
        while not done():
            for key, _ in self.selector.select(60):
                connection: Any = key.fileobj
                connection.flush()
                for data in connection.receive():
                    received(connection, data)


def _main() -> None:
    size, per_host, port, key = json.loads(sys.stdin.readline())
    ranks = _Ranks(size, per_host, port, bytes.fromhex(key))
    for line in sys.stdin:
        kind, messages = json.loads(line)
        received = 0
        if kind == "join":
            received = ranks.join()
        else:
            ranks.turn(kind, messages)
        print(received, flush=True)
    for connection in ranks.connections:
        connection.send(frame(encode(Leave())))


if __name__ == "__main__":
    _main()
