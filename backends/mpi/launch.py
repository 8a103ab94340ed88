"""Starting MPI through mpi4py: the launcher's own library, its world size, and MPI_Abort when one rank fails."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from unidist import settings
from unidist.backends.base import START_TIMEOUT
from unidist.errors import BackendError, UnidistError, WorldSizeError
from unidist.launch.topology import EXPLICIT, NONE, Launch

#: Waits for the end of its input; seconds, the process that gets a signal then, what it says, with the ranks of the job
#: that run on this host, where the launcher is one with PMIx, and the signal.
_WATCHDOG = r"""
import os, select, sys

def variables(pid):
    with open(f"/proc/{pid}/environ", errors="replace") as file:
        return dict(text.partition("=")[::2] for text in file.read().split("\0"))

def ranks():
    mine, found = variables(sys.argv[2]), {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            other, state = variables(pid), open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if "PMIX_NAMESPACE" in mine and mine["PMIX_NAMESPACE"] == other.get("PMIX_NAMESPACE"):
            rank = int(other["PMIX_RANK"])  # of the rank, or of a process that it has started
            found[rank] = max(found.get(rank, ""), " (stopped)" * (state == "T"))
    listed = ", ".join(f"{rank}{found[rank]}" for rank in sorted(found))
    return f"Of {mine.get('OMPI_COMM_WORLD_SIZE', 'all')} ranks, {listed} run on this host. " * bool(found)

if not select.select([0], [], [], float(sys.argv[1]))[0]:
    os.write(2, sys.argv[3].replace("Has a rank", f"{ranks()}Has a rank").encode())
    os.kill(int(sys.argv[2]), int(sys.argv[4]))
"""
#: Time for the launcher to read the error: MPICH's drops what is still in the pipe when a rank aborts.
_READ_S = 1.0


@contextmanager
def watchdog(timeout: timedelta, what: str) -> Iterator[None]:
    """End this process, and with it the job, if the calls of MPI or Horovod inside wait for longer, which nothing
    interrupts.

    Another process does it, because MPI's start keeps Python's lock.
    """
    seconds = timeout.total_seconds()
    message = (
        f"unidist: pid {os.getpid()} has waited {seconds:g} s for {what}, and ends. Has a rank stopped? If MPI has "
        "chosen a network in which the hosts do not reach each other, exclude it: mpirun --mca btl_tcp_if_exclude "
        "lo,docker0 (Open MPI), mpiexec -iface eth0 (MPICH). UNIDIST_TIMEOUT is how long ranks wait, in seconds.\n"
    )
    with _watchdog(seconds, message, signal.SIGKILL):  # its end closes the input, and waits
        yield


def _watchdog(seconds: float, message: str, number: int) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-I", "-S", "-c", _WATCHDOG, str(seconds), str(os.getpid()), message, str(int(number))]
    return subprocess.Popen(argv, stdin=subprocess.PIPE)


def _report_end() -> None:
    """Have it reported that this process, which is at its end, waits long in MPI_Finalize."""
    seconds = settings.stall(os.environ)
    if seconds and is_started():
        waits = f"has ended, and waits in MPI_Finalize for {seconds:g} s for the other ranks"
        process = _watchdog(seconds, f"unidist: pid {os.getpid()} {waits}. Has a rank stopped?\n", 0)
        assert process.stdin
        os.dup(process.stdin.fileno())  # open until this process has ended


def world(launch: Launch, timeout: timedelta | None = None) -> Any:
    """Return mpi4py's COMM_WORLD. Collective at the first call, which starts MPI.

    Args:
        launch: this process's.
        timeout: of MPI's start, after which this process is ended. Default: 300 s.

    Raises:
        BackendError: mpi4py is missing, or cannot load this launcher's MPI library, or this is not an MPI launcher.
        WorldSizeError: the library belongs to another launcher: its world is not the launcher's.
    """
    if not _starts_mpi(launch, os.environ):
        raise BackendError(
            f"{launch.launcher.name} started this process, and MPI needs its own launcher: 'mpirun -np 2 python "
            "script.py' (Open MPI), 'mpiexec -n 2 python script.py' (MPICH), 'horovodrun -np 2 --mpi python "
            "script.py' or 'srun -n 2 --mpi=pmix python script.py' (--mpi=pmi2 for MPICH)."
        )
    if "mpi4py.MPI" in sys.modules:
        comm, error = _world(launch)
    else:
        with watchdog(timeout or START_TIMEOUT, "MPI's start"):
            comm, error = _world(launch)
    if error is not None:
        raise error
    return comm


@cache
def _world(launch: Launch) -> tuple[Any, UnidistError | None]:
    # The first failure is the reason; a second attempt would find libraries that have been loaded since.
    try:
        return _start(launch), None
    except UnidistError as error:
        return None, error


def is_started() -> bool:
    """Return whether MPI runs in this process, by ``world`` or by the script's own import of mpi4py."""
    if "mpi4py.MPI" not in sys.modules:
        return False
    from mpi4py import MPI

    return bool(MPI.Is_initialized() and not MPI.Is_finalized())


def abort(status: int = 1) -> None:
    """End all ranks of the job, this one included."""
    from mpi4py import MPI

    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # who reads may be gone
            stream.flush()
    time.sleep(_READ_S)
    MPI.COMM_WORLD.Abort(status)


def _start(launch: Launch) -> Any:
    name = launch.launcher.name
    try:
        MPI = _import_mpi(launch)
    except (ImportError, RuntimeError) as error:
        raise BackendError(
            f"mpi4py cannot be used under {name}: {error}. Install it for this launcher's MPI (pip install mpi4py; "
            "Debian's MPICH: see docs/launchers.md). Backends other than 'mpi' do not need it if MASTER_ADDR and "
            "MASTER_PORT are set to rank 0's host and a free port of it."
        ) from None
    atexit.register(_report_end)
    size = MPI.COMM_WORLD.Get_size()
    if size != launch.world_size:
        library = MPI.Get_library_version().split(",")[0].split("\n")[0].strip()
        raise WorldSizeError(
            f"mpi4py made a world of {size}, but {name} declared {launch.world_size} ({launch.evidence}): mpi4py uses "
            f"{library}, which is not this launcher's library. Set "
            f"MPI4PY_MPIABI={launch.launcher.mpi or 'mpich or openmpi'} (and MPI4PY_LIBMPI to its path), or use that "
            "library's own mpirun."
        )
    return MPI.COMM_WORLD


def abort_if_running() -> None:
    """Abort the whole job if MPI runs in this process, after an uncaught exception was shown: the process would wait in
    MPI_Finalize for ranks that wait for it.
    """
    if is_started():
        abort()


def _starts_mpi(launch: Launch, env: Mapping[str, str]) -> bool:
    row = launch.launcher
    return row.rendezvous == "mpi" or row in (NONE, EXPLICIT) or (row.rendezvous == "slurm" and bool(_slurm_mpi(env)))


def _slurm_mpi(env: Mapping[str, str]) -> str:
    """Return the MPI that srun supports here, by the variables of its --mpi plugins."""
    return "openmpi" if env.get("PMIX_RANK") else "mpich" if env.get("PMI_RANK") else ""


def _import_mpi(launch: Launch) -> Any:
    """Import mpi4py.MPI for the launcher's MPI: its wheel contains several ABIs and loads the first library that it
    finds.
    """
    wanted = launch.launcher.mpi or (_slurm_mpi(os.environ) if launch.launcher.rendezvous == "slurm" else "")
    if wanted == "mpich" and "mpi4py.MPI" not in sys.modules and hasattr(ctypes.CDLL(None), "ompi_mpi_comm_world"):
        # Its symbols would shadow MPICH's, and the process would crash.
        raise ImportError("Open MPI is loaded in this process already (Horovod, if built for it, does that)")
    chosen = "MPI4PY_MPIABI" in os.environ or "MPI4PY_LIBMPI" in os.environ
    if wanted and not chosen:
        os.environ["MPI4PY_MPIABI"] = wanted
        if wanted == "mpich":
            _load_launchers_mpich()
    try:
        from mpi4py import MPI
    finally:
        if wanted and not chosen:
            del os.environ["MPI4PY_MPIABI"]
    return MPI


def _load_launchers_mpich() -> None:
    """Load the library of the MPICH whose ``mpiexec`` has started this process.

    mpi4py leaves it to the linker, which does not look beside the launcher: MPICH's wheel, an MPICH in /opt.
    """
    pid = os.getppid()
    with suppress(OSError):  # the files of another user's process are not readable
        while pid > 1:
            program = Path(f"/proc/{pid}/exe").readlink()
            if program.name == "hydra_pmi_proxy":
                ctypes.CDLL(str(program.parents[1] / "lib/libmpi.so.12"))
                return
            pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
