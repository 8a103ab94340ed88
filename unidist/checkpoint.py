"""Checkpoints that can be resumed on any backend and world size."""

from __future__ import annotations

import copy
import fcntl
import io
import os
import pickle
import random
import re
import secrets
import socket
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import IO, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from unidist.backends.base import Group
from unidist.collectives import all_gather_object, broadcast, broadcast_object
from unidist.context import current
from unidist.errors import CheckpointError
from unidist.model import assert_in_sync, unwrap
from unidist.tree import walk

T = TypeVar("T")
#: The key of the ranks' random states.
_RNG = "unidist_rng"
#: Bytes that are written, or broadcast, at once.
_CHUNK_BYTES = 2**28
_UNFINISHED = ".unfinished"
#: Interval of the collective in which the other ranks wait while the first one reads or writes.
_PERIOD_S = 0.5
#: How long an interrupted save has to remove its temporary file.
_GRACE_S = 5.0


def save_checkpoint(
    path: str | os.PathLike[str], *, keep_last: int | None = None, group: Group | None = None, **objects: Any
) -> None:
    """Write the states of objects to one file, which can be loaded on any backend and world size. Collective.

    Rank 0 writes a temporary file in the same directory and renames it: whenever the process is killed, ``path`` is a
    complete checkpoint, the old one or the new one. If ``path`` is a symbolic link, its target is replaced. The random
    states of all ranks (of Python, of NumPy if it is loaded, of torch on the CPU and the current GPU) are saved too.
    The other ranks wait as long as rank 0 lives, whatever the timeout of ``init()``.

    The file is a dict that ``torch.load(path, weights_only=True)`` reads; a model's keys have no ``module.`` prefix.

    ::

        unidist.save_checkpoint(f"runs/step-{step}.pt", keep_last=3, model=model, optimizer=optimizer, loader=train,
        step=step)

    Args:
        path: its directory is created if there is none.
        keep_last: keep so many checkpoints whose names differ from this one's in the last number only, and delete the
            older ones.
        group: the ranks that take part; the first of them writes. Default: all.
        objects: anything with a ``state_dict``, under names of your choice, and plain values (numbers, strings,
            tensors, lists, dicts). Models that require grad must be equal on all ranks, as ``assert_in_sync`` checks.

    Raises:
        CheckpointError: on every rank, if a rank failed: a full disk, a value that ``weights_only`` does not load.
        MismatchError: on every rank, if a model's trained parameters differ between ranks.
        ValueError: ``keep_last`` below 1, or with a path that has no number in its name.
    """
    path = Path(path)
    if keep_last is not None and (keep_last < 1 or not re.search(r"\d", path.name)):
        raise ValueError(
            f"keep_last={keep_last} must be 1 or more, and the file name {path.name!r} must contain a number, which "
            "orders the checkpoints."
        )
    if _RNG in objects:
        raise ValueError(f"save_checkpoint({_RNG}=...): the name is reserved for the random states.")
    for thing in objects.values():
        if isinstance(thing, nn.Module) and any(p.requires_grad for p in thing.parameters()):
            assert_in_sync(thing, group)
    call = f"save_checkpoint({os.fspath(path)!r})"
    state = _attempt(call, group, lambda: {name: _state_of(thing) for name, thing in objects.items()})
    state[_RNG] = all_gather_object(_random_state(), group)

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()  # the writing thread has a stream of its own

    def write(stop: Event) -> None:
        _write(path.resolve(), state, stop)
        if keep_last is not None:
            _prune(path, keep_last)

    _on_first(call, group, write)


def load_checkpoint(
    path: str | os.PathLike[str], *, random_states: bool = True, group: Group | None = None, **objects: Any
) -> dict[str, Any]:
    """Restore objects from a file of ``save_checkpoint``, on any backend and world size. Collective.

    All or nothing: if a rank fails, the objects and the random states of every rank are restored to what they were
    before, except objects without a ``state_dict``, which are loaded last. For this each rank copies its current states
    to the CPU.

    Rank 0 reads the file and broadcasts it. With as many ranks as saved it, each gets its own random states back;
    otherwise rank ``r`` gets those of rank ``r`` modulo the number of ranks that saved it.

    A dict that was saved without unidist can be loaded too; a model's keys may have the prefix ``module.``.

    Args:
        path: the file, as rank 0 sees it.
        random_states: whether to restore the random states; no when a new run starts from old weights.
        group: the ranks that take part; the first of them reads. Default: all.
        objects: what to restore, under the names of ``save_checkpoint``; models wrapped or not.

    Returns:
        The other values of the file, tensors on the CPU.

    Raises:
        CheckpointError: on every rank: no such file, a file that is not a checkpoint, or a state that a rank's object
            does not load.
    """
    call = f"load_checkpoint({os.fspath(path)!r})"
    data = _broadcast_bytes(_on_first(call, group, lambda stop: Path(path).read_bytes()) or b"", group)
    state = _attempt(call, group, lambda: _checked(_read(io.BytesIO(data)), objects))
    undo = _attempt(call, group, lambda: _undo(objects))

    kept = [name for name, thing in objects.items() if hasattr(thing, "state_dict")]

    def restore(names: Iterable[str]) -> None:
        for name in names:
            _restore(objects[name], state.pop(name))

    def restore_kept() -> None:
        restore(kept)
        saved = state.pop(_RNG, None)
        if saved and random_states:
            index = current().ranks(group).index(current().topology.rank)
            _set_random_state(saved[index % len(saved)])

    try:
        _attempt(call, group, restore_kept)
        _attempt(call, group, lambda: restore(name for name in objects if name not in kept))
    except Exception as error:
        if changed := undo():
            raise CheckpointError(f"{error}. On this rank these could not be restored: {changed}") from error
        raise
    return state


def latest_checkpoint(
    directory: str | os.PathLike[str], pattern: str = "*.pt", group: Group | None = None
) -> Path | None:
    """The newest checkpoint of a directory as rank 0 sees it, or None; the same on every rank. Collective.

    The newest is the file that was written last, also in a run that was resumed from an older one. If several runs
    share a directory, give each a pattern of its own.

    Args:
        directory: may be missing.
        pattern: which files are checkpoints, as for ``pathlib.Path.glob``.
        group: the ranks that take part; the first of them reads the directory. Default: all.
    """

    def newest() -> str | None:
        found = [path for path in Path(directory).glob(pattern) if _is_checkpoint(path)]
        return str(max(found, key=_written)) if found else None

    mine = _on_first(f"latest_checkpoint({os.fspath(directory)!r})", group, lambda stop: newest())
    name = broadcast_object(mine, current().ranks(group)[0], group)
    return Path(name) if name else None


def _attempt(call: str, group: Group | None, action: Callable[[], T]) -> T:
    """What ``action`` returns; its error on any rank is raised on all. Collective."""
    mine: Exception | None = None
    try:
        result = action()
    except Exception as error:
        mine = error
    errors = all_gather_object(None if mine is None else f"{type(mine).__name__}: {mine}", group)
    for rank, text in zip(current().ranks(group), errors):
        if text is not None:
            raise CheckpointError(f"{call} failed on rank {rank}: {text}") from mine
    return result


def _on_first(call: str, group: Group | None, action: Callable[[Event], T]) -> T | None:
    """What ``action`` returns on the first rank, and None on the others; its error is raised on all. Collective.

    It may take longer than the timeout of a collective: it runs in a thread, and the ranks wait in a series of short
    collectives. If another rank is lost meanwhile, ``action`` is completed. If this one is interrupted, its event is
    set.
    """
    ranks, stop = current().ranks(group), Event()
    if len(ranks) == 1:
        return _attempt(call, group, lambda: action(stop))
    done: Future[T | None] = Future()

    def run() -> None:
        try:
            done.set_result(action(stop))
        except BaseException as error:
            done.set_exception(error)

    if current().topology.rank == ranks[0]:
        Thread(target=run, name="unidist-checkpoint", daemon=True).start()
    else:
        done.set_result(None)
    try:
        while not all(all_gather_object(bool(wait([done], _PERIOD_S).done), group)):
            pass
    except Exception:
        wait([done])
        raise
    except BaseException:  # Ctrl-C, or another signal's
        stop.set()
        wait([done], _GRACE_S)
        raise
    return _attempt(call, group, done.result)


# ------------------------------------------------------------------------------------ states
def _state_of(thing: Any) -> Any:
    if isinstance(thing, nn.Module):
        return unwrap(thing).state_dict()
    return thing.state_dict() if hasattr(thing, "state_dict") else thing


def _checked(state: dict[str, Any], objects: dict[str, Any]) -> dict[str, Any]:
    missing = objects.keys() - state.keys()
    if missing:
        raise ValueError(f"the file contains {sorted(state.keys() - {_RNG})}, but not {sorted(missing)}")
    for name, thing in objects.items():
        if not hasattr(thing, "load_state_dict"):
            raise TypeError(
                f"{name}={type(thing).__name__} has no load_state_dict: use the value that load_checkpoint returns"
            )
    return state


def _restore(thing: Any, state: Any) -> None:
    if isinstance(thing, nn.Module):
        thing = unwrap(thing)
        if not any(key.startswith("module.") for key in thing.state_dict()):
            consume_prefix_in_state_dict_if_present(state, "module.")
    thing.load_state_dict(state)


def _undo(objects: dict[str, Any]) -> Callable[[], list[str]]:
    """A function that restores the current states of objects; it returns the names of those where that fails."""
    states = {name: _copy_to_cpu(_state_of(thing)) for name, thing in objects.items() if hasattr(thing, "state_dict")}
    random_state = _random_state()

    def undo() -> list[str]:
        failed = []
        for name, state in states.items():
            try:
                _restore(objects[name], state)
            except Exception:
                failed.append(name)
        _set_random_state(random_state)
        return failed

    return undo


def _copy_to_cpu(state: Any) -> Any:
    # On the CPU: a GPU may have no room for another copy.
    tensors = {id(leaf): leaf.detach().to("cpu", copy=True) for _, leaf in walk(state) if isinstance(leaf, Tensor)}
    return copy.deepcopy(state, tensors)


def _read(file: Any, **options: Any) -> dict[str, Any]:
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, **options)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        kind = re.search(r"GLOBAL (\S+)", str(error))
        raise ValueError(
            f"torch.load(weights_only=True) refuses it{f', because it contains a {kind[1]}' if kind else ''}; a "
            "checkpoint contains numbers, strings, tensors, lists and plain dicts only"
        ) from error
    if not isinstance(state, dict):
        raise ValueError(f"it contains a {type(state).__name__}, not a dict of states")
    return state


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy:
        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = [name, keys.tolist(), *rest]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state(current().device if current().device.type == "cuda" else "cuda")
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    numpy = sys.modules.get("numpy")
    if numpy and "numpy" in state:
        numpy.random.set_state(tuple(state["numpy"]))
    if "cuda" in state and current().device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], current().device)


# ------------------------------------------------------------------------------------ files
def _write(path: Path, state: dict[str, Any], stop: Event) -> None:
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
            _read(temporary, mmap=True)  # a file that cannot be loaded must not replace one that can
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


def _prune(path: Path, keep: int) -> None:
    """Delete older checkpoints of the series, and temporary files of processes of this host that were killed."""
    before, _, after = re.split(r"(\d+)(?=\D*$)", path.name)
    series = rf"{re.escape(before)}\d+{re.escape(after)}"
    files = list(path.parent.iterdir())
    checkpoints = [other for other in files if re.fullmatch(series, other.name) and _is_checkpoint(other)]
    for other in sorted(checkpoints, key=_written)[:-keep]:
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


def _is_checkpoint(path: Path) -> bool:
    return path.is_file() and not path.name.startswith(".")


def _written(path: Path) -> int:
    return path.stat().st_mtime_ns


def _broadcast_bytes(data: bytes, group: Group | None) -> bytes | bytearray:
    """The first rank's bytes on every rank, in chunks that every backend can broadcast."""
    first, *others = current().ranks(group)
    size = broadcast_object(len(data), first, group)
    if not others or not size:
        return data
    whole = bytearray(data or size)
    for piece in torch.split(torch.frombuffer(whole, dtype=torch.uint8), _CHUNK_BYTES):
        piece.copy_(broadcast(piece, first, group))
    return whole
