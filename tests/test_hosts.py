"""Worlds over several hosts: network namespaces with names, /etc/hosts and ssh servers of their own.

The names of the hosts are at 127.0.1.1 on themselves, as Debian has it, and a network interface has the same address on
all, as docker0 has.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support import hosts as machines
from tests.support import slurm
from tests.support.hosts import NAMES
from tests.support.worlds import PYTHON, ROOT, environment, free_port, load, shown
from tests.test_run import PRINTS, RUN, left
from unidist.diagnosis.timeline.recorder import path_of_rank
from unidist.diagnosis.timeline.trace import read_all
from unidist.diagnosis.timeline.waiting import waits
from unidist.launchers.process import kill
from unidist.launchers.table import HOROVODRUN, TORCHRUN, missing

ENGINES = str(ROOT / "tests/programs/on_every_engine.py")
TOLERANCE = 1e-5
#: The world of each launcher: the number of the host of each command, the command, the backends, ranks on each host.
WORLDS: dict[str, tuple[Sequence[int], list[str], list[str], list[int]]] = {
    "unidist run": ([0], [*RUN, "-H", "alpha:2,beta:1", PYTHON], ["gloo", "drop-in", "horovod"], [2, 1]),
    # Started on a host that has no rank; by addresses.
    "unidist run --hvd": ([2], [*RUN, "--hvd", "-H", "10.77.0.1:1,[fd77::2]:2", PYTHON], ["hvd", "gloo"], [1, 2]),
    "unidist run --mpi": (
        [0],
        [*RUN, "--mpi", "--network-interface", "net0", "-H", "alpha:2,beta:1", PYTHON],
        ["mpi", "gloo", "drop-in", "horovod"],
        [2, 1],
    ),
    "torchrun": (
        [0, 1],
        [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint"],
        ["gloo", "drop-in", "horovod"],
        [2, 2],
    ),
    "horovodrun": (
        [0],
        [*HOROVODRUN, "--gloo", "-np", "3", "--network-interface", "net0", "-H", "alpha:2,beta:1", PYTHON],
        ["gloo", "drop-in", "horovod"],
        [2, 1],
    ),
}


@pytest.fixture(scope="module")
def three_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    if why := machines.missing_ssh():
        pytest.skip(why)
    with machines.ssh_hosts(3, tmp_path_factory.mktemp("ssh")) as namespaces:
        yield namespaces


def start_on(hosts: list[str], number: int, argv: Sequence[str], **env: str) -> subprocess.Popen[str]:
    """Start a program on a host, with that host's name."""
    return machines.start(hosts[number], argv, environment("python", env), str(ROOT), NAMES[number])


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """The weights of one process that trains on all samples."""
    spec = importlib.util.spec_from_file_location("on_every_engine", ENGINES)
    assert spec and spec.loader
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    model: nn.Module = program.new_model()
    program.train(model, torch.optim.SGD(model.parameters(), lr=0.05), 0, 1)
    return [value for p in model.parameters() for value in p.flatten().tolist()]


@pytest.mark.parametrize("launcher", WORLDS)
def test_weights_over_two_hosts(launcher: str, three_hosts: list[str], alone: list[float], tmp_path: Path) -> None:
    numbers, command, engines, ranks = WORLDS[launcher]
    if "horovod" in engines and (why := missing("horovodrun")):
        pytest.skip(why)
    end = [f"alpha:{free_port()}"] if launcher == "torchrun" else []
    trace = tmp_path / "trace.json"
    env = {"UNIDIST_TIMELINE": str(trace)} if launcher == "unidist run" else {}
    running = [start_on(three_hosts, number, [*command, *end, ENGINES, *engines], **env) for number in numbers]
    try:
        output = "".join(process.communicate(timeout=240)[0] for process in running)
    finally:
        for process in running:
            kill(process)
    assert [process.returncode for process in running] == [0] * len(running), output
    check_weights(launcher, output, engines, ranks, alone)
    assert ("hvd is unidist.hvd" in output) is ("--hvd" in launcher)
    if env:
        check_timeline([path_of_rank(trace, rank) for rank in range(3)])


def check_timeline(paths: Sequence[Path]) -> None:
    """That of the last engine. The hosts have one clock, which they do not know."""
    traces, _ = read_all(paths)
    assert len({trace.host for trace in traces}) == 2 and traces[0].clock_offset_ns == 0
    assert all(abs(trace.clock_offset_ns) < 5e7 for trace in traces), traces
    assert traces[2].clock_offset_ns != 0 and waits(traces).collectives >= 6


def check_weights(launcher: str, output: str, engines: Sequence[str], ranks: Sequence[int], alone: list[float]) -> None:
    """Each rank was where it should be, and has the weights of one process, on every engine."""
    lines = [
        json.loads(text) for text in re.findall(r"TRAINED (\{.*\})", re.sub(r"(?<=.)\[1,\d\]<stdout>:", "", output))
    ]
    places = [[local, host] for host, count in zip(NAMES, ranks) for local in range(count)]
    size = len(places)
    for engine in dict.fromkeys(line["engine"] for line in lines):
        rows = sorted((line for line in lines if line["engine"] == engine), key=lambda line: line["place"])
        expected = [[rank, size, local, host] for rank, (local, host) in enumerate(places)]
        assert [row["place"] for row in rows] == expected, output
        worst = max(abs(a - b) for row in rows for a, b in zip(row["weights"], alone, strict=True))
        title = "over two hosts: distance of the weights to one process alone (limit 1e-5)"
        shown.setdefault(title, []).append(f"{launcher:19} {engine:18} {'+'.join(map(str, ranks))} ranks: {worst:.0e}")
        assert worst <= TOLERANCE, output
    assert len(lines) == size * len(engines), output


def test_two_nodes_of_slurm(three_hosts: list[str], alone: list[float], tmp_path: Path) -> None:
    if why := slurm.missing():
        pytest.skip(why)
    nodes = {name: (f"10.77.0.{i + 1}", machines.on(three_hosts[i], name)) for i, name in enumerate(NAMES[:2])}
    inside = [*RUN, PYTHON, ENGINES, "gloo"]  # the hosts of the allocation, by srun
    with slurm.slurm(tmp_path, nodes) as env:
        for launcher, argv, engines, ranks in [
            ("srun", ["srun", "-N", "2", "-n", "2", PYTHON, ENGINES], ["gloo", "drop-in", "horovod"], [1, 1]),
            ("unidist run, salloc", ["salloc", "-N", "2", "-n", "3", "--overcommit", *inside], ["gloo"], [2, 1]),
        ]:
            command = [*argv, *(engines if launcher == "srun" else [])]
            process = start_on(three_hosts, 0, command, **env)
            output, _ = process.communicate(timeout=240)
            assert process.returncode == 0, output
            check_weights(launcher, output, engines, ranks, alone)


def test_a_firewall_that_drops_is_named_before_gloo_waits_for_it(three_hosts: list[str]) -> None:
    port = free_port()
    world = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.77.0.1"}
    start = time.monotonic()
    with machines.firewall(three_hosts[1], port):
        running = [
            start_on(three_hosts, rank, [PYTHON, ENGINES, "gloo"], RANK=str(rank), MASTER_PORT=str(port), **world)
            for rank in range(2)
        ]
        try:
            outputs = [process.communicate(timeout=240)[0] for process in running]
        finally:
            for process in running:
                kill(process)
    for process, output in zip(running, outputs):
        assert process.returncode == 1, output
        assert re.search("rank 0 on host alpha cannot connect to rank 1 on host beta at 10.77.0.2, port .*: no", output)
    assert time.monotonic() - start < 60 * load()


# ------------------------------------------------------------------------------ unidist run, when something fails
def test_a_failure_on_another_host_is_the_status(three_hosts: list[str]) -> None:
    process = start_on(three_hosts, 0, [*RUN, "-H", "alpha:1,beta:2", PYTHON, PRINTS, "fail", "7"])
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 7, output
    assert "rank 1 on host beta ended with status 7" in output and "\n  reason: out of luck" in output


def test_hosts_that_do_not_answer_are_named(three_hosts: list[str]) -> None:
    process = start_on(three_hosts, 0, [*RUN, "-H", "alpha:1,beta:1", "-p", "23", "true"])
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 1 and re.search("host beta: .*port 23: Connection refused", output), output
    machines.set_link(three_hosts[1], "down")
    try:
        start = time.monotonic()
        process = start_on(three_hosts, 0, [*RUN, "-H", "alpha:1,beta:1,gamma:1", "--start-timeout", "7", "true"])
        output, _ = process.communicate(timeout=240)
    finally:
        machines.set_link(three_hosts[1], "up")
    assert process.returncode == 1 and time.monotonic() - start < 20 * load(), output
    assert "2 of 3 hosts have answered; waiting for beta" in output
    assert re.search(r"no answer of host beta within 7 s|host beta: .*(timed out|No route)", output), output


@pytest.mark.parametrize(
    "fault", ["driver killed", "driver stopped", "link cut", "host frozen", "agent killed", "ssh killed"]
)
def test_no_rank_is_left_on_any_host(fault: str, three_hosts: list[str]) -> None:
    mark = f"800.{os.getpid()}{len(fault)}"
    options = ["--heartbeat-timeout", "5", "-H", "alpha:1,beta:2"]
    driver = start_on(three_hosts, 0, [*RUN, *options, PYTHON, PRINTS, "wait", mark, "0"])
    assert driver.stdout
    try:
        # The warnings of torch's store about names that do not resolve come in between.
        while len(left(mark)) < 6 or "up" not in driver.stdout.readline():
            assert driver.poll() is None
        start = time.monotonic()
        if fault.startswith("driver"):
            driver.send_signal(signal.SIGKILL if fault == "driver killed" else signal.SIGSTOP)
        elif fault == "link cut":
            machines.set_link(three_hosts[1], "down")
        elif fault == "host frozen":
            machines.signal_all(three_hosts[1], signal.SIGSTOP)
            assert driver.wait(240) == 1
            assert time.monotonic() - start < 15 * load()
            machines.signal_all(three_hosts[1], signal.SIGCONT)
            start = time.monotonic()
        else:
            pattern = "^ssh -o BatchMode" if fault == "ssh killed" else r"^\S*python\S* -I -S -c import os"
            # Of this host alone: other tests have agents, too.
            (pid, *_) = machines.processes(three_hosts[0], pattern)
            os.kill(pid, signal.SIGKILL)
        ended = False
        while left(mark):
            assert not ended or fault.startswith(("driver", "host")), "ranks outlive their launcher"
            ended = driver.poll() is not None
            assert time.monotonic() < start + 10 * load(), left(mark)
            time.sleep(0.05)
        seconds = time.monotonic() - start
        if not fault.startswith("driver"):
            output, _ = driver.communicate(timeout=240)
            assert driver.returncode == 1 and re.search(r"host (alpha|beta) is lost", output), output
        shown.setdefault("unidist run: seconds until no rank is left on two hosts", []).append(
            f"{fault:15} {seconds:4.1f}"
        )
    finally:
        machines.set_link(three_hosts[1], "up")
        machines.signal_all(three_hosts[1], signal.SIGCONT)
        driver.kill()
        driver.communicate()


def test_a_network_that_stops_for_seconds_ends_no_job(three_hosts: list[str]) -> None:
    mark = f"801.{os.getpid()}"
    driver = start_on(three_hosts, 0, [*RUN, "-H", "alpha:1,beta:1", PYTHON, PRINTS, "wait", mark, "0"])
    assert driver.stdout
    try:
        while len(left(mark)) < 4 or "up" not in driver.stdout.readline():
            assert driver.poll() is None
        machines.set_link(three_hosts[1], "down")
        time.sleep(8)
        machines.set_link(three_hosts[1], "up")
        assert driver.poll() is None and len(left(mark)) == 4
        driver.send_signal(signal.SIGINT)
        output, _ = driver.communicate(timeout=240)
        assert "is lost" not in output and not left(mark), output
    finally:
        machines.set_link(three_hosts[1], "up")
        driver.kill()
        driver.communicate()


@pytest.mark.skipif("UNIDIST_TEST_HOSTS" not in os.environ, reason="make test-hosts runs these")
@pytest.mark.parametrize("engine", ["gloo", "mpi"])
def test_mpi_that_chooses_the_network_of_one_host_ends_with_a_remedy(engine: str, three_hosts: list[str]) -> None:
    argv = ["mpirun", "--allow-run-as-root", "-np", "2", "-H", "alpha:1,beta:1", "-x", "UNIDIST_TIMEOUT", "-x", "PATH"]
    process = start_on(three_hosts, 0, [*argv, PYTHON, ENGINES, engine], UNIDIST_TIMEOUT="10")
    output, _ = process.communicate(timeout=240)
    assert process.returncode != 0 and "--mca btl_tcp_if_exclude lo,docker0" in output, output


@pytest.mark.skipif("UNIDIST_TEST_HOSTS" not in os.environ, reason="make test-hosts runs these")
def test_an_interface_that_the_hosts_do_not_share_is_named(three_hosts: list[str]) -> None:
    options = ["--network-interface", "own0", "-H", "alpha:1,beta:1"]
    process = start_on(three_hosts, 0, [*RUN, *options, PYTHON, ENGINES, "gloo"])
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 1 and re.search("host beta cannot connect to unidist run at 10.78.1.1", output), output
