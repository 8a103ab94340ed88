"""Launchers, meeting points and what can go wrong between them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, start_processes

from tests.support.places import expected, places
from tests.support.worlds import PYTHON, ROOT, Result, environment, free_port, load, run_world, with_torch
from unidist.backends import rendezvous
from unidist.errors import BackendError
from unidist.run import spawn

PLACE = "tests/programs/place.py"


@pytest.mark.unit
def test_the_launchers_server_is_asked_until_it_answers() -> None:
    class Late(BaseHTTPRequestHandler):
        asked = 0

        def do_GET(self) -> None:
            type(self).asked += 1
            if self.asked == 1:
                self.connection.close()  # without an answer
                return
            self.send_response(404 if self.asked == 2 else 200)
            self.end_headers()
            self.wfile.write(b"here:1")

        def log_message(self, *_: object) -> None:
            pass

    port = free_port()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/unidist/store")
    with pytest.raises(TimeoutError, match=r"never had rank 0's address: .*refused"):
        rendezvous._ask(request, timedelta(0))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(rendezvous._ask, request, timedelta(seconds=60))
        time.sleep(0.1)  # nobody listens yet
        with HTTPServer(("127.0.0.1", port), Late) as server:
            while not answer.done():
                server.timeout = 0.1
                server.handle_request()
        assert answer.result() == "here:1" and Late.asked == 3


@pytest.mark.parametrize(("launcher", "backend", "rounds"), [("torchrun", "gloo", 100), ("openmpi", "mpi", 20)])
def test_rounds_of_init_and_shutdown_leave_nothing(launcher: str, backend: str, rounds: int) -> None:
    result = run_world(launcher, 2, ["tests/programs/rounds.py", str(rounds), backend])
    assert result.returncode == 0, result.output
    found = [json.loads(text) for text in re.findall(r"\[\{.*?\}\]", result.output)]
    assert len(found) == 2, result.output
    for early, late in found:
        # mpi4py keeps MPI running, whose errors an excepthook makes the job's.
        assert early == late and late["backends"] == 0 and late["hook"] is (backend != "mpi"), found


def test_eight_ranks() -> None:
    result = run_world("horovodrun", 8, [PLACE])
    assert result.returncode == 0, result.output
    assert places(result.output) == expected("horovodrun", "horovod", 8)


def test_a_process_alone_in_an_allocation_of_slurm_warns() -> None:
    for env, warns in (({"SLURM_NTASKS": "8"}, True), ({"SLURM_NTASKS": "8", "UNIDIST_LAUNCHER": "none"}, False)):
        result = run_world("python", 1, [PLACE], env={"SLURM_JOB_ID": "7", **env})
        assert result.returncode == 0, result.output
        assert ("alone in a Slurm allocation of 8 tasks" in result.output) == warns, result.output


def test_torchrun_inside_mpirun_and_slurm_wins(srun_env: dict[str, str]) -> None:
    """One torchrun per node, started by the scheduler: the inner launcher counts."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", PLACE]
    for launcher, env in (("openmpi", {}), ("slurm", srun_env)):
        result = run_world(launcher, 1, torchrun, env=env)
        assert result.returncode == 0, result.output
        assert places(result.output) == expected("torchrun", "gloo", 2)


def by_hand(options: dict[str, Any], size: int, **env: str) -> list[subprocess.CompletedProcess[str]]:
    """Start the ranks without a launcher, each with MY_RANK."""
    command = [PYTHON, PLACE, json.dumps(options)]
    running = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment("python", {**env, **with_torch(), "RANK" if "RANK" in env else "MY_RANK": str(rank)}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in running]
    return [
        subprocess.CompletedProcess(command, process.returncode, output) for process, output in zip(running, outputs)
    ]


@pytest.mark.parametrize(("method", "backend"), [("tcp", "gloo"), ("file", "horovod")])
def test_init_method(method: str, backend: str, tmp_path: Path) -> None:
    url = f"tcp://127.0.0.1:{free_port()}" if method == "tcp" else f"file://{tmp_path}/meeting"
    options = {"backend": backend, "init_method": url, "rank_from": "MY_RANK", "world_size": 2}
    ended = by_hand(options, 2)
    assert [process.returncode for process in ended] == [0, 0], ended
    assert places("".join(process.stdout for process in ended)) == expected("arguments", backend, 2)


@pytest.mark.parametrize("options", [{}, {"init_method": "env://"}], ids=["launcher env", "env://"])
def test_variables_set_by_hand(options: dict[str, Any]) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ended = by_hand(options, 2, **env)
    assert [process.returncode for process in ended] == [0, 0], ended
    assert places("".join(process.stdout for process in ended)) == expected("env", "gloo", 2)


@pytest.mark.unit
def test_a_unit_starts_no_world() -> None:
    import unidist

    for start in (lambda: run_world("torchrun", 2, [PLACE], fresh=True), lambda: unidist.spawn(os.getpid, 1)):
        with pytest.raises(AssertionError, match="is marked unit, and would start a world"):
            start()


# ------------------------------------------------------------------------------------ the guard
@pytest.mark.parametrize("launcher", ["torchrun", "mpich"])
def test_horovod_alone_in_a_world_of_two_is_refused(launcher: str) -> None:
    """``hvd.init()`` under these makes two worlds of one rank, without a word."""
    result = run_world(launcher, 2, ["tests/programs/lonely.py", "horovod"])
    assert result.returncode != 0
    assert "horovod made a world of 1" in result.output and "declared 2" in result.output, result.output
    assert "went on in a lonely world" not in result.output


def test_torch_alone_in_a_world_of_two_is_refused() -> None:
    result = run_world("openmpi", 2, ["tests/programs/lonely.py", "torch"])
    assert result.returncode != 0
    assert "gloo made a world of 1" in result.output and "declared 2" in result.output, result.output
    assert "went on in a lonely world" not in result.output


def test_single_under_a_launcher_is_refused() -> None:
    result = run_world("torchrun", 2, [PLACE], backend="single")
    assert result.returncode != 0
    assert "single made a world of 1" in result.output and "UNIDIST_LAUNCHER=none" in result.output


def test_the_wrong_mpi_library_is_refused() -> None:
    """mpi4py bound to Open MPI under MPICH's mpiexec makes two worlds of one rank."""
    result = run_world("mpich", 2, [PLACE], backend="gloo", env={"MPI4PY_MPIABI": "openmpi"})
    assert result.returncode != 0
    assert "mpi4py made a world of 1, but mpich declared 2" in result.output, result.output
    assert "MPI4PY_MPIABI=mpich" in result.output


def test_two_processes_of_one_rank_are_refused() -> None:
    # Rank 2 never comes, so rank 0 waits until both have claimed rank 1.
    env = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "UNIDIST_TIMEOUT": "240"}
    command = [PYTHON, PLACE]
    running = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment("python", {**env, "RANK": rank}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("0", "1", "1")
    ]
    start = time.monotonic()
    while all(process.poll() is None for process in running) and time.monotonic() < start + 230:
        time.sleep(0.1)
    ended = [process for process in running if process.poll() is not None]
    for process in running:
        process.kill()
    outputs = [process.communicate()[0] for process in running]
    assert len(ended) == 1 and ended[0].returncode != 0, outputs
    assert "two processes are rank 1" in outputs[running.index(ended[0])], outputs


@pytest.mark.parametrize(("backend", "launcher"), [("torch", "torchrun"), ("horovod", "openmpi")])
def test_adopts_what_runs_already(backend: str, launcher: str) -> None:
    result = run_world(launcher, 2, ["tests/programs/adopt.py", backend])
    assert result.returncode == 0, result.output
    assert result.output.count(f"adopted {backend}") == 2


def test_a_missing_rank_ends_the_start_with_a_clear_error() -> None:
    env = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "UNIDIST_TIMEOUT": "3",
    }
    result = run_world("python", 1, [PLACE], env=env)
    assert result.returncode != 0
    assert "rank 0 of 2 did not meet ranks 1 within 3 s" in result.output and result.seconds < 30 * load(), (
        result.output
    )


@pytest.mark.unit
def test_a_rank_that_comes_too_late_is_told_so() -> None:
    store = dist.HashStore()
    with pytest.raises(BackendError, match="rank 0 of 2 did not meet ranks 1 within 1 s"):
        rendezvous.exchange(store, 0, ["", ""], "", timedelta(seconds=1))
    with pytest.raises(BackendError, match="rank 1 of 2 came after the 1 s for which rank 0 waited for it"):
        rendezvous.exchange(store, 1, ["", ""], "", timedelta(seconds=1))


@pytest.mark.unit
def test_rank_0_is_told_when_the_store_has_gone() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    del server
    with pytest.raises(BackendError, match=r"rank 0 of 2 cannot use the key-value store: .*\. Has torchrun, or"):
        rendezvous.exchange(store, 0, ["", ""], "", timedelta(seconds=1))


# ------------------------------------------------------------------------------------ a rank that fails
# Every launcher, and every backend, with an exception that ends a rank. The launcher, and not the backend, sees a
# process that exits without a word.
FAILS = [
    ("torchrun", "gloo", "raise"), ("torchrun", "horovod", "exit"),
    ("spawn", "horovod", "raise"), ("spawn", "gloo", "exit"),
    ("horovodrun", "horovod", "raise"), ("horovodrun", "gloo", "exit"),
    ("horovodrun-mpi", "gloo", "raise"), ("horovodrun-mpi", "horovod", "exit"),
    ("openmpi", "horovod", "raise"), ("openmpi", "mpi", "raise without output"), ("openmpi", "mpi", "exit"),
    ("mpich", "gloo", "raise"), ("mpich", "mpi", "exit"),
]  # fmt: skip


def seconds_since_the_failure(result: Result) -> float:
    """Called when the world has ended. Its start, which takes long on a busy machine, is not counted."""
    return time.time() - float(re.findall(r"fails at ([\d.]+)", result.output)[0])


@pytest.mark.parametrize(("launcher", "backend", "how"), FAILS)
def test_a_rank_that_fails_ends_the_job(launcher: str, backend: str, how: str) -> None:
    result = run_world(launcher, 2, ["tests/programs/fail_on_rank.py", "1", how], backend=backend, fresh=True)
    assert result.returncode != 0 and seconds_since_the_failure(result) < 20
    assert "trained to the end" not in result.output
    if how == "raise":
        assert "rank 1 fails on purpose" in result.output, result.output


@pytest.mark.parametrize(
    ("launcher", "backend"),
    [("torchrun", "gloo"), ("horovodrun", "horovod"), ("openmpi", "mpi")],
)
def test_a_rank_that_does_not_come_ends_the_job(launcher: str, backend: str) -> None:
    argv = ["tests/programs/fail_on_rank.py", "1", "sleep"]
    for _ in range(4):  # a busy machine may take longer for the start alone
        result = run_world(launcher, 2, argv, backend=backend, env={"UNIDIST_TIMEOUT": "4"}, fresh=True)
        if "has waited 4 s for MPI's start" not in result.output:
            break
    assert result.returncode != 0 and seconds_since_the_failure(result) < 30
    # The collectives of a checkpoint wait for no disk, though their timeout is 4 s.
    assert result.output.count("the disk was slow") == 2, result.output
    failed = {
        "gloo": r"backward \(all_reduce of .*, operation \d+\), at \S+",
        "horovod": r"backward of .*, operation \d+, at \S+",
        "mpi": r"all_reduce of .*, operation \d+, at .*, hit its timeout of 4 s",
    }
    at = r"rank 1 \(host \S+ pid \d+\) is at tests/programs/fail_on_rank\.py:\d+"
    assert re.search(rf"rank 0 of 2 \({backend}\): {failed[backend]}.*: {at}", result.output), result.output


@pytest.mark.parametrize(
    ("backend", "step", "call", "error"),
    [
        # Reset where the other rank has not read all when it ends.
        ("gloo", "5", "backward", "Connection (closed|reset) by peer"),
        ("gloo", "1", "forward", "Connection (closed|reset) by peer"),  # which rebuilds buckets
        ("horovod", "5", "backward of float32 .*, operation", "Horovod has been shut down"),
    ],
)
def test_a_rank_that_leaves_early_is_explained(backend: str, step: str, call: str, error: str) -> None:
    """It makes fewer steps than the others, and fails in nothing."""
    argv = ["tests/programs/fail_on_rank.py", "1", "leave", step]
    result = run_world("torchrun", 2, argv, backend=backend)
    assert result.returncode != 0 and re.search(error, result.output), result.output
    ended = rf"rank 0 of 2 \({backend}\): {call} .*: rank 1 .* has ended without an exception, after "
    assert re.search(rf"{ended}.*shard_loader.*unidist\.join", result.output), result.output


NONSENSE: list[tuple[dict[str, str], str]] = [
    ({"RANK": "abc", "WORLD_SIZE": "2"}, "RANK='abc'"),
    ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
    ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is not below WORLD_SIZE=2"),
    ({"RANK": "0"}, "WORLD_SIZE is not set"),
    ({"WORLD_SIZE": "2"}, "RANK is not"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, "MASTER_PORT is not set"),
    ({"UNIDIST_LAUNCHER": "torchelastic"}, "use one of none, spawn, torchrun"),
    ({"UNIDIST_BACKEND": "mpi4py"}, "use auto, single, gloo"),
    ({"UNIDIST_TIMEOUT": "soon"}, "UNIDIST_TIMEOUT='soon'"),
]


def test_nonsense_environments_give_one_clear_error_at_once() -> None:
    """Each error comes from ``init()`` in under a second, and leaves nothing behind that the next would meet."""
    code = (
        "import json, os, sys, time, unidist\n"
        "unidist.init  # imports torch\n"
        "for env in json.loads(sys.argv[1]):\n"
        "    os.environ.update(env)\n"
        "    start = time.monotonic()\n"
        "    try:\n        unidist.init()\n"
        "    except unidist.UnidistError as error:\n"
        "        print(f'{type(error).__name__} after {time.monotonic() - start:.3f} s: {error}')\n"
        "    for name in env:\n        del os.environ[name]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps([env for env, _ in NONSENSE])],
        env=environment("python", {}), cwd=ROOT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    lines = done.stdout.strip().splitlines()
    assert len(lines) == len(NONSENSE), (done.stdout, done.stderr)
    for line, (env, message) in zip(lines, NONSENSE):
        assert message in line and float(line.split()[2]) < 1.0, (env, line)


#: A function of a notebook's cell: new processes cannot import it.
CELL = """
import functools, sys, threading, torch, unidist
factor = 10
def cell(x):
    return unidist.rank() * factor + x, unidist.all_reduce(torch.ones(1)).item()
print("RETURNED", unidist.spawn(functools.partial(cell, 7), 2))
def error_of(*arguments):
    try:
        unidist.spawn(*arguments)
    except Exception as error:
        print("SAID", " ".join(str(error).split()))
error_of(threading.Lock, 1)
error_of(sys.exit, 1, (0,))
sys.modules["cloudpickle"] = None
error_of(cell, 2, (7,))
"""


def test_spawn_returns_the_results_and_takes_a_notebooks_function() -> None:
    result = run_world("python", 1, ["-c", CELL], backend="gloo")
    assert result.returncode == 0 and "RETURNED [(7, 2.0), (17, 2.0)]" in result.output, result.output
    _, of_result, of_exit, of_function = result.output.split("SAID")
    assert "rank 0 returned a lock, which does not pickle" in of_result and "state_dict()" in of_result
    assert "rank 0 ended before its function returned, with status 0" in of_exit
    assert "spawn(cell): new processes cannot have this function" in of_function
    assert "pip install cloudpickle" in of_function


def _fails_by_the_other(rank: int) -> None:
    if rank == 1:
        # As any process that ends, it closes its descriptors first, and can be waited for later.
        os.closerange(3, 1024)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("the other rank is gone")


def test_spawn_names_the_process_that_was_killed_and_not_one_that_failed_by_it() -> None:
    started = start_processes(_fails_by_the_other, nprocs=2, join=False, start_method="fork")
    while len(wait(started.sentinels)) < 2:
        time.sleep(0.01)
    with pytest.raises(ProcessExitedException, match="process 1 terminated with signal SIGKILL"):
        spawn._join(started)


@pytest.mark.unit
def test_spawn_bad_input() -> None:
    import unidist

    for bad in (0, "2"):
        with pytest.raises(ValueError, match=f"nprocs={bad!r}"):
            unidist.spawn(os.getpid, bad)  # type: ignore[arg-type]
