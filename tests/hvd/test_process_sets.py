import pytest
import torch

from tests.hvd.api import REAL, hvd

alone = pytest.mark.skipif("hvd.size() == 1", reason="one rank has no other")


def test_the_global_set(rank: int, size: int) -> None:
    everybody = hvd.global_process_set
    assert everybody.process_set_id == 0 and everybody.ranks == list(range(size))
    assert (everybody.size(), everybody.rank(), everybody.included()) == (size, rank, True)
    assert hvd.remove_process_set(everybody) is False


@alone
def test_a_set_of_some_ranks(rank: int, size: int) -> None:
    first = hvd.add_process_set([0])
    rest = hvd.add_process_set(hvd.ProcessSet(range(1, size)))
    mine, offset = (first, 0) if rank == 0 else (rest, 1)
    assert mine.included() and mine.rank() == rank - offset and mine.size() == (1 if rank == 0 else size - 1)
    # Beside each other, as often as each set likes.
    for step in range(3 + rank * 0):
        result = hvd.allreduce(torch.full((2,), float(rank)), name=f"own.{step}", op=hvd.Sum, process_set=mine)
        assert torch.equal(result, torch.full((2,), 0.0 if rank == 0 else size * (size - 1) / 2))
    gathered = hvd.allgather(torch.full((1,), rank), name="own", process_set=mine)
    assert gathered.tolist() == mine.ranks
    root = mine.ranks[-1]
    assert hvd.broadcast(torch.full((1,), rank), root, name="own", process_set=mine).item() == root
    assert hvd.broadcast_object(rank, root, name="object", process_set=mine) == root
    sent = hvd.alltoall(torch.arange(mine.size()) + 10 * rank, name="own", process_set=mine)
    assert sent.tolist() == [mine.rank() + 10 * r for r in mine.ranks]
    part = hvd.reducescatter(torch.ones(mine.size()), name="own", op=hvd.Sum, process_set=mine)
    assert part.tolist() == [mine.size()]
    hvd.barrier(mine)
    other = rest if rank == 0 else first
    with pytest.raises(ValueError):
        hvd.allreduce(torch.ones(1), name="not mine", process_set=other)
    with pytest.raises(ValueError):
        other.rank()
    with pytest.raises(ValueError, match="root rank"):
        hvd.broadcast(torch.ones(1), other.ranks[0], name="root elsewhere", process_set=mine)
    assert hvd.allreduce(torch.ones(1), name="all again", op=hvd.Sum).item() == size
    assert hvd.remove_process_set(first) and hvd.remove_process_set(rest)
    assert first.process_set_id is None and first.size() is None and first.rank() is None
    assert hvd.remove_process_set(first) is False
    with pytest.raises((ValueError, TypeError)):
        hvd.allreduce(torch.ones(1), name="removed", process_set=first)


@alone
def test_sets_that_cannot_be(rank: int, size: int) -> None:
    with pytest.raises(ValueError):
        hvd.add_process_set(list(range(size)))
    one = hvd.add_process_set([size - 1])
    with pytest.raises(ValueError):
        hvd.add_process_set([size - 1])
    assert hvd.remove_process_set(one)
    with pytest.raises(ValueError):
        hvd.ProcessSet(["a"])
    if not REAL:  # Horovod ends the process
        with pytest.raises(ValueError, match=f"0 to {size - 1}"):
            hvd.add_process_set([0, size])
        with pytest.raises(hvd.HorovodInternalError, match="process sets"):
            hvd.add_process_set([int(rank == 0)])
