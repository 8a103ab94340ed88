"""Checkpoints that can be resumed on any backend and world size."""

from __future__ import annotations

import copy
import logging
import os
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Event, Thread
from typing import IO, Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from unidist.backends.base import Group
from unidist.checkpoint import archive, files, shards
from unidist.collectives.operations import all_gather_object, broadcast_object
from unidist.context import current, of_world
from unidist.diagnosis.watch.locations import here
from unidist.errors import CheckpointError
from unidist.training.model import assert_in_sync, unwrap
from unidist.tree import is_lazy_view, map_leaves, walk
from unidist.world import Feature

T = TypeVar("T")
#: The key of the ranks' random states.
_RNG = "unidist_rng"
#: The key of the digest of the shards' index.
_INDEX = "unidist_index"
#: In the place of a sharded tensor, the key of its name.
_SHARD = "unidist_shard"
#: Bytes that are broadcast at once.
_PIECE_BYTES = 2**26
#: Interval of the collective in which the other ranks wait while the first one reads or writes.
_PERIOD_S = 0.5
#: How long an interrupted save has to remove its temporary file.
_GRACE_S = 5.0
_log = logging.getLogger(__name__)


def save_checkpoint(
    path: str | os.PathLike[str],
    *,
    keep_last: int | None = None,
    wait: bool = True,
    group: Group | None = None,
    **objects: Any,
) -> None:
    """Write the states of objects to one file, which can be loaded on any backend and world size. Collective.

    Rank 0 writes a temporary file in the same directory and renames it: whenever the process is killed, ``path`` is a
    complete checkpoint, the old one or the new one. If ``path`` is a symbolic link, its target is replaced. A file that
    is replaced keeps its mode. The random states of all ranks (of Python, of NumPy if it is loaded, of torch on the CPU
    and the current GPU) are saved too. The other ranks wait as long as rank 0 lives, whatever ``init()``'s timeout.

    A model that is sharded (FSDP2, DTensors) and its optimizer are written by all ranks into a directory of this name.

    The file is a dict that ``torch.load(path, weights_only=True)`` reads; a model's keys have no ``module.`` prefix.

    ::

        unidist.save_checkpoint(f"runs/step-{step}.pt", keep_last=3, model=model, optimizer=optimizer, loader=train,
        step=step)

    Args:
        path: its directory is created if there is none.
        keep_last: keep this checkpoint and the latest of those whose names differ from its name in the last number
            only, as many in all, and delete the others. The latest are those with the highest numbers.
        wait: return when the file is complete. With ``False``, training goes on while it is written: rank 0 copies the
            states to the CPU first, so that they may change at once. The group's next call of ``save_checkpoint``,
            ``load_checkpoint`` or ``latest_checkpoint``, or ``shutdown()``, waits for the file and raises what went
            wrong; a script that ends without these waits, too, and logs it.
        group: the ranks that take part; the first of them writes. Default: all.
        objects: anything with a ``state_dict``, under names of your choice, and plain values (numbers, strings,
            tensors, lists, dicts). Models that require grad must be equal on all ranks, as ``assert_in_sync`` checks.

    Raises:
        CheckpointError: on every rank, if a rank failed: a full disk, a value that ``weights_only`` does not load, a
            path that is a device, a FIFO, a socket or a directory that is no checkpoint.
        MismatchError: on every rank, if a model's trained parameters differ between ranks.
        ValueError: ``keep_last`` below 1, or with a path that has no number in its name; ``wait=False`` or ``group``
            with a sharded model.
    """
    path = Path(path)
    if keep_last is not None and (keep_last < 1 or not re.search(r"\d", path.name)):
        raise ValueError(
            f"keep_last={keep_last} must be 1 or more, and the file name {path.name!r} must contain a number, which "
            "orders the checkpoints."
        )
    if reserved := objects.keys() & {_RNG, _INDEX, files.FORMAT}:
        raise ValueError(f"save_checkpoint({reserved.pop()}=...): the name is reserved for unidist.")
    of_world(_Writing).of_group(group)
    call = f"save_checkpoint({os.fspath(path)!r})"
    is_first = current().ranks(group)[0] == current().topology.rank

    def collect() -> dict[str, Any]:
        state = {}
        for name, thing in objects.items():
            with _naming(name):
                state[name] = _state_of(thing)
                if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in _leaves(state[name])):
                    raise ValueError("it has tensors on the meta device, which have no values to save")
        return (
            state
            if wait or not is_first or any(map(shards.is_sharded, _leaves(state)))
            else cast(dict[str, Any], _copy_to_cpu(state))
        )

    state = _attempt(call, group, collect)
    for thing in objects.values():
        if isinstance(thing, nn.Module) and any(p.requires_grad for p in thing.parameters()) and not _is_sharded(thing):
            assert_in_sync(thing, group)
    state[_RNG] = all_gather_object(_random_state(), group)

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()  # the writing thread has a stream of its own

    if any(all_gather_object(any(map(shards.is_sharded, _leaves(state))), group)):
        if not wait or group is not None:
            raise ValueError(f"{call}: a model that is sharded (DTensors) is saved by all ranks, which wait for it.")
        _save_sharded(call, path.resolve(), state, keep_last)
        return

    def write(stop: Event) -> None:
        files.write(path.resolve(), state, stop)
        if keep_last is not None:
            files.prune(path, keep_last)

    job = _Job(call, group, write if is_first else None)
    if wait:
        job.result()
    else:
        of_world(_Writing).jobs.append(job)


def load_checkpoint(
    path: str | os.PathLike[str], *, random_states: bool = True, group: Group | None = None, **objects: Any
) -> dict[str, Any]:
    """Restore objects from a file of ``save_checkpoint``, on any backend and world size. Collective.

    All or nothing: if a rank fails, the objects and the random states of every rank are restored to what they were
    before, except objects without a ``state_dict``. For this each rank copies their current states to the CPU, but not
    those of optimizers, and of models whose every tensor has one of the same name and shape in the file.

    A rank that sees the same file under this path maps it into memory; to others rank 0 broadcasts it. With as many
    ranks as saved it, each gets its own random states back; otherwise rank ``r`` gets those of rank ``r`` modulo the
    number of ranks that saved it.

    A dict that was saved without unidist can be loaded too; a model's keys may have the prefix ``module.``.

    Args:
        path: the file, as rank 0 sees it.
        random_states: whether to restore the random states; no when a new run starts from old weights.
        group: the ranks that take part; the first of them reads. Default: all.
        objects: what to restore, under the names of ``save_checkpoint``; models wrapped or not.

    Returns:
        The other values of the file, tensors on the CPU.

    Raises:
        CheckpointError: on every rank: no such file, one that is truncated, damaged, of a newer format or not a
            checkpoint, or a state that a rank's object does not load.
    """
    of_world(_Writing).of_group(group)
    call = f"load_checkpoint({os.fspath(path)!r})"
    path = files.found(Path(path))
    opened, has_shards = _open(call, path, group)
    with opened as file:
        state = _attempt(call, group, lambda: _checked(files.read(file), objects))
    if has_shards:
        state = _attempt(call, group, lambda: _with_shards(state, objects, path))
    fitting = [name for name, thing in objects.items() if _fits(thing, state[name])]
    kept = [name for name, thing in objects.items() if hasattr(thing, "state_dict") and name not in fitting]
    undo: Callable[[], list[str]] = list

    def restore(names: Iterable[str]) -> None:
        for name in names:
            # What keeps a tensor must not keep one that is mapped: a file system may lose the file.
            saved = state.pop(name) if name in fitting else _copy_to_cpu(state.pop(name))
            with _naming(name):
                _restore(objects[name], saved)

    def restore_kept() -> None:
        nonlocal undo
        undo = _undo({name: objects[name] for name in kept})
        restore(kept)
        saved = state.pop(_RNG, None)
        if saved and random_states:
            index = current().ranks(group).index(current().topology.rank)
            _set_random_state(saved[index % len(saved)])

    try:
        _attempt(call, group, restore_kept)
        _attempt(call, group, lambda: restore([name for name in objects if name not in (*kept, *fitting)]))
        rest = _attempt(call, group, lambda: _copy_to_cpu({n: v for n, v in state.items() if n not in fitting}))
        _attempt(call, group, lambda: restore(fitting))
    except Exception as error:
        if changed := [*undo(), *(name for name in fitting if name not in state)]:
            raise CheckpointError(f"{error}. On this rank these could not be restored: {changed}") from error
        raise
    return cast(dict[str, Any], rest)


def latest_checkpoint(
    directory: str | os.PathLike[str], pattern: str = "*.pt", group: Group | None = None
) -> Path | None:
    """Return the latest checkpoint of a directory as rank 0 sees it, or None; the same on every rank. Collective.

    The latest is the one with the highest step number, which is the last number in its name: 10 in ``run2-step10.pt``.
    Of equal numbers the one that was written last counts, as it does among names without a number, which come after
    all others. If several runs share a directory, give each a pattern of its own.

    Args:
        directory: may be missing.
        pattern: which files are checkpoints, as for ``pathlib.Path.glob``.
        group: the ranks that take part; the first of them reads the directory. Default: all.
    """

    of_world(_Writing).of_group(group)
    call = f"latest_checkpoint({os.fspath(directory)!r})"
    mine = _on_first(call, group, lambda stop: files.latest(Path(directory), pattern))
    return broadcast_object(mine, current().ranks(group)[0], group)


def _attempt(call: str, group: Group | None, action: Callable[[], T]) -> T:
    """Return what ``action`` returns; its error on any rank is raised on all. Collective."""
    mine: Exception | None = None
    try:
        result = action()
    except Exception as error:
        mine = error
    _raise_first(call, group, all_gather_object(_text(mine), group), mine)
    return result


def _text(error: BaseException | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"


def _raise_first(call: str, group: Group | None, errors: list[str | None], mine: BaseException | None) -> None:
    """Raise the error of the lowest rank that has one, if any."""
    for rank, text in zip(current().ranks(group), errors):
        if text is not None:
            raise CheckpointError(f"{call} failed on rank {rank}: {text} (called at {here()})") from mine


class _Job(Generic[T]):
    """What some ranks of a group do in a thread, while the others wait or do something else.

    It may take longer than the timeout of a collective: the ranks wait in a series of short ones. If another rank is
    lost meanwhile, it is completed. If this one is interrupted, the action's event is set.

    Args:
        call: what the user has called, for errors.
        group: the ranks that wait for it.
        action: of this rank; None: nothing.
    """

    def __init__(self, call: str, group: Group | None, action: Callable[[Event], T] | None) -> None:
        self.call = call
        self.group = group
        self.process = os.getpid()
        self.stop = Event()
        self.done: Future[T | None] = Future()
        self.thread: Thread | None = None
        if action is None:
            self.done.set_result(None)
        else:
            self.thread = Thread(target=self._run, args=(action,), name="unidist-checkpoint", daemon=True)
            self.thread.start()

    def _run(self, action: Callable[[Event], T]) -> None:
        try:
            self.done.set_result(action(self.stop))
        except BaseException as error:
            self.done.set_exception(error)

    def result(self) -> T | None:
        """Return what the action returned on this rank; its error on any rank is raised on all. Collective."""
        ended, errors = [False], list[str | None]()
        try:
            while not all(ended):
                has_ended = self.wait(_PERIOD_S)
                mine = (has_ended, _text(self.done.exception()) if has_ended else None)
                ended, errors = map(list, zip(*all_gather_object(mine, self.group)))
        except Exception:
            self.wait()
            raise
        except BaseException:  # Ctrl-C, or another signal's
            self.stop.set()
            self.wait(_GRACE_S)
            raise
        _raise_first(self.call, self.group, errors, self.done.exception())
        return self.done.result()

    def wait(self, timeout: float | None = None) -> bool:
        """Return whether this rank's action has ended. Not collective."""
        has_ended = bool(wait_for([self.done], timeout).done)
        if has_ended and self.thread is not None:
            self.thread.join()  # it frees copies of tensors, which at the interpreter's end would abort the process
        return has_ended


class _Writing(Feature):
    """Checkpoints that may still be written, on every rank of their groups."""

    def __init__(self) -> None:
        self.jobs: list[_Job[None]] = []

    def of_group(self, group: Group | None) -> None:
        """Wait for what the group writes, and raise its error on all ranks. Collective."""
        ranks = current().ranks(group)
        for job in [job for job in self.jobs if current().ranks(job.group) == ranks]:
            self.jobs.remove(job)
            job.result()

    def finish(self) -> None:
        while self.jobs:
            self.jobs.pop(0).result()

    def close(self) -> None:
        # The other ranks may be gone: this one completes its files.
        jobs = [job for job in self.jobs if job.process == os.getpid()]  # a forked child has no threads
        self.jobs.clear()
        for job in jobs:
            job.wait()
            if error := job.done.exception():
                _log.error("%s failed: %s: %s", job.call, type(error).__name__, error)


def _on_first(call: str, group: Group | None, action: Callable[[Event], T]) -> T | None:
    """Return the result of ``action`` on the first rank, None on the others; its error is raised on all. Collective."""
    ranks = current().ranks(group)
    if len(ranks) == 1:
        return _attempt(call, group, lambda: action(Event()))
    return _Job(call, group, action if current().topology.rank == ranks[0] else None).result()


# ------------------------------------------------------------------------------------ sharded models
def _leaves(tree: Any) -> list[Any]:
    return [leaf for _, leaf in walk(tree)]


def _is_sharded(model: nn.Module) -> bool:
    return any(map(shards.is_sharded, model.parameters()))


def _save_sharded(call: str, path: Path, state: dict[str, Any], keep_last: int | None) -> None:
    """Write a directory: the shards of all ranks, and a file with all else. Collective over the world."""
    made = _on_first(call, None, lambda stop: files.Unfinished(path, directory=True))
    directory = broadcast_object(made.path if made else None, current().ranks(None)[0])
    assert directory is not None  # else an error has been raised
    sharded = {_key(place): leaf for place, leaf in walk(state) if shards.is_sharded(leaf)}

    def complete(stop: Event) -> None:
        places = iter([(_key(place), leaf) for place, leaf in walk(state)])
        rest = map_leaves(lambda _: _without_shard(*next(places)), state)
        files.write(directory / files.REST, {_INDEX: shards.digest(directory), **rest}, stop)
        assert made is not None
        made.finish()
        if keep_last is not None:
            files.prune(path, keep_last)

    def save() -> None:
        with files.room(path, sharded):
            shards.save(sharded, directory)

    with made or nullcontext():
        _attempt(call, None, save)
        _on_first(call, None, complete)


def _key(place: tuple[Any, ...]) -> str:
    return "/".join(map(str, place))


def _without_shard(key: str, leaf: Any) -> Any:
    return {_SHARD: key, "shape": list(leaf.shape), "dtype": str(leaf.dtype)} if shards.is_sharded(leaf) else leaf


def _with_shards(state: dict[str, Any], objects: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Return the states of objects with this rank's shards; other states that have any are left out."""
    filled: dict[str, torch.Tensor] = {}

    def fill(saved: Any, own: Any, params: list[Tensor]) -> Any:
        if not isinstance(saved, dict):
            return [fill(value, None, params) for value in saved] if isinstance(saved, list) else saved
        if _SHARD not in saved:
            filling = {}
            for key, value in saved.items():
                mine = own.get(key) if isinstance(own, Mapping) else None
                # What an optimizer keeps of a parameter is sharded as that is.
                default = params[key] if isinstance(key, int) and key < len(params) else own
                filling[key] = fill(value, default if mine is None else mine, params)
            return filling
        if not isinstance(own, Tensor) or list(own.shape) != saved["shape"]:
            here = f"this one has {list(own.shape)}" if isinstance(own, Tensor) else "there is none here"
            raise ValueError(f"{saved[_SHARD]} of the checkpoint has shape {saved['shape']}, and {here}")
        dtype = getattr(torch, saved["dtype"].removeprefix("torch."))
        return filled.setdefault(saved[_SHARD], torch.empty_like(own.detach(), dtype=dtype))

    found: dict[str, Any] = {}
    for name, saved in state.items():
        if name == _INDEX:
            continue
        thing = objects.get(name)
        if thing is None:
            if not any(place[-1] == _SHARD for place, _ in walk(saved) if place):
                found[name] = saved
            continue
        params = [p for entry in thing.param_groups for p in entry["params"]] if hasattr(thing, "param_groups") else []
        found[name] = fill(saved, _state_of(thing) if hasattr(thing, "state_dict") else None, params)
    shards.load(filled, directory, state.get(_INDEX), archive.verify)
    return found


# ------------------------------------------------------------------------------------ the file on every rank
def _open(call: str, path: Path, group: Group | None) -> tuple[IO[bytes], bool]:
    """Return the first rank's file on every rank: opened where the rank sees it, else in memory; and whether it is that
    of a directory with shards. Collective.
    """
    ranks = current().ranks(group)
    me = current().topology.rank
    opened = _on_first(call, group, lambda stop: files.opened(path))
    wanted = broadcast_object(opened and opened[1], ranks[0], group)
    assert wanted is not None  # else an error has been raised
    file = opened[0] if opened else _open_same(path, wanted)
    identity = _identity(file) if file else None
    sees = all_gather_object(identity, group)
    readers = [rank for rank, seen in zip(ranks, sees) if seen == identity]
    with ExitStack() as stack:
        mine = stack.enter_context(file) if file else None
        verify = (lambda stop: archive.verify(mine, readers.index(me), len(readers))) if mine else None
        _Job(call, group, verify).result()
        sent = _send_file(call, mine, wanted.size, group) if None in sees else None
        stack.pop_all()
    return cast(IO[bytes], sent or mine), wanted.has_shards


def _identity(file: IO[bytes]) -> tuple[int, int, int]:
    """Return what is equal for ranks that read one file through one page cache."""
    status = os.fstat(file.fileno())
    return current().topology.node_rank, status.st_dev, status.st_ino


def _open_same(path: Path, wanted: files.Content) -> IO[bytes] | None:
    """Return the file, if this rank sees it and it is the same one."""
    with suppress(OSError, ValueError):
        file, found = files.opened(path)
        if found == wanted:
            return file
        file.close()
    return None


def _send_file(call: str, file: IO[bytes] | None, size: int, group: Group | None) -> IO[bytes]:
    """Send the first rank's file to the memory of the ranks that have none. Collective."""
    first = current().ranks(group)[0]
    is_first = current().topology.rank == first
    received = None if file else os.fdopen(os.memfd_create("unidist-checkpoint"), "w+b", buffering=0)
    buffer = bytearray(min(size, _PIECE_BYTES))
    failed: list[OSError] = []
    for start in range(0, size, _PIECE_BYTES):
        piece = memoryview(buffer)[: min(_PIECE_BYTES, size - start)]
        try:
            if is_first and file:
                os.preadv(file.fileno(), [piece], start)
            current().broadcast(torch.frombuffer(piece, dtype=torch.uint8), first, group)
            if received:
                received.write(piece)
        except OSError as error:  # the others go on to wait
            failed.append(error)

    def check() -> IO[bytes]:
        if failed:
            raise failed[0]
        return cast(IO[bytes], file or received)

    return _attempt(call, group, check)


# ------------------------------------------------------------------------------------ states
@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Errors inside say which object it is."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{name}=: {type(error).__name__}: {error}") from error


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


def _fits(thing: Any, state: Any) -> bool:
    """Return whether loading the state is to copy tensors into others of the same shape, and nothing that may fail."""
    if not isinstance(thing, nn.Module) or not isinstance(state, Mapping):
        return False
    model = unwrap(thing)
    own = model.state_dict()
    theirs = {key.removeprefix("module."): value for key, value in state.items()}
    return (
        all(map(_loads_as_torch_does, model.modules()))
        and own.keys() == theirs.keys()
        and all(
            isinstance(theirs[key], Tensor)
            and isinstance(value, Tensor)
            and not (value.is_nested or theirs[key].is_nested)
            and (value.shape, value.layout) == (theirs[key].shape, theirs[key].layout)
            for key, value in own.items()
        )
    )


def _loads_as_torch_does(module: nn.Module) -> bool:
    methods = (module.load_state_dict, module._load_from_state_dict, module.get_extra_state)
    return all(method.__module__.startswith("torch.nn.") for method in methods) and not (
        module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks
    )


def _restore(thing: Any, state: Any) -> None:
    if isinstance(thing, nn.Module):
        thing = unwrap(thing)
        if not any(key.startswith("module.") for key in thing.state_dict()):
            consume_prefix_in_state_dict_if_present(state, "module.")
    thing.load_state_dict(state)


def _undo(objects: dict[str, Any]) -> Callable[[], list[str]]:
    """Return a function that restores the current states of objects; it returns the names of those where that fails."""
    states = {
        # An optimizer's load_state_dict changes none of the tensors that it has.
        name: _state_of(thing) if isinstance(thing, torch.optim.Optimizer) else _copy_to_cpu(_state_of(thing))
        for name, thing in objects.items()
    }
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
    """Return a copy that shares nothing with the state; tensors that share memory there share it here, too."""
    # On the CPU: a GPU may have no room for another copy.
    storages: dict[int, torch.UntypedStorage] = {}
    tensors: dict[int, Any] = {}
    for _, leaf in walk(state):
        if not isinstance(leaf, Tensor) or id(leaf) in tensors:
            continue
        source = leaf.detach()
        if shards.is_sharded(source):
            tensors[id(leaf)] = source.clone()
            continue
        if is_lazy_view(leaf):  # a tensor of the storage would have lost that
            tensors[id(leaf)] = source.resolve_conj().resolve_neg().to("cpu", copy=True)
            continue
        if leaf.layout != torch.strided or leaf.is_nested or type(source) is not Tensor:
            tensors[id(leaf)] = source.to("cpu", copy=True)
            continue
        storage = source.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = _copy_of(storage)
        copied = torch.empty(0, dtype=leaf.dtype, device="cpu")
        tensors[id(leaf)] = copied.set_(storages[storage._cdata], leaf.storage_offset(), leaf.shape, leaf.stride())
    return copy.deepcopy(state, tensors)


def _copy_of(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    copied: torch.UntypedStorage = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
    return copied.copy_(storage)


def _random_state() -> dict[str, Any]:
    version, words, *rest = random.getstate()
    # torch.load(weights_only=True) takes 1 us for each number that is in no tensor.
    state: dict[str, Any] = {
        "python": [version, torch.tensor(words, device="cpu"), *rest],
        "torch": torch.get_rng_state(),
    }
    numpy = sys.modules.get("numpy")
    if numpy:
        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = [name, torch.tensor(keys.tolist(), device="cpu"), *rest]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state(current().device if current().device.type == "cuda" else "cuda")
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    version, words, *rest = state["python"]
    random.setstate((version, tuple(torch.as_tensor(words).tolist()), *rest))
    torch.set_rng_state(state["torch"])
    numpy = sys.modules.get("numpy")
    if numpy and "numpy" in state:
        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, torch.as_tensor(keys).tolist(), *rest))
    if "cuda" in state and current().device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], current().device)
