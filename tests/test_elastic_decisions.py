"""Who trains as which rank, and which samples: the decisions of elastic training, without processes."""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import unidist
from tests.support.worlds import ROOT
from unidist.elastic import sampler as sampler_module
from unidist.errors import LaunchError
from unidist.run import options
from unidist.run.elastic import STRIKES, Elastic, Limits, Worker
from unidist.run.hosts import HostSlots, Place, discovered_hosts, rank_variables

pytestmark = pytest.mark.unit


class Run:
    """An elastic run whose workers ask as soon as they are started, unless they are told not to."""

    def __init__(self, hosts: str, **limits: Any) -> None:
        self.elastic = Elastic(Limits(**limits))
        self.now = 0.0
        self.hosts(hosts)

    def hosts(self, text: str) -> None:
        self.elastic.set_hosts(discovered_hosts(text.replace(",", "\n"), 1))

    def start(self) -> list[int]:
        return [worker.number for worker in self.elastic.start(self.now)]

    def ask(self, *numbers: int, failed: bool = False) -> None:
        for number in numbers:
            self.elastic.ask(number, self.now, failed=failed)

    def form(self) -> list[int] | None:
        members = self.elastic.form(self.now)
        return None if members is None else [worker.number for worker in members]

    def begin(self) -> list[int] | None:
        self.ask(*self.start())
        return self.form()

    def fail(self, number: int) -> None:
        assert self.elastic.end(number, 1, self.now)

    def lose(self, number: int) -> list[int] | None:
        """A member is lost, and the others ask."""
        self.fail(number)
        self.ask(*(worker.number for worker in self.elastic.members), failed=True)
        return self.form()


def test_survivors_go_on_at_once_and_newcomers_come_last() -> None:
    run = Run("a:2,b:2", min_np=2)
    assert run.begin() == [0, 1, 2, 3]
    assert run.lose(1) == [0, 2, 3]
    assert run.start() == [4] and run.elastic.workers[4].place == Place("a", 1)
    assert not run.elastic.changes(run.now)  # while it is starting, training goes on
    run.ask(4)
    assert run.elastic.changes(run.now) and run.form() is None
    run.ask(0, 2)
    assert run.form() is None  # not before the last one has asked
    run.ask(3)
    assert run.form() == [0, 2, 3, 4]


def test_a_lost_rank_0_is_replaced_by_the_next_survivor() -> None:
    run = Run("a:2,b:2", min_np=4)
    assert run.begin() == [0, 1, 2, 3]
    assert run.lose(0) is None  # fewer than --min-np
    assert run.begin() == [1, 2, 3, 4]


def test_below_min_np_and_up_again() -> None:
    run = Run("a:2,b:1", min_np=2, timeout=100)
    run.begin()
    run.hosts("b:1")
    assert run.elastic.changes(run.now)
    run.ask(0, 1, 2)
    assert [worker.number for worker in run.elastic.leavers()] == [0, 1] and run.form() is None
    assert not run.elastic.end(0, 0, run.now) and not run.elastic.end(1, 0, run.now)  # no failure, and no end
    run.hosts("b:1,c:2")
    assert run.begin() == [2, 3, 4]
    run.hosts("b:1")
    run.ask(2, 3, 4)
    run.form()
    run.now += 101
    assert "2 workers are needed (--min-np), and 1 are left" in str(run.elastic.why_over(run.now))


def test_newcomers_come_together() -> None:
    run = Run("a:1", min_np=1)
    run.begin()
    run.hosts("a:1,b:2")
    first, second = run.start()
    run.ask(second)
    assert not run.elastic.changes(run.now)
    run.now += 11
    assert run.elastic.changes(run.now)  # not for ever
    run.ask(first)
    run.ask(0)
    assert run.form() == [0, first, second]  # in the order of their places


def test_max_np_and_np() -> None:
    run = Run("a:8", min_np=2, max_np=3, num_proc=3)
    assert run.start() == [0, 1, 2] and run.start() == []
    run.ask(0, 1)
    assert run.form() is None  # -np are needed at the start
    run.ask(2)
    assert run.form() == [0, 1, 2]


def test_failures_of_a_slot_blacklist_its_host_and_not_one_failure_of_each() -> None:
    run = Run("a:4,b:1", min_np=1)
    run.begin()
    for number in (0, 1, 2, 3):
        run.fail(number)
    assert not run.elastic.is_blacklisted("a", run.now)
    run.ask(4, failed=True)
    assert run.form() == [4]
    for _ in range(STRIKES - 1):
        (number, *_) = run.start()
        assert run.elastic.workers[number].place == Place("a", 0)
        run.fail(number)
    assert run.elastic.is_blacklisted("a", math.inf) and run.start() == []
    assert run.elastic.why_over(run.now) is None  # the other host trains
    for number in [worker for worker in run.elastic.workers if worker != 4]:
        run.fail(number)
    for _ in range(STRIKES):
        run.elastic._strike(Place("b", 0), run.now)
    run.fail(4)
    assert run.elastic.why_over(run.now)


def test_a_blacklisted_host_comes_back_and_stays_away_longer_each_time() -> None:
    run = Run("a:1,b:1", min_np=1, cooldown=(10, 35))
    run.begin()
    assert run.lose(1) == [0]
    for delay in (10, 20, 35, 35):
        while not run.elastic.is_blacklisted("b", run.now):
            (number,) = run.start()
            run.fail(number)
        assert run.start() == []
        run.now += delay - 1
        assert run.elastic.is_blacklisted("b", run.now)
        run.now += 2
        assert not run.elastic.is_blacklisted("b", run.now)
    assert not run.elastic.is_blacklisted("a", run.now)


def test_how_a_run_ends() -> None:
    run = Run("a:2", min_np=1)
    run.start()
    run.fail(0)
    assert run.start() == [] and run.elastic.why_over(run.now) is None  # while none has come to its init()
    run.fail(1)
    assert run.elastic.why_over(run.now) == "all workers have failed"

    run = Run("a:2", min_np=1)
    run.begin()
    run.fail(0)
    run.start()
    run.fail(1)
    assert "no worker of generation 1 is left" in str(run.elastic.why_over(run.now))

    run = Run("a:1,b:1", min_np=2)
    run.begin()
    run.lose(1)
    for _ in range(STRIKES - 1):
        run.fail(*run.start())
    for _ in range(STRIKES):
        run.elastic._strike(Place("a", 0), run.now)
    assert "all hosts are blacklisted" in str(run.elastic.why_over(run.now))

    run = Run("a:2", min_np=1)
    run.begin()
    assert not run.elastic.end(0, 0, run.now)  # the training has ended well
    run.fail(1)
    assert run.start() == [] and run.elastic.why_over(run.now) is None and not run.elastic.workers


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_reset_limit(limit: int) -> None:
    run = Run("a:9", min_np=1, reset_limit=limit)
    assert run.begin() is not None
    for number in range(limit):
        assert run.lose(number) is not None and run.elastic.why_over(run.now) is None
    assert run.start() == [] or limit  # nobody is started who could not come
    assert run.lose(limit) is None and f"--reset-limit {limit}" in str(run.elastic.why_over(run.now))


def test_a_member_that_does_not_come_is_hung_while_others_wait() -> None:
    run = Run("a:3", min_np=1, grace=60, timeout=600)
    run.begin()
    run.fail(0)
    run.now += 100
    assert run.elastic.hung(run.now) == []  # it may be writing a checkpoint
    run.ask(1, failed=True)
    run.now += 59
    assert run.elastic.hung(run.now) == []
    run.now += 2
    assert [worker.number for worker in run.elastic.hung(run.now)] == [2]
    run.fail(2)
    assert run.form() == [1]
    # At a commit on which all have agreed, a rank may take longer.
    run = Run("a:2", min_np=1, grace=60, timeout=600)
    run.begin()
    run.ask(0)
    run.now += 599
    assert run.elastic.hung(run.now) == []
    run.now += 2
    assert [worker.number for worker in run.elastic.hung(run.now)] == [1]


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False))
def test_any_sequence_of_events(draw: random.Random) -> None:
    least = draw.randint(1, 3)
    run = Run("a:2,b:2", min_np=least, max_np=draw.choice([None, 4, 5]), cooldown=(1, 4))
    before: list[Worker] = []
    for _ in range(60):
        run.now += draw.random() * 2
        elastic = run.elastic
        workers = list(elastic.workers)
        what = draw.choice(["start", "start", "ask", "ask all", "ask all", "fail", "hosts", "form", "form"])
        if what == "start":
            run.start()
        elif what == "ask" and workers:
            run.ask(draw.choice(workers))
        elif what == "ask all":
            run.ask(*workers)
        elif what == "fail" and workers:
            elastic.end(draw.choice(workers), 9, run.now)
        elif what == "hosts":
            run.hosts(draw.choice(["a:2,b:2", "a:1,b:3", "b:2", "a:2,c:4", "b:1,c:1"]))
        for worker in elastic.leavers():
            elastic.end(worker.number, 0, run.now)
        if run.form() is not None:
            members = elastic.members
            assert least <= len(members) <= (elastic.limits.max_np or math.inf)
            assert all(elastic.workers[member.number] is member and not member.leaving for member in members)
            old = [member for member in members if member in before]
            # Someone has the state, on the lowest ranks, in the same order.
            assert elastic.generation == 1 or old
            assert members[: len(old)] == old == [member for member in before if member in members]
            assert len({member.place for member in members}) == len(members)
            before = list(members)
        assert not elastic.finishing


def test_variables_of_a_host_with_a_hole() -> None:
    found = rank_variables([Place("a", 1), Place("b", 0), Place("a", 2)])
    assert [(env["RANK"], env["LOCAL_RANK"], env["GROUP_RANK"], env["LOCAL_WORLD_SIZE"]) for env in found] == [
        ("0", "1", "0", ""), ("1", "0", "1", "1"), ("2", "2", "0", ""),
    ]  # fmt: skip
    assert found[0]["HOROVOD_LOCAL_SIZE"] == "2" and found[0]["WORLD_SIZE"] == "3"


def test_what_discovery_prints() -> None:
    assert discovered_hosts("a:2\n\n b \n[fd00::1]:3\na:1\n", 4) == [
        HostSlots("a", 3), HostSlots("b", 4), HostSlots("fd00::1", 3),
    ]  # fmt: skip
    with pytest.raises(LaunchError, match="--host-discovery-script: 'a b'"):
        discovered_hosts("a b", 1)


# ---------------------------------------------------------------------------------------- samples
class World:
    """What ``ElasticSampler`` asks for its place."""

    rank, size = 0, 1


@settings(max_examples=200, deadline=None)
@given(
    samples=st.integers(1, 60),
    batch=st.integers(1, 5),
    shuffle=st.booleans(),
    draw=st.randoms(use_true_random=False),
)
def test_each_sample_of_an_epoch_is_committed_once(
    samples: int, batch: int, shuffle: bool, draw: random.Random
) -> None:
    """Workers come, leave and die, at commits and between them: each sample of an epoch is in one committed batch, and
    only the last batch of the epoch repeats some, so that all ranks have as many.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_module, "rank", lambda: World.rank)
        patch.setattr(sampler_module, "world_size", lambda: World.size)

        def world(size: int, state: dict[str, Any] | None) -> list[unidist.elastic.ElasticSampler]:
            made = []
            for World.rank in range(size):
                World.size = size
                sampler = unidist.elastic.ElasticSampler(range(samples), shuffle, seed=7)
                if state is not None:
                    sampler.load_state_dict(state)
                made.append(sampler)
            return made

        ranks = world(draw.randint(1, 4), None)
        for epoch in range(2):
            committed: list[int] = []
            last = 0
            state = ranks[0].state_dict()
            ended = False
            while not ended:
                pending: list[int] = []
                orders = [list(sampler) for sampler in ranks]
                assert len({len(order) for order in orders}) == 1
                event = ""
                for first in range(0, len(orders[0]), batch):
                    last = len(ranks)
                    for order in orders:
                        pending += order[first : first + batch]
                    for sampler in ranks:
                        sampler.record_batch(first // batch, batch)
                    event = draw.choice(["", "", "commit", "change", "kill"])
                    if event in ("commit", "change"):
                        committed += pending
                        pending, state = [], ranks[0].state_dict()
                    if event in ("change", "kill"):
                        ranks = world(draw.randint(1, 4), state)
                        break
                ended = event not in ("change", "kill")
            committed += pending
            count = Counter(committed)
            assert count.keys() == set(range(samples))
            assert len(committed) - samples < last  # ranks of the last batch
            for sampler in ranks:
                World.rank, World.size = sampler.rank, sampler.num_replicas
                sampler.set_epoch(epoch + 1)


def test_readme_and_docs_name_it() -> None:
    assert "elastic.run" in (ROOT / "README.md").read_text()
    page = (ROOT / "docs/elastic.md").read_text()
    assert all(name in page for name in unidist.elastic.__all__ if name not in ("State", "ObjectState"))


# ---------------------------------------------------------------------------------------- options
def limits_of(line: str) -> Limits:
    given: argparse.Namespace = options.parse([*line.split(), "python", "train.py"])
    assert options.is_elastic(given)
    return options.elastic_limits(given, {"HOROVOD_ELASTIC_TIMEOUT": "77"})


def test_limits() -> None:
    found = limits_of("-np 3 --min-num-proc 2 --max-np 4 --reset-limit 5 --blacklist-cooldown-range 2 9")
    assert found == Limits(2, 4, 3, 5, 77, 60, (2, 9))
    assert limits_of("-np 3 --host-discovery-script ./hosts.sh --elastic-timeout 5") == Limits(3, None, 3, timeout=5)
    for line, message in {
        "--host-discovery-script x": "--min-np None is not a number of workers",
        "--min-np 0": "--min-np 0 is not",
        "--min-np 3 --max-np 2": "--max-np 2 is below --min-np or -np, 3",
        "--min-np 1 --blacklist-cooldown-range 9 2": "9 2: from 1 to 3600 seconds",
        "--min-np 1 --reset-limit -1": "--reset-limit -1",
    }.items():
        with pytest.raises(LaunchError, match=message):
            limits_of(line)
