from typing import Any

import pytest
import torch

from tests.hvd.api import REAL, hvd
from tests.support.frames import documented, frames
from unidist.context import current

REDUCED = [torch.float16, torch.float32, torch.float64, torch.int32, torch.int64]
MOVED = [*REDUCED, torch.uint8, torch.int8, torch.int16]


def whole(size: int) -> torch.Tensor:
    return torch.arange(1, size + 1, dtype=torch.float64)


@pytest.mark.parametrize("dtype", REDUCED, ids=str)
@pytest.mark.parametrize("op", ["Average", "Sum", "Min", "Max", "Product"])
def test_allreduce(op: str, dtype: torch.dtype, rank: int, size: int) -> None:
    mine = torch.tensor([[rank + 1, -(rank + 1)], [3, 7]], dtype=dtype)
    everyone = torch.stack([torch.tensor([[r + 1, -(r + 1)], [3, 7]], dtype=torch.float64) for r in range(size)])
    expected = {
        "Average": everyone.mean(0), "Sum": everyone.sum(0), "Min": everyone.amin(0), "Max": everyone.amax(0),
        "Product": everyone.prod(0),
    }[op]  # fmt: skip
    if not dtype.is_floating_point:
        expected = expected.trunc()
    result = hvd.allreduce(mine, op=getattr(hvd, op))
    assert result.dtype == dtype and torch.allclose(
        result.double(), expected, atol=1e-3 if dtype == torch.float16 else 1e-6
    )
    assert torch.equal(mine, torch.tensor([[rank + 1, -(rank + 1)], [3, 7]], dtype=dtype))


def test_allreduce_averages_by_default_and_returns_a_copy(rank: int, size: int) -> None:
    mine = torch.full((3,), float(rank))
    result = hvd.allreduce(mine)
    assert result is not mine and torch.allclose(result, torch.full((3,), (size - 1) / 2))
    assert torch.equal(mine, torch.full((3,), float(rank)))


def test_average_and_op(rank: int, size: int) -> None:
    mine = torch.full((1,), float(rank + 1))
    total = float(sum(range(1, size + 1)))
    assert hvd.allreduce(mine, average=False).item() == total
    assert hvd.allreduce(mine, average=True).item() == pytest.approx(total / size)
    # What many scripts mean as a name.
    assert hvd.allreduce(mine, "avg_loss").item() == pytest.approx(total / size)
    with pytest.raises(ValueError, match="op parameter supersedes average"):
        hvd.allreduce(mine, average=True, op=hvd.Sum)
    assert hvd.allreduce(mine, op=hvd.mpi_ops.Sum).item() == total


def test_in_place_forms(rank: int, size: int) -> None:
    mine = torch.full((2, 2), float(rank))
    assert hvd.allreduce_(mine, op=hvd.Sum) is mine
    assert torch.equal(mine, torch.full((2, 2), size * (size - 1) / 2))
    handle = hvd.allreduce_async_(mine, average=False, name="again")
    assert isinstance(handle, int) and hvd.synchronize(handle) is mine
    assert torch.equal(mine, torch.full((2, 2), size * size * (size - 1) / 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_factors(dtype: torch.dtype, rank: int, size: int) -> None:
    mine = torch.full((4,), 4 * (rank + 1), dtype=dtype)
    result = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    assert torch.equal(result, torch.full((4,), 6 * size * (size + 1) // 2, dtype=dtype))


@pytest.mark.parametrize("numel", [6, 3000], ids=["inline", "moved"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("op", "pre", "post"), [("Sum", 0.3, 1.0), ("Sum", 1.0, 0.7), ("Average", 0.3, 0.7)])
def test_factors_are_applied_in_the_tensors_own_precision(
    op: str, pre: float, post: float, dtype: torch.dtype, numel: int, rank: int, size: int
) -> None:
    """Rounded after each of the three steps: prescale, sum, postscale. The sums here are exact."""
    values = torch.rand(numel, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    wide = torch.float32 if dtype == torch.float16 else dtype

    def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
        return (tensor.to(wide) * factor).to(dtype)

    mine = values if rank == 0 else torch.zeros_like(values)
    result = hvd.allreduce(mine, op=getattr(hvd, op), prescale_factor=pre, postscale_factor=post)
    assert torch.equal(result, scaled(scaled(values, pre), post / (size if op == "Average" else 1)))


def test_compression(rank: int, size: int) -> None:
    mine = torch.linspace(0, 1, 5) + rank
    result = hvd.allreduce(mine, op=hvd.Sum, compression=hvd.Compression.fp16)
    assert result.dtype == torch.float32 and torch.allclose(
        result, torch.linspace(0, 1, 5) * size + size * (size - 1) / 2, atol=1e-2
    )
    assert torch.equal(
        hvd.allreduce(torch.tensor([rank]), op=hvd.Sum, compression=hvd.Compression.fp16),
        torch.tensor([size * (size - 1) // 2]),
    )


def test_scalars_and_empty_tensors(rank: int, size: int) -> None:
    result = hvd.allreduce(torch.tensor(float(rank)), op=hvd.Sum)
    assert result.shape == () and result.item() == size * (size - 1) / 2
    assert hvd.allreduce(torch.ones(0)).shape == (0,)
    assert hvd.broadcast(torch.tensor(float(rank)), size - 1).item() == size - 1


def test_grouped_allreduce(rank: int, size: int) -> None:
    tensors = [torch.full((2,), float(rank)), torch.full((3,), rank + 1, dtype=torch.int32), torch.full((), 1.0)]
    results = hvd.grouped_allreduce(tensors, op=hvd.Sum)
    assert [result.tolist() for result in results] == [[size * (size - 1) / 2] * 2, [size * (size + 1) // 2] * 3, size]
    results = hvd.grouped_allreduce_(tensors, op=hvd.Max)
    assert all(result is tensor for result, tensor in zip(results, tensors))
    assert tensors[0].tolist() == [size - 1] * 2
    handle = hvd.grouped_allreduce_async([torch.ones(1), torch.ones(2)], name="group")
    assert [tensor.tolist() for tensor in hvd.synchronize(handle)] == [[1.0], [1.0, 1.0]]
    handle = hvd.grouped_allreduce_async_(tensors[:1], name="group", op=hvd.Sum)
    assert hvd.synchronize(handle)[0] is tensors[0]


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_allgather_of_uneven_parts(dtype: torch.dtype, rank: int, size: int) -> None:
    mine = torch.full((rank, 2), rank, dtype=dtype)
    expected = torch.cat([torch.full((r, 2), r, dtype=dtype) for r in range(size)])
    assert torch.equal(hvd.allgather(mine), expected)
    assert torch.equal(hvd.synchronize(hvd.allgather_async(mine, name="parts")), expected)


def test_grouped_allgather(rank: int, size: int) -> None:
    results = hvd.grouped_allgather([torch.full((1,), rank), torch.full((rank + 1, 2), float(rank))])
    assert results[0].tolist() == list(range(size)) and results[1].shape == (size * (size + 1) // 2, 2)
    handle = hvd.grouped_allgather_async([torch.full((1,), rank)], name="one")
    assert hvd.synchronize(handle)[0].tolist() == list(range(size))


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_broadcast(dtype: torch.dtype, rank: int, size: int) -> None:
    root = size - 1
    mine = torch.full((2, 3), rank + 1, dtype=dtype)
    result = hvd.broadcast(mine, root)
    assert torch.equal(result, torch.full((2, 3), size, dtype=dtype)) and mine[0, 0] == rank + 1
    assert hvd.broadcast_(mine, root_rank=root) is mine and torch.equal(mine, result)
    assert torch.equal(hvd.synchronize(hvd.broadcast_async(mine, root, name="b")), result)
    assert hvd.synchronize(hvd.broadcast_async_(mine, root, name="b")) is mine


def test_broadcast_to_a_parameter(rank: int) -> None:
    parameter = torch.nn.Parameter(torch.full((2,), float(rank)))
    hvd.broadcast_(parameter, 0)
    assert torch.equal(parameter.detach(), torch.zeros(2)) and parameter.requires_grad


def test_alltoall(rank: int, size: int) -> None:
    mine = torch.arange(2 * size) + 100 * rank
    expected = torch.cat([torch.arange(2 * rank, 2 * rank + 2) + 100 * r for r in range(size)])
    assert torch.equal(hvd.alltoall(mine), expected)
    splits = torch.tensor([rank + 1] * size, dtype=torch.int32)
    mine = torch.full((size * (rank + 1), 2), float(rank))
    result, counts = hvd.alltoall(mine, splits)
    assert counts.tolist() == [r + 1 for r in range(size)] and counts.dtype == torch.int32
    assert torch.equal(result, torch.cat([torch.full((r + 1, 2), float(r)) for r in range(size)]))
    result, counts = hvd.alltoall(torch.arange(size), splits=[1] * size)
    assert result.tolist() == [rank] * size
    result, counts = hvd.synchronize(hvd.alltoall_async(torch.arange(size), name="a"))
    assert result.tolist() == [rank] * size and counts.tolist() == [1] * size


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_reducescatter(op: str, rows: int, rank: int, size: int) -> None:
    mine = torch.arange(2.0 * rows).view(rows, 2) * (rank + 1)
    whole = torch.arange(2.0 * rows).view(rows, 2) * (size + 1) / 2 * (size if op == "Sum" else 1)
    counts = [rows // size + (r < rows % size) for r in range(size)]
    result = hvd.reducescatter(mine, op=getattr(hvd, op))
    assert torch.allclose(result, whole.split(counts)[rank])
    scaled = hvd.reducescatter(mine, op=getattr(hvd, op), prescale_factor=2.0, postscale_factor=0.25)
    assert torch.allclose(scaled, whole.split(counts)[rank] / 2)


def test_grouped_reducescatter(rank: int, size: int) -> None:
    results = hvd.grouped_reducescatter([torch.ones(size), torch.full((size, 2), float(rank))], op=hvd.Sum)
    assert results[0].tolist() == [size] and results[1].tolist() == [[size * (size - 1) / 2] * 2]
    handle = hvd.grouped_reducescatter_async([torch.ones(size)], name="rs")
    assert hvd.synchronize(handle)[0].tolist() == [1.0]
    assert hvd.synchronize(hvd.reducescatter_async(torch.ones(size), name="rs", op=hvd.Sum)).tolist() == [size]


@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_sparse_allreduce(op: str, rank: int, size: int) -> None:
    mine = torch.sparse_coo_tensor([[rank, 3]], [[2.0], [1.0]], (4, 1), check_invariants=True)
    result = hvd.sparse_allreduce_async(mine, name="sparse", op=getattr(hvd, op))()
    expected = torch.zeros(4, 1)
    for r in range(size):
        expected[r] += 2.0
        expected[3] += 1.0
    assert torch.allclose(result.to_dense(), expected / (size if op == "Average" else 1))


def test_adasum(rank: int, size: int) -> None:
    mine = torch.tensor([1.0, float(rank), 2.0])
    if size & (size - 1):
        with pytest.raises(NotImplementedError, match="power of 2"):
            hvd.allreduce(mine, op=hvd.Adasum)
        return
    if REAL and not hvd.mpi_enabled():
        pytest.skip("this Horovod has no Adasum on Gloo")
    result = hvd.allreduce(mine, op=hvd.Adasum)
    expected = mine.double()
    if size == 2:
        a, b = torch.tensor([1.0, 0.0, 2.0]).double(), torch.tensor([1.0, 1.0, 2.0]).double()
        expected = (1 - a @ b / (2 * a @ a)) * a + (1 - a @ b / (2 * b @ b)) * b
    assert torch.allclose(result.double(), expected)


def test_objects(rank: int, size: int) -> None:
    thing = {"lr": 0.1, "names": ["a", "ä"], "rank": rank}
    assert hvd.broadcast_object(thing, root_rank=size - 1) == {**thing, "rank": size - 1}
    assert hvd.broadcast_object(thing, name="thing")["rank"] == 0
    assert hvd.allgather_object([rank] * rank) == [[r] * r for r in range(size)]


def test_barrier_and_join_as_a_barrier(rank: int, size: int) -> None:
    assert hvd.barrier() is None
    assert 0 <= hvd.join() < size
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size


def test_inference_mode(rank: int, size: int) -> None:
    """Results are of the mode in which an operation was begun, whoever executes it."""
    weight = torch.ones(2 * size, requires_grad=True)
    handle = hvd.allgather_async(torch.ones(2), name="outside")
    with torch.inference_mode():
        assert hvd.allreduce(torch.ones(5000), name="inside", op=hvd.Sum)[0] == size
        tensor = torch.full((2000,), float(rank))
        inner = hvd.grouped_allreduce_async([tensor.half(), tensor.half()], name="halves", op=hvd.Max)
        later = hvd.broadcast_async_(tensor, size - 1, name="root's")
        assert hvd.synchronize(inner)[1][0] == size - 1 and hvd.synchronize(later)[0] == size - 1
    (weight * hvd.synchronize(handle)).sum().backward()
    assert torch.equal(weight.grad, torch.ones(2 * size))


@pytest.mark.skipif(REAL, reason="of the drop-in")
def test_frames_of_an_allreduce(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the executor that docs/architecture.md lists."""
    backend, seen = current(), []
    call = backend.all_reduce

    def watched(*args: Any) -> None:
        seen.append(frames())
        call(*args)

    monkeypatch.setattr(backend, "all_reduce", watched)
    hvd.allreduce(torch.ones(5000))
    assert documented("`hvd.allreduce(x)` on the drop-in") in seen, seen[-1]
