"""Ways to train: accumulation, several models, several passes, checkpointing, passes that fail."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import unidist
from tests.contract.models import (
    assert_gradient,
    assert_same,
    grads_of,
    inputs_of,
    loss_of,
    make_model,
    mean_gradient,
    mean_over_ranks,
    my_batch,
    seeded,
    train,
    whole_batch,
)


def test_zero_grad_and_accumulation() -> None:
    """Windows of 3 micro-batches with ``no_sync``, the last one short; grads kept or dropped between steps."""
    windows = [(0, 1, 2), (3, 4, 5), (6,)]
    for set_to_none in (True, False):
        model = unidist.wrap_model(make_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        alone = make_model()
        alone_optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
        for window in windows:
            for step in window[:-1]:
                with model.no_sync():
                    inputs, targets = my_batch(step)
                    F.cross_entropy(model(inputs), targets).backward()
            inputs, targets = my_batch(window[-1])
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            for step in window:
                inputs, targets = whole_batch(step)
                F.cross_entropy(alone(inputs), targets).backward()
            alone_optimizer.step()
            alone_optimizer.zero_grad()
        assert_same(model.module, alone, rtol=1e-5, atol=1e-6)


def test_no_sync_keeps_gradients_local() -> None:
    model = unidist.wrap_model(nn.Linear(1, 1, bias=False))
    with model.no_sync():
        model(torch.tensor([[float(unidist.rank() + 1)]])).sum().backward()
    assert model.module.weight.grad.item() == unidist.rank() + 1


def test_gradient_of_a_leaf_can_be_read_twice() -> None:
    """A second backward pass adds to the first one's mean."""
    model = unidist.wrap_model(nn.Linear(1, 1, bias=False))
    mean = sum(range(1, unidist.world_size() + 1)) / unidist.world_size()
    for times in (1, 2, 3):
        model(torch.tensor([[float(unidist.rank() + 1)]])).sum().backward()
        assert model.module.weight.grad.item() == pytest.approx(times * mean)


def test_two_models_in_one_backward_pass() -> None:
    """As in a GAN: the second model's loss flows through the first."""
    first, second = (unidist.wrap_model(nn.Linear(1, 1, bias=False)) for _ in range(2))
    for model in (first, second):
        nn.init.ones_(model.module.weight)
    rank, size = unidist.rank(), unidist.world_size()
    mean = mean_over_ranks([r + 1.0 for r in range(size)])
    for _ in range(2):
        first.zero_grad(), second.zero_grad()
        second(first(torch.tensor([[rank + 1.0]]))).sum().backward()
        assert first.module.weight.grad.item() == pytest.approx(mean)
        assert second.module.weight.grad.item() == pytest.approx(mean)


def test_shared_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2, bias=False)
            self.again = self.inner

        def forward(self, x: Tensor) -> Tensor:
            return self.again(torch.tanh(self.inner(x)))

    torch.manual_seed(0)
    inner = Tied()
    alone = copy.deepcopy(inner)
    model = unidist.wrap_model(inner)
    data = torch.arange(2.0 * unidist.world_size()).view(-1, 2)
    model(data[unidist.rank()]).sum().backward()
    (alone(data).sum() / unidist.world_size()).backward()
    torch.testing.assert_close(grads_of(model), grads_of(alone))


def test_several_forwards_before_one_backward() -> None:
    model = unidist.wrap_model(nn.Linear(1, 1, bias=False))
    rank, size = unidist.rank(), unidist.world_size()
    with model.no_sync():
        loss = model(torch.tensor([[float(rank)]])).sum()
    (loss + model(torch.tensor([[1.0]])).sum()).backward()
    assert model.module.weight.grad.item() == pytest.approx(1 + mean_over_ranks([float(r) for r in range(size)]))


def test_activation_checkpointing() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = make_model()

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.body:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    model = unidist.wrap_model(Checkpointed())
    train(model, my_batch, steps=2)
    alone = make_model()
    train(alone, whole_batch, steps=2)
    assert_same(model.module.body, alone, rtol=1e-5, atol=1e-6)


def test_backward_that_fails_can_be_followed_by_another() -> None:
    model = unidist.wrap_model(make_model())
    inputs, targets = my_batch(0)

    def fail(_: Tensor) -> None:
        raise RuntimeError("on purpose")

    loss = F.cross_entropy(model(inputs), targets)
    loss.register_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        loss.backward()
    train(model, my_batch)
    alone = make_model()
    train(alone, whole_batch)
    assert_same(model.module, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compression", [None, "fp16"])
def test_complex_parameters_keep_both_parts(compression: str | None) -> None:
    if torch.__version__.startswith("2.6.") and unidist.backend_name() == "gloo":
        pytest.skip("gloo of torch 2.6 does not broadcast complex tensors, as DDP does with parameters")

    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2, dtype=torch.complex64))

        def forward(self, scale: float) -> Tensor:
            return (self.w * torch.tensor([1.0, 2.0j]) * scale).imag.sum() + (self.w * 1j * scale).real.sum()

    model = unidist.wrap_model(Complex(), compression=compression)  # type: ignore[arg-type]
    model(float(unidist.rank())).backward()
    scale = sum(range(unidist.world_size())) / unidist.world_size()
    alone = Complex()
    alone(scale).backward()
    torch.testing.assert_close(model.module.w.grad, alone.w.grad)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_everything_checkpointed(use_reentrant: bool) -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden: Tensor = checkpoint(self.a, x, use_reentrant=use_reentrant)
            result: Tensor = checkpoint(self.b, hidden.tanh(), use_reentrant=use_reentrant)
            return result

    def loss(model: nn.Module, rank: int) -> Tensor:
        total: Tensor = model(inputs_of(rank).requires_grad_()).pow(2).sum()
        return total

    model = unidist.wrap_model(seeded(Blocks))
    for _ in range(2):
        model.zero_grad()
        loss(model, unidist.rank()).backward()
        assert_gradient(model, mean_gradient(seeded(Blocks), loss))


def test_every_backward_of_one_forward_averages() -> None:
    model = unidist.wrap_model(seeded())
    expected = mean_gradient(seeded(), loss_of)
    for _ in range(2):
        model.zero_grad()
        loss = loss_of(model, unidist.rank())
        loss.backward(retain_graph=True)
        assert_gradient(model, expected)
        loss.backward()
        assert_gradient(model, [2 * grad for grad in expected])


def test_no_sync_counts_for_its_own_forward_passes() -> None:
    model = unidist.wrap_model(seeded())
    loss = loss_of(model, unidist.rank())
    with model.no_sync():
        loss_of(model, unidist.rank())
    loss.backward()
    assert_gradient(model, mean_gradient(seeded(), loss_of))


def test_training_goes_on_after_a_backward_pass_that_failed() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            raise ArithmeticError("no gradient today")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 1)
            self.fails = False

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.a(x)
            result: Tensor = self.b(Fails.apply(hidden) if self.fails else hidden)
            return result

    # Each layer has a bucket of its own, so one is on its way when the pass fails.
    model = unidist.wrap_model(seeded(Net), bucket_cap_mb=1e-5)
    expected = mean_gradient(seeded(Net), loss_of)
    loss_of(model, unidist.rank()).backward()
    model.module.fails = True
    with pytest.raises(ArithmeticError, match="no gradient today"):
        loss_of(model, unidist.rank()).backward()
    net = model.module
    net.fails = False
    net.zero_grad()
    try:
        loss = loss_of(model, unidist.rank())
    except unidist.UnidistError as error:  # DDP cannot go on; that is said
        assert "wrap the model again" in str(error)
        model = unidist.wrap_model(net)
        loss = loss_of(model, unidist.rank())
    loss.backward()
    assert_gradient(model, expected)
