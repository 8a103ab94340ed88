"""The launchers that can start a world on this host: their commands, and what is missing for one."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

from unidist.launchers.process import output_of

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
HOROVODRUN = [sys.executable, "-c", "from horovod.runner.launch import run_commandline as run; run()"]
#: The programs of a launcher; the first that is found is used. Debian has its own names for Open MPI's and MPICH's.
OPENMPI = ("mpirun.openmpi", "mpirun")
MPICH = ("mpiexec.mpich", "mpiexec.hydra")
SRUN = ("srun",)
JAVA = ("java",)
#: Debian's packages.
_PACKAGES = {OPENMPI: "openmpi-bin libopenmpi-dev", MPICH: "mpich", SRUN: "slurm-wlm", JAVA: "default-jre-headless"}
_HOROVOD = ("horovod", "unidist build-horovod --install")


@dataclass(frozen=True)
class Command:
    """How a launcher is called."""

    #: What people type, for messages.
    typed: str
    #: The command for n processes on this host, up to the arguments of ``python``.
    prefix: Callable[[int], list[str]]
    #: Names of the program that it needs on PATH.
    programs: tuple[str, ...] = ()
    #: The package that it needs, and how to get it.
    package: tuple[str, str] = ("", "")
    #: Whether ``horovod`` is the drop-in in its ranks.
    drop_in: bool = False
    #: Whether it starts the ranks of an MPI library.
    mpi: bool = False


#: By the names of ``topology.LAUNCHERS``.
COMMANDS = {
    "torchrun": Command("torchrun", lambda n: [*TORCHRUN, "--nproc-per-node", str(n)]),
    "spawn": Command("unidist.spawn", lambda n: [sys.executable, "-m", "unidist.launchers.spawned", str(n)]),
    "unidist-run": Command(
        "unidist run", lambda n: [sys.executable, "-m", "unidist", "run", "-np", str(n), sys.executable]
    ),
    "horovodrun": Command(
        "horovodrun --gloo",
        lambda n: [*HOROVODRUN, "-np", str(n), "--gloo", sys.executable],
        package=_HOROVOD,
    ),
    "horovodrun-mpi": Command(
        "horovodrun --mpi",
        lambda n: [*HOROVODRUN, "-np", str(n), "--mpi", "--mpi-args=--oversubscribe", sys.executable],
        programs=OPENMPI,
        package=_HOROVOD,
        mpi=True,
    ),
    "openmpi": Command(
        "mpirun",
        lambda n: [_program(OPENMPI), "--oversubscribe", "--bind-to", "none", "-np", str(n), sys.executable],
        programs=OPENMPI,
        mpi=True,
    ),
    "mpich": Command(
        "mpiexec",
        lambda n: [_program(MPICH), "-n", str(n), sys.executable],
        programs=MPICH,
        mpi=True,
    ),
    "slurm": Command("srun", lambda n: ["srun", "-n", str(n), "--overcommit", sys.executable], programs=SRUN),
    "ray": Command(
        "python -m unidist.ray",
        lambda n: [sys.executable, "-m", "unidist.ray", str(n)],
        package=("ray", "pip install 'unidist-torch[ray]'"),
        drop_in=True,
    ),
    "spark": Command(
        "python -m unidist.spark",
        lambda n: [sys.executable, "-m", "unidist.spark", str(n)],
        programs=JAVA,
        package=("pyspark", "pip install 'unidist-torch[spark]'"),
        drop_in=True,
    ),
}
#: The backends that a world can be started on, each with the launcher that its users start it with.
BACKENDS = {"gloo": "torchrun", "nccl": "torchrun", "mpi": "openmpi", "horovod": "horovodrun"}


def command_line(launcher: str, ranks: int, argv: Sequence[str]) -> list[str]:
    """Return the launcher's command for ``ranks`` processes of ``python *argv`` on this host."""
    return [*COMMANDS[launcher].prefix(ranks), *argv]


def known_launchers() -> str:
    """Return all names for messages, each with what people type."""
    return ", ".join(
        name if name == command.typed else f"{name} ({command.typed})" for name, command in COMMANDS.items()
    )


def missing(launcher: str) -> str | None:
    """Return what is not installed here and the launcher needs, or None."""
    command = COMMANDS[launcher]
    package, remedy = command.package
    if package and not find_spec(package):
        return f"{package.capitalize()} is not installed: {remedy}"
    if not command.programs or any(map(_is_on_path, command.programs)):
        return None
    names = "Open MPI's " * (command.programs is OPENMPI) + " or ".join(command.programs)
    debian = _PACKAGES.get(command.programs)
    return f"{names} is not on PATH" + (f" (apt-get install {debian})" if debian else "")


def unavailable(launcher: str, backend: str, ranks: int) -> str | None:
    """Return why a world of so many ranks cannot be started here, or None."""
    if backend == "mpi" and not COMMANDS[launcher].mpi:
        names = ", ".join(name for name, command in COMMANDS.items() if command.mpi)
        return f"MPI needs its own launchers: {names}, or srun with --mpi=pmix or --mpi=pmi2"
    if backend == "mpi" and not find_spec("mpi4py"):
        return "mpi4py is not installed: pip install mpi4py"
    if backend == "horovod" and COMMANDS[launcher].drop_in:
        return "horovod is the drop-in there, so Horovod cannot be the backend"
    if lack := missing(launcher) or (missing("horovodrun") if backend == "horovod" else None):
        return lack
    if backend == "nccl":
        import torch

        if torch.cuda.device_count() < ranks:
            return f"{ranks} ranks on nccl need {ranks} GPUs, {torch.cuda.device_count()} are visible"
    return None


def _program(names: Sequence[str]) -> str:
    return next(filter(_is_on_path, names), names[0])


@cache
def _is_on_path(name: str) -> bool:
    # Every MPI calls its own program mpirun.
    return shutil.which(name) is not None and (name != "mpirun" or "Open" in output_of(name, "--version"))
