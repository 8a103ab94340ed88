"""The jobs of this user on this host: a file for each rank, which only the user can read."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from unidist.diagnosis.watch.server import Peer
from unidist.network.processes import pid_namespace, start_time

#: A directory that all users share.
_SHARED = Path("/tmp")


@dataclass(frozen=True)
class RunningRank:
    """A rank of a job that runs on this host, and how to ask all of its ranks."""

    pid: int
    rank: int
    backend: str
    key: bytes
    peers: dict[int, Peer]

    @property
    def id(self) -> str:
        """The same for all ranks of a job."""
        return hashlib.sha256(self.key).hexdigest()


def write(rank: int, backend: str, key: bytes, peers: dict[int, Peer]) -> Path | None:
    """Write this process's file; None where none can be written."""
    pid, start = os.getpid(), start_time(os.getpid())
    if not start:  # not Linux
        return None
    row = {
        "pid": pid,
        "start": start,
        "rank": rank,
        "backend": backend,
        "key": key.hex(),
        "peers": list(peers.values()),
    }
    for directory in chain(_directories(), [None]):
        with suppress(OSError, ValueError):
            if directory is None:  # another user has the name
                directory = Path(tempfile.mkdtemp(prefix=f"{_name()}-", dir=_SHARED))
            directory.mkdir(mode=0o700, exist_ok=True)
            if not _is_private(directory):
                continue
            for left in directory.glob(_files()):  # by processes that were killed
                if not start_time(int(left.stem.split("-")[1])):
                    left.unlink(missing_ok=True)
            path = directory / _files().replace("*", str(pid))
            path.unlink(missing_ok=True)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                json.dump(row, file)
            return path
    return None


def running() -> list[RunningRank]:
    """Return the ranks on this host, by job and rank; files of processes that have ended are removed."""
    return sorted(_running(), key=lambda job: (job.id, job.rank))


def _running() -> Iterator[RunningRank]:
    for directory in _directories():
        for path in directory.glob(_files()) if _is_private(directory) else ():
            row: Any = None
            with suppress(OSError, ValueError):
                row = json.loads(path.read_text())
            if row is None:
                continue  # it is being written, or has just been removed
            if row["start"] != start_time(row["pid"]):
                with suppress(OSError):
                    path.unlink()
                continue
            peers = {rank: Peer.from_row(peer) for rank, peer in enumerate(row["peers"])}
            yield RunningRank(row["pid"], row["rank"], row["backend"], bytes.fromhex(row["key"]), peers)


def _directories() -> Iterator[Path]:
    """Yield where files may be: a job and the user's shell need not have the same variables."""
    of_user = (os.environ.get("XDG_RUNTIME_DIR"), f"/run/user/{os.getuid()}")
    yield from dict.fromkeys(Path(directory, "unidist") for directory in of_user if directory)
    yield _SHARED / _name()
    yield from _SHARED.glob(f"{_name()}-*")  # the last: it reads a directory that may have thousands of entries


def _name() -> str:
    return f"unidist-{os.getuid()}"


def _files() -> str:
    """Return the pattern of the names of files, by pids: those of other namespaces are nothing here."""
    return f"{pid_namespace()}-*.json"


def _is_private(directory: Path) -> bool:
    """Return whether it is a directory of this user's that nobody else can read."""
    try:
        found = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
