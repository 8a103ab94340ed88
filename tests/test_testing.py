"""Worlds of threads: what ``unidist.testing`` promises. The contract suite runs in them too."""

import random
import threading
import time
import traceback
import warnings

import numpy
import pytest
import torch
from torch import nn

import unidist
import unidist.hvd
import unidist.testing
from unidist import context

pytestmark = pytest.mark.unit


def test_results_come_in_rank_order() -> None:
    def work(factor: int, *, plus: int) -> int:
        assert unidist.backend_name() == "threads" and unidist.local_size() == 3
        return int(unidist.all_reduce(torch.tensor(factor * unidist.rank())).item()) + plus + unidist.rank()

    with unidist.testing.world(3) as world:
        assert world.run(work, 2, plus=1) == [7, 8, 9]
        assert world.run(unidist.is_main) == [True, False, False]
    assert not unidist.is_initialized() and not [t for t in threading.enumerate() if t.name.startswith("rank ")]


def test_training_code_as_it_is() -> None:
    def main() -> torch.Tensor:
        unidist.init(timeout=600, seed=3)
        try:
            with pytest.raises(unidist.BackendError, match="came after init"):
                unidist.init("gloo")
            model = unidist.wrap_model(nn.Linear(2, 1))
            model(torch.full((1, 2), float(unidist.rank()))).sum().backward()
            assert model.module.weight.grad is not None
            return model.module.weight.grad
        finally:
            unidist.shutdown()
            assert not unidist.is_initialized()

    with unidist.testing.world(4) as world:
        for _ in range(2):
            assert [grad.tolist() for grad in world.run(main)] == [[[1.5, 1.5]]] * 4


def boom() -> None:
    if unidist.rank() == 1:
        raise KeyError("the cause")


def test_the_first_error_is_raised_with_its_traceback() -> None:
    outcomes: list[str] = []

    def work() -> None:
        boom()
        try:
            unidist.barrier()
        except BaseException as error:
            outcomes.append(str(error))
            raise

    with unidist.testing.world(3) as world:
        with pytest.raises(KeyError, match="the cause") as caught:
            world.run(work)
        assert "raise KeyError" in "".join(traceback.format_tb(caught.value.__traceback__))
        assert getattr(caught.value, "__notes__", ["(rank 1 of 3)"]) == ["(rank 1 of 3)"]
        assert len(outcomes) == 2 and all("rank 1 " in text and "the cause" in text for text in outcomes), outcomes
        assert world.run(unidist.rank) == [0, 1, 2]  # with new ranks


def test_a_rank_that_has_ended_is_named_at_once() -> None:
    def work() -> None:
        unidist.barrier()
        if unidist.rank() != 1:
            unidist.all_reduce(torch.ones(2))

    began = time.monotonic()
    with unidist.testing.world(3) as world, pytest.raises(unidist.CollectiveError) as caught:
        world.run(work)
    assert "rank 1 (" in str(caught.value) and "has ended without an exception, after barrier" in str(caught.value)
    assert time.monotonic() - began < 10


def test_ranks_that_wait_for_each_other_are_found_at_once() -> None:
    def work() -> None:
        pair = unidist.new_group([0, 1])
        unidist.barrier(pair if unidist.rank() == 0 else None)

    with unidist.testing.world(3) as world, pytest.raises(unidist.CollectiveError, match=r"rank 1 .* not come to"):
        world.run(work)


def test_calls_that_differ_are_an_error_of_the_backend_too() -> None:
    def work() -> None:
        backend = context.current()
        backend.broadcast(torch.ones(2), 0) if unidist.rank() else backend.all_reduce(torch.ones(2), "sum")

    with unidist.testing.world(2) as world, pytest.raises(unidist.CollectiveError, match="mismatch in operation 1"):
        world.run(work)


def test_a_rank_that_does_not_come_is_ended() -> None:
    gone = threading.Event()

    def work() -> None:
        try:
            while unidist.rank() == 1:
                time.sleep(0.01)
        finally:
            gone.set()
        unidist.barrier()

    with unidist.testing.world(2, timeout=0.5) as world:
        with pytest.raises(unidist.CollectiveError, match=r"rank 1 \(.*\) is at .*test_testing.*not come to barrier"):
            world.run(work)
        assert gone.wait(10)
    with unidist.testing.world(1, timeout=0.5) as world, pytest.raises(TimeoutError, match=r"rank 0 .*\(<lambda>\)"):
        world.run(lambda: time.sleep(1))


def test_a_call_that_is_aborted() -> None:
    def work() -> None:
        if unidist.rank() == 0:
            threading.Thread(target=context.current().abort).start()
            with pytest.raises(unidist.CollectiveError, match="aborted"):
                unidist.barrier()

    with unidist.testing.world(2) as world:
        world.run(work)


def draw() -> tuple[float, float, float]:
    return random.random(), numpy.random.rand(), torch.rand(()).item()


def test_each_rank_has_its_own_random_states() -> None:
    def work() -> tuple[object, ...]:
        first = draw()
        unidist.set_seed(unidist.rank())
        unidist.barrier()
        return first, draw()

    unidist.set_seed(7)
    before = torch.get_rng_state()
    with unidist.testing.world(3) as world:
        firsts, seconds = zip(*world.run(work))
    assert torch.equal(torch.get_rng_state(), before) and list(firsts) == [draw()] * 3
    for rank, second in enumerate(seconds):
        unidist.set_seed(rank)
        assert second == draw()


def test_each_rank_has_its_own_warnings() -> None:
    def work() -> None:
        with pytest.warns(UserWarning, match=f"of rank {unidist.rank()}"):
            unidist.barrier()
            warnings.warn(f"of rank {unidist.rank()}", stacklevel=1)
            unidist.barrier()

    with unidist.testing.world(3) as world:
        world.run(work)


def test_an_initialized_process_stays_so() -> None:
    unidist.init("single")
    try:
        with unidist.testing.world(2) as world:
            assert world.run(unidist.world_size) == [2, 2] and unidist.world_size() == 1
        assert unidist.backend_name() == "single"
    finally:
        unidist.shutdown()


def test_bad_worlds() -> None:
    with unidist.testing.world(2) as w, pytest.raises(unidist.BackendError, match="a process for each rank"):
        w.run(unidist.hvd.init)
    with pytest.raises(ValueError, match="at least one rank"), unidist.testing.world(0):
        pass
    with unidist.testing.world(1), pytest.raises(unidist.UnidistError, match="one at a time"), unidist.testing.world(1):
        pass
    with pytest.raises(unidist.BackendError, match=r"inside unidist\.testing\.world"):
        unidist.init("threads")
