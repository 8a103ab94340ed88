"""Checkpoint files of one rank: written, read, deleted."""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
import re
import secrets
import shutil
import socket
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import IO, Any, NamedTuple

import torch

#: Bytes that are written at once.
_CHUNK_BYTES = 2**28
#: Bytes that are read at once.
_READ_BYTES = 2**22
_SYNC_PERIOD_S = 0.05
_UNFINISHED = ".unfinished"
#: In a checkpoint's directory, the file with all that is not sharded.
REST = "unidist.pt"


def write(path: Path, state: dict[str, Any], stop: Event) -> None:
    """Write a file that replaces ``path`` when it is complete. Raises ``InterruptedError`` once ``stop`` is set."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _unfinished(path)
    with temporary.open("xb") as file, locked(temporary):
        try:
            with _synced_meanwhile(file):
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


@contextmanager
def _synced_meanwhile(file: IO[bytes]) -> Iterator[None]:
    """What is written inside goes to the disk at once, in a thread: ``fsync`` has little left to do."""
    ended = Event()
    failed: list[OSError] = []

    def sync() -> None:
        while not failed and not ended.wait(_SYNC_PERIOD_S):
            try:
                os.fdatasync(file.fileno())
            except OSError as error:  # the system tells it only once
                failed.append(error)

    thread = Thread(target=sync, name="unidist-checkpoint-sync", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if failed:
        raise failed[0]


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
        remove(other)
    leftover = rf"\.{series}\.{re.escape(socket.gethostname())}\.\w+{re.escape(_UNFINISHED)}"
    for other in files:
        if re.fullmatch(leftover, other.name) and _is_orphan(other):
            remove(other)


def _is_orphan(temporary: Path) -> bool:
    """Whether the process that wrote a temporary file or directory has ended: it is not locked."""
    with suppress(OSError), locked(temporary, wait=False):
        # An empty one may be about to be locked.
        return any(temporary.iterdir()) if temporary.is_dir() else temporary.stat().st_size > 0
    return False


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[None]:
    """A file or a directory is locked inside. Raises ``OSError`` where another process has it and ``wait`` is false."""
    opened = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        if wait:
            with suppress(OSError):  # not every file system can
                fcntl.flock(opened, fcntl.LOCK_EX)
        else:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(opened)


def is_checkpoint(path: Path) -> bool:
    """Whether a file may be a finished checkpoint, or a directory is one."""
    return (path.is_file() or (path / REST).is_file()) and not path.name.startswith(".")


def remove(path: Path) -> None:
    """Delete a file or a directory."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _unfinished(path: Path) -> Path:
    # A requeued job may write while the old one still does, under the same host name and pid.
    return path.with_name(f".{path.name}.{socket.gethostname()}.{secrets.token_hex(8)}{_UNFINISHED}")


def temporary_directory(path: Path) -> Path:
    """Make the directory that is to replace ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = _unfinished(path)
    made.mkdir()
    return made


def replace_directory(temporary: Path, path: Path) -> None:
    """Give a finished directory its name; what has it already is removed."""
    if path.exists():
        old = _unfinished(path)
        path.rename(old)
        temporary.rename(path)
        remove(old)
    else:
        temporary.rename(path)


def written(path: Path) -> int:
    """When a checkpoint was written."""
    return path.stat().st_mtime_ns
