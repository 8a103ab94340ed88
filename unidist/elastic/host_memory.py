"""Commits in the memory of a host, for the processes that torchrun starts after a failure.

torchrun restarts all processes of a host. The first of them writes each commit to a file in memory; the directory is
that of the torchrun which has started it, and of nobody else.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from unidist.context import current, local_rank
from unidist.topology import detect

_log = logging.getLogger("unidist")
_PREFIX = "unidist-commits-"
#: Whether a commit could not be written, which was said.
_failed = False


def restarts() -> bool:
    """Whether the launcher starts processes again after a failure: ``torchrun --max-restarts``."""
    limit = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    return limit.isdigit() and int(limit) > 0 and detect(os.environ).launcher.name == "torchrun"


def write(commit: int, state: Any) -> None:
    """Keep a commit for the processes that come after a restart; no-op where none will.

    Without room for it, that is said once, and a restart begins with the last commit that had room.
    """
    global _failed
    if not restarts() or local_rank() != 0 or _failed:
        return
    directory = _directory()
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        part = directory / "part"
        torch.save((commit, state), part)
        part.replace(directory / "commit")
    except (OSError, RuntimeError) as error:  # torch reports a full disk as the latter
        _failed = True
        with suppress(OSError):
            (directory / "part").unlink()
        _log.warning("commits are not kept for a restart: %s cannot be written: %s", directory, error)


def read() -> tuple[int, Any] | None:
    """The last commit of the processes before a restart, or None."""
    if not restarts():
        return None
    _remove_stale()
    path = _directory() / "commit"
    try:
        if path.stat().st_uid != os.getuid():  # anybody may write to the directory above
            return None
        found: tuple[int, Any] = torch.load(path, map_location=current().device, weights_only=False)
    except OSError:
        return None
    return found


def remove() -> None:
    """The training has ended well: there is nothing to go on with."""
    if restarts() and local_rank() == 0:
        shutil.rmtree(_directory(), ignore_errors=True)


# ---------------------------------------------------------------------------------------------
def _base() -> Path:
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else Path(tempfile.gettempdir())


def _directory() -> Path:
    return _base() / f"{_PREFIX}{os.getuid()}-{os.getppid()}-{_start_time(os.getppid())}"


def _start_time(pid: int) -> str:
    """When a process began: ids of processes are used again."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return "0"


def _remove_stale() -> None:
    """Directories of torchruns that were killed."""
    for path in _base().glob(f"{_PREFIX}{os.getuid()}-*"):
        pid, began = path.name.rsplit("-", 2)[1:]
        if not pid.isdigit() or _start_time(int(pid)) != began:
            shutil.rmtree(path, ignore_errors=True)
