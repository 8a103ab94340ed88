"""Rounds of gradient reductions after a join: who announces what, and when a joined rank takes part."""

import gc
import random
import threading

import pytest

from unidist.hvd.messages import AllJoined, AnnounceRounds, Rounds
from unidist.hvd.negotiation import Coordinator
from unidist.hvd.rounds import GradientRounds, ReducerId

pytestmark = pytest.mark.unit


class Optimizer:
    """A reducer whose rounds begin as a real one's: announced before their first collective."""

    def __init__(self, rounds: GradientRounds, set_id: int = 0) -> None:
        self.rounds = rounds
        self.id = rounds.add(self, set_id)
        self.zeros = 0

    def reduce_zeros(self) -> None:
        self.rounds.begin(self.id)
        self.zeros += 1


def test_ids_are_equal_on_ranks_that_make_their_optimizers_in_one_order() -> None:
    rounds = GradientRounds(lambda rounds: None)
    optimizers = [Optimizer(rounds, set_id) for set_id in (0, 0, 3, 0)]
    assert [optimizer.id for optimizer in optimizers] == [(0, 0), (0, 1), (3, 0), (0, 2)]


def test_a_reducer_is_the_only_one_again_when_the_other_is_dropped() -> None:
    rounds = GradientRounds(lambda rounds: None)
    first, other_set = Optimizer(rounds), Optimizer(rounds, 1)
    assert rounds.is_only_reducer(first.id) and rounds.is_only_reducer(other_set.id)
    second = Optimizer(rounds)
    assert not rounds.is_only_reducer(first.id)
    del second
    gc.collect()
    assert rounds.is_only_reducer(first.id)


def test_nothing_is_announced_before_a_join_and_the_last_rounds_after_it() -> None:
    sent: list[Rounds] = []
    rounds = GradientRounds(sent.append)
    optimizers = [Optimizer(rounds), Optimizer(rounds), Optimizer(rounds, 4)]
    for which in (0, 1, 0):
        rounds.begin(optimizers[which].id)
    assert sent == []
    rounds.announce()
    assert sent == [Rounds(0, 1, (0, 1, 0))]
    rounds.begin(optimizers[1].id)
    rounds.begin(optimizers[2].id)
    assert sent[1:] == [Rounds(0, 4, (1,)), Rounds(4, 1, (0,))]
    rounds.all_joined(1)
    rounds.begin(optimizers[0].id)
    assert len(sent) == 3
    for _ in range(100):
        rounds.begin(optimizers[0].id)
    rounds.announce()
    assert sent[3].first + len(sent[3].reducers) == 106 and len(sent[3].reducers) < 20


def test_a_joined_rank_makes_each_round_once() -> None:
    """Not those that it has made itself, nor those of process sets that it does not know."""
    rounds = GradientRounds(lambda rounds: None)
    optimizer = Optimizer(rounds)
    rounds.begin(optimizer.id)
    rounds.receive(Rounds(0, 1, (0, 0)))
    rounds.receive(Rounds(0, 2, (0, 0)))
    rounds.receive(Rounds(7, 1, (0,)))
    rounds.all_joined(4)
    assert rounds.wait_for_join() == 4 and optimizer.zeros == 2


def test_a_round_of_a_dropped_optimizer_is_an_error() -> None:
    """The others would wait for this rank."""
    rounds = GradientRounds(lambda rounds: None)
    dropped = Optimizer(rounds)
    rounds.begin(dropped.id)
    del dropped
    gc.collect()
    rounds.receive(Rounds(0, 1, (0,)))  # this rank has made it
    rounds.receive(Rounds(0, 2, (0,)))
    with pytest.raises(LookupError, match="keep it until join"):
        rounds.wait_for_join()


def test_a_failure_ends_the_wait() -> None:
    rounds = GradientRounds(lambda rounds: None)
    rounds.fail("rank 2 is gone")
    with pytest.raises(LookupError, match="rank 2 is gone"):
        rounds.wait_for_join()


@pytest.mark.parametrize("seed", range(20))
def test_ranks_of_different_length_make_the_same_rounds(seed: int) -> None:
    """Threads as ranks: a barrier stands for the collective of a round, in which all ranks must meet."""
    draw = random.Random(seed)
    size = draw.randint(2, 4)
    steps = [draw.randint(0, 5) for _ in range(size)]
    order = [draw.randrange(2) for _ in range(max(steps))]  # which of two optimizers steps
    meeting = threading.Barrier(size, timeout=20)
    lock = threading.Lock()
    ranks: list[GradientRounds] = []
    announcing: list[int] = []
    coordinator = Coordinator(size, 0, lambda signature, values, size: b"")
    log: list[list[ReducerId]] = [[] for _ in range(size)]
    errors: list[BaseException] = []

    def send(begun: Rounds) -> None:
        with lock:
            coordinator.begin_rounds(begun)
            deliver()

    def deliver() -> None:
        for receivers, message in coordinator.outgoing():
            for rank in receivers:
                if isinstance(message, Rounds):
                    ranks[rank].receive(message)
                elif isinstance(message, AnnounceRounds):
                    announcing.append(rank)
                elif isinstance(message, AllJoined):
                    ranks[rank].all_joined(message.last)

    class Rank(Optimizer):
        def __init__(self, rank: int) -> None:
            super().__init__(ranks[rank])
            self.rank = rank

        def step(self) -> None:
            self.rounds.begin(self.id)
            log[self.rank].append(self.id)
            meeting.wait()

        reduce_zeros = step

    def join(rank: int) -> None:
        with lock:
            coordinator.join(rank, 0.0)
            deliver()
            told = announcing[:]
            announcing.clear()
        for other in told:
            ranks[other].announce()

    def train(rank: int) -> None:
        try:
            optimizers = [Rank(rank), Rank(rank)]
            ready.wait()
            for which in order[: steps[rank]]:
                optimizers[which].step()
            join(rank)
            ranks[rank].wait_for_join()
        except BaseException as error:
            errors.append(error)
            meeting.abort()

    ranks += [GradientRounds(send) for _ in range(size)]
    ready = threading.Barrier(size, timeout=20)
    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors
    assert all(each == [ReducerId(0, which) for which in order] for each in log)
