"""Ranks that make different numbers of calls. Horovod counts its unnamed operations, so this comes last, and names all."""

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
        with pytest.raises(ValueError, match=r"same name|under way"):
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
