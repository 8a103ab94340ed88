"""Checkpoint files of one rank: written, read, deleted."""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
import re
import secrets
import socket
import zipfile
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import IO, Any, NamedTuple

import torch

#: Bytes that are written at once.
_CHUNK_BYTES = 2**28
#: Bytes that are read at once.
_READ_BYTES = 2**22
_UNFINISHED = ".unfinished"


def write(path: Path, state: dict[str, Any], stop: Event) -> None:
    """Write a file that replaces ``path`` when it is complete. Raises ``InterruptedError`` once ``stop`` is set."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A requeued job may write while the old one still does, under the same host name and pid.
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{secrets.token_hex(8)}{_UNFINISHED}")
    with temporary.open("xb") as file:
        try:
            with suppress(OSError):  # not every file system can
                fcntl.flock(file, fcntl.LOCK_EX)
            torch.save(state, _Stoppable(file, stop))  # type: ignore[arg-type]  # it needs no more than this has
            file.flush()
            os.fsync(file.fileno())
            with temporary.open("rb") as written:
                read(written)  # a file that cannot be loaded must not replace one that can
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # not every file system can
            os.fsync(directory)  # the new name, too, survives a power failure
    finally:
        os.close(directory)


class _Stoppable:
    """A file whose ``write`` raises once an event is set."""

    def __init__(self, file: IO[bytes], stop: Event) -> None:
        self._file = file
        self._stop = stop

    def write(self, data: memoryview) -> int:
        for start in range(0, len(data), _CHUNK_BYTES):
            if self._stop.is_set():
                raise InterruptedError("the save was interrupted")
            self._file.write(data[start : start + _CHUNK_BYTES])
        return len(data)

    def flush(self) -> None:
        self._file.flush()


class Content(NamedTuple):
    """What tells one file from another without reading all of it."""

    size: int
    digest: bytes


def content(file: IO[bytes]) -> Content:
    """The same for files of equal content. Of what ``torch.save`` writes, the checksums of all tensors are in it."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = [(entry.filename, entry.file_size, entry.CRC) for entry in archive.infolist()]
        digest = hashlib.sha256(repr(entries).encode())
    except zipfile.BadZipFile:
        digest = hashlib.sha256()
        file.seek(0)
        while data := file.read(_READ_BYTES):
            digest.update(data)
    return Content(os.fstat(file.fileno()).st_size, digest.digest())


def read_through(file: IO[bytes]) -> None:
    """Read all of a file into the host's page cache. What cannot be read raises here; in mapped memory it kills."""
    buffer = bytearray(_READ_BYTES)
    start = 0
    while count := os.preadv(file.fileno(), [buffer], start):
        start += count


def read(file: IO[bytes]) -> dict[str, Any]:
    """The checkpoint in an open file, its tensors mapped: they are read when they are used."""
    try:
        state = torch.load(
            f"/proc/self/fd/{file.fileno()}", map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
        )
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        kind = re.search(r"GLOBAL (\S+)", str(error))
        raise ValueError(
            f"torch.load(weights_only=True) refuses it{f', because it contains a {kind[1]}' if kind else ''}; a "
            "checkpoint contains numbers, strings, tensors, lists and plain dicts only"
        ) from error
    if not isinstance(state, dict):
        raise ValueError(f"it contains a {type(state).__name__}, not a dict of states")
    return state


def prune(path: Path, keep: int) -> None:
    """Delete older checkpoints of the series, and temporary files of processes of this host that were killed."""
    before, _, after = re.split(r"(\d+)(?=\D*$)", path.name)
    series = rf"{re.escape(before)}\d+{re.escape(after)}"
    files = list(path.parent.iterdir())
    checkpoints = [other for other in files if re.fullmatch(series, other.name) and is_checkpoint(other)]
    for other in sorted(checkpoints, key=written)[:-keep]:
        other.unlink(missing_ok=True)
    leftover = rf"\.{series}\.{re.escape(socket.gethostname())}\.\w+{re.escape(_UNFINISHED)}"
    for other in files:
        if re.fullmatch(leftover, other.name) and _is_orphan(other):
            other.unlink(missing_ok=True)


def _is_orphan(temporary: Path) -> bool:
    """Whether the process that wrote a temporary file has ended: the file is not locked."""
    with suppress(OSError), temporary.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(file.fileno()).st_size > 0  # an empty one may be about to be locked
    return False


def is_checkpoint(path: Path) -> bool:
    """Whether a file may be a finished checkpoint."""
    return path.is_file() and not path.name.startswith(".")


def written(path: Path) -> int:
    """When a checkpoint was written."""
    return path.stat().st_mtime_ns
