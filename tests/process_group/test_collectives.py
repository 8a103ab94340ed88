"""Every collective of torch.distributed, in every dtype."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import unidist
from tests.process_group.values import (
    COMPLEX,
    DTYPES,
    INTEGERS,
    SHAPES,
    all_gather_single,
    all_ranks,
    combined,
    mine,
    reduce_scatter_single,
    same,
    value,
)

OPS = ["sum", "avg", "product", "min", "max", "band", "bor", "bxor"]


def torch_op(name: str) -> dist.ReduceOp.RedOpType:
    return getattr(dist.ReduceOp, name.upper())


def allowed(op: str, dtype: torch.dtype) -> bool:
    if dtype in COMPLEX:
        return op in ("sum", "avg")  # torch itself refuses the others
    if dtype is torch.bool:
        return op != "avg"
    if dtype in (torch.uint16, torch.uint32, torch.uint64):
        return op != "avg"  # torch cannot divide them
    return dtype in INTEGERS or op not in ("band", "bor", "bxor")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_all_reduce(op: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        tensor = mine(shape, dtype)
        if not allowed(op, dtype):
            with pytest.raises((ValueError, RuntimeError), match=r"not defined|does not support"):
                dist.all_reduce(tensor, torch_op(op))
            continue
        dist.all_reduce(tensor, torch_op(op))
        expected = combined(all_ranks(shape, dtype), op)
        # A complex number is divided in another way.
        close = op == "avg" and dtype.is_complex and torch.allclose(tensor, expected, rtol=1e-6)
        assert close or same(tensor, expected), shape


def test_premultiplied_sums_are_refused() -> None:
    with pytest.raises(ValueError, match="not among sum, avg"):
        dist.all_reduce(mine((3,)), dist._make_nccl_premul_sum(2.0))


def test_halves_are_not_rounded_on_the_way() -> None:
    """Partial sums in bfloat16 would lose the ones."""
    for numel in (4, 50_000):
        tensor = torch.full((numel,), 256.0 if unidist.rank() == 0 else 1.0, dtype=torch.bfloat16)
        dist.all_reduce(tensor)
        whole = torch.tensor(256.0 + unidist.world_size() - 1).to(torch.bfloat16)
        assert torch.equal(tensor, whole.expand(numel))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("op", ["sum", "max"])
def test_reduce(op: str, dtype: torch.dtype) -> None:
    for dst, shape in itertools.product(range(unidist.world_size()), SHAPES):
        tensor = mine(shape, dtype)
        dist.reduce(tensor, dst, torch_op(op))
        here = dst == unidist.rank()
        assert same(tensor, combined(all_ranks(shape, dtype), op) if here else mine(shape, dtype)), (dst, shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_moves(dtype: torch.dtype) -> None:
    """broadcast, all_gather, gather, scatter and all_to_all take every dtype."""
    rank, size = unidist.rank(), unidist.world_size()
    for shape in SHAPES:
        everyone = all_ranks(shape, dtype)
        for root in range(size):
            tensor = mine(shape, dtype)
            dist.broadcast(tensor, root)
            assert same(tensor, everyone[root])

            gathered = [torch.empty_like(tensor) for _ in range(size)] if rank == root else None
            dist.gather(mine(shape, dtype), gathered, root)
            assert gathered is None or all(map(same, gathered, everyone))

            place = torch.empty_like(tensor)
            dist.scatter(place, everyone if rank == root else None, root)
            assert same(place, everyone[rank])
        places = [torch.empty_like(everyone[0]) for _ in range(size)]
        dist.all_gather(places, mine(shape, dtype))
        assert all(map(same, places, everyone))

        places = [torch.empty_like(everyone[0]) for _ in range(size)]
        # Rank i sends everyone the value of rank i.
        dist.all_to_all(places, [mine(shape, dtype) for _ in range(size)])
        assert all(map(same, places, everyone))


def test_all_gather_into_one_tensor() -> None:
    size = unidist.world_size()
    for shape in [(5,), (40_003,), (3, 7)]:
        whole = torch.empty(size * shape[0], *shape[1:])
        all_gather_single(whole, mine(shape))
        assert torch.equal(whole, torch.cat(all_ranks(shape)))
        # From its own place in the result, as sharded training does.
        place = torch.zeros_like(whole)
        own = place.chunk(size)[unidist.rank()]
        own.copy_(mine(shape))
        all_gather_single(place, own)
        assert torch.equal(place, whole)
    with pytest.raises((ValueError, RuntimeError), match="does not fit"):
        all_gather_single(torch.empty(size * 3), torch.zeros(4))


def test_all_gather_of_different_sizes() -> None:
    size = unidist.world_size()
    for unit in (1, 20_000):
        places = [torch.empty(unit * rank, 2) for rank in range(size)]
        dist.all_gather(places, mine((unit * unidist.rank(), 2)))
        assert all(
            torch.equal(place, value(rank, (unit * rank, 2), torch.float32)) for rank, place in enumerate(places)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("op", ["sum", "min"])
def test_reduce_scatter(op: str, dtype: torch.dtype) -> None:
    rank, size = unidist.rank(), unidist.world_size()
    for rows in (2, 30_001):
        shape = (rows * size, 2)
        whole = combined(all_ranks(shape, dtype), op)
        place = torch.empty(rows, 2, dtype=dtype)
        reduce_scatter_single(place, mine(shape, dtype), torch_op(op))
        assert same(place, whole[rank * rows : (rank + 1) * rows])
        place = torch.empty(rows, 2, dtype=dtype)
        dist.reduce_scatter(place, list(mine(shape, dtype).chunk(size)), torch_op(op))
        assert same(place, whole[rank * rows : (rank + 1) * rows])
        # Different sizes: i + 1 rows on rank i.
        counts = [(i + 1) * rows for i in range(size)]
        shape = (sum(counts), 2)
        place = torch.empty(counts[rank], 2, dtype=dtype)
        dist.reduce_scatter(place, list(mine(shape, dtype).split(counts)), torch_op(op))
        assert same(place, combined(all_ranks(shape, dtype), op).split(counts)[rank])


def test_reduce_scatter_with_empty_blocks() -> None:
    rank, size = unidist.rank(), unidist.world_size()
    for unit in (3, 20_000):
        counts = [i * unit for i in range(size)]
        place = torch.empty(counts[rank])
        dist.reduce_scatter(place, list(mine((sum(counts),)).split(counts)))
        assert torch.equal(place, combined(all_ranks((sum(counts),)), "sum").split(counts)[rank])


def test_all_to_all_in_place_and_negated_views() -> None:
    size = unidist.world_size()
    for numel in (4, 20_000):
        tensors = [mine((numel,)) for _ in range(size)]
        dist.all_to_all(tensors, tensors)
        assert all(map(torch.equal, tensors, all_ranks((numel,))))
    negated = torch.tensor([1 + 5j]).conj().imag
    assert negated.is_neg()
    dist.broadcast(negated, 0)
    assert negated.item() == -5


def test_all_to_all_of_one_tensor() -> None:
    rank, size = unidist.rank(), unidist.world_size()
    for unit in (1, 9_000):
        shape = (unit * size, 2)
        place = torch.empty(shape)
        dist.all_to_all_single(place, mine(shape))
        assert torch.equal(place, torch.cat([tensor.chunk(size)[rank] for tensor in all_ranks(shape)]))
        # Rank i sends j * unit rows to rank j: itself nothing, if it is 0.
        sizes = [j * unit for j in range(size)]
        shape = (sum(sizes), 2)
        place = torch.empty(size * rank * unit, 2)
        dist.all_to_all_single(place, mine(shape), [rank * unit] * size, sizes)
        assert torch.equal(place, torch.cat([tensor.split(sizes)[rank] for tensor in all_ranks(shape)]))
    with pytest.raises((ValueError, RuntimeError), match="split"):
        dist.all_to_all_single(torch.empty(size), torch.zeros(size), [1] * size, [2] * size)


def transposed(tensor: Tensor) -> Tensor:
    """The same values, out of order in memory."""
    return tensor.t().contiguous().t()


def test_tensors_that_are_not_contiguous() -> None:
    size = unidist.world_size()
    for shape in [(3, 5), (300, 50)]:
        everyone = all_ranks(shape)
        tensor = transposed(mine(shape))
        assert not tensor.is_contiguous()
        dist.all_reduce(tensor)
        assert torch.equal(tensor, combined(everyone, "sum"))
        tensor = transposed(mine(shape))
        dist.broadcast(tensor, size - 1)
        assert torch.equal(tensor, everyone[-1])
        places = [transposed(torch.empty(shape)) for _ in range(size)]
        dist.all_gather(places, transposed(mine(shape)))
        assert all(map(torch.equal, places, everyone))
        tensor = transposed(mine(shape))
        dist.reduce(tensor, 0)
        assert torch.equal(tensor, combined(everyone, "sum") if unidist.rank() == 0 else mine(shape))
        picture = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last) * (unidist.rank() + 1)
        dist.all_reduce(picture)
        assert torch.equal(picture, torch.full((2, 3, 4, 4), sum(range(1, size + 1))).float())
        assert picture.is_contiguous(memory_format=torch.channels_last)


def test_under_inference_mode_and_on_leaves_that_require_grad() -> None:
    leaf = mine((5,)).requires_grad_()
    dist.all_reduce(leaf, dist.ReduceOp.AVG)
    assert torch.equal(leaf, combined(all_ranks((5,)), "avg"))
    with torch.inference_mode():
        for numel in (5, 40_000):
            tensor = mine((numel,))
            dist.all_reduce(tensor, dist.ReduceOp.AVG)
            assert torch.equal(tensor, combined(all_ranks((numel,)), "avg"))
            places = [torch.empty(numel) for _ in range(unidist.world_size())]
            dist.all_gather(places, mine((numel,)))
            assert all(map(torch.equal, places, all_ranks((numel,))))


def test_sparse_all_reduce() -> None:
    rank, size = unidist.rank(), unidist.world_size()
    indices = torch.tensor([[0, rank, 9]])
    tensor = torch.sparse_coo_tensor(indices, torch.ones(3, 2) * (rank + 1), (10, 2), check_invariants=True)
    expected = torch.zeros(10, 2)
    for r in range(size):
        for row in (0, r, 9):
            expected[row] += r + 1
    dist.all_reduce(tensor)
    assert torch.equal(tensor.to_dense(), expected)


def test_coalesced_calls() -> None:
    size = unidist.world_size()
    shapes = [(3,), (40_000,), (2, 2)]
    tensors = [mine(shape) for shape in shapes]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    assert all(torch.equal(t, combined(all_ranks(shape), "sum")) for t, shape in zip(tensors, shapes))

    places = [torch.empty(size * shape[0], *shape[1:]) for shape in shapes]
    with dist._coalescing_manager(async_ops=True) as manager:
        for place, shape in zip(places, shapes):
            all_gather_single(place, mine(shape))
    manager.wait()
    assert all(torch.equal(place, torch.cat(all_ranks(shape))) for place, shape in zip(places, shapes))

    shapes = [(size * 2,), (size * 20_000,)]
    places = [torch.empty(shape[0] // size) for shape in shapes]
    with dist._coalescing_manager():
        for place, shape in zip(places, shapes):
            reduce_scatter_single(place, mine(shape))
    for place, shape in zip(places, shapes):
        assert torch.equal(place, combined(all_ranks(shape), "sum").chunk(size)[unidist.rank()])

    tensors = [mine((3,)), mine((40_000,))]
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        works = [dist.broadcast(tensor, 0, async_op=True) for tensor in tensors]
    manager.wait()
    assert all(work.is_completed() for work in works)
    assert all(torch.equal(tensor, value(0, tuple(tensor.shape), torch.float32)) for tensor in tensors)


def test_objects() -> None:
    rank, size = unidist.rank(), unidist.world_size()
    own = {"rank": rank, "words": ["ä"] * (rank + 1), "tensor": torch.ones(rank)}
    found: list[object] = [None] * size
    dist.all_gather_object(found, own)
    assert [entry["rank"] for entry in found] == list(range(size))  # type: ignore[index]
    expected = [own, rank]
    dist.broadcast_object_list(expected, src=size - 1)
    assert expected[1] == size - 1
    scattered: list[object] = [None]
    dist.scatter_object_list(scattered, [f"for {r}" for r in range(size)] if rank == 0 else None, src=0)
    assert scattered == [f"for {rank}"]
    gathered = [None] * size if rank == 0 else None
    dist.gather_object(rank, gathered, dst=0)
    assert gathered in (None, list(range(size)))


@pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")  # renamed in torch 2.13
def test_functional_collectives() -> None:
    """torch's own forms for compiled programs find the group by its name."""
    import torch.distributed._functional_collectives as functional

    group = dist.group.WORLD
    assert group is not None
    size = unidist.world_size()
    for shape in [(4,), (40_000,)]:
        everyone = all_ranks(shape)
        assert torch.equal(functional.all_reduce(mine(shape), "sum", group) + 0, combined(everyone, "sum"))
        assert torch.equal(functional.all_gather_tensor(mine(shape), 0, group) + 0, torch.cat(everyone))
        assert torch.equal(functional.broadcast(mine(shape), size - 1, group) + 0, everyone[-1])
        shape = (shape[0] * size,)
        part = functional.reduce_scatter_tensor(mine(shape), "sum", 0, group) + 0
        assert torch.equal(part, combined(all_ranks(shape), "sum").chunk(size)[unidist.rank()])
        moved = functional.all_to_all_single(mine(shape), None, None, group) + 0
        assert torch.equal(moved, torch.cat([tensor.chunk(size)[unidist.rank()] for tensor in all_ranks(shape)]))


def test_lists_of_another_length_are_refused() -> None:
    size = unidist.world_size()
    with pytest.raises((ValueError, RuntimeError), match=f"{size} ranks|world size|size of the group"):
        dist.all_gather([torch.empty(2)] * (size + 1), torch.zeros(2))
    with pytest.raises((ValueError, RuntimeError), match=f"{size} ranks|world size|size of the group"):
        dist.all_to_all([torch.empty(2)] * (size + 1), [torch.zeros(2)] * (size + 1))


def test_half_precision_trains() -> None:
    """DDP of a model in bfloat16."""
    torch.manual_seed(0)
    model = unidist.wrap_model(torch.nn.Linear(300, 100).to(torch.bfloat16))
    model(torch.full((2, 300), float(unidist.rank()), dtype=torch.bfloat16)).sum().backward()
    mean = sum(range(unidist.world_size())) / unidist.world_size()
    assert torch.allclose(model.module.weight.grad.float(), torch.full((100, 300), 2.0 * mean), rtol=1e-2)
