import random
import time
from typing import Any

import pytest
import torch

from tests.hvd.api import REAL, hvd

alone = pytest.mark.skipif("hvd.size() == 1", reason="one rank agrees with itself")


def test_operations_may_start_in_any_order(rank: int, size: int) -> None:
    order = list(range(60))
    random.Random(rank).shuffle(order)
    handles = {
        i: hvd.allreduce_async(torch.full((i + 1,), float(i + rank)), name=f"shuffled.{i}", op=hvd.Sum) for i in order
    }
    random.Random(size + rank).shuffle(order)
    for i in order:
        assert torch.equal(hvd.synchronize(handles[i]), torch.full((i + 1,), i * size + size * (size - 1) / 2))


def test_kinds_may_start_in_any_order(rank: int, size: int) -> None:
    starts: list[Any] = [
        lambda: hvd.allreduce_async(torch.ones(2), name="same name", op=hvd.Sum),
        lambda: hvd.allgather_async(torch.ones(1), name="same name"),
        lambda: hvd.broadcast_async(torch.full((3,), float(rank)), 0, name="same name"),
        lambda: hvd.alltoall_async(torch.arange(size), name="same name"),
        lambda: hvd.reducescatter_async(torch.ones(size), name="same name", op=hvd.Sum),
    ]
    order = list(range(len(starts)))
    random.Random(rank).shuffle(order)
    handles = {i: starts[i]() for i in order}
    results = [hvd.synchronize(handles[i]) for i in range(len(starts))]
    assert (
        results[0].tolist() == [size] * 2 and results[1].tolist() == [1.0] * size and results[2].tolist() == [0.0] * 3
    )
    assert results[3][0].tolist() == [rank] * size and results[4].tolist() == [size]


def test_poll(rank: int, size: int) -> None:
    handle = hvd.allreduce_async(torch.ones(1), name="polled")
    end = time.monotonic() + 20
    while not hvd.poll(handle):
        assert time.monotonic() < end
        time.sleep(1e-3)
    assert hvd.synchronize(handle).item() == 1.0
    assert hvd.synchronize(handle) is None
    with pytest.raises(ValueError, match=str(handle)):
        hvd.poll(handle)


@alone
def test_a_rank_may_come_late(rank: int, size: int) -> None:
    if rank == size - 1:
        hvd.barrier()
        handle = hvd.allreduce_async(torch.ones(1), name="late", op=hvd.Sum)
    else:
        handle = hvd.allreduce_async(torch.ones(1), name="late", op=hvd.Sum)
        assert not hvd.poll(handle)
        before = executed(done=False)
        hvd.barrier()
    assert hvd.synchronize(handle).item() == size
    if not REAL:  # reports tell by them who has come to an operation, whose name comes again
        after = executed(done=True)
        assert hvd.allgather_object(after) == [after] * size
        assert rank == size - 1 or before[0] < after[0]


def executed(*, done: bool) -> list[int]:
    """How many operations had been executed when the pending ones began, or with the last one that is done."""
    if REAL:
        return []
    from unidist.hvd.session import current_session

    return [each.executed for each in current_session().records() if each.done == done]


@alone
@pytest.mark.parametrize(
    "start",
    [
        lambda odd: hvd.allreduce_async(torch.ones(2 + odd), name="differs"),
        lambda odd: hvd.allreduce_async(torch.ones(2, 2 + odd), name="differs"),
        lambda odd: hvd.allreduce_async(torch.ones(2, dtype=torch.float64 if odd else torch.float32), name="differs"),
        lambda odd: hvd.allreduce_async(torch.ones(2), name="differs", op=hvd.Sum if odd else hvd.Max),
        lambda odd: hvd.allreduce_async(torch.ones(2), name="differs", op=hvd.Sum, prescale_factor=1.0 + odd),
        lambda odd: hvd.allreduce_async(torch.ones(2), name="differs", op=hvd.Sum, postscale_factor=1.0 + odd),
        lambda odd: hvd.allgather_async(torch.ones(2, 2 + odd), name="differs"),
        lambda odd: hvd.allgather_async(torch.ones([2] * (1 + odd)), name="differs"),
        lambda odd: hvd.allgather_async(torch.ones(2, dtype=torch.int32 if odd else torch.int64), name="differs"),
        lambda odd: hvd.broadcast_async(torch.ones(2 + odd), 0, name="differs"),
        lambda odd: hvd.broadcast_async(torch.ones(2), odd, name="differs"),
        lambda odd: hvd.alltoall_async(torch.ones(hvd.size(), 1 + odd), name="differs"),
        lambda odd: hvd.reducescatter_async(torch.ones(hvd.size() + odd), name="differs"),
        lambda odd: hvd.grouped_allreduce_async([torch.ones(1), torch.ones(2 + odd)], name="differs"),
    ],
    ids=lambda start: "",
)  # fmt: skip
def test_ranks_that_differ_are_told_on_every_rank(start: Any, rank: int, size: int) -> None:
    handle = start(int(rank == size - 1))
    with pytest.raises(hvd.HorovodInternalError, match=r"(?i)mismatched") as caught:
        hvd.synchronize(handle)
    if not REAL:
        assert "differs" in str(caught.value) and f"rank {size - 1}" in str(caught.value)
    # And nothing is broken by it.
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="after").item() == size


def test_bad_arguments(rank: int, size: int) -> None:
    for call in (hvd.allreduce, hvd.allgather, lambda t: hvd.broadcast_(t, 0), hvd.reducescatter):
        with pytest.raises(ValueError, match="contiguous"):
            call(torch.ones(2, 3).t())
    with pytest.raises(ValueError, match="not supported"):
        hvd.allreduce(torch.ones(2, dtype=torch.bool))
    with pytest.raises(ValueError, match="root rank"):
        hvd.broadcast(torch.ones(1), size)
    with pytest.raises(ValueError, match="splits"):
        hvd.alltoall(torch.ones(size), torch.tensor([9] * size, dtype=torch.int32))
    with pytest.raises(ValueError, match="splits"):
        hvd.alltoall(torch.ones(size), torch.ones(size, dtype=torch.int64))
    with pytest.raises(hvd.HorovodInternalError):
        hvd.allreduce(torch.ones(1), op=77)
    with pytest.raises(hvd.HorovodInternalError):
        hvd.reducescatter(torch.ones(size), op=hvd.Min)
    with pytest.raises(ValueError):
        hvd.reducescatter(torch.tensor(1.0))
    with pytest.raises(ValueError):
        hvd.grouped_allreduce([])
    if size > 1:
        with pytest.raises(ValueError, match="splits"):
            hvd.alltoall(torch.ones(size + 1))
