"""Horovod's timeline: what each tensor waited for and went through, in Chrome's trace event format."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

from unidist.diagnosis.timeline.trace_file import Event, TraceFile

#: Row, phase, activity, time.
_Item = tuple[str, str, str, float]


class TensorTimeline:
    """A file of trace events (``chrome://tracing``, Perfetto), one process row for each tensor name. Thread-safe;
    off until ``open``.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may make a call in the middle of another
        self._file: TraceFile[_Item] | None = None
        #: Activities that a row is in.
        self._depths: dict[str, int] = {}
        self._mark_cycles = False

    @property
    def on(self) -> bool:
        """Whether events are recorded."""
        return self._file is not None and self._file.on

    def open(self, path: str | Path, mark_cycles: bool = False) -> None:
        """Begin a file. An existing one is overwritten."""
        self.close()
        with self._lock:
            self._mark_cycles = mark_cycles
            self._depths.clear()
            rows = _Rows(time.perf_counter())
            self._file = TraceFile(path, [rows.name(0, "unidist.hvd")], rows.events, "unidist-hvd-timeline")

    def close(self) -> None:
        """End the file; no-op without one."""
        with self._lock:
            file, self._file = self._file, None
        if file is not None:
            file.close()

    def begin(self, name: str, activity: str) -> None:
        """Record that a tensor enters an activity."""
        with self._lock:
            if self._file is not None:
                self._depths[name] = self._depths.get(name, 0) + 1
                self._file.add((name, "B", activity, time.perf_counter()))

    def end(self, name: str) -> None:
        """Record that a tensor leaves the activity that it entered last; no-op for one that began before the file."""
        with self._lock:
            if self._file is not None and self._depths.get(name, 0):
                self._depths[name] -= 1
                if not self._depths[name]:
                    del self._depths[name]
                self._file.add((name, "E", "", time.perf_counter()))

    def cycle(self) -> None:
        """Record that operations begin together."""
        with self._lock:
            if self._file is not None and self._mark_cycles:
                self._file.add(("cycles", "i", "CYCLE_START", time.perf_counter()))


class _Rows:
    """The row of each tensor name: a process, to the viewers."""

    def __init__(self, zero: float) -> None:
        self._zero = zero
        self._rows: dict[str, int] = {}

    def name(self, row: int, name: str) -> Event:
        return {"name": "process_name", "ph": "M", "pid": row, "args": {"name": name}}

    def events(self, item: _Item) -> Iterator[Event]:
        name, phase, activity, seconds = item
        if name not in self._rows:
            self._rows[name] = len(self._rows) + 1
            yield self.name(self._rows[name], name)
        at = round((seconds - self._zero) * 1e6, 1)
        event = {"name": activity, "ph": phase, "ts": at, "pid": self._rows[name], "tid": 0}
        yield {**event, "s": "g"} if phase == "i" else event
