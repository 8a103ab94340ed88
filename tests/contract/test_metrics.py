"""Figures over all ranks."""

import math
from collections import OrderedDict, namedtuple
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch

import unidist
from unidist.context import current


def total(values: range) -> int:
    return sum(values)


def test_numbers() -> None:
    rank, size = unidist.rank(), unidist.world_size()
    ranks = range(size)
    assert unidist.allreduce_metric(rank) == pytest.approx(sum(ranks) / size)
    assert unidist.allreduce_metric(0.1) == pytest.approx(0.1, abs=1e-16)
    result = unidist.allreduce_metric(rank, op="sum")
    assert result == sum(ranks) and isinstance(result, int)
    assert unidist.allreduce_metric(rank + 0.5, op="max") == size - 0.5
    assert unidist.allreduce_metric(rank + 3, op="min") == 3
    assert unidist.allreduce_metric(True, op="sum") == size


def test_exact_sums() -> None:
    size = unidist.world_size()
    for n in (2**24 + 1, 2**53 + 1, 2**63 + 5, -(2**70) - 3, 0):
        assert unidist.allreduce_metric(n + unidist.rank(), op="sum") == sum(n + rank for rank in range(size))
    tensor = torch.tensor([2**53 + 1, -(2**62) + 7]) // size
    assert unidist.allreduce_metric(tensor, op="sum").tolist() == (tensor * size).tolist()
    assert unidist.allreduce_metric(2**24 + 1, op="max") == 2**24 + 1


def test_a_rank_may_have_an_integer_where_another_has_a_float() -> None:
    value = 0 if unidist.rank() == 0 else 0.5
    assert unidist.allreduce_metric(value, op="sum") == pytest.approx(0.5 * (unidist.world_size() - 1))
    if unidist.world_size() > 1:
        assert unidist.allreduce_metric(1 if unidist.rank() == 0 else 0.5, op="min") == 0.5


def test_tensors() -> None:
    size = unidist.world_size()
    half = torch.tensor([1.0, float(unidist.rank())], dtype=torch.float16)
    mean = unidist.allreduce_metric(half)
    assert mean.dtype == torch.float16
    torch.testing.assert_close(mean, torch.tensor([1.0, (size - 1) / 2], dtype=torch.float16))
    counts = torch.arange(4).view(2, 2)
    summed = unidist.allreduce_metric(counts, op="sum")
    assert summed.dtype == torch.int64 and torch.equal(summed, counts * size)
    assert unidist.allreduce_metric(torch.tensor(3)).dtype == torch.float32
    assert unidist.allreduce_metric(torch.tensor([True, False]), op="sum").tolist() == [size, 0]
    assert unidist.allreduce_metric(torch.tensor(2.5)).shape == ()
    assert unidist.allreduce_metric(torch.empty(0), op="max").shape == (0,)
    loss = torch.tensor(1.0, requires_grad=True)
    assert not unidist.allreduce_metric(loss).requires_grad


def test_sums_of_integer_tensors_are_exact_or_an_error() -> None:
    size = unidist.world_size()
    for dtype, value in ((torch.int64, -(2**63) // size + 5), (torch.uint64, (2**63 - 1) // size), (torch.uint8, 255)):
        found = unidist.allreduce_metric(torch.tensor([value, 1], dtype=dtype), op="sum")
        assert found.tolist() == [value * size, size] and found.dtype == torch.int64
    for each in (torch.tensor([2**63 - 1]), torch.tensor(-(2**63)), torch.tensor(2**63 + 5, dtype=torch.uint64)):
        if size == 1 and each.dtype == torch.int64:
            continue
        with pytest.raises(ValueError, match=rf"sum of {each.dtype} over the ranks is beyond int64"):
            unidist.allreduce_metric(each, op="sum")


def test_structures() -> None:
    Point = namedtuple("Point", "x y")
    rank, size = unidist.rank(), unidist.world_size()
    keys = ["loss", "acc", 3] if rank % 2 == 0 else [3, "acc", "loss"]
    values: dict[Any, Any] = {"loss": [rank, (1, 2.0)], "acc": Point(rank, torch.ones(2)), 3: Fraction(1, 2)}
    result = unidist.allreduce_metric({key: values[key] for key in keys}, op="sum")
    assert list(result) == keys
    assert result["loss"] == [sum(range(size)), (size, 2.0 * size)]
    assert (
        isinstance(result["acc"], Point)
        and result["acc"].x == sum(range(size))
        and result["acc"].y.tolist() == [size] * 2
    )
    assert result[3] == 0.5 * size
    assert unidist.allreduce_metric(numpy.bool_(True)) == 1.0
    total = unidist.allreduce_metric(numpy.bool_(True), op="sum")
    assert total == size and type(total) is int
    ordered = unidist.allreduce_metric(OrderedDict(loss=1.0, acc=2), op="sum")
    assert type(ordered) is OrderedDict and list(ordered.items()) == [("loss", float(size)), ("acc", 2 * size)]
    assert unidist.allreduce_metric({}) == {} and unidist.allreduce_metric([]) == []


def test_weights() -> None:
    rank, size = unidist.rank(), unidist.world_size()
    weighted = unidist.allreduce_metric({"a": float(rank), "b": torch.tensor([rank])}, weight=rank + 1)
    expected = sum(r * (r + 1) for r in range(size)) / sum(range(1, size + 1))
    assert weighted["a"] == pytest.approx(expected)
    assert weighted["b"].item() == pytest.approx(expected)
    assert unidist.allreduce_metric(2.0, weight=torch.tensor(3)) == 2.0
    # A rank without samples has a nan for a mean, and does not count.
    mine = 5.0 if rank == 0 else math.nan
    assert unidist.allreduce_metric(mine, weight=int(rank == 0)) == 5.0
    assert math.isnan(unidist.allreduce_metric(1.0, weight=0))
    assert torch.isnan(unidist.allreduce_metric(torch.ones(2), weight=0)).all()


@pytest.mark.parametrize("op", ["mean", "sum", "min", "max"])
def test_nan_of_any_rank_shows(op: str) -> None:
    for holder in range(unidist.world_size()):
        mine = math.nan if unidist.rank() == holder else 1.0 + unidist.rank()
        assert math.isnan(unidist.allreduce_metric(mine, op=op))  # type: ignore[arg-type]


def test_sums_of_small_integer_types_do_not_wrap() -> None:
    for value, dtype in ((200, torch.uint8), (2**31 - 1, torch.int32)):
        total = unidist.allreduce_metric(torch.tensor([value], dtype=dtype), op="sum")
        assert total.dtype == torch.int64 and total.tolist() == [value * unidist.world_size()]


def test_nan_shows() -> None:
    assert math.isnan(unidist.allreduce_metric(math.nan if unidist.rank() == 0 else 1.0))
    assert unidist.allreduce_metric(math.inf, op="sum") == math.inf


def test_different_structures_are_told_on_every_rank() -> None:
    if unidist.world_size() == 1:
        return
    for op in ("mean", "min"):
        with pytest.raises(unidist.MismatchError, match="different structure"):
            unidist.allreduce_metric({"loss": 1.0, **({"extra": 2.0} if unidist.rank() == 0 else {})}, op=op)  # type: ignore[arg-type]
        with pytest.raises(unidist.MismatchError, match=r"different structure \(rank 0: \['loss'\] a number, rank 1: "):
            unidist.allreduce_metric({"loss" if unidist.rank() == 0 else "Loss": 1.0}, op=op)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "options", "error", "match"),
    [
        ("0.5", {}, TypeError, "str"),
        (1j, {}, TypeError, "complex"),
        (torch.ones(1, dtype=torch.complex64), {}, TypeError, "complex64"),
        (1.0, {"op": "average"}, ValueError, "use 'mean'"),
        (1.0, {"op": "sum", "weight": 2}, ValueError, "needs op='mean'"),
        (1.0, {"weight": -1}, ValueError, "weight=-1"),
        (1.0, {"weight": math.nan}, ValueError, "weight=nan"),
        (2**53 + 1, {"op": "max"}, ValueError, "not exact"),
        (2**81, {"op": "sum"}, ValueError, "not exact"),
        (torch.tensor(2**53 + 1), {"op": "max"}, ValueError, "not exact"),
    ],
    ids=str,
)
def test_bad_input(value: Any, options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        unidist.allreduce_metric(value, **options)


def test_one_call_is_one_collective_two_frames_deep(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dict of 8 numbers: one call of the backend, made by the backend's class, called by allreduce_metric."""
    import sys

    backend = current()
    calls: list[str] = []
    stacks: list[list[str]] = []
    real = type(backend).all_reduce
    watched = {name: getattr(type(backend), name) for name in ("all_gather", "broadcast", "all_to_all", "barrier")}

    def count(name: str, method: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.extend([name] * (args[0] is backend))
            return method(*args, **kwargs)

        return counted

    def all_reduce(self: Any, *args: Any, **kwargs: Any) -> None:
        if self is not backend:  # of another rank, which is a thread
            return real(self, *args, **kwargs)
        calls.append("all_reduce")
        frame, names = sys._getframe(1), []
        while frame is not None and frame.f_code.co_name != "test_one_call_is_one_collective_two_frames_deep":
            names.append(frame.f_code.co_name)
            frame = frame.f_back  # type: ignore[assignment]
        stacks.append(names)
        real(self, *args, **kwargs)

    monkeypatch.setattr(type(backend), "all_reduce", all_reduce)
    for name, method in watched.items():
        monkeypatch.setattr(type(backend), name, count(name, method))
    monkeypatch.setattr(backend, "calls", {None: 1000})  # else calls are compared first
    result = unidist.allreduce_metric({f"m{i}": float(i) for i in range(8)})
    assert result == {f"m{i}": float(i) for i in range(8)}
    assert calls == ["all_reduce"]
    # allreduce_metric, and then the backend's own all_reduce: two frames of unidist above the backend's call.
    assert stacks == [["allreduce_metric"]]
