"""Models, batches and comparisons that several files use."""

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unidist

Batch = tuple[Tensor, Tensor]


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def whole_batch(step: int, per_rank: int = 4) -> Batch:
    """The batch of one process that trains alone."""
    generator = torch.Generator().manual_seed(step)
    n = per_rank * unidist.world_size()
    return torch.randn(n, 6, generator=generator), torch.randint(0, 3, (n,), generator=generator)


def my_batch(step: int, per_rank: int = 4) -> Batch:
    start = per_rank * unidist.rank()
    return tuple(part[start : start + per_rank] for part in whole_batch(step, per_rank))  # type: ignore[return-value]


def train(model: nn.Module, batch: Callable[[int], Batch], steps: int = 5, **sgd: float) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def assert_same(left: nn.Module, right: nn.Module, **tolerance: float) -> None:
    for (name, a), (_, b) in zip(left.state_dict().items(), right.state_dict().items()):
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def assert_in_step(model: nn.Module) -> None:
    """Every rank has the same weights."""
    for name, value in model.state_dict().items():
        assert torch.equal(unidist.broadcast(value), value), name


class Branches(nn.Module):
    """Three branches, of which a call uses some."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.branches = nn.ModuleList(nn.Linear(2, 1) for _ in range(3))

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        return torch.stack([self.branches[i](x) for i in used]).sum()


def grads_of(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def mean_over_ranks(values: list[float]) -> float:
    return sum(values) / len(values)


def mean_gradient(model: nn.Module, loss: Callable[[nn.Module, int], Tensor]) -> list[Tensor]:
    """The mean over the ranks of a plain model's gradient, computed here alone."""
    alone = copy.deepcopy(model)
    for rank in range(unidist.world_size()):
        (loss(alone, rank) / unidist.world_size()).backward()
    return [p.grad for p in alone.parameters() if p.grad is not None]


def inputs_of(rank: int, width: int = 3) -> Tensor:
    return torch.randn(5, width, generator=torch.Generator().manual_seed(rank))


def loss_of(model: nn.Module, rank: int) -> Tensor:
    loss: Tensor = model(inputs_of(rank)).pow(2).sum()
    return loss


def assert_gradient(model: nn.Module, expected: list[Tensor]) -> None:
    for param, grad in zip(model.parameters(), expected):
        torch.testing.assert_close(param.grad, grad)


def seeded(make: Callable[[], nn.Module] = lambda: nn.Linear(3, 1)) -> nn.Module:
    torch.manual_seed(11)
    return make()
