"""Ranks that make different numbers of calls. Horovod counts its unnamed operations, so this comes last, and names
all.
"""

import time

import pytest
import torch

from tests.hvd.api import REAL, hvd

alone = pytest.mark.skipif("hvd.size() == 1", reason="one rank has no other")


@alone
def test_a_name_that_is_under_way(rank: int, size: int) -> None:
    # One rank waits, so that the operation cannot have ended.
    if rank == 0:
        hvd.synchronize(
            hvd.allreduce_async(torch.ones(1), name="the others are ready", process_set=hvd.global_process_set)
        )
        hvd.allreduce(torch.ones(1), name="twice")
    else:
        handle = hvd.allreduce_async(torch.ones(1), name="twice")
        with pytest.raises(ValueError, match=r"same name|pending already"):
            hvd.allreduce_async(torch.ones(1), name="twice")
        hvd.allreduce(torch.ones(1), name="the others are ready")
        assert hvd.synchronize(handle).item() == 1.0


def test_join_lets_ranks_stop_early(rank: int, size: int) -> None:
    seen = [hvd.allreduce(torch.full((2,), 6.0), name=f"step.{step}", op=hvd.Sum) for step in range(rank + 1)]
    last = hvd.join()
    assert 0 <= last < size
    assert [tensor[0].item() for tensor in seen] == [6.0 * (size - step) for step in range(rank + 1)]
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="after").item() == size


def test_averages_count_those_who_have_joined(rank: int, size: int) -> None:
    if rank == size - 1:
        assert hvd.allreduce(torch.full((1,), 6.0), name="last").item() == pytest.approx(6.0 / size)
        assert hvd.allreduce(torch.full((1,), 6, dtype=torch.int64), name="last", op=hvd.Sum).item() == 6
    assert hvd.join() == size - 1


@alone
@pytest.mark.skipif(REAL, reason="Horovod crashes the ranks that have joined")
def test_only_sums_go_on_without_those_who_have_joined(rank: int, size: int) -> None:
    if rank == 0:
        for call in (
            lambda: hvd.allgather(torch.ones(1), name="joined"),
            lambda: hvd.broadcast(torch.ones(1), 0, name="joined"),
            lambda: hvd.barrier(),
        ):
            with pytest.raises(hvd.HorovodInternalError, match="joined"):
                call()
    hvd.join()


@alone
def test_ranks_join_one_after_another(rank: int, size: int) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    for _ in range([2, 3, 5][rank]):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    if rank == 1:
        time.sleep(1)
    assert 0 <= hvd.join() < size


@alone
def test_join_with_two_optimizers(rank: int, size: int) -> None:
    """Gradients of both come in turns, in more than one bucket."""
    a, c, b = (
        torch.nn.Parameter(torch.zeros(n, dtype=d))
        for n, d in ((3, torch.float32), (3, torch.float64), (5, torch.float32))
    )
    first = hvd.DistributedOptimizer(torch.optim.SGD([a, c], 1.0), named_parameters=[("a", a), ("c", c)])
    second = hvd.DistributedOptimizer(torch.optim.SGD([b], 1.0), named_parameters=[("b", b)])
    for _ in range(2 + 2 * rank):
        first.zero_grad()
        second.zero_grad()
        x = (a * 100).sum()
        x = x * 1 + b.sum()
        x = x * 1 + (c * 10).sum().float()
        x.backward()
        first.step()
        second.step()
    hvd.join()
    if rank == size - 1:
        average = sum((size - step // 2) / size if step >= 2 else 1.0 for step in range(2 * size))
        assert torch.allclose(a, torch.full((3,), -100.0 * average)) and torch.allclose(b, torch.full((5,), -average))
        assert torch.allclose(c, torch.full((3,), -10.0 * average, dtype=torch.float64))


@pytest.mark.skipif(REAL, reason="Horovod's Adasum does not know join")
@pytest.mark.skipif("hvd.size() != 2", reason="Adasum takes a power of 2 of ranks, and join needs two")
def test_join_with_adasum(rank: int, size: int) -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], 1.0), named_parameters=[("p", param)], op=hvd.Adasum)
    for _ in range(2 * rank):
        optimizer.zero_grad()
        param.sum().backward()
        optimizer.step()
    hvd.join()
    # The sum of a step and of nothing is the step.
    assert torch.equal(param.detach(), torch.full((2,), -2.0 * rank))


@pytest.mark.skipif("hvd.size() < 3", reason="needs ranks inside and outside a set")
def test_join_with_optimizers_that_only_some_ranks_have(rank: int, size: int) -> None:
    some = hvd.add_process_set([0, 1])
    a, b = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(4))
    if rank < 2:
        first = hvd.DistributedOptimizer(torch.optim.SGD([a], 1.0), named_parameters=[("a", a)], process_set=some)
    second = hvd.DistributedOptimizer(torch.optim.SGD([b], 1.0), named_parameters=[("b", b)])
    for _ in range([4, 4, 2][rank]):
        if rank < 2:
            first.zero_grad()
            a.sum().backward()
            first.step()
        second.zero_grad()
        b.sum().backward()
        second.step()
    hvd.join()
    if rank < 2:
        assert torch.equal(a.detach(), torch.full((2,), -4.0)) and torch.allclose(b, torch.full((4,), -2.0 - 2 * 2 / 3))


@alone
@pytest.mark.skipif(REAL, reason="Horovod waits for ever")
def test_after_a_join_unnamed_operations_are_counted_anew(rank: int, size: int) -> None:
    for _ in range(rank):
        hvd.allreduce(torch.ones(1))
    hvd.join()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size


@alone
@pytest.mark.skipif(REAL, reason="Horovod waits for ever")
def test_unnamed_operations_that_differ(rank: int, size: int) -> None:
    with pytest.raises(hvd.HorovodInternalError, match="mismatched operations: allgather on rank 0; allreduce on rank"):
        if rank == 0:
            hvd.allgather(torch.ones(1))
        else:
            hvd.allreduce(torch.ones(1))
