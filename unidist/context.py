"""The only global state: the running world."""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import torch

from unidist import settings
from unidist.backends.base import Backend, Start
from unidist.backends.joined import Joined
from unidist.diagnosis.operations import format_ranks
from unidist.diagnosis.watch.locations import error_location
from unidist.diagnosis.watch.watch import Watch
from unidist.errors import BackendError, CollectiveError, NotInitializedError, UnidistError, WorldSizeError
from unidist.launch import membership
from unidist.launch.topology import EXPLICIT, Launch, allocated_tasks, detect, master
from unidist.launch.topology import NONE as NO_LAUNCHER
from unidist.network import open_files
from unidist.network.connection import new_secret
from unidist.network.processes import Process
from unidist.seed import set_seed
from unidist.world import Feature, World, hook_of_no_world

if TYPE_CHECKING:
    from unidist.diagnosis.timeline.recorder import Timeline


class BackendEntry(NamedTuple):
    """Where a backend's class is; it is imported when the backend is first used."""

    module: str
    attribute: str
    #: The backend can be running already only if this module has been imported.
    library: str


BACKENDS = {
    "single": BackendEntry("unidist.backends.single", "SingleBackend", ""),
    "gloo": BackendEntry("unidist.backends.torch_distributed", "TorchBackend", "torch.distributed"),
    "nccl": BackendEntry("unidist.backends.torch_distributed", "TorchBackend", "torch.distributed"),
    "mpi": BackendEntry("unidist.backends.torch_distributed", "TorchBackend", "torch.distributed"),
    "horovod": BackendEntry("unidist.backends.horovod", "HorovodBackend", "horovod.torch"),
    "threads": BackendEntry("unidist.backends.threads", "ThreadsBackend", "unidist.testing"),
}

#: The reason for the choice of a backend that runs already.
_ADOPTED = "already initialised"
F = TypeVar("F", bound=Feature)
#: What ``init`` and ``spawn`` take for ``backend``.
BackendName = Literal["auto", "single", "gloo", "nccl", "mpi", "horovod", "threads"]

_log = logging.getLogger("unidist")
_world: World | None = None
#: How often ``init`` was called in this process.
_attempts = 0
#: The arguments of the last world, for ``rejoin``.
_last: dict[str, Any] = {}


def init(
    backend: BackendName = "auto",
    *,
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: float | timedelta | None = None,
    device: str | torch.device | None = None,
    seed: int | None = None,
    export_env: bool = False,
) -> None:
    """Join the world that the launcher declared. Collective.

    A second call is a no-op, except for ``seed``, and an error if it passes other arguments. Rank 0 logs the backend
    and the reason for it to the logger ``unidist`` at level INFO.

    Args:
        backend: ``single``, ``gloo``, ``nccl``, ``mpi`` (under an MPI launcher), ``horovod``, ``threads`` (inside
            ``unidist.testing.world``), or ``auto``: the value of ``UNIDIST_BACKEND`` if set; else a process group or
            Horovod that is already initialised; else Horovod under horovodrun if it is installed; else ``nccl`` where
            CUDA is available and ``gloo`` elsewhere; ``single`` without a launcher. A backend that is named is never
            replaced by another one.
        init_method: the rendezvous, as for ``torch.distributed.init_process_group``: ``env://``, ``tcp://host:port`` or
            ``file:///path``. Default: that of the launcher.
        rank, world_size: both or neither. Default: from the launcher.
        timeout: seconds (or a timedelta) after which start-up and collectives fail if a rank is missing. Default:
            ``UNIDIST_TIMEOUT``, else 300 s for start-up, and for collectives torch's default, 30 min on Horovod too.
        device: what ``device()`` returns. Default: this process's GPU for ``nccl``, ``horovod`` and
            ``single`` where CUDA is available, else the CPU.
        seed: passed to ``set_seed``: every rank draws the same random numbers, including dropout masks; for different
            ones call ``set_seed(seed + rank())`` after the model has been created.
        export_env: set torchrun's variables in ``os.environ`` (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...) until
            ``shutdown``, so that Accelerate, Trainer, Fabric and DeepSpeed find the world under every launcher.

    Raises:
        LaunchError: the launcher's variables are incomplete or contradict each other.
        BackendError: the backend cannot start here, or another one is running already.
        WorldSizeError: the backend's world size is not the one that the launcher declared.
    """
    with error_location("init()"):
        _init(backend, init_method, rank, world_size, timeout, device, export_env, default_group=True)
    if seed is not None:
        set_seed(seed)
    path = settings.timeline(os.environ, of_horovod=current().name != "horovod")
    if path and _running().timeline is None:
        timeline(path)


def init_beside_default_group(backend: BackendName) -> None:
    """Initialize without torch's default process group: a script may make and destroy that one, before and after.

    The drop-in starts so, as Horovod's users expect. Collective.
    """
    _init(backend, default_group=False)


def _init(
    backend: BackendName,
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: float | timedelta | None = None,
    device: str | torch.device | None = None,
    export_env: bool = False,
    *,
    default_group: bool,
) -> None:
    global _world
    arguments: dict[str, object] = {
        "backend": None if backend == "auto" else backend,
        "init_method": init_method,
        "rank": rank,
        "world_size": world_size,
        "timeout": None if timeout is None else _timeout(timeout),
        "device": None if device is None else torch.device(device),
        "export_env": export_env or None,
    }
    if _world is not None:
        _world.arguments = _world.arguments or arguments
        _refuse_change(arguments, _world)
        return
    stall, is_checked = settings.stall(os.environ), settings.check(os.environ)
    name = backend if backend != "auto" else settings.backend(os.environ)
    wanted = None if device is None else torch.device(device)
    hook_before = hook_of_no_world()
    try:
        start, started, why = _meet(name, init_method, rank, world_size, _timeout(timeout), wanted, default_group)
    except UnidistError as error:
        raise error.with_traceback(None) from error.__cause__  # the message says all
    launch = start.launch
    _guard(started, launch)
    again = {
        "backend": backend, "timeout": timeout, "device": device, "export_env": export_env,
        "default_group": default_group,
    }  # fmt: skip
    world = World(started, arguments, again, hook_before)
    world.ends_mpi = why is not _ADOPTED and started.topology.world_size > 1
    try:
        if export_env and (launch.launcher is not NO_LAUNCHER or started.topology.world_size > 1):
            world.restore_env = _export(started, start)
        if started.topology.world_size > 1 and started.watch is None:
            _introduce(started, start.start_timeout.total_seconds())
            world.watch = Watch(started, stall)
    except BaseException:
        world.close(alone=False)
        raise
    started.compares_all = is_checked
    _world = world
    if name == "auto" and world_size is None and (tasks := allocated_tasks(os.environ)) > 1:
        _log.warning(
            "this process trains alone in a Slurm allocation of %d tasks: start the script with 'srun python "
            "script.py', or set %s=none if a single process is intended.",
            tasks,
            settings.LAUNCHER,
        )
    if started.topology.rank == 0:
        _report_start(started, launch, why)


def _report_start(backend: Backend, launch: Launch, why: str) -> None:
    """Log which backend has started and why, and warn of what may go wrong with it. On rank 0."""
    _warn_of_horovod(backend, launch)
    _warn_of_libraries(backend, launch)
    topology = backend.topology
    _log.info(
        "backend %s (%s): %d ranks on %d nodes, launcher %s (%s), device %s",
        backend.name,
        why,
        topology.world_size,
        topology.num_nodes,
        topology.launcher,
        launch.evidence,
        backend.device,
    )


def _meet(
    name: str,
    init_method: str | None,
    rank: int | None,
    world_size: int | None,
    timeout: timedelta | None,
    device: torch.device | None,
    default_group: bool,
) -> tuple[Start, Backend, str]:
    """Start the backend, in the next generation of an elastic run; its arguments, and the reason for the choice."""
    global _attempts
    member = membership.current() if init_method is None and rank is None else None
    while True:
        if member is not None:
            member.take()
        launch = _declared(init_method, rank, world_size)
        # Each generation has a store of its own.
        start = Start(launch, init_method, timeout, device, default_group, 0 if member else _attempts)
        open_files.raise_limit(open_files.of_rank(launch.world_size))
        _attempts += 1  # failed attempts count: they have left keys in the store
        try:
            return start, *_start(name, start)
        except UnidistError as error:
            if member is None or not member.lost(wait=membership.VERDICT_S):
                raise
            member.ask(failed=str(error))


def _introduce(backend: Backend, timeout: float) -> None:
    """Let every rank know where the others run, and the job's secret. Collective.

    The engine broadcasts the secret of rank 0: whoever can read the store of the rendezvous does not learn it.

    Raises:
        BackendError: the ranks have different versions of unidist, or not all of them came in time.
    """
    from unidist import __version__
    from unidist.backends.rendezvous import in_time

    rows = [json.loads(text) for text in backend.exchange(json.dumps([*Process.current(), __version__]))]
    by_version: dict[str, list[int]] = {}
    for rank, row in enumerate(rows):
        by_version.setdefault(row[3], []).append(rank)
    if len(by_version) > 1:
        found = "; ".join(f"{version} on rank {format_ranks(ranks)}" for version, ranks in by_version.items())
        raise BackendError(f"the ranks have different versions of unidist: {found}. Install the same one everywhere.")
    backend.processes = [Process.from_row(row[:3]) for row in rows]
    secret = torch.frombuffer(bytearray(new_secret()), dtype=torch.uint8)
    try:
        in_time(partial(backend.broadcast, secret, 0), timedelta(seconds=timeout))
    except (TimeoutError, CollectiveError) as error:
        gone = ""
        try:  # who is; others may be at the exchange of the watch's addresses already
            in_time(partial(backend.exchange, json.dumps(Watch.NO_ADDRESS), 3.0), timedelta(seconds=6))
        except BackendError as missing:
            gone = str(missing)
        except (CollectiveError, TimeoutError):
            pass
        if isinstance(error, CollectiveError) and not gone:
            raise
        backend.abort()
        raise BackendError(
            f"rank {backend.topology.rank} of {len(rows)}: the first broadcast of {backend.name} did not end (limit: "
            f"{timeout:g} s). {gone or 'Has another rank stopped or ended?'}"
        ) from error
    backend.secret = bytes(secret.tolist())


def _warn_of_horovod(backend: Backend, launch: Launch) -> None:
    """Warn if Horovod itself is imported, too, and would start a world of its own, of one process."""
    alone = launch.launcher.rendezvous != "horovod" and not launch.launcher.mpi
    if alone and launch.world_size > 1 and backend.name != "horovod" and "horovod.torch.mpi_lib_v2" in sys.modules:
        _log.warning(
            "this process has imported Horovod itself, whose hvd.init() makes a world of one process under this "
            "launcher: start the script with 'python -m unidist.hvd script.py', which gives such code the drop-in, or "
            "under horovodrun."
        )


def _export(backend: Backend, start: Start) -> Callable[[], None]:
    """Set torchrun's variables; the result takes them back. Collective."""
    from unidist.torchrun_env import export

    return export(start.launch, backend.topology, backend.exchange)


def _warn_of_libraries(backend: Backend, launch: Launch) -> None:
    """Warn if a library is imported that would not find this world, and begin one of one process on each rank.

    Libraries that are imported after ``init()`` are not seen: a hook would slow down every import.
    """
    if backend.topology.world_size == 1 or "LOCAL_RANK" in os.environ:
        return
    lost = ["accelerate"] + ["lightning_fabric", "lightning"] * (launch.launcher.rendezvous == "horovod")
    found = [name for name in lost if name in sys.modules]
    if found:
        _log.warning(
            "%s finds its world by torchrun's variables, which %s does not set: it would train alone on each of the %d "
            "ranks. Call unidist.init(export_env=True) before, or start the script with 'python -m unidist script.py'.",
            " and ".join(found),
            launch.launcher.name,
            backend.topology.world_size,
        )


def shutdown() -> None:
    """Leave the world; ``init()`` may be called again afterwards. Collective. No-op when not initialised.

    Waits for the other ranks, unless an exception is being handled (as in a ``finally`` block). A backend that was
    already running when ``init()`` was called is left running. A script that ends without this call does not wait.
    """
    waits = _world is not None and sys.exc_info()[0] is None
    try:
        if _world is not None and waits:
            for feature in [*_world.features.values()]:
                feature.finish()
            _world.current.barrier()
    except BaseException:
        leave()
        raise
    leave(alone=not waits)


def timeline(path: str | os.PathLike[str]) -> Timeline:
    """Record where the time of each rank goes, from now until ``close()`` of the result, the end of its ``with`` block
    or ``shutdown()``. Collective.

    Each rank writes a file of Chrome's trace event format (Perfetto, ``chrome://tracing``): ``trace.json`` is
    ``trace.0.json`` on rank 0. It has the collective calls of unidist, the gradient buckets of models that are wrapped
    while it is on, and the waiting for the batches of ``shard_loader``; all on rank 0's clock. ``unidist timeline
    trace.*.json`` prints who waits for whom. A timeline that is on is closed.

    Args:
        path: the file's name without the rank. A file that cannot be written is logged, and training goes on.
    """
    from unidist.diagnosis.timeline.recorder import Timeline, path_of_rank

    world = _running()
    if world.timeline is not None:
        world.timeline.close()
    world.timeline = Timeline(path_of_rank(path, rank()), world.current)
    return world.timeline


def of_world(kind: type[F]) -> F:
    """Return what a feature keeps for the running world: made at its first use, closed with the world."""
    features = _running().features
    if kind not in features:
        features[kind] = kind()
    return features[kind]  # type: ignore[return-value]  # by its class


@atexit.register
def leave(*, alone: bool = True) -> None:
    """Shut down without waiting for the other ranks; ``alone``: they may go on."""
    global _world
    for feature in () if _world is None else [*_world.features.values()]:
        feature.close()
    world, _world = _world, None
    if world is not None:
        _last.update(world.again)
        world.close(alone=alone)


def rejoin() -> None:
    """Initialize with the arguments of the last world, after ``leave``: in the next generation of an elastic run.
    Collective.
    """
    _init(**_last)


def complete_start(step: Callable[[], object]) -> None:
    """Call a function that ends a start: again in the next generation if a worker of an elastic run is lost meanwhile.
    Collective.
    """
    while True:
        try:
            step()
            return
        except UnidistError as error:
            member = membership.current()
            if member is None or not member.lost(wait=membership.VERDICT_S):
                raise
            leave()
            member.ask(failed=str(error))
            rejoin()


def is_initialized() -> bool:
    """Return whether this process is in a world."""
    return _world is not None


def current() -> Backend:
    """Return the running backend.

    Raises:
        NotInitializedError: ``init()`` has not been called, or ``shutdown()`` has.
    """
    if _world is None:
        raise NotInitializedError("unidist is not initialized: call unidist.init() first.")
    return _world.current


def _running() -> World:
    current()
    assert _world is not None
    return _world


def watch() -> Watch | None:
    """Return what reports the ranks' states; None in a world of one."""
    return None if _world is None else _world.watch


def timeout() -> timedelta | None:
    """Return the timeout that ``init`` was given, or ``UNIDIST_TIMEOUT``; None without one."""
    given = None if _world is None else _world.arguments.get("timeout")
    return given if isinstance(given, timedelta) else settings.timeout(os.environ)


def in_join() -> bool:
    """Return whether a ``unidist.join`` block is running."""
    return _world is not None and isinstance(_world.current, Joined)


@contextmanager
def replaced(backend: Backend) -> Iterator[None]:
    """Make ``current()`` another backend inside, on top of the running one."""
    world = _running()
    before, world.current = world.current, backend
    try:
        yield
    finally:
        world.current = before


def rank() -> int:
    """Return this process's rank, from 0. Raises NotInitializedError before ``init``."""
    return current().topology.rank


def world_size() -> int:
    """Return the number of processes. Raises NotInitializedError before ``init``."""
    return current().topology.world_size


def local_rank() -> int:
    """Return this process's rank among those of its node, from 0. Raises NotInitializedError before ``init``."""
    return current().topology.local_rank


def local_size() -> int:
    """Return the number of processes on this node. Raises NotInitializedError before ``init``."""
    return current().topology.local_size


def node_rank() -> int:
    """Return this node's rank, from 0. Raises NotInitializedError before ``init``."""
    return current().topology.node_rank


def num_nodes() -> int:
    """Return the number of nodes. Raises NotInitializedError before ``init``."""
    return current().topology.num_nodes


def device() -> torch.device:
    """Return the device for this process's model and data: that of ``init(device=)``; by default its GPU on
    ``nccl``, ``horovod`` and ``single`` where CUDA is available, else the CPU. Raises NotInitializedError before
    ``init``.
    """
    return current().device


def is_main() -> bool:
    """Return whether this is rank 0, which prints and saves. Raises NotInitializedError before ``init``."""
    return rank() == 0


def backend_name() -> str:
    """Return the running backend: ``single``, ``gloo``, ``nccl``, ``mpi``, ``horovod``, or ``threads`` in a world of
    ``unidist.testing``. Raises NotInitializedError before ``init``.
    """
    return current().name


# ---------------------------------------------------------------------------------------------
def _declared(init_method: str | None, rank: int | None, world_size: int | None) -> Launch:
    if (rank is None) != (world_size is None):
        raise ValueError(f"init(rank={rank}, world_size={world_size}): pass both, or neither to use the launcher's.")
    if rank is None or world_size is None:
        return detect(os.environ)
    if not 0 <= rank < world_size:
        raise ValueError(f"init(rank={rank}, world_size={world_size}): ranks run from 0 to world_size - 1.")
    if init_method is None and world_size > 1:
        raise ValueError(
            f"init(rank={rank}, world_size={world_size}) needs init_method=, for example 'tcp://host:port' of rank 0."
        )
    if init_method is not None and init_method.startswith("env://"):
        address, port = master(os.environ, EXPLICIT)
        return Launch(EXPLICIT, rank, world_size, master_addr=address, master_port=port)
    return Launch(EXPLICIT, rank, world_size)


def _timeout(timeout: float | timedelta | None) -> timedelta | None:
    if timeout is None:
        return settings.timeout(os.environ)
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not 0 < seconds < 1e9:
        raise ValueError(f"init(timeout={timeout}) must be a number of seconds above 0 and below 1e9.")
    return timedelta(seconds=seconds)


def _class(name: str) -> type[Backend]:
    if name not in BACKENDS:
        raise BackendError(f"backend {name!r} is unknown: use auto, {', '.join(BACKENDS)}.")
    entry = BACKENDS[name]
    found: type[Backend] = getattr(importlib.import_module(entry.module), entry.attribute)
    return found


def _start(name: str, start: Start) -> tuple[Backend, str]:
    """Return the backend, adopted or started, and the reason for the choice."""
    running = [name] if name != "auto" else [name for name, row in BACKENDS.items() if row.library in sys.modules]
    for candidate in running:
        adopted = _class(candidate).adopt(start)
        if adopted and name in ("auto", adopted.name):
            return adopted, _ADOPTED
        if adopted:
            raise BackendError(
                f"init({name!r}): a process group on {adopted.name!r} is already initialised: pass that name."
            )
    why = "requested"
    if name == "auto":
        name, why = _pick(start)
    kind = _class(name)
    if kind.needs_launcher and start.launch.launcher is NO_LAUNCHER:
        raise BackendError(
            f"backend {name!r} needs a launcher, and no launcher's variables are set: start the script with "
            f"'horovodrun -np 2 python script.py' or 'torchrun --nproc-per-node 2 script.py'."
        )
    return kind.start(name, start), why


def _pick(start: Start) -> tuple[str, str]:
    launcher = start.launch.launcher
    if launcher is NO_LAUNCHER and start.init_method is None:
        return "single", "no launcher"
    if launcher.backend and importlib.util.find_spec(launcher.backend):
        return launcher.backend, f"started by {launcher.name}"
    cuda = torch.cuda.is_available() and (start.device is None or start.device.type == "cuda")
    return ("nccl", "CUDA is available") if cuda else ("gloo", "CUDA is not used")


def _guard(backend: Backend, launch: Launch) -> None:
    """Refuse N jobs of one rank: the backend must have the world size that the launcher declared."""
    real, declared = backend.world_size(), launch.world_size
    # A backend that runs already may be another launcher's, or none's.
    if real == declared or launch.launcher is NO_LAUNCHER or backend.topology.launcher != launch.launcher.name:
        return
    backend.shutdown()
    raise WorldSizeError(
        f"{backend.name} made a world of {real}, but {launch.launcher.name} declared {declared} ({launch.evidence}): "
        f"each process would train alone. Let unidist.init() start the backend, use a library built for this "
        f"launcher, or set {settings.LAUNCHER}=none if a single process is intended."
    )


def _refuse_change(arguments: dict[str, object], world: World) -> None:
    was = {**world.arguments, "backend": world.current.name}
    for key, value in arguments.items():
        if value is not None and value != was.get(key):
            raise BackendError(
                f"init({key}={str(value)!r}) came after init() with {key}={str(was.get(key))!r}: call shutdown() first."
            )
