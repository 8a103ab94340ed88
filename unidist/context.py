"""The one global: the engine that ``init()`` started."""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal, NamedTuple

import torch

from unidist import knobs
from unidist.backends.base import Backend, Start
from unidist.backends.joined import Joined
from unidist.errors import BackendError, NotInitializedError, WorldSizeError
from unidist.seed import set_seed
from unidist.topology import EXPLICIT, Launch, allocated_tasks, detect
from unidist.topology import NONE as NO_LAUNCHER


class Engine(NamedTuple):
    """Where an engine's class is; it is imported when the engine is first asked for."""

    module: str
    attribute: str
    #: The engine can be running already only if this module was imported.
    library: str


BACKENDS = {
    "single": Engine("unidist.backends.single", "SingleBackend", ""),
    "gloo": Engine("unidist.backends.torch_distributed", "TorchBackend", "torch.distributed"),
    "nccl": Engine("unidist.backends.torch_distributed", "TorchBackend", "torch.distributed"),
    "mpi": Engine("unidist.backends.torch_distributed", "TorchBackend", "torch.distributed"),
    "horovod": Engine("unidist.backends.horovod", "HorovodBackend", "horovod.torch"),
}

#: What ``init`` and ``spawn`` take for ``backend``.
BackendName = Literal["auto", "single", "gloo", "nccl", "mpi", "horovod"]

_log = logging.getLogger("unidist")
_current: Backend | None = None
_asked: dict[str, object] = {}
_sessions = 0
_closers: list[Callable[[], None]] = []
_process = os.getpid()


def init(
    backend: BackendName = "auto",
    *,
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: float | timedelta | None = None,
    device: str | torch.device | None = None,
    seed: int | None = None,
) -> None:
    """Join the world that the launcher declared, on an engine. Collective.

    A second call is a no-op unless it asks for something else. Logs what was picked and why, once,
    on rank 0, to the logger ``unidist`` at level INFO.

    Args:
        backend: ``single``, ``gloo``, ``nccl``, ``mpi`` (under an MPI launcher), ``horovod``, or ``auto``: the value of ``UNIDIST_BACKEND``
            if set; else a process group or Horovod that is already initialised; else Horovod under
            horovodrun if it is installed; else ``nccl`` where CUDA is available and
            ``gloo`` elsewhere; ``single`` without a launcher. A backend that was named is never replaced.
        init_method: where the processes meet, as for ``torch.distributed.init_process_group``: ``env://``,
            ``tcp://host:port`` or ``file:///path``. Default: what the launcher offers.
        rank, world_size: this process's place, both or neither. Default: from the launcher.
        timeout: seconds (or a timedelta) after which start-up and collectives fail for want of a peer. Default:
            ``UNIDIST_TIMEOUT``, else 300 s for start-up, and for collectives torch's default, or none on Horovod.
        device: what ``device()`` returns. Default: this process's own GPU for ``nccl``, ``horovod`` and
            ``single`` where CUDA is available, else the CPU.
        seed: passed to ``set_seed``: every rank draws the same numbers, dropout masks among them; for other ones on each
            rank call ``set_seed(seed + rank())`` when the model is made.

    Raises:
        LaunchError: the launcher's variables make no sense.
        BackendError: the engine cannot start here, or another one is running already.
        WorldSizeError: the engine's world has another size than the launcher declared.
    """
    global _current, _asked, _sessions
    asked: dict[str, object] = {
        "backend": None if backend == "auto" else backend,
        "init_method": init_method,
        "rank": rank,
        "world_size": world_size,
        "timeout": None if timeout is None else _timeout(timeout),
        "device": None if device is None else torch.device(device),
    }
    if _current is not None:
        _refuse_change(asked, _current)
    else:
        launch = _declared(init_method, rank, world_size)
        start = Start(
            launch, init_method, _timeout(timeout), None if device is None else torch.device(device), _sessions
        )
        name = backend if backend != "auto" else knobs.backend(os.environ)
        _sessions += 1  # attempts count: one that failed has left its traces at the meeting point
        started, why = _start(name, start)
        _guard(started, launch)
        _current, _asked = started, asked
        if name == "auto" and world_size is None and (tasks := allocated_tasks(os.environ)) > 1:
            _log.warning(
                "this process trains alone in a Slurm allocation of %d tasks: start the script with 'srun python script.py', or "
                "set %s=none if one process is meant.", tasks, knobs.LAUNCHER,
            )  # fmt: skip
        if started.topology.rank == 0:
            place = started.topology
            _log.info(
                "backend %s (%s): %d ranks on %d nodes, launcher %s (%s), device %s",
                started.name, why, place.world_size, place.num_nodes, place.launcher, launch.evidence, started.device,
            )  # fmt: skip
    if seed is not None:
        set_seed(seed)


def shutdown() -> None:
    """Leave the world; ``init()`` may be called again afterwards. Collective. No-op when not initialised.

    Waits for the other ranks, which may still be at work, unless an exception is on its way through
    this process (as in a ``finally`` block). An engine that ``init()`` found running is left running.
    A script that ends without this call leaves without waiting.
    """
    if _current is not None and sys.exc_info()[0] is None:
        _current.barrier()
    leave()


def before_leaving(close: Callable[[], None]) -> Callable[[], None]:
    """Call this each time before the engine is left: it has something open on it. A decorator."""
    _closers.append(close)
    return close


@atexit.register
def leave() -> None:
    """``shutdown`` without waiting for the other ranks."""
    global _current, _asked
    for close in _closers:
        close()
    backend, _current, _asked = _current, None, {}
    # A child that was forked off is no rank: it leaves the parent's engine alone.
    if backend is not None and os.getpid() == _process:
        backend.shutdown()


def is_initialized() -> bool:
    """Whether this process is in a world."""
    return _current is not None


def current() -> Backend:
    """The running engine.

    Raises:
        NotInitializedError: ``init()`` has not been called, or ``shutdown()`` has.
    """
    if _current is None:
        raise NotInitializedError("there is no world yet: call unidist.init() first.")
    return _current


def in_join() -> bool:
    """Whether a ``unidist.join`` block is running."""
    return isinstance(_current, Joined)


@contextmanager
def replaced(backend: Backend) -> Iterator[None]:
    """Inside, ``current()`` is another engine over the running one."""
    global _current
    before, _current = _current, backend
    try:
        yield
    finally:
        if _current is backend:  # not after a shutdown
            _current = before


def rank() -> int:
    """This process's rank, from 0."""
    return current().topology.rank


def world_size() -> int:
    """The number of processes."""
    return current().topology.world_size


def local_rank() -> int:
    """This process's rank among those of its node, from 0."""
    return current().topology.local_rank


def local_size() -> int:
    """The number of processes on this node."""
    return current().topology.local_size


def node_rank() -> int:
    """This node's rank, from 0."""
    return current().topology.node_rank


def num_nodes() -> int:
    """The number of nodes."""
    return current().topology.num_nodes


def device() -> torch.device:
    """The device for this process's model and data."""
    return current().device


def is_main() -> bool:
    """Whether this is rank 0, which prints and saves."""
    return rank() == 0


def backend_name() -> str:
    """The running engine: ``single``, ``gloo``, ``nccl``, ``mpi`` or ``horovod``."""
    return current().name


# ---------------------------------------------------------------------------------------------
def _declared(init_method: str | None, rank: int | None, world_size: int | None) -> Launch:
    if (rank is None) != (world_size is None):
        raise ValueError(f"init(rank={rank}, world_size={world_size}): give both, or neither to follow the launcher.")
    if rank is None or world_size is None:
        return detect(os.environ)
    if not 0 <= rank < world_size:
        raise ValueError(f"init(rank={rank}, world_size={world_size}): ranks run from 0 to world_size - 1.")
    if init_method is None and world_size > 1:
        raise ValueError(
            f"init(rank={rank}, world_size={world_size}) needs init_method=, for example 'tcp://host:port' of rank 0."
        )
    return Launch(EXPLICIT, rank, world_size)


def _timeout(timeout: float | timedelta | None) -> timedelta | None:
    if timeout is None:
        return knobs.timeout(os.environ)
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not 0 < seconds < 1e9:
        raise ValueError(f"init(timeout={timeout}) must be a number of seconds above 0 and below 1e9.")
    return timedelta(seconds=seconds)


def _class(name: str) -> type[Backend]:
    if name not in BACKENDS:
        raise BackendError(f"backend {name!r} is unknown: use auto, {', '.join(BACKENDS)}.")
    engine = BACKENDS[name]
    found: type[Backend] = getattr(importlib.import_module(engine.module), engine.attribute)
    return found


def _start(name: str, start: Start) -> tuple[Backend, str]:
    """The engine, adopted or started, and the reason for the choice."""
    running = [name] if name != "auto" else [name for name, row in BACKENDS.items() if row.library in sys.modules]
    for candidate in running:
        adopted = _class(candidate).adopt(start)
        if adopted and name in ("auto", adopted.name):
            return adopted, "already initialised"
        if adopted:
            raise BackendError(
                f"init({name!r}): a process group on {adopted.name!r} is already initialised; ask for that."
            )
    why = "asked for"
    if name == "auto":
        name, why = _pick(start)
    kind = _class(name)
    if kind.needs_launcher and start.launch.launcher is NO_LAUNCHER:
        raise BackendError(
            f"backend {name!r} needs a launcher and found none: start the script with "
            f"'horovodrun -np 2 python script.py' or 'torchrun --nproc-per-node 2 script.py'."
        )
    return kind.start(name, start), why


def _pick(start: Start) -> tuple[str, str]:
    launcher = start.launch.launcher
    if launcher is NO_LAUNCHER and start.init_method is None:
        return "single", "no launcher"
    if launcher.engine and importlib.util.find_spec(launcher.engine):
        return launcher.engine, f"started by {launcher.name}"
    cuda = torch.cuda.is_available() and (start.device is None or start.device.type == "cuda")
    return ("nccl", "CUDA is available") if cuda else ("gloo", "no CUDA in use")


def _guard(backend: Backend, launch: Launch) -> None:
    """Refuse N lonely jobs: the engine's world must have the size that the launcher declared."""
    real, declared = backend.world_size(), launch.world_size
    adopted_alone = launch.launcher is NO_LAUNCHER
    if real == declared or adopted_alone:
        return
    backend.shutdown()
    raise WorldSizeError(
        f"{backend.name} made a world of {real}, but {launch.launcher.name} declared {declared} ({launch.evidence}): "
        f"each process would have trained alone. Let unidist.init() start the engine, use a library built for this "
        f"launcher, or set {knobs.LAUNCHER}=none if one process is meant."
    )


def _refuse_change(asked: dict[str, object], running: Backend) -> None:
    was = {**_asked, "backend": running.name}
    for key, value in asked.items():
        if value is not None and value != was.get(key):
            raise BackendError(
                f"init({key}={str(value)!r}) came after init() with {key}={str(was.get(key))!r}: call shutdown() in between."
            )
