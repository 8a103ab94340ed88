"""Rounds of gradient reductions after a join: who announces what, and when a joined rank takes part."""

import gc
import random
import threading

import pytest

from unidist.hvd.rounds import GradientRounds, ReducerId, Round

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
    rounds = GradientRounds(lambda begun: None)
    optimizers = [Optimizer(rounds, set_id) for set_id in (0, 0, 3, 0)]
    assert [optimizer.id for optimizer in optimizers] == [(0, 0), (0, 1), (3, 0), (0, 2)]


def test_a_reducer_is_the_only_one_again_when_the_other_is_dropped() -> None:
    rounds = GradientRounds(lambda begun: None)
    first, other_set = Optimizer(rounds), Optimizer(rounds, 1)
    assert rounds.is_only_reducer(first.id) and rounds.is_only_reducer(other_set.id)
    second = Optimizer(rounds)
    assert not rounds.is_only_reducer(first.id)
    del second
    gc.collect()
    assert rounds.is_only_reducer(first.id)


def test_nothing_is_announced_before_a_join_and_all_that_was_missed_after_it() -> None:
    sent: list[tuple[Round, ...]] = []
    rounds = GradientRounds(sent.append)
    optimizer = Optimizer(rounds)
    for _ in range(3):
        rounds.begin(optimizer.id)
    assert sent == []
    rounds.announce()
    assert sent == [tuple(Round(optimizer.id, number) for number in (1, 2, 3))]
    rounds.begin(optimizer.id)
    assert sent[1:] == [(Round(optimizer.id, 4),)]
    rounds.all_joined(1)
    rounds.begin(optimizer.id)
    assert len(sent) == 2


def test_a_joined_rank_makes_each_round_once() -> None:
    """Rounds that it has made itself, and those that several ranks announce, count once; unknown reducers not at
    all.
    """
    rounds = GradientRounds(lambda begun: None)
    optimizer = Optimizer(rounds)
    rounds.begin(optimizer.id)
    rounds.receive((Round(optimizer.id, 1), Round(optimizer.id, 2)))
    rounds.receive((Round(optimizer.id, 2), Round(optimizer.id, 3)))
    rounds.receive((Round(ReducerId(7, 0), 1),))
    rounds.all_joined(4)
    assert rounds.wait_for_join() == 4 and optimizer.zeros == 2


def test_rounds_of_a_dropped_optimizer_are_passed_over() -> None:
    rounds = GradientRounds(lambda begun: None)
    optimizer = Optimizer(rounds)
    key = optimizer.id
    del optimizer
    gc.collect()
    rounds.receive((Round(key, 1),))
    rounds.all_joined(0)
    assert rounds.wait_for_join() == 0


def test_a_failure_ends_the_wait() -> None:
    rounds = GradientRounds(lambda begun: None)
    rounds.fail(RuntimeError("rank 2 is gone"))
    with pytest.raises(RuntimeError, match="rank 2 is gone"):
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
    joined: list[int] = []
    log: list[list[ReducerId]] = [[] for _ in range(size)]
    errors: list[BaseException] = []

    def send(begun: tuple[Round, ...]) -> None:  # rank 0 passes them on to those who have joined
        with lock:
            for rank in joined:
                ranks[rank].receive(begun)

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
            joined.append(rank)
            everyone = len(joined) == size
        for other in ranks:
            other.announce()
        if everyone:
            for other in ranks:
                other.all_joined(rank)

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
