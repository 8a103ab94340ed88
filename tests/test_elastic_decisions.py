"""Who trains as which rank, and which samples: the decisions of elastic training, without processes."""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import unidist
from tests.support.worlds import PYTHON, ROOT
from unidist.elastic import sampler as sampler_module
from unidist.errors import LaunchError
from unidist.run import agent, options
from unidist.run.elastic import FAILURES, Elastic, Limits, Worker
from unidist.run.hosts import HostSlots, Place, discovered_hosts, rank_variables

pytestmark = pytest.mark.unit

#: What discovery prints in a run of any events.
HOSTS = ["a:2,b:2", "a:4", "a:2", "b:2", "a:1,b:3", "a:1", "", "b:1,c:1"]
#: The options of such a run.
LIMITS: dict[str, list[Any]] = {
    "min_np": [1, 2, 3],
    "more": [None, 0, 1, 3],
    "num_proc": [None, None, 1, 3],
    "reset_limit": [None, None, None, 0, 2],
    "cooldown": [None, (1, 4), (30, 100)],
    "hosts": HOSTS,
}
#: Its events, and their arguments.
EVENTS: list[tuple[str, dict[str, Sequence[Any]]]] = []


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


def test_a_newcomer_that_fails_after_the_end_is_no_failure() -> None:
    run = Run("a:2,b:1", min_np=1)
    assert run.begin() == [0, 1, 2]
    assert run.lose(2) == [0, 1] and run.start() == [3]
    assert not run.elastic.end(0, 0, run.now) and run.elastic.finishing
    assert not run.elastic.end(3, 1, run.now)
    run.fail(1)  # a member


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
    assert [worker.number for worker in run.elastic.dismiss()] == [0, 1] and run.form() is None
    assert not run.elastic.end(0, 0, run.now) and not run.elastic.end(1, 0, run.now)  # no failure, and no end
    run.hosts("b:1,c:2")
    assert run.begin() == [2, 3, 4]
    run.hosts("b:1")
    run.ask(2, 3, 4)
    run.form()
    run.now += 101
    assert "2 workers are needed (--min-np), and 1 are left" in str(run.elastic.why_over(run.now))


def test_slots_that_leave_and_come_back_end_nothing() -> None:
    run = Run("a:4", min_np=1)
    assert run.begin() == [0, 1, 2, 3]
    run.hosts("a:2")
    run.ask(0, 1, 2, 3)
    assert [worker.number for worker in run.elastic.dismiss()] == [2, 3] and run.form() == [0, 1]
    run.hosts("a:4")  # 2 and 3 are ending
    assert run.start() == [] and not run.elastic.changes(run.now)
    assert not run.elastic.end(2, 0, run.now) and not run.elastic.end(3, 0, run.now) and not run.elastic.finishing
    run.ask(*run.start())
    run.ask(0, 1)
    assert run.form() == [0, 1, 4, 5]
    # All leave: one stays until others have the state.
    run.hosts("b:2")
    run.ask(0, 1, 4, 5)
    assert run.elastic.dismiss() == [] and run.begin() == [0, 6, 7]
    assert [worker.number for worker in run.elastic.dismiss()] == [1, 4, 5] and run.elastic.changes(run.now)
    # A worker whose slot has left before its init() may end in any way.
    run = Run("a:1", min_np=1)
    assert run.begin() == [0]
    run.hosts("a:2")
    assert run.start() == [1]
    run.hosts("a:1")
    assert not run.elastic.end(1, 1, run.now)


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
    for _ in range(FAILURES - 1):
        (number, *_) = run.start()
        assert run.elastic.workers[number].place == Place("a", 0)
        run.fail(number)
    assert run.elastic.is_blacklisted("a", math.inf) and run.start() == []
    assert run.elastic.why_over(run.now) is None  # the other host trains
    for number in [worker for worker in run.elastic.workers if worker != 4]:
        run.fail(number)
    for _ in range(FAILURES):
        run.elastic._count_failure(Place("b", 0), run.now)
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
    for _ in range(FAILURES - 1):
        run.fail(*run.start())
    for _ in range(FAILURES):
        run.elastic._count_failure(Place("a", 0), run.now)
    assert "all hosts are blacklisted" in str(run.elastic.why_over(run.now))

    run = Run("a:2", min_np=1)
    run.begin()
    assert not run.elastic.end(0, 0, run.now)  # the training has ended well
    assert not run.elastic.changes(run.now)  # and nobody comes any more
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


@dataclass
class Process:
    """A worker as it is, whatever ``Elastic`` believes of it."""

    place: Place
    state: str = "starting"
    #: What the driver has sent it.
    lost: bool = False
    dismissed: float | None = None


def sampled(arguments: dict[str, Sequence[Any]]) -> dict[str, st.SearchStrategy[Any]]:
    return {name: st.sampled_from(values) for name, values in arguments.items()}


def event(**arguments: Sequence[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        EVENTS.append((function.__name__, arguments))
        return rule(**sampled(arguments))(function)

    return decorate


class ElasticRun(RuleBasedStateMachine):
    """Processes, hosts and a driver around ``Elastic``, in any order of events; at the end all goes well."""

    @initialize(**sampled(LIMITS))
    def begin(self, min_np: int, more: int | None, num_proc: int | None, hosts: str, **limits: Any) -> None:
        self.needed = max(min_np, num_proc or 0)
        self.most = math.inf if more is None else self.needed + more
        max_np = None if more is None else self.needed + more
        self.elastic = Elastic(Limits(min_np, max_np, num_proc, **limits))
        self.now = 0.0
        self.processes: dict[int, Process] = {}
        self.members: list[int] = []  # of the last generation, alive or not
        self.held = self.broken = self.finished = self.failed = self.ended = False
        self.over_since: float | None = None
        self.failures: dict[Place, list[float]] = {}
        self.blacklisted: dict[str, tuple[int, float]] = {}
        self.seen: set[str] = set()
        self.change_hosts(hosts)
        self.go_well(2)

    # ------------------------------------------------------------------------------------ events
    @event(hosts=HOSTS)
    def change_hosts(self, hosts: str) -> None:
        found = discovered_hosts(hosts.replace(",", "\n"), 1)
        self.seen |= {host.name for host in found}
        self.slots = {Place(host.name, local) for host in found for local in range(host.slots)}
        self.elastic.set_hosts(found)

    @event(hosts=HOSTS, ticks=range(4))
    def flap(self, hosts: str, ticks: int) -> None:
        before = [HostSlots(name, count) for name, count in Counter(place.host for place in self.slots).items()]
        self.change_hosts(hosts)
        self.go_well(ticks, leave=False)
        self.slots = {Place(host.name, local) for host in before for local in range(host.slots)}
        self.elastic.set_hosts(before)

    @event(seconds=[0, 0.1, 1, 1, 11, 61, 700])
    def decide(self, seconds: float) -> None:
        self.now += seconds
        if not self.ended:
            self._decide()

    @event(ticks=[1, 2, 3, 8, 15], leave=[True, False])
    def go_well(self, ticks: int, leave: bool = True) -> None:
        for _ in range(ticks):
            for number in list(self.processes):
                self._act(number, leave)
            self.decide(1)

    @event(index=range(8))
    def act(self, index: int) -> None:
        if self.processes:
            self._act(list(self.processes)[index % len(self.processes)])

    @event(index=range(8), status=[1, -9])
    def fail(self, index: int, status: int) -> None:
        if self.processes:
            self._end(list(self.processes)[index % len(self.processes)], status)

    @event(host="ab")
    def fail_often(self, host: str) -> None:
        for _ in range(FAILURES):
            for number in [number for number, process in self.processes.items() if process.place == Place(host, 0)]:
                self._end(number, 1)
            self.decide(1)

    @event(index=range(8), likely=range(4))
    def return_from_training(self, index: int, likely: int) -> None:
        training = [number for number, process in self.processes.items() if process.state == "training"]
        if likely == 3 and training and len(training) == len(self.members) and not self.ended:
            self._end(training[index % len(training)], 0)

    # ------------------------------------------------------------------------- what a process does
    def _act(self, number: int, leave: bool = True) -> None:
        process = self.processes.get(number)
        if process is None or self.ended:
            return
        if process.dismissed is not None:
            if leave:
                self._end(number, 0)
        elif process.state == "starting":
            self._ask(number, failed=False)
        elif process.state == "training":
            if process.lost:
                self._ask(number, failed=True)
            elif self.finished and not self.broken:
                self._end(number, 0)
            elif self.held and not self.broken:  # all have come to the check on which they have agreed
                self._ask(number, failed=False)

    def _ask(self, number: int, *, failed: bool) -> None:
        if number in self.members or not self.elastic.generation:
            self.over_since = self.now if self.over_since is None else self.over_since
        self.processes[number].state = "asking"
        self.elastic.ask(number, self.now, failed=failed)

    def _end(self, number: int, status: int) -> None:
        if self.ended:
            return
        process, is_member = self.processes.pop(number), number in self.members
        away = process.dismissed is not None and not self.finished
        late = self.finished and not is_member and self.elastic.generation > 0
        well = away or late or (status == 0 and (is_member or self.finished or not self.elastic.generation))
        self.finished = self.finished or (well and not away)
        if is_member and not well:
            self.broken, self.over_since = True, self.now
        if away:
            self.failed = False
        elif not well and process.place in self.slots:
            self.failed = True
            self._count_failure(process.place)
        if self.elastic.end(number, status, self.now):
            assert not well
            self.ended = self.finished  # with its status
            if is_member:
                for other in self.elastic.members:
                    self.processes[other.number].lost = True
        assert self.elastic.finishing == self.finished

    def _count_failure(self, place: Place) -> None:
        self.failures[place] = [at for at in self.failures.get(place, []) if self.now - at < 600] + [self.now]
        if len(self.failures[place]) == FAILURES:
            times = self.blacklisted.get(place.host, (0, 0))[0]
            least, longest = self.elastic.limits.cooldown or (math.inf, math.inf)
            self.blacklisted[place.host] = times + 1, self.now + min(least * 2**times, longest)
            self.failures = {other: at for other, at in self.failures.items() if other.host != place.host}

    # ------------------------------------------------------------------------- what the driver does
    def _decide(self) -> None:
        elastic, now = self.elastic, self.now
        for number, process in list(self.processes.items()):
            if process.dismissed is not None and now - process.dismissed > 30:
                self._end(number, -15)
        for worker in elastic.dismiss():
            self._dismiss(worker)
        if why := elastic.why_over(now):
            self.ended = True
            self._check_end(why)
            return
        for worker in elastic.start(now):
            assert worker.place in self.slots and worker.place not in [other.place for other in self.processes.values()]
            assert self.blacklisted.get(worker.place.host, (0, 0))[1] <= now and not self.finished
            self.processes[worker.number] = Process(worker.place)
        for worker in elastic.hung(now):
            assert self.processes[worker.number].state == "training"
            self._end(worker.number, -9)
        self.held = self.held or elastic.changes(now)
        before = list(self.members)
        if (members := elastic.form(now)) is not None:
            self._check_members(members, before)

    def _dismiss(self, worker: Worker) -> None:
        process = self.processes[worker.number]
        assert process.state == "asking" and process.dismissed is None
        process.dismissed = self.now
        if not self.finished:
            assert process.place not in self.slots
            # Who has the state goes only when another one who has it stays.
            assert worker.number not in self.members or [who for who in self._left() if who in self.members]

    def _check_members(self, members: Sequence[Worker], before: Sequence[int]) -> None:
        numbers = [worker.number for worker in members]
        found = [self.processes[number] for number in numbers]  # none has ended
        assert all(process.state == "asking" and process.dismissed is None for process in found)
        assert len({process.place for process in found}) == len(found)
        old = [number for number in before if number in numbers]
        assert numbers[: len(old)] == old and (old or not before)  # one has the state, and they keep their order
        gone = [process for process in found if process.place not in self.slots]
        assert not gone or gone == found[:1] == [self.processes[number] for number in old]
        assert self.needed <= len(found) - len(gone) <= self.most and not self.finished
        for process in found:
            process.state, process.lost = "training", False
        self.members, self.held, self.broken, self.over_since = numbers, False, False, None
        self.needed = self.elastic.limits.min_np

    def _left(self) -> list[int]:
        return [
            number
            for number, process in self.processes.items()
            if process.place in self.slots and process.dismissed is None
        ]

    def _check_end(self, why: str) -> None:
        """The run ends only if it cannot go on."""
        here, limit = self._left(), self.elastic.limits.reset_limit
        asking = [number for number in here if self.processes[number].state == "asking"]
        state = [number for number in self.members if number in self.processes]
        state = [number for number in state if self.processes[number].dismissed is None]
        assert not self.finished, why
        if self.members and not state:
            assert "no worker of generation" in why
        elif "all workers have failed" in why:
            assert not self.processes and not self.members and self.failed
        elif "--reset-limit" in why:
            assert limit is not None and self.elastic.generation > limit and self.over_since is not None
        elif "blacklisted" in why:
            assert all(self.blacklisted[host][1] == math.inf for host in self.seen) and len(here) < self.needed
        else:
            assert self.over_since is None or self.now - self.over_since > 600, why
            all_late = all(self.processes[number].state == "training" for number in state)
            assert len(asking) < self.needed or (state and all_late), why

    # ------------------------------------------------------------------------------------ the end
    def teardown(self) -> None:
        """When all goes well, and hosts come that have not failed, all slots train within a minute."""
        if not hasattr(self, "elastic"):
            return
        limit = self.elastic.limits.reset_limit
        self.change_hosts("a:1,z:4")
        for _ in range(100):
            self.go_well(1)
            training = [number for number, process in self.processes.items() if process.state == "training"]
            calm = training == sorted(self.members) == list(self.processes) and not self.held and not self.broken
            all_come = set(training) == set(self._left()) and len(training) >= min(self.most, 4)
            fixed = limit is not None and self.elastic.generation > limit and not self.broken
            if self.ended or (self.finished and not self.processes) or (calm and all_come) or fixed:
                return
        raise AssertionError(f"it does not go on: {self.processes}, generation {self.elastic.generation}")


TestElasticRun = ElasticRun.TestCase
TestElasticRun.settings = settings(max_examples=50, stateful_step_count=15)


def test_many_sequences_of_events() -> None:
    """As above, ten times as many in a second: ``UNIDIST_TEST_SEQUENCES=100000 pytest -k many_sequences`` for more.

    Each is repeated by its seed.
    """
    for seed in range(int(os.environ.get("UNIDIST_TEST_SEQUENCES", "500"))):
        draw, run, done = random.Random(seed), ElasticRun(), list[str]()

        def do(name: str, arguments: dict[str, Sequence[Any]]) -> None:
            drawn = {key: draw.choice(values) for key, values in arguments.items()}  # noqa: B023
            done.append(f"{name} {drawn}")  # noqa: B023
            getattr(run, name)(**drawn)  # noqa: B023

        try:
            do("begin", LIMITS)
            for _ in range(draw.randint(1, 40)):
                do(*draw.choice(EVENTS))
            run.teardown()
        except Exception as error:
            raise AssertionError("\n".join([f"seed {seed}:", *done])) from error


def test_variables_of_a_host_with_a_hole() -> None:
    found = rank_variables([Place("a", 1), Place("b", 0), Place("a", 2)])
    assert [(env["RANK"], env["LOCAL_RANK"], env["GROUP_RANK"], env["LOCAL_WORLD_SIZE"]) for env in found] == [
        ("0", "1", "0", ""), ("1", "0", "1", "1"), ("2", "2", "0", ""),
    ]  # fmt: skip
    assert found[0]["HOROVOD_LOCAL_SIZE"] == "2" and found[0]["WORLD_SIZE"] == "3"
    # Of the hosts that have this local rank.
    assert [(env["HOROVOD_CROSS_RANK"], env["HOROVOD_CROSS_SIZE"]) for env in found] == [("0", "1")] * 3
    found = rank_variables([Place("a", 0), Place("a", 1), Place("b", 0)])
    assert [(env["HOROVOD_CROSS_RANK"], env["HOROVOD_CROSS_SIZE"]) for env in found] == [
        ("0", "2"), ("0", "1"), ("1", "2"),
    ]  # fmt: skip


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


@settings(max_examples=200)
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


def test_a_worker_that_is_stopped_is_told_from_one_that_is_busy() -> None:
    """Neither answers the other ranks while it holds Python's lock."""
    with subprocess.Popen(["env", PYTHON, "-S", "-c", "while True: pass"], start_new_session=True) as process:
        try:
            assert not agent._is_stopped(process.pid)
            os.kill(process.pid, signal.SIGSTOP)
            end = time.monotonic() + 10
            while not agent._is_stopped(process.pid):
                assert time.monotonic() < end
                time.sleep(0.01)
        finally:
            process.kill()
