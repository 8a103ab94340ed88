"""One meaning on every backend."""

import math
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import unidist
from unidist.collectives.operations import ReduceOp
from unidist.context import current

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
SHAPES = [(), (0,), (1,), (5,), (2, 3), (2, 0, 3)]


def make(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The tensor of a rank; every rank can make every rank's."""
    generator = torch.Generator().manual_seed(rank + 1)
    return torch.randint(1, 5, shape, generator=generator).to(dtype)


def everyone(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.stack([make(rank, shape, dtype) for rank in range(unidist.world_size())])


def reduced(stack: torch.Tensor, op: str) -> torch.Tensor:
    wide = stack.double() if stack.dtype.is_floating_point else stack.long()
    done = {
        "sum": lambda: wide.sum(0),
        "mean": lambda: wide.mean(0),
        "min": lambda: wide.amin(0),
        "max": lambda: wide.amax(0),
        "product": lambda: wide.prod(0),
    }[op]()
    return done.to(stack.dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS + INTS, ids=str)
def test_all_reduce(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    mine = make(unidist.rank(), shape, dtype)
    before = mine.clone()
    for op in ("sum", "min", "max", "product", "mean"):
        if op == "mean" and not dtype.is_floating_point:
            continue
        result = unidist.all_reduce(mine, op)  # type: ignore[arg-type]
        torch.testing.assert_close(result, reduced(everyone(shape, dtype), op))
        own = mine.clone()
        assert unidist.all_reduce_(own, op) is own and torch.equal(own, result)  # type: ignore[arg-type]
    assert torch.equal(mine, before) and (not mine.numel() or result.data_ptr() != mine.data_ptr())


def test_all_reduce_in_place_of_views() -> None:
    size = unidist.world_size()
    whole = torch.ones(4, 6)
    unidist.all_reduce_(whole[1])
    unidist.all_reduce_(whole[:, 2])
    expected = torch.ones(4, 6)
    expected[1] *= size
    expected[:, 2] *= size
    assert torch.equal(whole, expected)
    with pytest.raises(ValueError, match="requires grad"):
        unidist.all_reduce_(torch.ones(2, requires_grad=True))


def test_all_reduce_bool() -> None:
    mine = torch.tensor([True, unidist.rank() == 0, False])
    assert unidist.all_reduce(mine, "or").tolist() == [True, True, False]
    assert unidist.all_reduce(mine, "and").tolist() == [True, unidist.world_size() == 1, False]


def test_all_reduce_complex() -> None:
    mine = torch.tensor([1 + 2j, 3j]) * (unidist.rank() + 1)
    total = sum(range(1, unidist.world_size() + 1))
    torch.testing.assert_close(unidist.all_reduce(mine), torch.tensor([1 + 2j, 3j]) * total)
    torch.testing.assert_close(unidist.all_reduce(mine.conj()), torch.tensor([1 - 2j, -3j]) * total)
    torch.testing.assert_close(
        unidist.all_reduce(mine, "mean"), torch.tensor([1 + 2j, 3j]) * total / unidist.world_size()
    )


def test_exact_beyond_float64() -> None:
    big = 2**53 + 1
    result = unidist.all_reduce(torch.tensor([big + unidist.rank()]))
    assert result.item() == sum(big + rank for rank in range(unidist.world_size()))
    assert unidist.all_reduce(torch.tensor(big + unidist.rank()), "max").item() == big + unidist.world_size() - 1
    assert unidist.all_gather(torch.tensor(-(2**63))).tolist() == [-(2**63)] * unidist.world_size()


def test_mean_of_half_does_not_overflow() -> None:
    result = unidist.all_reduce(torch.tensor([60000.0], dtype=torch.float16), "mean")
    assert result.item() == 60000.0


def test_non_contiguous() -> None:
    base = torch.arange(12.0).view(3, 4) + unidist.rank()
    size = unidist.world_size()
    extra = sum(range(size))
    torch.testing.assert_close(unidist.all_reduce(base.t()), torch.arange(12.0).view(3, 4).t() * size + extra)
    gathered = unidist.all_gather(base[:, ::2])
    torch.testing.assert_close(gathered, torch.cat([torch.arange(12.0).view(3, 4)[:, ::2] + r for r in range(size)]))
    expanded = torch.ones(1, 3).expand(2, 3)
    torch.testing.assert_close(unidist.all_reduce(expanded), torch.full((2, 3), float(size)))
    torch.testing.assert_close(unidist.broadcast(base.t()), torch.arange(12.0).view(3, 4).t())


@pytest.mark.parametrize("dtype", [*FLOATS, *INTS, torch.bool, torch.complex64, torch.uint16], ids=str)
def test_all_gather_uneven(dtype: torch.dtype) -> None:
    mine = make(unidist.rank(), (unidist.rank(), 2), torch.int64).to(dtype)
    expected = torch.cat([make(rank, (rank, 2), torch.int64).to(dtype) for rank in range(unidist.world_size())])
    result = unidist.all_gather(mine)
    assert result.dtype == dtype and torch.equal(result, expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_gather_shapes(shape: tuple[int, ...]) -> None:
    result = unidist.all_gather(make(unidist.rank(), shape, torch.float32))
    stack = everyone(shape, torch.float32)
    assert torch.equal(result, stack if shape == () else stack.flatten(0, 1))


def test_sizes_that_jump_between_calls() -> None:
    rank, size = unidist.rank(), unidist.world_size()
    for base in (0, 1, 64, 65, 3, 20_000, 2, 16_384, 0, 65_536, 1, 256):
        counts = [base * (other + 1) % 70_001 for other in range(size)]
        for _ in range(2):
            gathered = unidist.all_gather(torch.full((counts[rank],), rank, dtype=torch.uint8))
            expected = [torch.full((count,), other, dtype=torch.uint8) for other, count in enumerate(counts)]
            assert torch.equal(gathered, torch.cat(expected))
    assert unidist.all_gather_object("x" * counts[rank]) == ["x" * count for count in counts]


def test_a_small_tensor_is_gathered_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, calls = current(), []
    real = backend.all_gather
    monkeypatch.setattr(backend, "all_gather", lambda *args: (calls.append(args), real(*args))[1])
    for numel, expected in ((3, 1), (1000, 2), (1000, 1), (3, 1), (1000, 2), (10**5, 2), (10**5, 2)):
        calls.clear()
        unidist.all_gather(torch.zeros(numel))
        assert len(calls) == expected, numel


def first_or(mine: Any, others: Any) -> Any:
    return mine if unidist.rank() == 0 else others


FLAT, DEEP, INTEGERS = torch.ones(1, 5), torch.ones(1, 2, 5), torch.ones(1, 5, dtype=torch.int32)
WIDE = torch.ones(24, 1, 2)
#: Calls that differ between rank 0 and the others, and how both are named.
DIFFERENT: list[tuple[str, Callable[[], object], str, str]] = [
    ("shape", lambda: unidist.broadcast(first_or(FLAT, DEEP)), r"float32 \(1, 5\)", r"float32 \(1, 2, 5\)"),
    ("dtype", lambda: unidist.broadcast(first_or(FLAT, INTEGERS)), r"float32 \(1, 5\)", r"int32 \(1, 5\)"),
    ("root", lambda: unidist.broadcast(FLAT, first_or(0, 1)), "from rank 0", "from rank 1"),
    ("shape", lambda: unidist.all_reduce(first_or(FLAT, FLAT.t())), r"\(1, 5\)", r"\(5, 1\)"),
    ("size", lambda: unidist.all_reduce_(first_or(FLAT, DEEP)), r"\(1, 5\)", r"\(1, 2, 5\)"),
    ("dtype", lambda: unidist.all_reduce(first_or(FLAT, INTEGERS)), "float32", "int32"),
    ("op", lambda: unidist.all_reduce(FLAT, first_or("sum", "max")), r"all_reduce \(sum\)", r"all_reduce \(max\)"),
    ("call", lambda: first_or(unidist.all_reduce, unidist.broadcast)(FLAT), "all_reduce", "broadcast"),
    ("call", lambda: first_or(unidist.barrier, unidist.all_gather_object)(None), "barrier", "all_gather_object"),
    ("call", lambda: first_or(unidist.all_reduce, unidist.all_gather)(FLAT), "all_reduce", "all_gather of float32"),
    ("shape", lambda: unidist.all_gather(first_or(FLAT, FLAT.t())), r"float32 \(1, 5\)", r"float32 \(5, 1\)"),
    ("dtype", lambda: unidist.all_gather(first_or(FLAT, INTEGERS)), "float32", "int32"),
    ("pad", lambda: unidist.all_gather(FLAT, pad=first_or(0, 1)), r"all_gather \(pad=0\)", r"all_gather \(pad=1\)"),
    ("pad", lambda: unidist.all_gather(FLAT, pad=first_or(None, 0)), "all_gather of float32", r"all_gather \(pad=0\)"),
    ("dim", lambda: unidist.all_gather(first_or(FLAT, DEEP), pad=0), r"float32 \(1, 5\)", r"float32 \(1, 2, 5\)"),
    ("shape", lambda: unidist.all_to_all(first_or(WIDE, WIDE.view(24, 2))), r"\(24, 1, 2\)", r"\(24, 2\)"),
    ("op", lambda: unidist.reduce_scatter(WIDE, first_or("sum", "max")), "(sum)", "(max)"),
    ("shape", lambda: unidist.reduce_scatter(first_or(WIDE, WIDE.view(24, 2))), r"\(24, 1, 2\)", r"\(24, 2\)"),
    ("rows", lambda: unidist.reduce_scatter(first_or(WIDE, WIDE.view(-1)[1:])), r"\(24, 1, 2\)", r"\(47,\)"),
    ("root", lambda: unidist.broadcast_object("x", first_or(0, 1)), "from rank 0", "from rank 1"),
    ("call", lambda: first_or(unidist.broadcast_object, unidist.all_gather_object)(1), "broadcast_object", "gather"),
    ("op", lambda: unidist.allreduce_metric(1.0, op=first_or("sum", "max")), "(sum)", "(max)"),
    # Arguments that are wrong on some ranks alone.
    ("op", lambda: unidist.all_reduce(FLAT, first_or("sum", "add")), r"all_reduce \(sum\)", r"all_reduce \(add\)"),
    ("op", lambda: unidist.all_reduce_(FLAT.clone(), first_or("sum", "and")), "(sum)", "(and)"),
    ("op", lambda: unidist.reduce_scatter(WIDE, first_or("avg", "sum")), "(avg)", "(sum)"),
    ("root", lambda: unidist.broadcast(FLAT, first_or(0, 17)), "from rank 0", "from rank 17"),
    ("root", lambda: unidist.broadcast_(FLAT.clone(), first_or(-1, 0)), "from rank -1", "from rank 0"),
    ("root", lambda: unidist.broadcast_object("x", first_or(0, 17)), "from rank 0", "from rank 17"),
    ("pad", lambda: unidist.all_gather(FLAT, pad=first_or(0, "0")), r"\(pad=0\)", r"\(pad='0'\)"),
    ("type", lambda: unidist.all_reduce(first_or(FLAT, [1.0])), "of float32", "of list"),
    ("type", lambda: unidist.broadcast_(first_or(1.0, FLAT.clone())), "of float", "of float32"),
]


@pytest.mark.parametrize(("call", "first", "others"), [row[1:] for row in DIFFERENT], ids=[row[0] for row in DIFFERENT])
def test_calls_that_differ_are_an_error_on_every_rank(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[], object], first: str, others: str
) -> None:
    if unidist.world_size() == 1:
        return
    monkeypatch.setattr(current(), "calls", {})  # calls of the whole suite have been counted
    with pytest.raises(unidist.MismatchError, match=rf"rank 0: .*{first}.* at .*test_coll.*; ranks? 1.*: .*{others}"):
        call()
    assert unidist.all_gather(torch.ones(1)).tolist() == [1.0] * unidist.world_size()


def test_results_have_a_memory_of_their_own_from_its_beginning() -> None:
    """Some functions of torch read a tensor's memory from there."""
    torch.manual_seed(unidist.rank())
    state = unidist.broadcast(torch.get_rng_state())
    torch.set_rng_state(state)
    numbers = torch.rand(4)
    assert torch.equal(unidist.broadcast(numbers), numbers)
    for call in (unidist.broadcast, unidist.all_reduce, unidist.all_gather, unidist.all_to_all):
        assert call(torch.ones(4 * unidist.world_size())).storage_offset() == 0


def test_what_is_sent_along_is_compared_in_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the calls that are compared before they are made."""
    if unidist.world_size() == 1:
        return
    monkeypatch.setattr(current(), "calls", {None: 1000})
    for call in (unidist.all_gather, unidist.all_to_all, unidist.reduce_scatter):
        with pytest.raises(unidist.MismatchError, match=r"rank 0: .* of float32.*; ranks? 1.*: .* of int32"):
            call(first_or(WIDE, WIDE.int()))
    for tensor in (FLAT.t(), INTEGERS):
        if unidist.rank() == 0:
            assert torch.equal(unidist.broadcast(FLAT), FLAT)  # it only sends
        else:
            with pytest.raises(unidist.MismatchError, match="rank 0 has sent another dtype or shape"):
                unidist.broadcast(tensor)
    assert current().calls == {None: 1005}


@pytest.mark.parametrize("dtype", [*FLOATS, *INTS, torch.bool, torch.complex64], ids=str)
def test_broadcast(dtype: torch.dtype) -> None:
    for src in range(unidist.world_size()):
        for shape in SHAPES:
            mine = make(unidist.rank(), shape, torch.int64).to(dtype)
            before = mine.clone()
            result = unidist.broadcast(mine, src)
            assert result.shape == shape and torch.equal(result, make(src, shape, torch.int64).to(dtype))
            assert torch.equal(mine, before)
            assert unidist.broadcast_(mine, src) is mine and torch.equal(mine, result)
    view = torch.full((3, 4), float(unidist.rank()))
    unidist.broadcast_(view[:, 1:3], unidist.world_size() - 1)
    assert view.sum() == 6 * (unidist.rank() + unidist.world_size() - 1)


def test_all_to_all() -> None:
    rank, size = unidist.rank(), unidist.world_size()
    even = torch.arange(size * 2).view(size * 2, 1) + 100 * rank
    expected = torch.cat([torch.arange(rank * 2, rank * 2 + 2).view(2, 1) + 100 * r for r in range(size)])
    assert torch.equal(unidist.all_to_all(even), expected)
    # Rank r sends r + d rows to rank d, each of the value 10 r + d.
    splits = [rank + d for d in range(size)]
    rows = torch.cat([torch.full((rank + d, 3), 10 * rank + d, dtype=torch.int16) for d in range(size)])
    received = unidist.all_to_all(rows, splits)
    assert torch.equal(
        received, torch.cat([torch.full((r + rank, 3), 10 * r + rank, dtype=torch.int16) for r in range(size)])
    )
    with pytest.raises(ValueError, match="add up to"):
        unidist.all_to_all(torch.zeros(3), [1] * (size + 1))


@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "product"])
def test_reduce_scatter(op: ReduceOp) -> None:
    rank, size = unidist.rank(), unidist.world_size()
    for dtype in (torch.float32, torch.bfloat16):
        mine = make(rank, (size * 2, 3), dtype)
        expected = reduced(everyone((size * 2, 3), dtype), op)[rank * 2 : rank * 2 + 2]
        torch.testing.assert_close(unidist.reduce_scatter(mine, op), expected)
    with pytest.raises(ValueError, match="cannot split"):
        unidist.reduce_scatter(torch.tensor(1.0))


def test_calls_of_changing_shape_and_dtype() -> None:
    """The same call again with other arguments; a backend that caches by name must notice."""
    for step in range(12):
        dtype = (torch.float32, torch.int64, torch.float64)[step % 3]
        result = unidist.all_reduce(torch.ones(1 + step * 7 % 5, dtype=dtype))
        assert result.dtype == dtype and result.tolist() == [unidist.world_size()] * (1 + step * 7 % 5)
        assert unidist.all_gather(torch.ones(step % 4, dtype=dtype)).numel() == step % 4 * unidist.world_size()


# ------------------------------------------------------------------------------------ objects
OBJECTS = [None, "Zürich, 東京 🦊", {"n": 2**100, "t": (1, [2.5])}, b"\x00\xff", float("inf"), list(range(5000))]


def test_objects() -> None:
    size = unidist.world_size()
    for obj in OBJECTS:
        assert unidist.all_gather_object((unidist.rank(), obj)) == [(rank, obj) for rank in range(size)]
        for src in range(size):
            assert unidist.broadcast_object(obj if unidist.rank() == src else "ignored", src) == obj
    assert unidist.all_gather_object("x" * unidist.rank() * 1000) == ["x" * rank * 1000 for rank in range(size)]


def test_an_object_that_cannot_be_pickled_is_an_error_on_every_rank() -> None:
    last = unidist.world_size() - 1
    obj: Any = (lambda: 1) if unidist.rank() == last else 1
    error, text = (Exception, "pickle") if unidist.rank() == last else (unidist.CollectiveError, f"of rank {last} cann")
    with pytest.raises(error, match=text):
        unidist.all_gather_object(obj)
    with pytest.raises(error, match=text):
        unidist.broadcast_object(obj, last)
    assert unidist.all_gather_object("ok") == ["ok"] * unidist.world_size()  # the next call is the next one everywhere


# ------------------------------------------------------------------------------------ gradients
def grad_of(result: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Gradient of a rank's own loss: rank r weighs every entry of the result with r + 1."""
    (result.double().sum() * (unidist.rank() + 1)).backward()
    assert x.grad is not None
    return x.grad


def test_gradients() -> None:
    rank, size = unidist.rank(), unidist.world_size()
    total = float(sum(range(1, size + 1)))
    x = torch.ones(3, requires_grad=True)
    torch.testing.assert_close(grad_of(unidist.all_reduce(x), x), torch.full((3,), total))
    x = torch.ones(3, requires_grad=True)
    torch.testing.assert_close(grad_of(unidist.all_reduce(x, "mean"), x), torch.full((3,), total / size))
    x = torch.ones(rank + 1, 2, requires_grad=True)
    torch.testing.assert_close(grad_of(unidist.all_gather(x), x), torch.full((rank + 1, 2), total))
    x = torch.tensor(1.0, requires_grad=True)
    torch.testing.assert_close(grad_of(unidist.all_gather(x), x), torch.tensor(total))
    x = torch.ones(2, requires_grad=True)
    torch.testing.assert_close(
        grad_of(unidist.broadcast(x, size - 1), x), torch.full((2,), total if rank == size - 1 else 0.0)
    )
    x = torch.ones(size, requires_grad=True)
    torch.testing.assert_close(grad_of(unidist.all_to_all(x), x), torch.arange(1.0, size + 1))
    x = torch.ones(size, 2, requires_grad=True)
    expected = torch.arange(1.0, size + 1).view(-1, 1).expand(size, 2)
    torch.testing.assert_close(grad_of(unidist.reduce_scatter(x), x), expected)
    x = torch.ones(size, 2, requires_grad=True)
    torch.testing.assert_close(grad_of(unidist.reduce_scatter(x, "mean"), x), expected / size)


def test_contrastive_loss_is_that_of_one_process() -> None:
    """A loss over all ranks' embeddings has the gradients of one process with the whole batch."""
    size = unidist.world_size()
    generator = torch.Generator().manual_seed(3)
    data = torch.randn(size * 2, 4, generator=generator, dtype=torch.float64)
    weight = torch.randn(4, 4, generator=generator, dtype=torch.float64)

    def loss_of(embedded: torch.Tensor) -> torch.Tensor:
        return torch.logsumexp(embedded @ embedded.t(), dim=1).mean()

    local = weight.clone().requires_grad_()
    mine = data[unidist.rank() * 2 : unidist.rank() * 2 + 2]
    loss_of(unidist.all_gather(mine @ local)).backward()
    whole = weight.clone().requires_grad_()
    loss_of(data @ whole).backward()
    assert local.grad is not None
    torch.testing.assert_close(unidist.all_reduce(local.grad, "mean"), whole.grad)


def test_no_gradient_without_asking() -> None:
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert not unidist.all_reduce(x, "max").requires_grad
    assert not unidist.all_reduce(x.detach()).requires_grad
    with pytest.raises(ValueError, match="detach"):
        unidist.all_reduce(x, "max")


# ------------------------------------------------------------------------------------ groups
def test_groups() -> None:
    rank, size = unidist.rank(), unidist.world_size()
    evens = unidist.new_group(range(0, size, 2))
    last = unidist.new_group([size - 1])
    assert unidist.new_group(list(reversed(range(0, size, 2)))) is evens
    if rank in evens.ranks:
        assert unidist.all_reduce(torch.tensor(rank), group=evens).item() == sum(evens.ranks)
        assert unidist.all_reduce(torch.tensor(float(rank)), "mean", evens).item() == sum(evens.ranks) / len(
            evens.ranks
        )
        assert unidist.all_gather(torch.tensor([rank]), evens).tolist() == list(evens.ranks)
        assert unidist.broadcast(torch.tensor(rank), evens.ranks[-1], evens).item() == evens.ranks[-1]
        assert unidist.all_gather_object(rank, evens) == list(evens.ranks)
        assert unidist.broadcast_object(rank, evens.ranks[-1], evens) == evens.ranks[-1]
        assert unidist.all_to_all(torch.full((len(evens.ranks),), rank), group=evens).tolist() == list(evens.ranks)
        assert unidist.reduce_scatter(torch.ones(len(evens.ranks)), group=evens).tolist() == [len(evens.ranks)]
        unidist.barrier(evens)
    else:
        with pytest.raises(ValueError, match="not in the group"):
            unidist.all_reduce(torch.ones(1), group=evens)
    if rank == size - 1:
        assert unidist.all_reduce(torch.tensor(7), group=last).item() == 7
    # Only some ranks took part above; the world still agrees.
    assert unidist.all_gather(torch.tensor(rank)).tolist() == list(range(size))


def test_a_second_thread_in_a_call_of_the_same_group_is_an_error() -> None:
    if unidist.backend_name() in ("single", "threads"):
        pytest.skip("no rank waits for another outside of Python, or a rank's own threads are none of its world")
    group = unidist.new_group(list(range(unidist.world_size())))
    unidist.barrier(group)
    is_last = unidist.rank() == unidist.world_size() - 1
    thread = threading.Thread(target=current().all_reduce, args=(torch.ones(2), "sum", group))
    if is_last:
        unidist.barrier()
        thread.start()
    else:
        thread.start()  # waits for the last rank
        while not current().waiting:
            time.sleep(0.01)
        error = "'MainThread' made a call of a group in which another"
        with pytest.raises(unidist.UnidistError, match=error):
            unidist.barrier(group)
        unidist.barrier()
        thread.join()
        with pytest.raises(unidist.UnidistError, match=error):
            unidist.barrier(group)
    thread.join()
    assert unidist.all_reduce(torch.ones(1)) == unidist.world_size()  # other groups go on
    current().waiting.clear()  # for other tests of the same ranks


@pytest.mark.parametrize("ranks", [[], [0, 0], [-1], [99]], ids=str)
def test_bad_groups(ranks: list[int]) -> None:
    with pytest.raises(ValueError, match="new_group"):
        unidist.new_group(ranks)


@pytest.mark.parametrize("ranks", [1, ["a"], [0.5], None], ids=str)
def test_groups_of_what_is_no_rank(ranks: Any) -> None:
    with pytest.raises(TypeError, match="pass global ranks as integers"):
        unidist.new_group(ranks)


# ------------------------------------------------------------------------------------ bad input
@pytest.mark.parametrize(
    ("tensor", "op", "error", "match"),
    [
        (torch.ones(1), "average", ValueError, "use one of sum, mean"),
        (torch.ones(1, dtype=torch.int64), "mean", TypeError, "not an integer"),
        (torch.ones(1, dtype=torch.bool), "sum", TypeError, "bool tensors only"),
        (torch.ones(1), "and", TypeError, "bool tensors only"),
        (torch.ones(1, dtype=torch.complex64), "max", TypeError, "complex tensors take"),
        (torch.ones(1, dtype=torch.uint16), "sum", TypeError, "not supported"),
    ],
)
def test_bad_all_reduce(tensor: torch.Tensor, op: ReduceOp, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        unidist.all_reduce(tensor, op)


@pytest.mark.parametrize("call", [unidist.all_gather, unidist.all_to_all, unidist.broadcast, unidist.all_reduce])
def test_what_is_no_dense_tensor(call: Callable[[Any], torch.Tensor]) -> None:
    with pytest.raises(TypeError, match="collectives take tensors, not float"):
        call(1.0)
    with pytest.raises(TypeError, match="to_dense"):
        call(torch.eye(2).to_sparse())
    with pytest.raises(TypeError, match="meta device"):
        call(torch.ones(2, device="meta"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested ones are a prototype, quantized ones deprecated
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(TypeError, match="to_padded_tensor"):
        call(nested)
    with pytest.raises(TypeError, match="dequantize"):
        call(quantized)


def test_bad_src() -> None:
    with pytest.raises(ValueError, match="src=17"):
        unidist.broadcast(torch.ones(1), 17)
    with pytest.raises(ValueError, match="src=-1"):
        unidist.broadcast_object(1, -1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("op", ["min", "max"])
def test_extrema_are_exact_and_nan_wins(op: str, dtype: torch.dtype) -> None:
    rank, size = unidist.rank(), unidist.world_size()
    numbers = [0.0, -0.5, 2.5, -math.inf, math.inf, 1e-4, -3.0]
    rows = torch.stack([torch.tensor(numbers, dtype=dtype).roll(r) for r in range(size)])
    combine = torch.amin if op == "min" else torch.amax
    assert torch.equal(unidist.all_reduce(rows[rank], op), combine(rows, 0))  # type: ignore[arg-type]
    for holder in range(size):
        mine = torch.full((1000,), math.nan if rank == holder else rank + 1.0, dtype=dtype)
        assert unidist.all_reduce(mine, op).isnan().all()  # type: ignore[arg-type]


def test_inference_mode() -> None:
    size = unidist.world_size()
    with torch.inference_mode():
        ones = torch.ones(size)
        assert unidist.all_reduce(ones).tolist() == [size] * size
        assert unidist.all_gather(ones).shape == (size * size,)
        assert unidist.all_to_all(ones).tolist() == [1.0] * size
        assert unidist.reduce_scatter(ones).tolist() == [size]
        assert unidist.broadcast(ones).tolist() == [1.0] * size
        assert unidist.all_gather_object("x") == ["x"] * size


def test_second_derivatives() -> None:
    """The gradient of a gradient is collective on every rank, and the same through each linear collective."""
    size = unidist.world_size()
    for move in (unidist.all_to_all, unidist.broadcast):
        tensor = torch.full((size,), 1.0 + unidist.rank(), requires_grad=True)
        (grad,) = torch.autograd.grad((move(tensor) ** 3).sum(), tensor, create_graph=True)
        grad.pow(2).sum().backward()
        assert tensor.grad is not None
        # g = 3 t^2 (n times from rank 0 for a broadcast), so the derivative of g^2 is 36 t^3 (n^2 times).
        factor = size**2 if move is unidist.broadcast else 1
        expected = 36.0 * (1.0 + unidist.rank()) ** 3 * factor
        if move is unidist.broadcast and unidist.rank() > 0:
            expected = 0.0
        torch.testing.assert_close(tensor.grad, torch.full((size,), expected))


def test_structures() -> None:
    rank, size = unidist.rank(), unidist.world_size()
    gathered = unidist.all_gather({"ids": torch.full((rank + 1, 2), rank), "loss": [torch.tensor(float(rank))]})
    assert gathered["ids"][:, 0].tolist() == [each for each in range(size) for _ in range(each + 1)]
    assert gathered["loss"][0].tolist() == list(range(size))
    root = unidist.broadcast((torch.tensor(rank), {"x": torch.ones(2) * rank}), src=size - 1)
    assert root[0].item() == size - 1 and root[1]["x"].tolist() == [size - 1] * 2
    assert unidist.all_gather({}) == {}
    if size > 1:
        with pytest.raises(unidist.MismatchError, match=r"all_gather \(a structure of \['a'\], \['b'\]\)"):
            unidist.all_gather({key: torch.zeros(1) for key in ("ab" if rank else "a")})


def test_all_gather_pads_the_ends() -> None:
    rank, size = unidist.rank(), unidist.world_size()
    mine = torch.full((2, rank + 1, 3 - rank % 2), float(rank), requires_grad=True)
    gathered = unidist.all_gather(mine, pad=-1)
    assert gathered.shape == (2 * size, size, 3)
    for each in range(size):
        expected = torch.full((2, size, 3), -1.0)
        expected[:, : each + 1, : 3 - each % 2] = each
        assert torch.equal(gathered[2 * each : 2 * each + 2], expected)
    gathered.sum().backward()
    assert mine.grad is not None and torch.equal(mine.grad, torch.full_like(mine, float(size)))
    assert unidist.all_gather(torch.ones(1, rank + 1, dtype=torch.bool), pad=False).sum() == sum(range(size + 1))
    assert unidist.all_gather(torch.tensor(rank), pad=0).tolist() == list(range(size))


@pytest.mark.parametrize(
    ("dtype", "pad", "error"),
    [
        (torch.uint8, -1, "pad=-1.*: torch.uint8 has no"),
        (torch.int64, 0.5, "pad=0.5.*: torch.int64 has no"),
        (torch.int64, 2**63, "torch.int64 has no such value"),
        (torch.bool, 2, "torch.bool has no such value"),
        (torch.float16, 1e6, "torch.float16 has no such value"),
        (torch.float32, "0", "pad='0'.*: pass a number"),
        (torch.int64, 2**63 - 1, ""),
        (torch.float16, -math.inf, ""),
        (torch.bfloat16, 0.1, ""),
        (torch.bool, 1, ""),
        (torch.complex64, 1j, ""),
    ],
)
def test_padding_must_be_a_value_of_the_dtype(dtype: torch.dtype, pad: Any, error: str) -> None:
    rank, size = unidist.rank(), unidist.world_size()
    mine = {"ids": torch.zeros(1, 1 + rank, dtype=dtype), "counts": torch.ones(2, dtype=torch.uint8)}
    if error:
        with pytest.raises((TypeError, ValueError), match=error):
            unidist.all_gather(mine, pad=pad)
    else:
        padded = unidist.all_gather(mine, pad=pad)["ids"][0, 1:]
        assert torch.equal(padded, torch.full((size - 1,), pad, dtype=dtype))
    unidist.barrier()


def test_all_reduce_of_a_python_bool() -> None:
    rank, size = unidist.rank(), unidist.world_size()
    assert unidist.all_reduce(rank == 0, "or") is True
    assert unidist.all_reduce(numpy.bool_(rank == 0), "or") is True
    with pytest.raises(TypeError, match=r"all_reduce_ of a bool.*: use all_reduce"):
        unidist.all_reduce_(True, "or")  # type: ignore[type-var]
    assert unidist.all_reduce(rank == 0, "and") is (size == 1)
    with pytest.raises(TypeError, match=r"'sum' of torch\.bool"):
        unidist.all_reduce(True)


def test_rank_and_size_of_a_group() -> None:
    rank, size = unidist.rank(), unidist.world_size()
    group = unidist.new_group(range(size // 2, size))
    assert group.size() == size - size // 2 and (rank in group) == (rank >= size // 2)
    assert group.rank() == (rank - size // 2 if rank in group else -1)
    assert unidist.new_group(group.ranks) is group


def test_the_first_rank_goes_first(tmp_path_factory: pytest.TempPathFactory) -> None:
    rank = unidist.rank()
    for local in (False, True):
        is_first = (unidist.local_rank() if local else rank) == 0
        path = Path(unidist.broadcast_object(str(tmp_path_factory.mktemp("cache") / "file")))
        with unidist.first_rank(local=local):
            assert path.exists() is not is_first
            path.touch()
        unidist.barrier()
        error: type[Exception] = OSError if is_first else unidist.CollectiveError
        with pytest.raises(error, match="no such file"), unidist.first_rank(local=local):
            raise OSError("no such file")
    unidist.barrier()
