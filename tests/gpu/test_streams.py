"""A reduction waits for the kernels that compute its input, and whoever uses its result for the reduction.

A long kernel comes first on the stream: whatever does not wait for it reads old values.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unidist
import unidist.hvd as hvd

SIZE = 1_000_000
#: Clock cycles: a tenth of a second or so.
LONG = 200_000_000

STREAMS = ["default", "another"]


@pytest.fixture(params=STREAMS)
def stream(request: pytest.FixtureRequest) -> AbstractContextManager[Any]:
    if request.param == "default":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(unidist.device()))


@pytest.fixture
def total() -> float:
    return float(sum(range(1, unidist.world_size() + 1)))


@pytest.fixture(scope="module", autouse=True)
def drop_in(world: None) -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


def late() -> Tensor:
    """A tensor whose values, rank + 1, are written behind a long kernel."""
    x = torch.zeros(SIZE, device=unidist.device())
    torch.cuda._sleep(LONG)
    x.fill_(unidist.rank() + 1)
    return x


def all_equal(tensor: Tensor, value: float) -> bool:
    return bool((tensor == value).all())


def test_all_reduce(stream: AbstractContextManager[Any], total: float) -> None:
    with stream:
        assert all_equal(unidist.all_reduce(late()), total)


def test_all_gather(stream: AbstractContextManager[Any]) -> None:
    with stream:
        parts = unidist.all_gather(late()).chunk(unidist.world_size())
        assert all(all_equal(part, rank + 1) for rank, part in enumerate(parts))


def test_the_input_may_be_overwritten_at_once(stream: AbstractContextManager[Any], total: float) -> None:
    with stream:
        x = late()
        result = unidist.all_reduce(x)
        x.zero_()
        assert all_equal(result, total)


def test_the_drop_ins_operations(stream: AbstractContextManager[Any], total: float) -> None:
    with stream:
        assert all_equal(hvd.allreduce(late(), op=hvd.Sum), total)
        handles = [hvd.allreduce_async(late(), op=hvd.Sum, name=f"late{i}") for i in range(3)]
        assert all(all_equal(hvd.synchronize(handle), total) for handle in handles)
        x = late()
        hvd.allreduce_(x, op=hvd.Sum)
        assert all_equal(x, total)
        assert all_equal(hvd.broadcast(late(), 0), 1.0)


class LateGradient(torch.autograd.Function):
    """The identity; its gradient is computed behind a long kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        torch.cuda._sleep(LONG)
        return grad.clone()


class Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = LateGradient.apply(self.weight)  # type: ignore[no-untyped-call]
        return (y * x).sum()


def test_gradients_of_a_wrapped_model(stream: AbstractContextManager[Any], total: float) -> None:
    """The optimizer steps at once: each step moves the weights by the mean of the ranks' gradients."""
    mean = total / unidist.world_size()
    with stream:
        model = unidist.wrap_model(Late().to(unidist.device()))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for step in range(1, 4):
            optimizer.zero_grad()
            model(torch.full((SIZE,), unidist.rank() + 1.0, device=unidist.device())).backward()
            optimizer.step()
            assert torch.allclose(model.module.weight, torch.full_like(model.module.weight, -mean * step))


def test_gradients_of_the_drop_ins_optimizer(stream: AbstractContextManager[Any], total: float) -> None:
    mean = total / unidist.world_size()
    with stream:
        model = Late().to(unidist.device())
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
        for step in range(1, 4):
            optimizer.zero_grad()
            model(torch.full((SIZE,), unidist.rank() + 1.0, device=unidist.device())).backward()
            optimizer.step()
            assert torch.allclose(model.weight, torch.full_like(model.weight, -mean * step))
