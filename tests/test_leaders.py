"""The drop-in over several hosts, whose ranks are connected to rank 0 by a leader each."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import hosts as machines
from tests.support.worlds import IN_WORLD, PYTHON, ROOT, environment, free_port
from tests.test_hvd import DYNAMIC

#: Seconds of UNIDIST_TIMEOUT.
TIMEOUT = 8


@pytest.fixture(scope="module")
def three_hosts() -> Iterator[list[str]]:
    if why := machines.missing():
        pytest.skip(why)
    with machines.hosts(3) as names:
        yield names


def world(hosts: list[str], places: str, argv: list[str], **more: str) -> list[subprocess.Popen[str]]:
    """The ranks of a world; ``places`` has the number of each one's host."""
    env = {"WORLD_SIZE": str(len(places)), "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": str(free_port()), **more}
    return [
        machines.start(hosts[int(place)], [PYTHON, *argv], environment("python", {**env, "RANK": str(rank)}), str(ROOT))
        for rank, place in enumerate(places)
    ]


def test_the_drop_ins_suite_behind_a_leader(three_hosts: list[str], tmp_path: Path) -> None:
    options = "-q --color=no -p no:cacheprovider -p tests.support.in_world"
    argv = ["-m", "pytest", "tests/hvd", *options.split(), "-k", "not test_place"]  # which expects one host
    ranks = world(three_hosts, "011", argv, UNIDIST_BACKEND="gloo", **{IN_WORLD: str(tmp_path)}, **DYNAMIC)
    try:
        outputs = [process.communicate(timeout=240)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0, 0], outputs


@pytest.mark.parametrize(
    ("places", "kind", "victim", "connections"),
    [
        ("0011", "SIGKILL", 2, (2, 1, 2, 1)),  # a leader
        ("0011", "SIGSTOP", 2, (2, 1, 2, 1)),
        ("0111", "SIGKILL", 3, (1, 3, 1, 1)),  # behind one
        ("0111", "SIGSTOP", 2, (1, 3, 1, 1)),
        ("01212", "SIGSTOP", 0, (2, 2, 2, 1, 1)),
    ],
)
def test_operations_and_a_rank_that_is_lost(
    three_hosts: list[str], places: str, kind: str, victim: int, connections: tuple[int, ...]
) -> None:
    ranks = world(
        three_hosts, places, ["tests/programs/leaders.py", kind, str(victim)],
        UNIDIST_TIMEOUT=str(TIMEOUT), UNIDIST_BACKEND="gloo",
    )  # fmt: skip
    try:
        end = time.monotonic() + 240
        for rank, process in enumerate(ranks):
            if rank != victim:
                output, _ = process.communicate(timeout=max(1.0, end - time.monotonic()))
                assert f"TRAINED {connections[rank]}" in output, output
                assert re.search(rf"RAISED .*rank {victim} \(host {machines.NAME}\)", output), output
                why = "is gone" if kind == "SIGKILL" else f"no sign of life for {TIMEOUT} s"
                assert why in output, output
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
