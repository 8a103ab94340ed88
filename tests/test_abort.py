"""A rank that has stopped, and the others, which wait for it: at the start, and in a library."""

import re
import subprocess
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.worlds import PYTHON, ROOT, environment, free_port, load, run_world, with_torch
from unidist.backends import process_groups
from unidist.errors import CollectiveError

RANKS = 3


@pytest.mark.parametrize("what", ["all_reduce", "start_all_reduce", "backward", "first_call", "default_group"])
def test_abort_frees_the_ranks_that_wait_for_a_stopped_one(what: str) -> None:
    """Their calls raise, no other socket is touched, and their processes end."""
    env = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    # Started without a launcher, which would wait for the stopped process.
    ranks = [
        subprocess.Popen(
            [PYTHON, "tests/programs/stopped_rank.py", what],
            cwd=ROOT, env=environment("python", {**env, **with_torch(), "RANK": str(rank)}), stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    stopped = ranks[-1]
    try:
        for rank, process in enumerate(ranks[:-1]):
            output, _ = process.communicate(timeout=240)
            ended = time.time()
            assert process.returncode == 0, output
            # DDP's backward pass calls no code of this package.
            error = "RuntimeError" if what == "backward" else "CollectiveError"
            found = re.search(rf"raised {error} at ([\d.]+)", output)
            aborted = re.search(r"aborts at ([\d.]+)", output)
            assert found and aborted and f"rank {rank} is refused" in output, output
            assert float(found[1]) - float(aborted[1]) < 3 * load(), output
            left = float(re.findall(r"leaves at ([\d.]+)", output)[0])
            assert ended - left < 15 * load(), output
        assert stopped.poll() is None  # it was there all the time
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


#: Seconds of UNIDIST_TIMEOUT, and how much longer a start may take to fail.
TIMEOUT, GRACE = 4, 10


@pytest.mark.parametrize(
    ("call", "victim"),
    [
        ("unidist.backends.rendezvous._base_store", 0),  # nobody listens
        ("unidist.backends.rendezvous.exchange", 0),  # who listens does not answer
        ("unidist.hvd.session.open_control", 0),
        ("unidist.hvd.session.open_control", 1),
        ("unidist.hvd.bootstrap.accept", 0),
        ("unidist.hvd.bootstrap.connect", 1),
    ],
)
def test_a_rank_that_stops_in_the_start_is_named_in_time(call: str, victim: int) -> None:
    env = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env |= {"UNIDIST_TIMEOUT": str(TIMEOUT), "UNIDIST_BACKEND": "gloo"}
    ranks = [
        subprocess.Popen(
            [PYTHON, "tests/programs/stopped_start.py", call, str(victim)],
            cwd=ROOT, env=environment("python", {**env, **with_torch(), "RANK": str(rank)}), stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(3)
    ]  # fmt: skip
    try:
        for rank, process in enumerate(ranks):
            if rank == victim:
                continue
            output, _ = process.communicate(timeout=240)
            found = re.search(rf"rank {rank} raised BackendError after ([\d.]+) s: (.*)", output)
            assert found and float(found[1]) < TIMEOUT + GRACE * load(), output
            # Where nobody listens, rank 0's address is all that is known.
            assert re.search(rf"ranks? {victim}\b|127.0.0.1:\d+", found[2]), output
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("call", "what"),
    [
        ("unidist.backends.mpi.launch._start", f"has waited {TIMEOUT} s for MPI's start"),
        ("unidist.backends.rendezvous.this_host", f"has waited {TIMEOUT} s for all ranks to come to MPI's first coll"),
        ("horovod.torch.init", f"has waited {1.5 * TIMEOUT:g} s for Horovod's start"),
    ],
)
def test_a_rank_that_stops_in_the_start_of_mpi_ends_the_job(call: str, what: str) -> None:
    env = {"UNIDIST_TIMEOUT": str(TIMEOUT)}
    result = run_world(
        "openmpi", 3, ["tests/programs/stopped_start.py", call, "1"], backend="gloo", env=env, fresh=True
    )
    assert result.returncode != 0 and result.seconds < 45 * load(), result.output
    assert what in result.output and re.search(r"Of 3 ranks, .*\b1 \(stopped\)", result.output), result.output
    assert "btl_tcp_if_exclude" in result.output and "has begun" not in result.output, result.output


def test_a_rank_that_waits_for_others_at_its_end_says_so() -> None:
    code = "import time, unidist; unidist.init(); rank = unidist.rank(); unidist.shutdown(); time.sleep(4 * rank)"
    result = run_world("openmpi", 2, ["-c", code], backend="gloo", env={"UNIDIST_STALL_S": "1"}, fresh=True)
    assert result.returncode == 0, result.output
    waits = re.findall("has ended, and waits in MPI_Finalize for 1 s.*", result.output)[0]
    assert waits.endswith("Of 2 ranks, 0, 1 run on this host. Has a rank stopped?")


@pytest.mark.unit
def test_a_rank_that_cannot_make_gloo_has_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo would wait for its address five times the timeout, in C++, and name nobody."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)

    def group(rank: int) -> process_groups.LazyProcessGroup:
        world: Any = SimpleNamespace(store=store, topology=SimpleNamespace(rank=rank), address="127.0.0.1")
        return process_groups.ProcessGroups("gloo", world, timedelta(seconds=1)).new_group([0, 1])

    waiting, failing = group(0), group(1)
    with monkeypatch.context() as patch:
        patch.setattr(process_groups, "_gloo_device", lambda address: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            failing.get()
    with pytest.raises(CollectiveError, match="ranks 1 did not come to the first call of the group"):
        waiting.get()
