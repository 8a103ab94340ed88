"""Checkpoints that any engine and world size can go on from."""

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
#: Where a checkpoint keeps the random states of the ranks.
_RNG = "unidist_rng"
#: Bytes that travel at once.
_PIECE = 2**28
_UNFINISHED = ".unfinished"
#: How often the ranks meet while the first of them reads or writes.
_PERIOD_S = 0.5
#: How long an interrupted save may take to remove its temporary file.
_GRACE_S = 5.0


def save_checkpoint(
    path: str | os.PathLike[str], *, keep_last: int | None = None, group: Group | None = None, **objects: Any
) -> None:
    """Write the state of some objects to one file, which any engine and world size can load. Collective.

    Rank 0 writes, to a temporary file beside ``path`` that then takes its place at once: whenever the process is killed,
    what stands under ``path`` is a whole checkpoint, the old one or the new one. Where ``path`` is a link, its target is
    replaced. The random states of all ranks (Python's, NumPy's where loaded, torch's on the CPU and on the GPU in use) are
    written too. The other ranks wait for the disk as long as rank 0 lives, whatever the timeout of ``init()``.

    The file is a dict that ``torch.load(path, weights_only=True)`` reads; a model's keys have no ``module.`` in front.

    ::

        unidist.save_checkpoint(f"runs/step-{step}.pt", keep_last=3, model=model, optimizer=optimizer, loader=train, step=step)

    Args:
        path: its folder is made if there is none.
        keep_last: delete all but the newest of the files whose names differ from this one's in the last number only, and keep
            so many.
        group: the ranks that take part; the first of them writes. Default: all.
        objects: whatever has a ``state_dict``, under names of your choice; other values (numbers, strings, tensors, lists,
            dicts) as they are. Trained models must be equal on all ranks, as ``assert_in_sync`` checks.

    Raises:
        CheckpointError: on every rank, if a rank failed: a full disk, a value that ``weights_only`` would not load.
        MismatchError: on every rank, if a model's trained parameters differ between ranks.
        ValueError: ``keep_last`` below 1, or with a path that has no number in its name.
    """
    path = Path(path)
    if keep_last is not None and (keep_last < 1 or not re.search(r"\d", path.name)):
        raise ValueError(
            f"keep_last={keep_last} must be 1 or more, and {path.name!r} have a number in it that tells its age."
        )
    if _RNG in objects:
        raise ValueError(f"save_checkpoint({_RNG}=...): that name is taken by the random states.")
    for thing in objects.values():
        if isinstance(thing, nn.Module) and any(p.requires_grad for p in thing.parameters()):
            assert_in_sync(thing, group)
    call = f"save_checkpoint({os.fspath(path)!r})"
    state = _attempt(call, group, lambda: {name: _state_of(thing) for name, thing in objects.items()})
    state[_RNG] = all_gather_object(_random_state(), group)

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()  # the thread that writes has a stream of its own

    def write(stop: Event) -> None:
        _write(path.resolve(), state, stop)
        if keep_last is not None:
            _prune(path, keep_last)

    _on_first(call, group, write)


def load_checkpoint(
    path: str | os.PathLike[str], *, random_states: bool = True, group: Group | None = None, **objects: Any
) -> dict[str, Any]:
    """Restore objects from a file that ``save_checkpoint`` wrote, on whatever engine and world size. Collective.

    All or nothing: if a rank fails, the objects and the random states of every rank are as they were before, except objects
    that have no ``state_dict``; those are restored last. For this each rank holds a copy of its present states on the CPU.

    Rank 0 reads, and sends the file to the others, which need not see it. With as many ranks as wrote it, each takes up
    its own random states; otherwise rank ``r`` takes up those of rank ``r`` modulo the number that wrote it.

    A dict that a script without unidist saved loads too; a model's keys may begin with ``module.``.

    Args:
        path: the file, as rank 0 sees it.
        random_states: whether to take up the random states of the file; not when a new run begins with old weights.
        group: the ranks that take part; the first of them reads. Default: all.
        objects: what to restore, under the names they were saved with; models wrapped or not.

    Returns:
        What the file has under other names: the values that were saved as they are, on the CPU.

    Raises:
        CheckpointError: on every rank: no such file, one that is not a checkpoint, or a rank's object does not fit it.
    """
    call = f"load_checkpoint({os.fspath(path)!r})"
    data = _sent(_on_first(call, group, lambda stop: Path(path).read_bytes()) or b"", group)
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
            place = current().ranks(group).index(current().topology.rank)
            _set_random_state(saved[place % len(saved)])

    try:
        _attempt(call, group, restore_kept)
        _attempt(call, group, lambda: restore(name for name in objects if name not in kept))
    except Exception as error:
        if changed := undo():
            raise CheckpointError(f"{error}. On this rank these are not as they were before: {changed}") from error
        raise
    return state


def latest_checkpoint(folder: str | os.PathLike[str], pattern: str = "*.pt", group: Group | None = None) -> Path | None:
    """The newest checkpoint in a folder as rank 0 sees it, or None; the same on every rank. Collective.

    The newest is the file that was written last, also in a run that went back to an older one. Where several runs
    share a folder, give each its pattern.

    Args:
        folder: may be missing.
        pattern: which files are checkpoints, as for ``pathlib.Path.glob``.
        group: the ranks that take part; the first of them looks. Default: all.
    """

    def look() -> str | None:
        found = [path for path in Path(folder).glob(pattern) if _is_whole(path)]
        return str(max(found, key=_written)) if found else None

    mine = _on_first(f"latest_checkpoint({os.fspath(folder)!r})", group, lambda stop: look())
    name = broadcast_object(mine, current().ranks(group)[0], group)
    return Path(name) if name else None


def _attempt(call: str, group: Group | None, action: Callable[[], T]) -> T:
    """What ``action`` returns; its error on any rank is raised on all. Collective."""
    mine: Exception | None = None
    try:
        result = action()
    except Exception as error:
        mine = error
    told = all_gather_object(None if mine is None else f"{type(mine).__name__}: {mine}", group)
    for rank, text in zip(current().ranks(group), told):
        if text is not None:
            raise CheckpointError(f"{call} failed on rank {rank}: {text}") from mine
    return result


def _on_first(call: str, group: Group | None, action: Callable[[Event], T]) -> T | None:
    """What ``action`` returns on the first rank, and None on the others; its error is raised on all. Collective.

    It may take longer than a collective: a thread does it, and the ranks meet every now and then. If another rank
    is lost meanwhile, it is finished all the same. If this one is interrupted, ``action`` finds its event set.
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
        raise ValueError(f"it has {sorted(state.keys() - {_RNG})}, and not {sorted(missing)}")
    for name, thing in objects.items():
        if not hasattr(thing, "load_state_dict"):
            raise TypeError(
                f"{name}={type(thing).__name__} has no load_state_dict: take the value from what load_checkpoint returns"
            )
    return state


def _restore(thing: Any, state: Any) -> None:
    if isinstance(thing, nn.Module):
        thing = unwrap(thing)
        if not any(key.startswith("module.") for key in thing.state_dict()):
            consume_prefix_in_state_dict_if_present(state, "module.")
    thing.load_state_dict(state)


def _undo(objects: dict[str, Any]) -> Callable[[], list[str]]:
    """A function that puts objects and random states back to where they are now; the names of those where that fails."""
    states = {name: _copied(_state_of(thing)) for name, thing in objects.items() if hasattr(thing, "state_dict")}
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


def _copied(state: Any) -> Any:
    # On the CPU: a GPU may have no room for another copy.
    tensors = {id(leaf): leaf.detach().to("cpu", copy=True) for _, leaf in walk(state) if isinstance(leaf, Tensor)}
    return copy.deepcopy(state, tensors)


def _read(file: Any, **options: Any) -> dict[str, Any]:
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, **options)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        kind = re.search(r"GLOBAL (\S+)", str(error))
        raise ValueError(
            f"torch.load(weights_only=True) refuses it{f', for it holds a {kind[1]}' if kind else ''}; a checkpoint holds numbers, "
            "strings, tensors, lists and plain dicts"
        ) from error
    if not isinstance(state, dict):
        raise ValueError(f"it holds a {type(state).__name__}, not a dict of states")
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
    # A job that was requeued may write while the old one still does, under the same host name and pid.
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{secrets.token_hex(8)}{_UNFINISHED}")
    with temporary.open("xb") as file:
        try:
            with suppress(OSError):  # not every file system can
                fcntl.flock(file, fcntl.LOCK_EX)
            torch.save(state, _Stoppable(file, stop))  # type: ignore[arg-type]  # it needs no more than this has
            file.flush()
            os.fsync(file.fileno())
            _read(temporary, mmap=True)  # what cannot be loaded must not take the place of what can
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # not every file system can
            os.fsync(folder)  # the new name, too, survives a power cut
    finally:
        os.close(folder)


class _Stoppable:
    """A file to which nothing can be written once an event is set."""

    def __init__(self, file: IO[bytes], stop: Event) -> None:
        self._file = file
        self._stop = stop

    def write(self, data: memoryview) -> int:
        for start in range(0, len(data), _PIECE):
            if self._stop.is_set():
                raise InterruptedError("the save was interrupted")
            self._file.write(data[start : start + _PIECE])
        return len(data)

    def flush(self) -> None:
        self._file.flush()


def _prune(path: Path, keep: int) -> None:
    """Delete older relatives of ``path``, and what killed processes of this host have left of them."""
    before, _, after = re.split(r"(\d+)(?=\D*$)", path.name)
    family = rf"{re.escape(before)}\d+{re.escape(after)}"
    here = list(path.parent.iterdir())
    relatives = [other for other in here if re.fullmatch(family, other.name) and _is_whole(other)]
    for other in sorted(relatives, key=_written)[:-keep]:
        other.unlink(missing_ok=True)
    left = rf"\.{family}\.{re.escape(socket.gethostname())}\.\w+{re.escape(_UNFINISHED)}"
    for other in here:
        if re.fullmatch(left, other.name) and _is_left(other):
            other.unlink(missing_ok=True)


def _is_left(temporary: Path) -> bool:
    """Whether the process that wrote a temporary file is gone: nobody holds its lock."""
    with suppress(OSError), temporary.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(file.fileno()).st_size > 0  # an empty one may be about to be locked
    return False


def _is_whole(path: Path) -> bool:
    return path.is_file() and not path.name.startswith(".")


def _written(path: Path) -> int:
    return path.stat().st_mtime_ns


def _sent(data: bytes, group: Group | None) -> bytes | bytearray:
    """The first rank's bytes on every rank, in pieces that every engine carries."""
    first, *others = current().ranks(group)
    size = broadcast_object(len(data), first, group)
    if not others or not size:
        return data
    whole = bytearray(data or size)
    for piece in torch.split(torch.frombuffer(whole, dtype=torch.uint8), _PIECE):
        piece.copy_(broadcast(piece, first, group))
    return whole
