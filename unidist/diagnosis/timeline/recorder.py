"""The file in which one rank records where its time goes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import TYPE_CHECKING

from unidist.diagnosis.spans import Span, spans
from unidist.diagnosis.timeline.trace_file import Event, TraceFile
from unidist.network.addresses import this_host

if TYPE_CHECKING:
    from unidist.backends.base import Backend

#: Barriers by which the clocks of several hosts are compared.
_BARRIERS = 21
#: The name of the event with what ``unidist timeline`` needs to know of a file.
ABOUT = "unidist"
#: Rows of a rank: what it waits in, and the operations that go on beside its computing.
_WAITS, _BESIDE = 0, 1


class Timeline:
    """A timeline that is on, until ``close``, the end of the ``with`` block or ``shutdown()``."""

    def __init__(self, path: Path, backend: Backend) -> None:
        topology, host = backend.topology, this_host()
        rows = [json.loads(row) for row in backend.exchange(json.dumps([host.id, time.time_ns()]))]
        #: Rank 0's time at the start is the zero of all ranks.
        zero = rows[0][1]
        offset = _clock_offset(backend) if len({id for id, _ in rows}) > 1 else 0
        #: Of ``perf_counter_ns`` to nanoseconds since the zero.
        self._shift = time.time_ns() + offset - time.perf_counter_ns() - zero
        self._rank = topology.rank
        about = {
            "rank": topology.rank,
            "world_size": topology.world_size,
            "host": host.name,
            "backend": backend.name,
            "zero_ns": zero,
            "clock_offset_ns": offset,
        }
        header = [
            self._metadata("process_name", {"name": f"rank {topology.rank} ({host.name})"}),
            self._metadata("process_sort_index", {"sort_index": topology.rank}),
            self._metadata("thread_name", {"name": "waits"}),
            {**self._metadata("thread_name", {"name": "asynchronous"}), "tid": _BESIDE},
            self._metadata(ABOUT, about),
        ]
        self._file: TraceFile[Span] = TraceFile(path, header, self._events, "unidist-timeline")
        spans.start(self._file.add)

    @property
    def path(self) -> Path:
        """This rank's file."""
        return self._file.path

    def close(self) -> None:
        """End this rank's file; no-op for one that has ended. Not collective."""
        if self._file.on:
            spans.stop()
            self._file.close()

    def __enter__(self) -> Timeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _metadata(self, name: str, values: dict[str, object]) -> Event:
        return {"name": name, "ph": "M", "pid": self._rank, "tid": _WAITS, "args": values}

    def _events(self, span: Span) -> Iterator[Event]:
        begin, end, blocked = (round((ns + self._shift) / 1000, 3) for ns in (span.begin, span.end, span.blocked))
        event = {"name": span.name, "cat": span.category, "pid": self._rank}
        if blocked <= begin:
            yield {**event, "ph": "X", "ts": begin, "dur": round(end - begin, 3), "tid": _WAITS, "args": span.arguments}
            return
        # Operations that go on beside others overlap.
        id = f"{span.arguments['group']} {span.arguments['number']}"
        beside = {**event, "id": id, "tid": _BESIDE}
        yield {**beside, "ph": "b", "ts": begin, "args": {**span.arguments, "blocked": blocked}}
        yield {**beside, "ph": "e", "ts": end}
        if blocked < end:
            yield {**event, "cat": "wait", "ph": "X", "ts": blocked, "dur": round(end - blocked, 3), "tid": _WAITS}


def _clock_offset(backend: Backend) -> int:
    """Return what to add to this host's clock for rank 0's, in nanoseconds. Collective.

    The ranks leave a barrier at about the same time. The median over some barriers is as exact as a message is fast.
    """
    left = []
    for _ in range(_BARRIERS):
        backend.barrier()
        left.append(time.time_ns())
    times = [json.loads(row) for row in backend.exchange(json.dumps(left))]
    return int(median(zero - own for zero, own in zip(times[0], left)))


def path_of_rank(path: str | os.PathLike[str], rank: int) -> Path:
    """Return a rank's file: ``trace.3.json`` of ``trace.json`` on rank 3."""
    path = Path(path)
    return path.with_name(f"{path.stem}.{rank}{path.suffix or '.json'}")
