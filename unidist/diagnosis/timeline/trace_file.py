"""A file of Chrome's trace event format that is written while the program runs."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Event = dict[str, Any]
_log = logging.getLogger("unidist")
#: Interval at which events are written.
_WRITE_S = 0.5
#: How long ``close`` waits for a slow disk.
_CLOSE_TIMEOUT_S = 10.0


class TraceFile(Generic[T]):
    """Writes items as events, in a thread, twice a second, so that a job that is killed or hangs leaves a file that
    viewers load: in this format the closing bracket may be missing.

    If the file cannot be written, that is logged once, and the items are dropped. An existing file is overwritten.

    Args:
        path: the file.
        header: the first events.
        events: the events of an item; called in the thread.
        thread_name: of the thread.
    """

    def __init__(
        self, path: str | Path, header: Iterable[Event], events: Callable[[T], Iterable[Event]], thread_name: str
    ) -> None:
        #: False once the file has ended, or cannot be written.
        self.on = False
        self.path = Path(path)
        self._events = events
        #: To be written.
        self._items: deque[T] = deque()
        self._closing = threading.Event()
        try:
            file = FileIO(path, "w")
        except OSError as error:
            self._failed(error)
            return
        self.on = True
        self._writer = threading.Thread(target=self._write, args=(file, list(header)), name=thread_name, daemon=True)
        self._writer.start()

    def add(self, item: T) -> None:
        """Queue an item; any thread."""
        if self.on:
            self._items.append(item)

    def close(self) -> None:
        """Write what is left, and end the file. A second call does nothing."""
        if self.on:
            self.on = False
            self._closing.set()
            self._writer.join(_CLOSE_TIMEOUT_S)

    def _write(self, file: FileIO, header: list[Event]) -> None:
        whole, last = 0, False
        text = "[\n" + ",\n".join(map(json.dumps, header))
        try:
            with file:
                while True:
                    whole += _write_all(file, text)
                    if last:
                        return
                    last = self._closing.wait(_WRITE_S)
                    text = "".join(self._texts()) + "\n]\n" * last
        except OSError as error:
            with suppress(OSError):  # viewers load no half of an event
                os.truncate(self.path, whole)
            self._failed(error)
            self.on = False
            self._items.clear()

    def _texts(self) -> Iterable[str]:
        while self._items:
            for event in self._events(self._items.popleft()):
                yield ",\n" + json.dumps(event)

    def _failed(self, error: OSError) -> None:
        _log.error("the timeline %s cannot be written (%s): training goes on without it.", self.path, error)


def _write_all(file: FileIO, text: str) -> int:
    """Write all of it: its number of bytes."""
    data = text.encode()
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
    return len(data)
