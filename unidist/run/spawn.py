"""``spawn``: the processes of a world, started from Python on this host.

Not called ``spawn.py``: importing a module of that name would bind it over the function ``unidist.spawn``.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, SupportsIndex, TypeVar

from torch.multiprocessing.spawn import ProcessContext, ProcessExitedException, ProcessRaisedException
from torch.multiprocessing.spawn import spawn as start_processes

from unidist import context, settings
from unidist.errors import UnidistError

T = TypeVar("T")
_RETURN = "Return numbers, tensors or a state_dict()."


def spawn(
    fn: Callable[..., T], nprocs: int, args: tuple[Any, ...] = (), backend: context.BackendName = "auto"
) -> list[T]:
    """Run ``fn(*args)`` in ``nprocs`` new processes of this host, each in a world of that size.

    ``init(backend)`` is called in each before ``fn``, so that ``fn`` may call ``unidist.rank()`` and the like (and
    ``unidist.init()``, as it would under a launcher). As with ``torch.multiprocessing.spawn``, ``fn``, ``args`` and the
    results must pickle, and a script needs ``if __name__ == "__main__":`` around the call. Functions of a notebook,
    lambdas and local functions need cloudpickle.

    Args:
        fn: called with ``args`` alone.
        nprocs: number of processes, at least 1.
        args: arguments of ``fn``.
        backend: as for ``init``.

    Returns:
        What ``fn`` returned in each process, in rank order.

    Raises:
        ValueError: ``nprocs`` below 1.
        UnidistError: ``fn``, ``args`` or a result do not pickle.
        torch.multiprocessing.ProcessRaisedException: ``fn`` failed in one process; the others were ended.
        torch.multiprocessing.ProcessExitedException: one process was killed or exited; the others were ended.
    """
    return start(fn, nprocs, args, backend)


def start(
    fn: Callable[..., T], nprocs: int, args: tuple[Any, ...] = (), backend: context.BackendName | None = None
) -> list[T]:
    """Start processes as ``spawn``; without a backend, ``fn`` calls ``init`` itself."""
    if not isinstance(nprocs, SupportsIndex) or nprocs < 1:  # NumPy's integers, too
        raise ValueError(f"spawn(nprocs={nprocs!r}) needs at least 1 process.")
    from unidist.backends import rendezvous
    from unidist.network.addresses import LOOPBACK

    try:
        payload = _pickled((fn, args))
    except Exception as error:
        raise UnidistError(
            f"spawn({getattr(fn, '__qualname__', fn)}): new processes cannot have this function or its arguments: "
            f"{error}. Put the function into a .py file and import it from there, or pip install cloudpickle."
        ) from error
    # The children's store, for as long as they run.
    store = rendezvous.open_on_free_port(LOOPBACK)
    with tempfile.TemporaryDirectory(prefix="unidist-spawn-") as directory:
        arguments = (nprocs, store.port, payload, directory, backend)
        started = start_processes(_run, args=arguments, nprocs=nprocs, join=False)  # type: ignore[no-untyped-call]
        _join(started)
        return [_result(Path(directory) / str(rank)) for rank in range(nprocs)]


def _join(started: ProcessContext) -> None:
    """Wait for all processes; where one fails, the others are ended, and its failure is raised."""
    exited = None
    try:
        while True:
            exited = _exited(started, wait(started.sentinels))
            if started.join():
                break
    except ProcessRaisedException as error:
        raise exited or _first_failure(started, error) from None


def _exited(started: ProcessContext, ended: list[Any]) -> ProcessExitedException | None:
    """Return the error of a process that was killed or exited, of those that have ended."""
    for index in map(started.sentinels.__getitem__, ended):
        process = started.processes[index]
        process.join()  # it has closed its descriptors, and its exit code may not be there yet
        if process.exitcode and not os.path.exists(started.error_files[index]):
            code = process.exitcode
            name = signal.Signals(-code).name if code < 0 else None
            text = f"process {index} terminated with {f'signal {name}' if name else f'exit code {code}'}"
            return ProcessExitedException(text, index, process.pid, code, name)
    return None


def _first_failure(started: ProcessContext, error: ProcessRaisedException) -> ProcessRaisedException:
    """Return the failure of the rank that failed first, not of the one whose process ended first: others fail by it."""
    times = {index: os.stat(path).st_mtime_ns for index, path in enumerate(started.error_files) if os.path.exists(path)}
    index = min(times, key=lambda each: times[each])
    if index == error.error_index:
        return error
    trace = pickle.loads(Path(started.error_files[index]).read_bytes())
    text = f"\n\n-- Process {index} terminated with the following error:\n{trace}"
    return ProcessRaisedException(text, index, started.processes[index].pid)


def _pickled(value: object) -> bytes:
    """By cloudpickle where pickle fails, or refers to a notebook's cells, which another process cannot import."""
    interactive = not hasattr(sys.modules["__main__"], "__file__")
    try:
        data = pickle.dumps(value)
        if not interactive or b"__main__" not in data:
            return data
        failure: Exception = pickle.PicklingError("it is defined in a notebook or at a prompt")
    except Exception as error:
        failure = error
    try:
        import cloudpickle
    except ImportError:
        raise failure from None
    by_value: bytes = cloudpickle.dumps(value)
    return by_value


def _result(path: Path) -> Any:
    if not path.exists():
        raise UnidistError(f"spawn: rank {path.name} ended before its function returned, with status 0: sys.exit(0)?")
    try:
        return pickle.loads(path.read_bytes())
    except Exception as error:
        raise UnidistError(
            f"spawn: what rank {path.name} returned cannot be unpickled in this process: {error}. {_RETURN}"
        ) from error


def _run(
    index: int, nprocs: int, port: int, payload: bytes, directory: str, backend: context.BackendName | None
) -> None:
    os.environ.update(
        {
            settings.LAUNCHER: "spawn",
            "RANK": str(index),
            "WORLD_SIZE": str(nprocs),
            "LOCAL_RANK": str(index),
            "LOCAL_WORLD_SIZE": str(nprocs),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            # To torch this says: the parent is the store's server, so rank 0 connects to it.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
    )
    if backend is not None:
        context.init(backend)
    try:
        fn, args = pickle.loads(payload)
        result = fn(*args)
        try:
            data = _pickled(result)
        except Exception as error:
            raise UnidistError(
                f"spawn: rank {index} returned a {type(result).__name__}, which does not pickle: {error}. {_RETURN}"
            ) from error
    except BaseException:
        # The others fail when this rank leaves: not before its own failure is on record.
        atexit.unregister(context.leave)
        raise
    context.shutdown()
    (Path(directory) / str(index)).write_bytes(data)
