"""Horovod's timeline: what each tensor waited for and went through, in Chrome's trace event format."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path

_log = logging.getLogger("unidist")
#: Interval at which events are written.
_WRITE_S = 0.5
#: How long ``close`` waits for a slow disk.
_CLOSE_TIMEOUT_S = 10.0


class Timeline:
    """A file of trace events (``chrome://tracing``, Perfetto), one process row for each tensor name. Thread-safe;
    off until ``open``.

    A thread of its own writes the events, twice a second, so that a job that is killed or hangs leaves a file that
    viewers load: in this format the closing bracket may be missing. If the file cannot be written, that is logged once,
    and the timeline is off.
    """

    def __init__(self) -> None:
        self.on = False
        self._lock = threading.RLock()  # a signal handler may make a call in the middle of another
        #: Row, phase, activity, time: to be written.
        self._events: deque[tuple[str, str, str, float]] = deque()
        #: Activities that a row is in.
        self._depths: dict[str, int] = {}
        self._mark_cycles = False
        self._closing = threading.Event()
        self._writer: threading.Thread | None = None

    def open(self, path: str | Path, mark_cycles: bool = False) -> None:
        """Begin a file. An existing one is overwritten."""
        self.close()
        try:
            file = FileIO(path, "w")
        except OSError as error:
            _log_failure(path, error)
            return
        with self._lock:
            self._mark_cycles = mark_cycles
            self._depths.clear()
            self._events.clear()
            self._closing = threading.Event()
            self._writer = threading.Thread(
                target=self._write_in_background, args=(file, self._closing), name="unidist-hvd-timeline", daemon=True
            )
            self.on = True
            self._writer.start()

    def close(self) -> None:
        """End the file; no-op without one."""
        with self._lock:
            self.on = False
            writer, self._writer = self._writer, None
        if writer is not None:
            self._closing.set()
            writer.join(_CLOSE_TIMEOUT_S)

    def begin(self, name: str, activity: str) -> None:
        """A tensor enters an activity."""
        with self._lock:
            if self.on:
                self._depths[name] = self._depths.get(name, 0) + 1
                self._events.append((name, "B", activity, time.perf_counter()))

    def end(self, name: str) -> None:
        """A tensor leaves the activity that it entered last; no-op for one that began before the file."""
        with self._lock:
            if self.on and self._depths.get(name, 0):
                self._depths[name] -= 1
                if not self._depths[name]:
                    del self._depths[name]
                self._events.append((name, "E", "", time.perf_counter()))

    def cycle(self) -> None:
        """Operations begin together."""
        with self._lock:
            if self.on and self._mark_cycles:
                self._events.append(("cycles", "i", "CYCLE_START", time.perf_counter()))

    def _write_in_background(self, file: FileIO, closing: threading.Event) -> None:
        zero, whole = time.perf_counter(), 0
        rows: dict[str, int] = {}
        text = "[\n" + json.dumps({"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "unidist.hvd"}})
        last = False
        try:
            with file:
                while True:
                    whole += _write(file, text)
                    if last:
                        return
                    last = closing.wait(_WRITE_S)
                    text = "".join(self._texts(rows, zero)) + "\n]\n" * last
        except OSError as error:
            self.on = False
            self._events.clear()
            with suppress(OSError):  # viewers load no half of an event
                os.truncate(file.name, whole)
            _log_failure(file.name, error)

    def _texts(self, rows: dict[str, int], zero: float) -> Iterator[str]:
        while self._events:
            name, phase, activity, seconds = self._events.popleft()
            if name not in rows:
                rows[name] = len(rows) + 1
                yield ",\n" + json.dumps({"name": "process_name", "ph": "M", "pid": rows[name], "args": {"name": name}})
            event = {"name": activity, "ph": phase, "ts": round((seconds - zero) * 1e6, 1), "pid": rows[name], "tid": 0}
            yield ",\n" + json.dumps({**event, "s": "g"} if phase == "i" else event)


def _write(file: FileIO, text: str) -> int:
    """Write all of it: its number of bytes."""
    data = text.encode()
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
    return len(data)


def _log_failure(path: object, error: OSError) -> None:
    _log.error("the timeline %s cannot be written (%s): training goes on without it.", path, error)
