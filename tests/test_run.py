"""`unidist run` on this host: what the ranks see, what is printed, and how it ends."""

from __future__ import annotations

import asyncio
import os
import re
import select
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.hosts import command_lines
from tests.support.worlds import PYTHON, ROOT, environment, load
from unidist.launchers.table import missing
from unidist.run.agents import HostAgent

PRINTS = str(ROOT / "tests/programs/prints.py")
RUN = [PYTHON, "-m", "unidist", "run"]


def run(*argv: str, env: dict[str, str] | None = None, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*RUN, *argv], env=environment("unidist-run", env or {}), cwd=ROOT, capture_output=True, text=True,
        errors="surrogateescape", timeout=timeout,
    )  # fmt: skip


def by_rank(text: str) -> dict[tuple[str, str], list[str]]:
    """The lines of each rank and stream, in their order."""
    found = defaultdict(list)
    for line in text.splitlines():
        match = re.fullmatch(r"\[(\d+)\]<(\w+)>:(.*)", line)
        assert match, line
        found[match[1], match[2]].append(match[3])
    return found


def test_lines_are_whole_and_in_order_and_in_files(tmp_path: Path) -> None:
    result = run("-np", "3", "--output-filename", str(tmp_path), PYTHON, PRINTS, "lines")
    assert result.returncode == 0, result.stderr
    printed, errors = by_rank(result.stdout), by_rank(result.stderr)
    for rank in "012":
        expected = [f"line {i} of {rank} " + "x" * 50 for i in range(200)]
        expected += ["0 %", "1 %", "2 %", "", "no end\udcff\udcfe"]
        assert printed[rank, "stdout"] == expected
        assert errors[rank, "stderr"] == [f"error {i} of {rank}" for i in range(200)]
        text = (tmp_path / f"rank.{rank}/stdout").read_bytes()
        assert text.startswith(f"line 0 of {rank}".encode()) and text.endswith(b"\r2 %\n\nno end\xff\xfe\n")
        assert (tmp_path / f"rank.{rank}/stderr").read_text().count("\n") == 200


def test_the_first_failure_is_the_status_and_is_shown() -> None:
    result = run("-np", "3", "-prefix-timestamp", PYTHON, PRINTS, "fail", "7")
    assert result.returncode == 7
    assert re.search(r"\w+ \w+ .\d \d\d:\d\d:\d\d 20\d\d\[1\]<stdout>:reason", result.stdout), result.stdout
    last = result.stderr.splitlines()[-2:]
    assert re.search(
        r"rank 1 on host \S+ ended with status 7, the first to fail. 2 other ranks had not ended yet, and got", last[0]
    ), last
    assert last[1] == "  reason: out of luck"


def test_a_signal_is_128_and_its_number() -> None:
    result = run("-np", "2", PYTHON, PRINTS, "fail", "SIGSEGV")
    assert result.returncode == 128 + signal.SIGSEGV
    assert "was ended by SIGSEGV" in result.stderr


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (["-np", "2", "no-such-program"], 127, r"cannot start no-such-program: No such file.* PATH"),
        (["-np", "2", "./tests"], 126, r"cannot start \./tests: .*It is a directory"),
        (["-np", "2", "tests"], 127, "It is a directory"),
        (["-np", "2"], 1, "there is no command to start"),
        (["python", "x.py"], 1, "-np is missing"),
        (["-np", "0", "python", "x.py"], 1, "-np 0 is not a number of ranks"),
        (["-np", "3", "-H", "localhost:2", "python", "x.py"], 1, "3 ranks were asked for, and the hosts have 2 slots"),
        (["-np", "2", "--nonsense"], 1, "usage: unidist run"),
        pytest.param(["-H", "no-such-host.invalid:2", "true"], 1, "host no-such-host.invalid: .*resolve", id="by ssh"),
    ],
)
def test_what_cannot_be_started(argv: list[str], status: int, message: str) -> None:
    result = run(*argv)
    assert result.returncode == status, result.stderr
    assert re.search(message, result.stderr), result.stderr
    assert "Traceback" not in result.stderr


def test_what_the_ranks_see() -> None:
    outer = {
        "RANK": "7",
        "OMPI_COMM_WORLD_RANK": "5",
        "HOROVOD_CROSS_SIZE": "9",
        "KEY": "outer",
        "UNIDIST_BACKEND": "mpi",
    }
    expected = {
        "WORLD_SIZE": "2", "GROUP_RANK": "0", "OMPI_COMM_WORLD_RANK": "None", "HOROVOD_CROSS_SIZE": "1",
        "HOROVOD_CYCLE_TIME": "2.0", "KEY": "of the command", "UNIDIST_BACKEND": "mpi",
    }  # fmt: skip
    names = ["RANK", "LOCAL_RANK", "HOROVOD_RANK", *expected]
    command = ["KEY=of the command", PYTHON, PRINTS, "environment", ",".join(names)]
    result = run("-n", "2", "--cycle-time-ms=2", *command, env=outer)
    assert result.returncode == 0, result.stderr
    common = " ".join(f"{name}={text}" for name, text in expected.items())
    for (rank, _), lines in by_rank(result.stdout).items():
        assert lines == [f"RANK={rank} LOCAL_RANK={rank} HOROVOD_RANK={rank} {common} cwd {ROOT}"]


def test_values_of_variables_are_on_no_command_line() -> None:
    result = run("-np", "2", PYTHON, PRINTS, "command lines", env={"SECRET": "s3cr3t-of-the-job"})
    assert by_rank(result.stdout) == {("0", "stdout"): ["seen in 0"], ("1", "stdout"): ["seen in 0"]}, result.stderr


def left(mark: str) -> list[str]:
    """The command lines that have a mark."""
    return [line for line in command_lines(re.escape(mark)).values() if "unidist run" not in line]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_nothing_is_left_when_it_is_ended(number: int, status: int) -> None:
    mark = f"900.{os.getpid()}{number}"
    with started("--grace-period", "1", "-np", "2", PYTHON, PRINTS, "wait", mark) as driver:
        assert len(left(mark)) == 4
        start = time.monotonic()
        driver.send_signal(number)
        assert driver.wait(240) == status
        while left(mark):
            assert time.monotonic() < start + 10 * load(), left(mark)
            time.sleep(0.05)


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A driver whose two ranks have printed "up"."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # A job in the background of a shell's script ignores SIGINT, and so would the driver.
    default = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    argv = [*RUN, *arguments]
    with subprocess.Popen(argv, env=environment("unidist-run", {}), cwd=ROOT, **streams, **default) as driver:
        try:
            assert sorted(driver.stdout.readline() for _ in range(2)) == ["[0]<stdout>:up\n", "[1]<stdout>:up\n"]
            yield driver
        finally:
            driver.kill()


@pytest.mark.parametrize("status", [0, 3])
def test_ranks_have_time_to_save_after_sigterm(status: int) -> None:
    with started("-np", "2", PYTHON, PRINTS, "save", "4", str(status)) as driver:
        driver.send_signal(signal.SIGTERM)
        output, errors = driver.communicate(timeout=240)
    assert driver.returncode == status and output.count("saved") == 2, errors
    assert "SIGTERM goes to the ranks, which have 30 s to end" in errors
    assert ("ended by SIGTERM; rank 1 ended with status 3" in errors) == (status == 3)


def test_the_agents_own_sigterm_goes_to_the_ranks() -> None:
    with started("-np", "2", PYTHON, PRINTS, "save", "4", "0") as driver:
        agent = int(Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split()[0])
        os.kill(agent, signal.SIGTERM)  # as from srun
        output, errors = driver.communicate(timeout=240)
    assert driver.returncode == 0 and output.count("saved") == 2, errors


def test_a_second_signal_ends_the_ranks_at_once() -> None:
    mark = f"901.{os.getpid()}"
    with started("--grace-period", "600", "-np", "2", PYTHON, PRINTS, "wait", mark) as driver:
        driver.send_signal(signal.SIGTERM)
        assert "another signal ends them at once" in driver.stderr.readline()
        driver.send_signal(signal.SIGTERM)
        _, errors = driver.communicate(timeout=240)  # of 600 s
    assert driver.returncode == 143 and "killed: ranks 0, 1" in errors and not left(mark)


def test_too_few_open_files_are_an_error_before_the_start() -> None:
    line = f"ulimit -n 48; {' '.join(RUN)} -np 24 touch started"
    env = environment("unidist-run", {})
    done = subprocess.run(["bash", "-c", line], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1 and "needs 59 open files for 24 ranks, and 48 are allowed" in done.stderr, done.stderr


def test_a_script_needs_no_interpreter_and_closed_streams_are_no_fault(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import pathlib, sys\npathlib.Path(__file__).with_suffix('.done').write_text(sys.executable)\n")
    env = environment("unidist-run", {})
    line = f"{' '.join(RUN)} -np 1 {script} >&-"
    done = subprocess.run(["bash", "-c", line], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert script.with_suffix(".done").read_text() == PYTHON
    assert run("-np", "1", "/dev/null").returncode == 126


def test_a_dry_run_starts_nothing() -> None:
    result = run("-H", "localhost:1,other:1", "--dry-run", "-p", "2222", "python", "train.py", "--name", "a b")
    assert result.returncode == 0, result.stderr
    assert re.search(
        r"other, started by ssh .*-p 2222 other:\n  rank 1: RANK=1 .*python train.py --name 'a b'", result.stdout
    )
    if not missing("openmpi"):
        result = run("--mpi", "-np", "2", "--dry-run", "--mpi-args=--map-by node", "python", "train.py")
        assert re.search(r"mpirun\S* .*-np 2 -H localhost:2 .*-x PATH .*--map-by node python train.py", result.stdout)


def test_check_build() -> None:
    result = run("--check-build")
    assert "    [X] gloo\n" in result.stdout and "    [X] torchrun\n" in result.stdout, result.stdout


def test_a_config_file(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("params: {fusion_threshold_mb: 3}\n")
    result = run("-np", "1", "--config-file", str(file), "sh", "-c", "echo $HOROVOD_FUSION_THRESHOLD")
    assert result.stdout == f"[0]<stdout>:{3 * 2**20}\n", result.stderr


def test_output_that_nobody_reads_or_that_cannot_be_written_ends_the_job() -> None:
    line = f"{' '.join(RUN)} -np 2 yes"
    env = environment("unidist-run", {})
    done = subprocess.run(
        ["bash", "-c", f"{line} | head -1; exit ${{PIPESTATUS[0]}}"],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 128 + signal.SIGPIPE and "nobody reads this process's stdout" in done.stderr, done.stderr
    done = subprocess.run(["bash", "-c", f"{line} > /dev/full"], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1 and "No space left on device" in done.stderr, done.stderr
    done = run("-np", "1", "--output-filename", "/dev/null/x", "true")
    assert done.returncode == 1 and "--output-filename /dev/null/x: " in done.stderr, done.stderr


def test_a_hangup_that_nohup_ignores_is_ignored() -> None:
    argv = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *RUN, "-np", "1", "sh", "-c", "echo up; sleep 2; echo end"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(argv, env=environment("unidist-run", {}), **streams) as driver:
        assert driver.stdout.readline() == "[0]<stdout>:up\n"
        driver.send_signal(signal.SIGHUP)
        assert driver.wait(240) == 0, driver.stderr.read()
        assert driver.stdout.read() == "[0]<stdout>:end\n"


def test_a_torch_that_cannot_be_imported_ends_an_elastic_job(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    rank = ["env", "-u", "PYTHONPATH", PYTHON, "-c", "import unidist; unidist.init('gloo')"]
    done = run("-np", "1", "--min-np", "1", *rank, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    error = "unidist run: cannot serve torch's key-value store: libcudart.so.12: cannot open shared object file"
    assert done.stderr.splitlines()[-1] == error
    assert "Traceback" not in done.stderr


def test_a_driver_that_is_held_up_does_not_take_hosts_for_lost() -> None:
    """As the import of torch holds it up on a busy machine: what the agent has sent meanwhile is read first."""
    beats = """
import time
print('{"host": ["id", "name", []], "files": 1}', flush=True)
while True:
    time.sleep(0.1)
    print("{}", flush=True)
"""
    lost: list[str] = []
    listener = cast(Any, SimpleNamespace(agent_lost=lambda agent, why: lost.append(why)))

    async def drive() -> None:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(PYTHON, "-c", beats, stdin=pipe, stdout=pipe)
        agent = HostAgent("name", process, listener, b"", heartbeat_timeout=1.0)
        await agent.answered.wait()
        for _ in range(3):
            time.sleep(1.5)
            select.select([cast(Any, process)._transport.get_pipe_transport(1).get_extra_info("pipe")], [], [])
            for _ in range(10):
                await asyncio.sleep(0)
            assert not lost
        process.kill()
        await agent.reading

    asyncio.run(drive())
    assert lost == ["ssh or Python ended there with status -9"]
