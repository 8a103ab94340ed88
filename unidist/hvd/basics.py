"""Starting and stopping; this process's rank and node; what is built in."""

from __future__ import annotations

import atexit
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import torch

from unidist import context, settings
from unidist.diagnosis.watch.locations import error_location
from unidist.errors import BackendError
from unidist.hvd import names
from unidist.hvd.process_sets import ProcessSet, add_process_set
from unidist.hvd.session import close_session, is_open, not_initialized, open_session, timeline
from unidist.launch.topology import NONE, Topology, detect

__all__ = [
    "Adasum", "Average", "Max", "Min", "Product", "Sum", "ccl_built", "cross_rank", "cross_size", "cuda_built",
    "ddl_built", "gloo_built", "gloo_enabled", "init", "is_initialized", "local_rank",
    "local_size", "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built", "rank", "rocm_built",
    "shutdown", "size", "start_timeline", "stop_timeline",
]  # fmt: skip

#: The reduction operations, by Horovod's numbers.
Average, Sum, Adasum, Min, Max, Product = range(6)

_started_backend = False


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the world that the launcher declared, on ``torch.distributed``. Collective. A second call is a no-op.

    torch's default process group is left alone: ``torch.distributed.init_process_group`` may come before, later, or
    never.

    The backend is that of ``UNIDIST_BACKEND``, else one that runs already, else nccl where CUDA is available, else
    gloo; one process without a launcher is a world of its own. After ``unidist.init()`` this call is a no-op.

    Args:
        comm: the ranks of the world, all of them; None is the same.
        process_sets: sets to make, which get their numbers here; ``"dynamic"`` is accepted, and not necessary.

    Raises:
        BackendError: the backend cannot start here.
        NotImplementedError: ``comm`` is an MPI communicator, or a part of the world.
        ValueError: a process set is there twice.
    """
    global _started_backend
    if is_open():
        return
    if not context.is_initialized():
        with error_location("hvd.init()"):
            context.init_beside_default_group(_backend())  # type: ignore[arg-type]  # it refuses unknown names
        _started_backend = True
    world_size = context.current().topology.world_size
    if comm is not None and (not isinstance(comm, Sequence) or (comm and sorted(comm) != list(range(world_size)))):
        raise NotImplementedError(
            f"init(comm={comm!r}): the world is that of the launcher. Start as many processes as are meant, or use a "
            "process set."
        )
    with error_location("hvd.init()"):
        context.complete_start(open_session)
    for process_set in () if process_sets is None or isinstance(process_sets, str) else process_sets:
        add_process_set(process_set)


def _backend() -> str:
    wanted = settings.backend(os.environ)
    if wanted == "horovod" and names.is_installed():
        raise BackendError(
            f"{settings.BACKEND}=horovod: in this process `horovod` means the drop-in, so Horovod itself cannot be the "
            "backend. Unset the variable, or start the script without `-m unidist.hvd`."
        )
    if wanted != "auto":
        return wanted
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        running = torch.distributed.get_backend_config()
        return next((name for name in ("nccl", "mpi") if name in running), "gloo")
    if detect(os.environ).launcher is NONE:
        return "single"
    return "nccl" if torch.cuda.is_available() else "gloo"


@atexit.register
def shutdown() -> None:
    """Leave. Pending operations fail, here and on the other ranks. ``init`` may be called again. No-op when not
    initialised.
    """
    global _started_backend
    close_session()
    if _started_backend:
        _started_backend = False
        context.leave()


def is_initialized() -> bool:
    """Return whether ``init`` (or ``unidist.init``) has been called, and ``shutdown`` not since."""
    return context.is_initialized()


def _topology() -> Topology:
    # No collective: one rank alone may ask before the session is open.
    if not context.is_initialized():
        raise not_initialized()
    return context.current().topology


def size() -> int:
    """Return the number of processes. Before ``init``, this and those below raise ``ValueError``."""
    return _topology().world_size


def rank() -> int:
    """Return this process's rank, from 0."""
    return _topology().rank


def local_size() -> int:
    """Return the number of processes on this node."""
    return _topology().local_size


def local_rank() -> int:
    """Return this process's rank among those of its node, from 0."""
    return _topology().local_rank


def cross_size() -> int:
    """Return the number of nodes that have a process of this local rank."""
    return _topology().cross_size


def cross_rank() -> int:
    """Return this process's rank among those of its local rank, from 0: that of its node if all have as many."""
    return _topology().cross_rank


def is_homogeneous() -> bool:
    """Return whether all nodes have as many processes."""
    return _topology().homogeneous


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record what each operation waits for and goes through, on rank 0, in Chrome's trace format. Not collective.

    Args:
        file_path: an existing file is overwritten.
        mark_cycles: mark the times at which operations begin together.
    """
    if rank() == 0:
        timeline.open(file_path, mark_cycles)


def stop_timeline() -> None:
    """End the file that ``start_timeline`` began."""
    _topology()
    timeline.close()


# ------------------------------------------------------------------------------------ what is there
def mpi_threads_supported() -> bool:
    """Return whether the backend takes calls from several threads: each one does."""
    _topology()
    return True


def mpi_enabled() -> bool:
    """Return whether MPI moves the tensors."""
    return context.is_initialized() and context.backend_name() == "mpi"


def mpi_built() -> bool:
    """Return whether the backend ``mpi`` has what it needs: mpi4py."""
    return importlib.util.find_spec("mpi4py") is not None


def gloo_enabled() -> bool:
    """Return whether gloo moves CPU tensors."""
    return not mpi_enabled()


def gloo_built() -> bool:
    """Return whether this torch has gloo."""
    return torch.distributed.is_available() and torch.distributed.is_gloo_available()


def nccl_built() -> int:
    """Return the version of this torch's NCCL as a number, 0 without one."""
    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return 0
    major, minor, patch = (*torch.cuda.nccl.version(), 0, 0)[:3]  # type: ignore[no-untyped-call]
    return int(major * 10000 + minor * 100 + patch)


def ddl_built() -> bool:
    """Return False: torch has no backend of that name."""
    return False


def ccl_built() -> bool:
    """Return False: torch has no backend of that name."""
    return False


def cuda_built() -> bool:
    """Return whether this torch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether this torch was built for ROCm."""
    return torch.version.hip is not None
