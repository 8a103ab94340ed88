"""Starting worlds with the real launchers."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
PYTHON = sys.executable
#: Set in the processes of a world.
IN_WORLD = "UNIDIST_TESTS_IN_WORLD"
#: Tables for the end of the run's output, by title.
shown: dict[str, list[str]] = {}

TORCHRUN = [PYTHON, "-m", "torch.distributed.run"]
HOROVODRUN = [PYTHON, "-c", "from horovod.runner.launch import run_commandline as run; run()"]


@dataclass
class Result:
    """How a world ended."""

    returncode: int
    output: str
    seconds: float


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _torchrun(*options: str) -> Callable[[int, Sequence[str]], list[list[str]]]:
    return lambda n, argv: [[*TORCHRUN, *options, "--nproc-per-node", str(n), *argv]]


def _two_agents(n: int, argv: Sequence[str]) -> list[list[str]]:
    assert n % 2 == 0
    meeting = [
        "--nnodes",
        "2",
        "--nproc-per-node",
        str(n // 2),
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(free_port()),
    ]
    return [[*TORCHRUN, *meeting, "--node-rank", str(node), *argv] for node in range(2)]


#: Each launcher's commands for n processes of ``python *argv``.
LAUNCHERS: dict[str, Callable[[int, Sequence[str]], list[list[str]]]] = {
    "python": lambda n, argv: [[PYTHON, *argv]],
    "torchrun": _torchrun(),
    "torchrun c10d": _torchrun("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
    "torchrun 2 nodes": _two_agents,
    "launch": lambda n, argv: [
        [PYTHON, "-W", "ignore", "-m", "torch.distributed.launch", "--use-env", "--nproc-per-node", str(n), *argv]
    ],
    "spawn": lambda n, argv: [[PYTHON, str(ROOT / "tests/programs/spawn_script.py"), str(n), *argv]],
    "horovodrun --gloo": lambda n, argv: [[*HOROVODRUN, "-np", str(n), "--gloo", PYTHON, *argv]],
    "horovodrun --mpi": lambda n, argv: [
        [*HOROVODRUN, "-np", str(n), "--mpi", "--mpi-args=--oversubscribe", PYTHON, *argv]
    ],
    "mpirun": lambda n, argv: [
        ["mpirun.openmpi", "--oversubscribe", "--bind-to", "none", "-np", str(n), PYTHON, *argv]
    ],
    "mpiexec (MPICH)": lambda n, argv: [["mpiexec.mpich", "-n", str(n), PYTHON, *argv]],
    "srun": lambda n, argv: [["srun", "-n", str(n), "--overcommit", PYTHON, *argv]],
}


def environment(launcher: str, extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without other tests' traces, with what this machine needs."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("UNIDIST_", "PYTEST_"))}
    env.update(
        OMP_NUM_THREADS="1",
        # A test machine runs as root and has fewer cores than ranks.
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        PYTHONUNBUFFERED="1",
    )
    if launcher == "mpiexec (MPICH)":
        env["LD_LIBRARY_PATH"] = str(mpich_for_mpi4py())
    return {**env, **extra}


def mpich_for_mpi4py() -> Path:
    """A folder with Debian's libmpich.so.12 under the name that mpi4py's wheel asks for (docs/launchers.md)."""
    folder = Path(sys.prefix) / "lib" / "mpich"
    link = folder / "libmpi.so.12"
    if not link.exists():
        library = next(Path("/usr/lib").glob("*/libmpich.so.12"))
        folder.mkdir(parents=True, exist_ok=True)
        link.symlink_to(library)
    return folder


def run_world(
    launcher: str,
    nprocs: int,
    argv: Sequence[str],
    *,
    backend: str = "auto",
    env: Mapping[str, str] | None = None,
    timeout: float = 120,
) -> Result:
    """Run ``python *argv`` in ``nprocs`` processes under a launcher, and wait for its end.

    Raises:
        TimeoutError: the world did not end; it was killed.
    """
    whole = environment(launcher, {"UNIDIST_BACKEND": backend, **(env or {})})
    start = time.monotonic()
    commands = LAUNCHERS[launcher](nprocs, argv)
    running = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=whole,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        for command in commands
    ]
    output = ""
    try:
        for process in running:
            left = timeout - (time.monotonic() - start)
            output += process.communicate(timeout=max(1.0, left))[0]
    except subprocess.TimeoutExpired as error:
        for process in running:
            kill_tree(process.pid)
            output += process.communicate()[0]
        raise TimeoutError(f"{launcher} on {backend} did not end within {timeout:.0f} s:\n{output}") from error
    codes = [process.returncode for process in running]
    return Result(next((code for code in codes if code), 0), output, time.monotonic() - start)


def kill_tree(pid: int) -> None:
    """Kill a launcher and what it started; workers may be in sessions of their own."""
    with suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(pid)
        for process in [*launcher.children(recursive=True), launcher]:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def missing(launcher: str) -> str | None:
    """What this machine lacks for a launcher, or None."""
    program = LAUNCHERS[launcher](2, [])[0][0]
    return None if shutil.which(program) else f"{program} is not installed"
