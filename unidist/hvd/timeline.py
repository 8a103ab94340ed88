"""Horovod's timeline: what each tensor waited for and went through, in Chrome's trace event format."""

from __future__ import annotations

import json
import threading
import time
from itertools import count
from pathlib import Path
from typing import IO


class Timeline:
    """A file of trace events (``chrome://tracing``, Perfetto), one process row for each tensor name. Thread-safe;
    off until ``open``.
    """

    def __init__(self) -> None:
        self.on = False
        self._lock = threading.Lock()
        self._file: IO[str] | None = None
        self._rows: dict[str, int] = {}
        self._numbers = count(1)
        self._open: dict[str, int] = {}
        self._zero = time.perf_counter()
        self._mark_cycles = False

    def open(self, path: str | Path, mark_cycles: bool = False) -> None:
        """Begin a file. An existing one is overwritten."""
        self.close()
        file = open(path, "w")  # noqa: SIM115 - open until close()
        with self._lock:
            self._file, self._zero, self._mark_cycles = file, time.perf_counter(), mark_cycles
            self._rows.clear()
            self._open.clear()
            file.write("[\n")
            self._write({"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "unidist.hvd"}}, first=True)
            self.on = True

    def close(self) -> None:
        """End the file; no-op without one."""
        with self._lock:
            self.on = False
            file, self._file = self._file, None
        if file is not None:
            file.write("\n]\n")
            file.close()

    def begin(self, name: str, activity: str) -> None:
        """A tensor enters an activity."""
        with self._lock:
            self._open[name] = self._open.get(name, 0) + 1
            self._event(name, {"name": activity, "ph": "B"})

    def end(self, name: str) -> None:
        """A tensor leaves the activity that it entered last; no-op for one that began before the file."""
        with self._lock:
            if self._open.get(name, 0):
                self._open[name] -= 1
                self._event(name, {"ph": "E"})

    def cycle(self) -> None:
        """Operations begin together."""
        if self._mark_cycles:
            with self._lock:
                self._event("cycles", {"name": "CYCLE_START", "ph": "i", "s": "g"})

    def _event(self, name: str, event: dict[str, object]) -> None:
        if self._file is None:
            return
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = next(self._numbers)
            self._write({"name": "process_name", "ph": "M", "pid": row, "args": {"name": name}})
        self._write({**event, "ts": round((time.perf_counter() - self._zero) * 1e6, 1), "pid": row, "tid": 0})

    def _write(self, event: dict[str, object], first: bool = False) -> None:
        if self._file is not None:
            self._file.write(("" if first else ",\n") + json.dumps(event))
