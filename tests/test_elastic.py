"""Elastic training under `unidist run` and torchrun: workers that come, leave, fail and hang."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import hosts as machines
from tests.support.preloaded import SERVER
from tests.support.weights import distance
from tests.support.worlds import PYTHON, ROOT, environment, load, shown, with_torch
from tests.test_run import RUN, left
from unidist.elastic import host_memory
from unidist.launchers.table import TORCHRUN

WORKER = [PYTHON, "tests/programs/elastic_worker.py"]
HOROVOD = [PYTHON, "tests/programs/elastic_horovod.py"]
NATIVE = [PYTHON, "tests/programs/elastic_train.py"]
SAMPLES, EPOCHS = 96, 3
TIMEOUT_S = 240


class Job:
    """An elastic job that is running."""

    def __init__(self, process: subprocess.Popen[str], directory: Path) -> None:
        self.process = process
        self.directory = directory
        self._lines: list[str] = []
        self._ended = False
        #: The line from which on one is waited for: of the last generation.
        self._first = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)
        self._ended = True

    @property
    def output(self) -> str:
        return "".join(self._lines)

    def do(self, *names: str) -> None:
        """Put files into the directory: faults, and the end."""
        for name in names:
            (self.directory / name).touch()

    def hosts(self, *lines: str) -> None:
        """What the discovery script prints from now on."""
        part = self.directory / "part"
        part.write_text("\n".join(lines))
        part.replace(self.directory / "hosts")

    def wait_for(self, pattern: str, count: int = 1) -> list[re.Match[str]]:
        """Lines of this generation, or of one to come, in which a pattern is found; workers print in any order."""
        end = time.monotonic() + TIMEOUT_S
        while True:
            over = self._ended or time.monotonic() > end
            found = [match for line in self._lines[self._first :] if (match := re.search(pattern, line))]
            if len(found) >= count:
                return found
            assert not over, f"{pattern!r} was not printed:\n{self.output}"
            time.sleep(0.02)

    def generation(self, *members: int) -> list[dict[str, str]]:
        """Wait until these workers train, and nobody else; their places, in rank order."""
        members_list = re.escape(json.dumps(list(members)))
        lines = self.wait_for(rf"<stdout>:(.*\"members\": {members_list}.*)", len(members))
        self._first = min(self._lines.index(line.string) for line in lines)
        return sorted((json.loads(line[1]) for line in lines), key=lambda place: int(place["RANK"]))

    def status(self) -> int:
        """The exit status, once all of the output has been read."""
        status = self.process.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        return status


@contextmanager
def started(directory: Path, options: Sequence[str], command: Sequence[str], **env: str) -> Iterator[Job]:
    """`unidist run` with options that are relative to a directory of hosts, faults and notes."""
    directory.mkdir(exist_ok=True)
    argv = [*RUN, *(option.format(directory) for option in options), *command[:2], str(directory), *command[2:]]
    with subprocess.Popen(
        argv,
        cwd=ROOT,
        env=environment("unidist-run", {**with_torch(), **env}),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            yield Job(process, directory)
        finally:
            process.kill()


def test_workers_come_leave_and_fail(tmp_path: Path) -> None:
    """Hosts added and removed, failures by exception and by a signal, below --min-np and up again, a worker that hangs:
    who trains then, and as which rank."""
    options = ["-np", "2", "--min-np", "2", "--max-np", "4", "--host-discovery-script", "cat {}/hosts"]
    (tmp_path / "hosts").write_text("localhost:2\n")
    with started(tmp_path, options, WORKER, UNIDIST_GRACE="1") as job:
        job.generation(0, 1)
        # Hosts added. All end the generation at their check of the same number, also one that is late.
        job.do("slow.1")
        job.hosts("localhost:2", "127.0.0.1:2")
        numbers = {match[1] for match in job.wait_for(r"interrupted at (\d+)", 2)}
        assert len(numbers) == 1
        places = job.generation(0, 1, 2, 3)
        assert [(place["RANK"], place["LOCAL_RANK"], place["GROUP_RANK"]) for place in places] == [
            ("0", "0", "0"), ("1", "1", "0"), ("2", "0", "1"), ("3", "1", "1"),
        ]  # fmt: skip
        # One fails by a signal: the others go on, and the one that replaces it gets its local rank.
        job.do("kill.1")
        job.wait_for("lost: worker 1, rank 1 of generation 2, on host localhost was ended by SIGKILL", 3)
        # On a busy machine the new one may be ready when the others meet.
        assert [place["LOCAL_RANK"] for place in job.generation(0, 2, 3, 4)] == ["0", "0", "1", "1"]
        # One fails by its status, the oldest: the next one is rank 0.
        job.do("exit.0")
        job.generation(2, 3, 4, 5)
        # A host removed: its workers end without a failure.
        job.hosts("127.0.0.1:2")
        assert [place["GROUP_RANK"] for place in job.generation(2, 3)] == ["0", "0"]
        # Below --min-np: the others wait, and go on when there are enough.
        job.hosts("127.0.0.1:1")
        job.wait_for("interrupted", 2)
        job.hosts("127.0.0.1:1", "localhost:1")
        job.generation(2, 6)
        job.hosts("127.0.0.1:1", "localhost:2")
        job.generation(2, 6, 7)
        # A worker that does not come is killed while the others wait.
        job.do("hang.6")
        job.wait_for("hangs")
        job.do("kill.2")
        job.wait_for("worker 6 on host localhost does not come while the others wait: it is killed")
        job.wait_for("worker 6, .*was ended by SIGKILL")
        job.wait_for(r'"members": \[7, ')
        job.do("end")
        assert job.status() == 0, job.output


def test_a_member_ends_well_while_others_wait_for_its_number_of_checks(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost:2\n")
    options = ["-np", "2", "--min-np", "1", "--host-discovery-script", "cat {}/hosts"]
    with started(tmp_path, options, [*WORKER, "end when held"]) as job:
        job.generation(0, 1)
        job.hosts("localhost:3")
        job.wait_for("is held")
        job.do("end")
        assert job.status() == 0, job.output


def test_how_elastic_jobs_end(tmp_path: Path) -> None:
    """All ranks fail, all hosts are blacklisted, too few hosts, the reset limits 1 and 2, hosts that come back, and an
    interrupt."""
    two = ["-np", "2", "--min-np", "2"]
    names = ("start", "training", "blacklisted", "comes back", "timeout", "limit 1", "limit 2", "interrupted")
    paths = [tmp_path / name.replace(" ", "-") for name in names]
    with (
        started(paths[0], two, [*WORKER, "fail at the start"]) as at_start,
        started(paths[1], two, [*WORKER, "fail in training"]) as in_training,
        started(paths[2], two, WORKER) as blacklisted,
        started(paths[3], [*two, "--blacklist-cooldown-range", "1", "2"], WORKER) as comes_back,
        started(paths[4], [*two, "--elastic-timeout", "1", "--host-discovery-script", "echo localhost"], WORKER) as few,
        started(paths[5], ["-np", "2", "--min-np", "1", "--reset-limit", "1"], WORKER) as limit_1,
        started(paths[6], ["-np", "3", "--min-np", "1", "--reset-limit", "2"], WORKER) as limit_2,
        started(paths[7], two, WORKER) as interrupted,
    ):
        assert at_start.status() == 3 and "all workers have failed" in at_start.output, at_start.output
        assert in_training.status() == 5, in_training.output
        assert "no worker of generation 1 is left" in in_training.output, in_training.output
        for job in (blacklisted, comes_back):
            job.generation(0, 1)
            job.do("broken", "kill.1")
        assert blacklisted.status() == 3, blacklisted.output
        assert "host localhost is blacklisted: no worker is started there any more" in blacklisted.output
        assert re.search(r"all hosts are blacklisted after 3 failures of a slot: 2 workers are", blacklisted.output)
        comes_back.wait_for("host localhost is blacklisted: no worker is started there for 1 s")
        (paths[3] / "broken").unlink()
        assert [place["RANK"] for place in comes_back.generation(0, 4)] == ["0", "1"]
        comes_back.do("end")
        assert comes_back.status() == 0, comes_back.output
        assert few.status() == 1 and "2 workers are needed (-np), and 1 are left" in few.output, few.output
        interrupted.generation(0, 1)
        interrupted.process.send_signal(signal.SIGINT)
        assert interrupted.status() == 130 and "ended by SIGINT" in interrupted.output, interrupted.output
        assert not left(str(interrupted.directory))
        limit_1.generation(0, 1)
        limit_1.do("kill.0")
        limit_1.generation(1)
        limit_1.do("exit.1")
        assert limit_1.status() == 5 and "no worker of generation 2 is left" in limit_1.output, limit_1.output
        limit_2.generation(0, 1, 2)
        limit_2.do("kill.0")
        limit_2.generation(1, 2)
        limit_2.generation(1, 2, 3)
        limit_2.do("exit.1")
        assert limit_2.status() == 5 and "--reset-limit 2 allows no further change" in limit_2.output, limit_2.output


# ------------------------------------------------------------------------------------- training
def notes(directory: Path) -> list[dict[str, Any]]:
    """What the workers have written, in order of time."""
    lines = [line for file in directory.glob("worker-*.jsonl") for line in file.read_text().splitlines()]
    return sorted(map(json.loads, lines), key=lambda note: float(note["time"]))


def assert_each_sample_once(found: Sequence[dict[str, Any]]) -> None:
    """Of each epoch every sample is in one committed step; ranks repeat some in the last one, to have as many."""
    committed = [note for note in found if note["event"] == "committed"]
    for epoch in range(EPOCHS):
        count: Counter[int] = Counter()
        size = 0
        for step in sorted({note["step"] for note in committed if note["epoch"] == epoch}):
            # A step that was lost was made again by a later generation.
            last = max(note["generation"] for note in committed if note["step"] == step)
            same = [note for note in committed if note["step"] == step and note["generation"] == last]
            size = same[0]["size"]
            assert sorted(note["rank"] for note in same) == list(range(size)), same
            for note in same:
                count.update(note["ids"])
        assert count.keys() == set(range(SAMPLES)) and count.total() - SAMPLES < size, (epoch, count)


def show_recovery(name: str, found: Sequence[dict[str, Any]]) -> None:
    """Add to the table of this test run: seconds from each fault to the others' next step, and to the full size."""
    full = max(note["size"] for note in found if "size" in note)
    steps = [note for note in found if note["event"] == "committed"]
    for fault in (note for note in found if note["event"] == "fault"):
        later = [note for note in steps if note["generation"] > fault["generation"]]
        first = min(note["time"] for note in later) - fault["time"]
        whole = min(note["time"] for note in later if note["size"] == full) - fault["time"]
        row = f"{name:34} {fault['kind']:12} next step after {first:5.1f} s, all ranks after {whole:5.1f} s"
        shown.setdefault("elastic training: from a fault to the next step", []).append(row)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the Horovod script and the native one without a fault, in a world of two ranks that stays."""
    directory = tmp_path_factory.mktemp("unbroken")
    with (
        started(directory / "horovod", ["--hvd", "-np", "2"], HOROVOD) as horovod,
        started(directory / "native", ["-np", "2"], [*NATIVE, "replicate", "0"]) as native,
    ):
        assert horovod.status() == 0, horovod.output
        assert native.status() == 0, native.output
    return directory


def test_an_unmodified_horovod_script_as_if_nothing_had_happened(unbroken: Path, tmp_path: Path) -> None:
    """A rank is killed, and rank 0 raises: the world waits for those that replace them, and ends with the weights of a
    run without faults. What the state holds in a list is undone, too."""
    with started(tmp_path, ["--hvd", "-np", "2", "--min-np", "2"], HOROVOD) as job:
        job.do("kill.1.5", "raise.0.20")
        assert job.status() == 0, job.output
    found = notes(tmp_path)
    assert [note["generation"] for note in found if note["event"] == "enter"] == [0, 0, 1, 1, 2, 2]
    assert [note["step"] for note in found if note["event"] == "enter"][2:] in ([5, 5, 20, 20],)
    for note in found:
        assert note["event"] != "end" or note["losses"] == list(range(1, 37)), note
    assert_each_sample_once(found)
    assert distance(tmp_path / "weights.pt", unbroken / "horovod" / "weights.pt") == 0
    show_recovery("hvd.elastic, --min-np 2 of 2", found)


def test_an_unmodified_horovod_script_on_hosts_that_come_and_go(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost:1\n")
    options = ["--hvd", "-np", "1", "--min-np", "1", "--max-np", "3", "--host-discovery-script", "cat {}/hosts"]
    with started(tmp_path, options, HOROVOD, HELD_SIZES="1 3") as job:
        job.wait_for("generation 1: 1 workers on localhost:1")
        job.hosts("localhost:1", "127.0.0.1:2")
        job.wait_for("generation 2: 3 workers on localhost:1, 127.0.0.1:2")
        end = time.monotonic() + TIMEOUT_S
        while not any(note["event"] == "committed" and note["size"] == 3 for note in notes(tmp_path)):
            assert time.monotonic() < end, job.output
            time.sleep(0.05)
        job.hosts("127.0.0.1:2")
        job.wait_for("generation 3: 2 workers on 127.0.0.1:2")
        assert job.status() == 0, job.output
    found = notes(tmp_path)
    assert [note["size"] for note in found if note["event"] == "enter"] == [1, 3, 3, 3, 2, 2]
    assert sum(note["event"] == "reset" for note in found) == 1 + 2  # of those that were there before
    assert_each_sample_once(found)
    shared = [tuple(note["losses"]) for note in found if note["event"] == "end"]
    assert len(shared) == 2 and len(set(shared)) == 1


@pytest.mark.parametrize(("call", "fault"), [("replicate", "kill"), ("wrap_model", "stop")])
def test_survivors_go_on_without_the_one_that_is_lost(call: str, fault: str, tmp_path: Path) -> None:
    """A rank that is stopped is killed after the report of the others that wait."""
    options = ["-np", "2", "--min-np", "1"]
    env = {"UNIDIST_STALL_S": "2", "HELD_SIZES": "1", SERVER: ""}  # the new worker comes when the other has gone on
    with started(tmp_path, options, [*NATIVE, call, "0"], **env) as job:
        job.do(f"{fault}.1.4")
        assert job.status() == 0, job.output
    assert ("host localhost: worker 1 has stopped while others wait: it is killed" in job.output) == (fault == "stop")
    found = notes(tmp_path)
    assert [note["size"] for note in found if note["event"] == "enter"] == [2, 2, 1, 2, 2], job.output
    assert_each_sample_once(found)
    show_recovery(f"unidist.elastic, {call}", found)


def test_torchrun_restarts_from_the_commits_in_memory(unbroken: Path, tmp_path: Path) -> None:
    tmp_path.joinpath("kill.1.7").touch()
    env = {"TMPDIR": str(tmp_path)}
    command = [*TORCHRUN, "--nproc-per-node", "2", "--max-restarts", "1", *NATIVE[1:], str(tmp_path), "replicate", "0"]
    done = subprocess.run(command, cwd=ROOT, env=environment("torchrun", env), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = notes(tmp_path)
    assert [note["step"] for note in found if note["event"] == "enter"] == [0, 0, 7, 7]
    assert_each_sample_once(found)
    assert distance(tmp_path / "weights.pt", unbroken / "native" / "weights.pt") == 0
    show_recovery("unidist.elastic, torchrun", found)


def holders() -> set[int]:
    """Processes that hold the commits of jobs."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if host_memory._PROGRAM.encode() in path.read_bytes():
                found.add(int(path.parent.name))
    return found


@contextmanager
def committing(directory: Path, how: str, *before: str) -> Iterator[Job]:
    """A job of one rank under torchrun that commits."""
    argv = [*before, *TORCHRUN, "--nproc-per-node=1", "--max-restarts=1", "tests/programs/commits.py", directory, how]
    with subprocess.Popen(
        argv, cwd=ROOT, env=environment("torchrun", {}), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            yield Job(process, directory)
        finally:
            process.kill()


def test_commits_under_torchrun_end_with_it_and_are_no_other_jobs(tmp_path: Path) -> None:
    """A job that fails for good, one that is killed, and two whose processes do not see each other."""
    before, shared = holders(), set(os.listdir("/dev/shm"))
    alone = ["unshare", *["--user", "--map-root-user"][: 2 * bool(os.getuid())], "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode:
        alone = []  # no other namespaces here
    with committing(tmp_path, "once", *alone) as job, committing(tmp_path, "always") as failing:
        job.wait_for("once: committed 3"), failing.wait_for("always: committed 3")
        with committing(tmp_path, "never", *alone) as other:
            assert other.status() == 0 and "never: begins at 0" in other.output, other.output
        job.do("fail")
        assert job.status() == 0 and "once: begins at 3" in job.output, job.output
        assert failing.status() != 0 and "always: begins at 3" in failing.output, failing.output
    (tmp_path / "fail").unlink()
    with committing(tmp_path, "once") as killed:
        (worker,) = killed.wait_for(r"process (\d+)")
        killed.wait_for("once: committed 3")
        try:
            end = time.monotonic() + TIMEOUT_S  # /proc has a new program's arguments a moment after Popen returns
            while len(holders() - before) != 1:
                assert time.monotonic() < end
                time.sleep(0.05)
            killed.process.kill()
            end = time.monotonic() + 10 * load()
            while holders() - before and time.monotonic() < end:
                time.sleep(0.05)
        finally:
            os.kill(int(worker[1]), signal.SIGKILL)  # it goes on alone
    assert holders() <= before and not [name for name in set(os.listdir("/dev/shm")) - shared if "unidist" in name]


@pytest.mark.unit
def test_commits_of_another_user_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.getuid():
        pytest.skip("needs root, to be another user")
    monkeypatch.setattr(host_memory, "current", lambda: SimpleNamespace(device="cpu"))
    theirs = (
        "import os, sys\n"
        "files = [os.memfd_create('unidist-commits') for _ in range(3)]\n"
        "os.write(files[2], b'0')\n"
        "for file in files: os.set_inheritable(file, True)\n"
        "os.execv(sys.argv[1], [*sys.argv[1:], *map(str, files)])\n"
    )
    argv = ["setpriv", "--reuid=65534", "--clear-groups", "/usr/bin/python3", "-c", theirs, *host_memory._command()]
    argv[6] = "/usr/bin/python3"  # the interpreter of the tests may be root's
    monkeypatch.setattr(sys, "executable", argv[6])
    with subprocess.Popen(argv) as stranger:
        while not Path(f"/proc/{stranger.pid}/cmdline").read_bytes().startswith(b"/usr/bin/python3\0-ISc"):
            time.sleep(0.01)
        try:
            assert host_memory._CommitProcess.find() is None
            ours = host_memory._CommitProcess.start()
            for commit in (1, 2, 3):
                ours.write(commit, {"x": torch.ones(3)})
            end = time.monotonic() + TIMEOUT_S  # /proc has a new program's arguments a moment after Popen returns
            while (found := host_memory._CommitProcess.find()) is None and time.monotonic() < end:
                time.sleep(0.01)
            assert found is not None
            assert (commit_of := found.read()) is not None and commit_of[0] == 3
            found.clear()
            assert found.read() is None
            os.kill(int(Path(os.readlink(f"/proc/self/fd/{found._directory}")).name), signal.SIGKILL)
            end = time.monotonic() + 10 * load()
            while ours.runs() and time.monotonic() < end:
                time.sleep(0.01)
            assert not ours.runs() and host_memory._CommitProcess.find() is None
        finally:
            stranger.kill()


@pytest.mark.skipif("UNIDIST_TEST_HOSTS" not in os.environ, reason="make test-hosts runs these")
def test_a_host_that_is_cut_off_and_comes_back(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    if why := machines.missing_ssh():
        pytest.skip(why)
    options = ["--hvd", "-np", "3", "--min-np", "1", "-H", "alpha:1,beta:1,gamma:1"]
    argv = [*RUN, *options, *HOROVOD, str(tmp_path), "0.6"]
    with (
        machines.ssh_hosts(3, tmp_path_factory.mktemp("ssh")) as hosts,
        machines.start(hosts[0], argv, environment("python", {}), str(ROOT), machines.NAMES[0]) as process,
    ):
        try:
            job = Job(process, tmp_path)
            job.wait_for("generation 1: 3 workers on alpha:1, beta:1, gamma:1")
            time.sleep(3.0)  # some steps
            machines.set_link(hosts[2], "down")
            job.wait_for("on host gamma is lost with its host: no message for 5 s")
            job.wait_for("generation 2: 2 workers on alpha:1, beta:1")
            machines.set_link(hosts[2], "up")
            job.wait_for("generation 3: 3 workers on alpha:1, beta:1, gamma:1")
            assert job.status() == 0, job.output
        finally:
            process.kill()
    assert_each_sample_once(notes(tmp_path))
