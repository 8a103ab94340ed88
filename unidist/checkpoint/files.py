"""Checkpoint files of one rank: written, read, deleted."""

from __future__ import annotations

import copy
import ctypes
import errno
import fcntl
import hashlib
import io
import os
import pickle
import re
import secrets
import shutil
import socket
import stat
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import IO, Any, NamedTuple

import torch

from unidist.checkpoint import archive, shards
from unidist.tree import walk

#: Bytes that are written at once.
_CHUNK_BYTES = 2**28
_SYNC_PERIOD_S = 0.05
_UNFINISHED, _REPLACED = ".unfinished", ".replaced"
_DAY_S = 86400
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
#: The key of the format's version in a file.
FORMAT = "unidist_format"
_VERSION = 1
#: In a checkpoint's directory, the file with all that is not sharded.
REST = "unidist.pt"
_ONLY = (
    "contains numbers, strings, tensors, lists and plain dicts only: convert a number of NumPy's by "
    "float(x), give an object a state_dict(), and save the unbind() of a nested tensor, which PyTorch refuses from "
    "2.15 on, unless torch.serialization.add_safe_globals allows it"
)


def write(path: Path, state: dict[str, Any], stop: Event) -> None:
    """Write a file that replaces ``path`` when it is complete. Raises ``InterruptedError`` once ``stop`` is set."""
    with room(path, state), Unfinished(path) as unfinished:
        with unfinished.path.open("r+b") as file:
            try:
                with _synced_meanwhile(file):
                    _save({FORMAT: _VERSION, **state}, _Stoppable(file, stop))
                file.flush()
                os.fsync(file.fileno())
                read(file)  # a file that cannot be loaded must not replace one that can
            except (ValueError, TypeError, AttributeError, pickle.PicklingError) as error:
                said = error if isinstance(error, ValueError) else f"{error}; a checkpoint {_ONLY}"
                raise ValueError(f"{_refused(state)}{said}") from error
        unfinished.finish()


def _refused(state: dict[str, Any]) -> str:
    """Return the first value that cannot be saved or loaded, and where in it."""
    for name, value in state.items():
        if not _is_plain(value):
            leaves = ((path, leaf) for path, leaf in walk(value) if type(leaf) not in (int, float, str))
            keys = "".join(f"[{key!r}]" for key in next((path for path, leaf in leaves if not _is_plain(leaf)), ()))
            return f"{name}=: {keys and f'at {keys}: '}"
    return ""


def _is_plain(value: Any) -> bool:
    """Return whether it can be saved and loaded, but for its plain tensors."""
    data = io.BytesIO()
    with suppress(Exception):
        no_plain_tensors = {
            id(leaf): leaf if leaf.is_nested or type(leaf) not in (torch.Tensor, torch.nn.Parameter) else None
            for _, leaf in walk(value)
            if isinstance(leaf, torch.Tensor)
        }
        torch.save(copy.deepcopy(value, no_plain_tensors), data)
        data.seek(0)
        torch.load(data, weights_only=True)
        return True
    return False


def _save(state: dict[str, Any], file: _Stoppable) -> None:
    computed = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        torch.save(state, file)  # type: ignore[arg-type]  # it needs no more than this has
    except RuntimeError as error:  # of torch's writer, in place of the file's own
        raise (file.error or error) from None
    finally:
        torch.serialization.set_crc32_options(computed)


@contextmanager
def room(path: Path, state: Any) -> Iterator[None]:
    """Say in the error of a full file system how many bytes the state needs, and how many were free."""
    above = next(parent for parent in path.parents if parent.exists())
    free = shutil.disk_usage(above).free
    try:
        yield
    except OSError as error:
        tensors = [leaf for _, leaf in walk(state) if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided]
        storages = [shards.local(tensor).untyped_storage() for tensor in tensors]
        needed = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        # torch.distributed.checkpoint does not say what the system has.
        unknown = type(error) is OSError and error.errno is None and shutil.disk_usage(above).free < needed
        if not unknown and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            f"no space left on the file system of {above}: the tensors of this rank have {needed} bytes, and {free} "
            f"were free; {path.name} is as it was ({error})"
        ) from error


class Unfinished:
    """A file or a directory that is to replace ``path``: locked, and removed at the end if it has not.

    What processes that were killed have left of such ones is removed first.
    """

    def __init__(self, path: Path, directory: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_replaceable(path, directory)
        self.final = path
        #: That of what is replaced; None: the umask's.
        self._mode: int | None = None
        self._open(directory)
        with suppress(FileNotFoundError):
            found = path.stat().st_mode
            if stat.S_ISDIR(found) == directory:
                self._mode = found & 0o777
                os.fchmod(self._lock, self._mode | (0o700 if directory else 0o600))
        with suppress(OSError):  # others' files, or a directory that cannot be read
            _remove_leftovers(self)

    def _open(self, directory: bool) -> None:
        while True:
            # A requeued job may write while the old one still does, under the same host name and pid.
            token = f"{socket.gethostname()}.{secrets.token_hex(8)}"
            self.path = self.final.with_name(f".{self.final.name}.{token}{_UNFINISHED}")
            if directory:
                self.path.mkdir()
            self._lock = os.open(self.path, os.O_RDONLY if directory else os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            with suppress(OSError):  # not every file system can
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._lock), self.path.stat()):
                    return
            os.close(self._lock)  # another process took it for a leftover

    def finish(self) -> None:
        """Give it its name, in one step where the system can; what had the name before is removed at the end."""
        path, replaced = self.final, _replaced(self.final)
        if self._mode is not None:
            os.fchmod(self._lock, self._mode)
        if not path.exists() or not (path.is_dir() or self.path.is_dir()):
            self.path.replace(path)
        elif not _exchange(self.path, path):
            remove(replaced)
            path.rename(replaced)
            self.path.rename(path)
        with suppress(OSError):  # not every file system can
            _sync_directory(path.parent)  # the new name, too, survives a power failure
        remove(replaced)

    def close(self) -> None:
        """Remove what has not become the checkpoint, or was the one before."""
        remove(self.path)
        os.close(self._lock)

    def __enter__(self) -> Unfinished:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _check_replaceable(path: Path, directory: bool) -> None:
    kind = _kind(path)
    if kind and not (directory and kind == "directory" and not any(path.iterdir())):
        raise FileExistsError(f"{path} is a {kind}, which a checkpoint does not replace: choose another name")


def _kind(path: Path) -> str | None:
    """Return what is there, if it is neither a file nor the directory of a checkpoint."""
    kinds = (Path.is_dir, "directory"), (Path.is_fifo, "FIFO"), (Path.is_socket, "socket")
    if not path.exists() or path.is_file() or (path / REST).is_file():
        return None
    return next((name for test, name in kinds if test(path)), "device")


def _exchange(one: Path, other: Path) -> bool:
    """Give each of two files or directories the other's name in one step; false where the system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    names = [argument for path in (one, other) for argument in (_AT_FDCWD, os.fsencode(path))]
    return rename is not None and rename(*names, _RENAME_EXCHANGE) == 0


def _replaced(path: Path) -> Path:
    """Return the name of the old one while a new one takes its place, where that is no single step."""
    return path.with_name(f".{path.name}{_REPLACED}")


def found(path: Path) -> Path:
    """Return where the checkpoint of a name is: under another one where a process was killed while it replaced it."""
    replaced = _replaced(Path(os.path.realpath(path)))
    return replaced if replaced.exists() and not path.exists() else path


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@contextmanager
def _synced_meanwhile(file: IO[bytes]) -> Iterator[None]:
    """Send what is written inside to the disk at once, in a thread: ``fsync`` has little left to do."""
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
        #: What ``write`` raised.
        self.error: OSError | None = None

    def write(self, data: memoryview) -> int:
        try:
            for start in range(0, len(data), _CHUNK_BYTES):
                if self._stop.is_set():
                    raise InterruptedError("the save was interrupted")
                self._file.write(data[start : start + _CHUNK_BYTES])
        except OSError as error:
            self.error = error
            raise
        return len(data)

    def flush(self) -> None:
        self._file.flush()


class Content(NamedTuple):
    """What tells one file from another without reading all of it."""

    size: int
    digest: bytes
    #: Whether it is that of a directory with shards.
    has_shards: bool


def opened(path: Path) -> tuple[IO[bytes], Content]:
    """Return the file of a checkpoint. Raises ``ValueError`` for what is not a regular file, or is truncated."""
    if kind := _kind(path):
        raise ValueError(f"it is not a checkpoint but a {kind}")
    has_shards = (path / REST).is_file()
    with ExitStack() as stack:
        file = stack.enter_context((path / REST if has_shards else path).open("rb"))
        size, digest = os.fstat(file.fileno()).st_size, _digest(file)
        stack.pop_all()
    return file, Content(size, digest, has_shards)


def _digest(file: IO[bytes]) -> bytes:
    """Return a digest that files of equal content share; ``torch.save``'s has the checksums of all tensors."""
    entries = archive.entries(file)
    digest = hashlib.sha256(repr([(entry.filename, entry.file_size, entry.CRC) for entry in entries]).encode())
    if not entries:
        for data in archive.pieces(file, 0, os.fstat(file.fileno()).st_size):
            digest.update(data)
    return digest.digest()


def read(file: IO[bytes]) -> dict[str, Any]:
    """Return the checkpoint in an open file, its tensors mapped: they are read when they are used."""
    is_archive = zipfile.is_zipfile(file)
    try:
        state = _load(f"/proc/self/fd/{file.fileno()}", mmap=is_archive)
    except OSError:
        raise
    except Exception as error:  # of any kind, in a file that is damaged or not torch's
        if kind := re.search(r"GLOBAL (\S+)", str(error)):
            raise ValueError(
                f"torch.load(weights_only=True) refuses it, because it contains a {kind[1]}; a checkpoint {_ONLY}"
            ) from error
        what = "damaged or not a checkpoint" if is_archive else "not a checkpoint"
        raise ValueError(f"it is {what}: torch.load(weights_only=True) cannot read it") from error
    if not isinstance(state, dict):
        raise ValueError(f"it is not a checkpoint: it contains a {type(state).__name__}, not a dict of states")
    if (version := state.pop(FORMAT, 0)) > _VERSION:
        raise ValueError(f"it has format {version}, and this unidist reads formats up to {_VERSION}: upgrade unidist")
    return state


def _load(path: str, mmap: bool) -> Any:
    """Return what ``torch.load`` reads, of jagged tensors, too, which it loads only where torch._dynamo is imported."""
    load = partial(torch.load, path, map_location="cpu", weights_only=True, mmap=mmap)
    try:
        return load()
    except pickle.UnpicklingError as error:
        if "torch._dynamo" not in str(error):
            raise
    from torch import _dynamo  # noqa: F401

    return load()


def order(path: Path) -> tuple[int, int]:
    """Return what orders checkpoints: the last number in the name (none: -1), then when it was written."""
    numbers = re.findall(r"\d+", path.name)
    try:
        written = found(path).stat().st_mtime_ns
    except OSError:  # another job has deleted it
        written = 0
    return int(numbers[-1]) if numbers else -1, written


def latest(directory: Path, pattern: str) -> Path | None:
    """Return the latest of the checkpoints that a pattern matches."""
    above, name = os.path.split(pattern)
    names: set[Path] | None = None
    while True:
        before = names
        try:
            replaced = directory.glob(os.path.join(above, f".{name}{_REPLACED}"))
            names = {path.with_name(path.name[1 : -len(_REPLACED)]) for path in replaced} | set(directory.glob(pattern))
        except FileNotFoundError:  # of a directory that another job deleted meanwhile
            continue
        # Another job may delete them: the oldest first, after it wrote a later one.
        newest = next(filter(is_checkpoint, sorted(names, key=order, reverse=True)), None)
        if newest or names == before:
            return newest


def prune(path: Path, keep: int) -> None:
    """Delete older checkpoints of the series of ``path``, which is kept itself."""
    others = [
        other
        for other in path.parent.iterdir()
        if re.fullmatch(_series(path.name), other.name) and is_checkpoint(other) and other.name != path.name
    ]
    for other in reversed(sorted(others, key=order, reverse=True)[keep - 1 :]):
        remove(other)


def _series(name: str) -> str:
    """Return a pattern of the names that differ from this one in the last number only."""
    return r"\d+".join(map(re.escape, re.split(r"\d+(?=\D*$)", name)))


def _remove_leftovers(mine: Unfinished) -> None:
    """Delete what killed processes of this host have left of the series; of other hosts after a day."""
    host = mine.path.name[len(mine.final.name) + 2 :].rsplit(".", 2)[0]
    now = mine.path.stat().st_mtime
    for other in mine.path.parent.iterdir():
        name = re.fullmatch(rf"\.{_series(mine.final.name)}\.(.+)\.\w+{re.escape(_UNFINISHED)}", other.name)
        if name and other != mine.path:
            with suppress(OSError), _locked(other):  # not where a process writes
                if name[1] == host or now - other.stat().st_mtime > _DAY_S:
                    remove(other)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock a file or a directory inside. Raises ``OSError`` where another process has it."""
    opened = os.open(path, (os.O_RDONLY if path.is_dir() else os.O_RDWR) | os.O_NOFOLLOW)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(opened)


def is_checkpoint(path: Path) -> bool:
    """Return whether a file may be a finished checkpoint, or a directory is one."""
    at = found(path)
    return (at.is_file() or (at / REST).is_file()) and not path.name.startswith(".")


def remove(path: Path) -> None:
    """Delete a file or a directory."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
