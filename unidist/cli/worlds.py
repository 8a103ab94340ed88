"""Starting worlds on this host, with each launcher's own program."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import psutil

from unidist import knobs
from unidist.cli.toolchain import output_of

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
HOROVODRUN = [sys.executable, "-c", "from horovod.runner.launch import run_commandline as run; run()"]

#: Each launcher's command for n processes of ``python *argv`` on this host.
LAUNCHERS: dict[str, Callable[[int, Sequence[str]], list[str]]] = {
    "torchrun": lambda n, argv: [*TORCHRUN, "--nproc-per-node", str(n), *argv],
    "spawn": lambda n, argv: [sys.executable, "-m", "unidist.cli.spawn", str(n), *argv],
    "horovodrun --gloo": lambda n, argv: [*HOROVODRUN, "-np", str(n), "--gloo", sys.executable, *argv],
    "horovodrun --mpi": lambda n, argv: [
        *HOROVODRUN, "-np", str(n), "--mpi", "--mpi-args=--oversubscribe", sys.executable, *argv
    ],
    "mpirun": lambda n, argv: [
        program("mpirun"), "--oversubscribe", "--bind-to", "none", "-np", str(n), sys.executable, *argv
    ],
    "mpiexec (MPICH)": lambda n, argv: [program("mpiexec (MPICH)"), "-n", str(n), sys.executable, *argv],
    "srun": lambda n, argv: ["srun", "-n", str(n), "--overcommit", sys.executable, *argv],
}  # fmt: skip
#: The programs that a launcher needs; the first that is found is taken. Debian gives Open MPI's and MPICH's names of their own.
PROGRAMS = {
    "horovodrun --mpi": ("mpirun.openmpi", "mpirun"),
    "mpirun": ("mpirun.openmpi", "mpirun"),
    "mpiexec (MPICH)": ("mpiexec.mpich", "mpiexec.hydra"),
    "srun": ("srun",),
}
#: Those that start the ranks of an MPI library.
MPI_LAUNCHERS = ("horovodrun --mpi", "mpirun", "mpiexec (MPICH)")
#: The engines that a world can be started on, each with the launcher that its users start it with.
ENGINES = {"gloo": "torchrun", "nccl": "torchrun", "mpi": "mpirun", "horovod": "horovodrun --gloo"}
#: The variables by which a launcher, or a user for one, tells of another world.
OUTER = re.compile(
    r"RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE|TORCHELASTIC|MASTER|OMPI_COMM|PMI|PMIX|JSM_NAMESPACE)_.*|MPI_LOCAL.*|"
    r"HOROVOD_(RANK|SIZE|LOCAL_.*|CROSS_.*|GLOO_RENDEZVOUS_.*|CONTROLLER|CPU_OPERATIONS|HOSTNAME)|UNIDIST_(BACKEND|LAUNCHER)|"
    r"SLURM_(PROCID|LOCALID|NODEID|STEP_.*|NTASKS)"
)


@dataclass
class Result:
    """How a world ended."""

    #: The first status other than 0 of its launchers.
    returncode: int
    #: What all ranks printed, on either stream.
    output: str
    seconds: float


def program(launcher: str) -> str:
    """The launcher's program on PATH, or the name that is missing there."""
    names = PROGRAMS[launcher]
    return next(filter(_is_there, names), names[0])


@cache
def _is_there(name: str) -> bool:
    # Every MPI calls its own mpirun.
    return shutil.which(name) is not None and (name != "mpirun" or "Open" in output_of(name, "--version"))


def missing(launcher: str) -> str | None:
    """What a launcher lacks on this machine, or None."""
    if launcher.startswith("horovodrun") and not find_spec("horovod"):
        return "Horovod is not installed: unidist build-horovod --install"
    names = PROGRAMS.get(launcher, ())
    kind = "Open MPI's " if "mpirun" in names else ""
    return f"{kind}{' or '.join(names)} is not on PATH" if names and not any(map(_is_there, names)) else None


def lacking(launcher: str, engine: str) -> str | None:
    """What this machine lacks for an engine under a launcher, GPUs aside, or None."""
    if engine == "mpi" and launcher not in MPI_LAUNCHERS:
        return f"MPI has launchers of its own: {', '.join(MPI_LAUNCHERS)}, srun --mpi=pmix or pmi2"
    if engine == "mpi" and not find_spec("mpi4py"):
        return "mpi4py is not installed: pip install mpi4py"
    return missing(launcher) or (missing("horovodrun --gloo") if engine == "horovod" else None)


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment(env: Mapping[str, str], nprocs: int, backend: str | None = None) -> dict[str, str]:
    """``env`` with what worlds on one host need: root may start MPI, the ranks share the cores and have an engine.

    What an outer launcher, or a user for one, has set is left out: the ranks have to see their own launcher.
    """
    ours = {
        "OMP_NUM_THREADS": str(max(1, usable_cores() // nprocs)),
        "PYTHONUNBUFFERED": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    wanted = {knobs.BACKEND: backend} if backend else {}
    return {**ours, **{name: value for name, value in env.items() if not OUTER.fullmatch(name)}, **wanted}


def run(
    commands: Sequence[Sequence[str]],
    env: Mapping[str, str],
    *,
    timeout: float,
    cwd: str | os.PathLike[str] | None = None,
    on_line: Callable[[str], None] = lambda line: None,
) -> Result:
    """Run the commands of one world together, and wait for their end.

    Args:
        commands: one, or one for each node's agent.
        env: the whole environment of each.
        timeout: seconds after which all are killed.
        cwd: the folder that they run in. Default: this process's.
        on_line: called with each line of output as it comes.

    Raises:
        TimeoutError: the world did not end in time; it says what was printed until then.
    """
    start = time.monotonic()
    lines: list[str] = []
    running = [
        subprocess.Popen(
            command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", start_new_session=True,
        )
        for command in commands
    ]  # fmt: skip

    def read(process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                lines.append(line)
                on_line(line)

    readers = [threading.Thread(target=read, args=(process,), daemon=True) for process in running]
    for reader in readers:
        reader.start()
    late = False
    try:
        for process in running:
            process.wait(max(0.1, start + timeout - time.monotonic()))
    except subprocess.TimeoutExpired:
        late = True
    finally:
        for process in running:
            kill(process)
    for reader in readers:
        reader.join(10)
    output = "".join(lines)
    if late:
        raise TimeoutError(f"{' '.join(commands[0][:8])} ... did not end within {timeout:.0f} s:\n{output}")
    codes = [process.returncode for process in running]
    return Result(next((code for code in codes if code), 0), output, time.monotonic() - start)


def kill(launcher: subprocess.Popen[str]) -> None:
    """End a launcher and all that it started, politely first."""
    started = []
    with suppress(psutil.NoSuchProcess):
        # Workers may be in sessions of their own, so the family tree is asked while it stands.
        started = psutil.Process(launcher.pid).children(recursive=True)
    if launcher.poll() is None:
        launcher.terminate()
        with suppress(subprocess.TimeoutExpired):
            launcher.wait(5)
    for process in started:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    launcher.kill()
    launcher.wait()
