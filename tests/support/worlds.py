"""Starting worlds with the real launchers."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support import preloaded
from unidist.launchers import table, world
from unidist.launchers.process import Result, run
from unidist.launchers.table import HOROVODRUN, TORCHRUN, command_line

ROOT = Path(__file__).parents[2]
PYTHON = sys.executable
#: Programs of several files, by the one that is started.
PROJECTS = sorted((ROOT / "tests/legacy_projects").glob("*/train.py"))
#: Scripts of Horovod's users. The one whose last join leaves ranks apart comes last in a world of several.
LEGACY = sorted((ROOT / "tests/legacy").glob("*.py"), key=lambda path: (path.stem == "join_uneven", path.name))
#: Scripts of torch.distributed's and DataParallel's users, and programs of several files.
LEGACY_DDP = sorted((ROOT / "tests/legacy_ddp").glob("*.py"))
PROJECTS_DDP = sorted((ROOT / "tests/legacy_ddp_projects").glob("*/train.py"))
#: Runs the script that is its first argument, with that default dtype.
IN_FLOAT64 = "tests/programs/float64.py"
#: Set in the processes of a world.
IN_WORLD = "UNIDIST_TESTS_IN_WORLD"
#: Set where the world of a suite begins as the drop-in's does, without torch's default process group.
BESIDE = "UNIDIST_TESTS_BESIDE_DEFAULT_GROUP"
#: Tables for the end of the run's output, by title.
shown: dict[str, list[str]] = {}


def free_port() -> int:
    """A port that neither the kernel gives to a connection meanwhile, nor unidist to a job of Slurm's."""
    while True:
        port = random.randint(10000, 19999)  # below net.ipv4.ip_local_port_range, and topology's 20000 + ... of Slurm
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def _two_agents(n: int, argv: Sequence[str]) -> list[list[str]]:
    assert n % 2 == 0
    meeting = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    return [
        [*TORCHRUN, *meeting, "--nproc-per-node", str(n // 2), "--node-rank", str(node), *argv] for node in range(2)
    ]


def _horovodrun(n: int, argv: Sequence[str]) -> list[list[str]]:
    return [[*HOROVODRUN, "-np", str(n), PYTHON, *argv]]


def _two_hosts(n: int, argv: Sequence[str]) -> list[list[str]]:
    # This host by two names: one process on the first, the others on the second.
    return [[*HOROVODRUN, "--gloo", "-np", str(n), "-H", f"localhost:1,127.0.0.1:{n - 1}", PYTHON, *argv]]


def _launch(n: int, argv: Sequence[str]) -> list[list[str]]:
    torch_launch = ["-W", "ignore", "-m", "torch.distributed.launch", "--use-env", "--nproc-per-node", str(n)]
    return [[PYTHON, *torch_launch, *argv]]


#: More ways to call a launcher; the first word is the name by which ``topology()`` knows it.
VARIANTS: dict[str, Callable[[int, Sequence[str]], list[list[str]]]] = {
    "torchrun c10d": lambda n, argv: [
        command_line("torchrun", n, ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *argv])
    ],
    "torchrun 2 nodes": _two_agents,
    "torchrun as torch.distributed.launch": _launch,
    # Without a flag, horovodrun uses MPI where Horovod has it, and becomes an mpirun.
    "horovodrun-mpi by default": _horovodrun,
    "horovodrun 2 hosts": _two_hosts,
    # As the launcher of an MPI library: Open MPI's, MPICH's.
    "slurm pmix": lambda n, argv: [["srun", "--mpi=pmix", *command_line("slurm", n, argv)[1:]]],
    "slurm pmi2": lambda n, argv: [["srun", "--mpi=pmi2", *command_line("slurm", n, argv)[1:]]],
}


def commands(launcher: str, n: int, argv: Sequence[str]) -> list[list[str]]:
    """The commands of one world: n processes of ``python *argv``."""
    if launcher == "python":
        return [[PYTHON, *argv]]
    return VARIANTS[launcher](n, argv) if launcher in VARIANTS else [command_line(launcher, n, argv)]


def load() -> float:
    """How many processes have shared a core in the last minute, at least one: what may take longer, by how much."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def scaled(seconds: float) -> str:
    """What takes so many seconds on a quiet machine: a value of UNIDIST_TIMEOUT, say."""
    return str(round(seconds * load()))


def missing(launcher: str) -> str | None:
    """What is not installed here and a launcher needs, or None."""
    return None if launcher == "python" else table.missing(launcher.split()[0])


def require(launcher: str, backend: str) -> None:
    """Skip the test where the launcher or the backend is not installed."""
    why = missing(launcher) or (table.missing("horovodrun") if backend == "horovod" else None)
    if backend == "mpi" or (launcher != "python" and table.COMMANDS[launcher.split()[0]].mpi):
        why = why or (None if find_spec("mpi4py") else 'mpi4py is not installed: pip install "mpi4py>=4"')
        why = why or (table.missing("openmpi") if launcher == "python" else None)
    if why:
        pytest.skip(why)


def environment(launcher: str, extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without what other tests have set, with what this machine needs."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("UNIDIST_", "PYTEST_"))}
    env["OMP_NUM_THREADS"] = "1"
    env = world.environment(env, 1)
    if launcher in ("mpich", "slurm pmi2"):
        env["LD_LIBRARY_PATH"] = str(mpich_for_mpi4py())
    env |= extra
    first = str(ROOT / "tests/support/site")
    others = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", first)]
    env["PYTHONPATH"] = os.pathsep.join([first, *others])
    return env


def mpich_for_mpi4py() -> Path:
    """A directory with Debian's libmpich.so.12 under the name that mpi4py's wheel asks for (docs/launchers.md)."""
    directory = Path(sys.prefix) / "lib" / "mpich"
    link = directory / "libmpi.so.12"
    if not link.exists():
        library = next(Path("/usr/lib").glob("*/libmpich.so.12"))
        directory.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):  # made by another worker
            link.symlink_to(library)
    return directory


@cache
def _server() -> tuple[subprocess.Popen[str], str]:
    """This process's server of ``tests.support.preloaded``, which ends with it, and its address."""
    address = f"{tempfile.mkdtemp()}/server"
    server = subprocess.Popen(
        [PYTHON, preloaded.__file__, address], env=environment("python", {}), cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert server.stdout is not None and server.stdout.readline() == "ready\n"
    return server, address


def with_torch() -> dict[str, str]:
    """Variables of processes that have imported PyTorch when they begin: see ``tests.support.preloaded``."""
    return {preloaded.SERVER: _server()[1]}


def run_suite(
    suite_name: str,
    launcher: str,
    size: int,
    backend: str,
    outcomes: Path,
    env: Mapping[str, str] | None = None,
    files: Sequence[str] = (),
) -> str:
    """Run the tests of a directory, or of some files in it, inside one world; returns a line about the outcome.

    Raises:
        AssertionError: a test failed, or the ranks did not run the same tests.
    """
    options = "-q --color=no -p no:cacheprovider -p tests.support.in_world"
    paths = [f"tests/{suite_name}/{file}" for file in files] or [f"tests/{suite_name}"]
    suite = ["-m", "pytest", *paths, *options.split()]
    # An MPI rank that fails must end the others.
    argv = ["-m", "mpi4py", *suite] if launcher in ("openmpi", "mpich") else suite
    result = run_world(launcher, size, argv, backend=backend, env={IN_WORLD: str(outcomes), **(env or {})}, timeout=300)
    assert result.returncode == 0, result.output
    counts = [json.loads((outcomes / f"{rank}.json").read_text()) for rank in range(size)]
    assert all(count == counts[0] for count in counts) and counts[0]["passed"] > 1, counts
    summary = ", ".join(f"{count} {outcome}" for outcome, count in counts[0].items())
    return f"{backend:8} {launcher:18} {size} ranks: {summary} on each, {result.seconds:.0f} s"


def run_world(
    launcher: str,
    nprocs: int,
    argv: Sequence[str],
    *,
    backend: str = "auto",
    env: Mapping[str, str] | None = None,
    timeout: float = 240,
    fresh: bool = False,
) -> Result:
    """Run ``python *argv`` in ``nprocs`` processes under a launcher, and wait for its end.

    Args:
        fresh: for tests of starts and ends; else ``with_torch``.

    Raises:
        TimeoutError: the world did not end; it was killed.
        Skipped: the launcher or the backend is not installed.
    """
    require(launcher, backend)
    whole = environment(launcher, {"UNIDIST_BACKEND": backend, **(env or {}), **({} if fresh else with_torch())})
    return run(commands(launcher, nprocs, argv), whole, timeout=timeout, cwd=ROOT)
