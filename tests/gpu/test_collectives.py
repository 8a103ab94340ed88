"""CUDA tensors in every collective, beside the same call on the CPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import unidist

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int32, torch.int64, torch.bool]
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: unidist.all_reduce(x, "sum"),
    "min": lambda x: unidist.all_reduce(x, "min"),
    "max": lambda x: unidist.all_reduce(x, "max"),
    "mean": lambda x: unidist.all_reduce(x, "mean"),
    "or": lambda x: unidist.all_reduce(x, "or"),
    "gather": lambda x: unidist.all_gather(x[: unidist.rank() + 1]),
    "broadcast": lambda x: unidist.broadcast(x, unidist.world_size() - 1),
    "all_to_all": unidist.all_to_all,
    "reduce_scatter": unidist.reduce_scatter,
}


def mine(dtype: torch.dtype) -> Tensor:
    numbers = torch.arange(4 * unidist.world_size()).reshape(-1, 2) + unidist.rank()
    return (numbers % 3 > 0) if dtype == torch.bool else numbers.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_collectives(name: str, dtype: torch.dtype) -> None:
    only_bool, only_float = name == "or", name == "mean"
    if only_bool != (dtype == torch.bool) and name in ("or", "sum", "min", "max", "mean", "reduce_scatter"):
        return
    if only_float and not dtype.is_floating_point:
        return
    x = mine(dtype)
    here = CALLS[name](x.to(unidist.device()))
    assert here.device == unidist.device() and here.dtype == dtype
    assert torch.equal(here.cpu(), CALLS[name](x))


def test_gradients_through_collectives() -> None:
    for call in (CALLS["sum"], CALLS["mean"], unidist.all_gather, CALLS["broadcast"], unidist.all_to_all):
        x = mine(torch.float32).to(unidist.device()).requires_grad_()
        y = mine(torch.float32).requires_grad_()
        for tensor in (x, y):
            call(tensor).square().sum().backward()
        assert x.grad is not None and y.grad is not None and torch.allclose(x.grad.cpu(), y.grad)


def test_metrics() -> None:
    values = {"loss": torch.tensor(unidist.rank() + 1.0, device=unidist.device()), "count": 2}
    total = unidist.allreduce_metric(values, op="sum")
    size = unidist.world_size()
    assert total["count"] == 2 * size and total["loss"].device == unidist.device()
    assert total["loss"].item() == size * (size + 1) / 2
    mean, accuracy = unidist.Mean(), unidist.Accuracy()
    mean.update(values["loss"], 3)
    accuracy.update(torch.eye(4, device=unidist.device()), torch.arange(4, device=unidist.device()))
    assert mean.compute() == pytest.approx((size + 1) / 2) and accuracy.compute() == 1.0
