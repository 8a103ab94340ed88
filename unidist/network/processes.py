"""Where a rank runs, and whether it does."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from unidist.network import addresses


class Process(NamedTuple):
    """Where a rank runs."""

    host: addresses.Host
    pid: int
    #: Processes of one namespace see each other by their pids.
    pid_namespace: int

    @classmethod
    def current(cls) -> Process:
        """Return this process."""
        return cls(addresses.this_host(), os.getpid(), pid_namespace())

    @classmethod
    def from_row(cls, row: Any) -> Process:
        """Return the process of a JSON list."""
        (id_, name, found), pid, namespace = row
        return cls(addresses.Host(id_, name, tuple(found)), pid, namespace)

    def state(self) -> str:
        """Return the kernel's state code, such as R, S and T (stopped); X: it has ended; empty: it cannot be seen."""
        here = Process.current()
        if not self.pid_namespace or (self.host.id, self.pid_namespace) != (here.host.id, here.pid_namespace):
            return ""
        return stat_fields(self.pid)[0] or "X"

    def is_running(self) -> bool | None:
        """Return whether a process is neither stopped nor ended (one in a debugger is not); None: it cannot be seen."""
        state = self.state()
        return state not in "TZX" if state else None


def pid_namespace() -> int:
    """Return the number of this process's namespace of pids, 0 where it cannot be seen."""
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0


def start_time(pid: int) -> str:
    """Return what tells a process from a later one with its pid; empty: it has ended, or this is not Linux."""
    return stat_fields(pid)[1]


def stat_fields(pid: int) -> tuple[str, str]:
    """Return a process's state and start time, or empty."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "", ""
