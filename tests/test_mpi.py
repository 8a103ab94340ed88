"""The mpi backend: its process group under real launchers, and what can go wrong."""

import re
from pathlib import Path

import psutil
import pytest

from tests.support.worlds import load, run_suite, run_world, scaled, shown

PLACE = "tests/programs/place.py"
LIBRARIES = ["openmpi", "mpich"]


@pytest.mark.parametrize(("launcher", "size"), [("openmpi", 1), ("openmpi", 3), ("mpich", 2)])
def test_process_group(launcher: str, size: int, tmp_path: Path) -> None:
    shown.setdefault("process group suite", []).append(run_suite("process_group", launcher, size, "mpi", tmp_path))


@pytest.mark.parametrize("launcher", ["torchrun", "horovodrun"])
def test_another_launcher_is_refused_with_the_right_ones(launcher: str) -> None:
    result = run_world(launcher, 2, [PLACE], backend="mpi")
    assert result.returncode != 0
    assert "MPI needs its own launcher: 'mpirun -np 2 python script.py'" in result.output, result.output


def test_srun_without_mpi_is_refused(srun_env: dict[str, str]) -> None:
    result = run_world("slurm", 2, [PLACE], backend="mpi", env=srun_env)
    assert result.returncode != 0 and "srun -n 2 --mpi=pmix" in result.output, result.output


def test_an_mpi_without_threads_is_refused() -> None:
    code = "import mpi4py; mpi4py.rc.thread_level = 'serialized'; import unidist; unidist.init('mpi')"
    result = run_world("openmpi", 2, ["-c", code])
    assert result.returncode != 0
    assert "needs an MPI with thread level 'multiple', and this one gave 'serialized'" in result.output, result.output


def test_without_mpi4py_each_rank_says_so_in_a_few_lines() -> None:
    code = "import sys; sys.modules['mpi4py'] = None; import unidist; unidist.init('gloo')"
    result = run_world("openmpi", 2, ["-c", code])
    assert result.returncode != 0 and "mpi4py cannot be used under openmpi" in result.output, result.output
    assert "During handling" not in result.output and "direct cause" not in result.output, result.output
    ranks = result.output.count("Traceback")  # Open MPI may end the second one before it has said so
    assert result.output.count('  File "') <= 3 * ranks, result.output


@pytest.mark.parametrize(("launcher", "cycles", "spare"), [("openmpi", 100, 0), ("mpich", 60, 20)])
def test_many_worlds_leave_nothing_behind(launcher: str, cycles: int, spare: int) -> None:
    """MPICH has about 2,000 communicators, of which 20 are left; each world needs two. Open MPI has far more."""
    result = run_world(launcher, 2, ["tests/programs/mpi_cycles.py", str(cycles), str(spare)], timeout=300)
    assert result.returncode == 0, result.output
    ended = re.findall(rf"{cycles} cycles, (\d+) threads left, (-?\d+) MiB grown", result.output)
    assert len(ended) == 2, result.output
    # The watch, those of the last world and one that is just ending.
    assert all(int(threads) < 6 and int(grown) < 5 for threads, grown in ended), ended
    shown.setdefault("worlds one after another", []).append(f"{launcher:16} {cycles}: {ended}, {result.seconds:.0f} s")


def test_messages_over_two_gibibytes() -> None:
    needed = 12 * 2**30
    if psutil.virtual_memory().available < needed:
        pytest.skip("messages of 2 GiB need 12 GiB of free memory")
    result = run_world("openmpi", 2, ["tests/programs/mpi_large.py"], timeout=300)
    assert result.returncode == 0 and result.output.count("all done") == 2, result.output


@pytest.mark.parametrize("launcher", LIBRARIES)
def test_a_missing_rank_is_named_with_the_operation(launcher: str) -> None:
    code = """
import time, torch, torch.distributed as dist, unidist
unidist.init("mpi")
for _ in range(3):
    dist.all_reduce(torch.ones(4))
time.sleep(600 if unidist.rank() == 1 else 0)
dist.all_reduce(torch.ones(5))
"""
    timeout = scaled(6)
    result = run_world(launcher, 3, ["-c", code], env={"UNIDIST_TIMEOUT": timeout})
    assert result.returncode != 0 and result.seconds < 40 * load(), result.output
    expected = (
        r"rank [02] of 3 \(mpi\): all_reduce of float32 \[5\], operation \d+, at <string>:7, "
        rf"hit its timeout of {timeout} s: "
        r"(rank [02] [^;]+ does not answer: [^;]+; )?"  # on a busy host
        r"rank 1 \(host \S+ pid \d+\) is at <string>:6, after all_reduce of float32 \[4\], operation \d+, and has not "
    )
    assert re.search(expected, result.output), result.output


def test_ranks_in_different_calls_are_told_apart() -> None:
    code = f"""
import torch, torch.distributed as dist, unidist
unidist.init("mpi", timeout={scaled(4)})
tensor = torch.ones(3 if unidist.rank() else 100_000)
dist.all_reduce(tensor, async_op=True).get_future().wait()
"""
    result = run_world("openmpi", 2, ["-c", code])
    assert result.returncode != 0 and result.seconds < 30 * load(), result.output
    calls = r"rank 0 .* called all_reduce of float32 \[100000\].*; rank 1 .* called all_reduce of float32 \[3\]"
    assert re.search(rf"mismatch in operation \d+: {calls}", result.output), result.output


def test_a_caught_timeout_ends_the_job_a_little_later() -> None:
    code = f"""
import time, torch, torch.distributed as dist, unidist
unidist.init("mpi", timeout={scaled(3)})
if unidist.rank() == 0:
    try:
        dist.recv(torch.ones(1), 1)
    except dist.DistBackendError as error:
        print("caught:", error, flush=True)
time.sleep(600)
"""
    result = run_world("openmpi", 2, ["-c", code])
    assert result.returncode != 0 and result.seconds < 40 * load(), result.output
    caught = "caught: rank 0 of 2 (mpi): recv of float32 [1], message 1, at <string>:6, hit its timeout"
    assert caught in result.output, result.output
    assert "The job ends now." in result.output
