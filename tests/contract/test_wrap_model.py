"""After ``backward()``, ``.grad`` is the mean over the ranks, whatever the engine."""

import contextlib
import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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


@pytest.mark.parametrize("bucket_cap_mb", [25, 1e-4])
def test_training_is_that_of_one_process(bucket_cap_mb: float) -> None:
    model = unidist.wrap_model(make_model(), bucket_cap_mb=bucket_cap_mb)
    train(model, my_batch)
    alone = make_model()
    train(alone, whole_batch)
    assert_same(model.module, alone, rtol=1e-5, atol=1e-6)
    assert_in_step(model)


def test_face_of_ddp() -> None:
    inner = make_model()
    model = unidist.wrap_model(inner)
    assert model.module is inner
    assert list(model.state_dict()) == [f"module.{name}" for name in inner.state_dict()]
    assert model.eval() is model and not inner.training
    assert len(list(model.parameters())) == len(list(inner.parameters()))


def test_initial_weights_are_those_of_rank_0() -> None:
    torch.manual_seed(unidist.rank())
    inner = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Linear(3, 2).bfloat16())
    inner[1].running_mean.fill_(unidist.rank())  # type: ignore[operator, union-attr]
    model = unidist.wrap_model(inner)
    assert_in_step(model)
    assert model.module[1].running_mean.tolist() == [0.0] * 3


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


class Branches(nn.Module):
    """Three branches, of which a call uses some."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.branches = nn.ModuleList(nn.Linear(2, 1) for _ in range(3))

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        return torch.stack([self.branches[i](x) for i in used]).sum()


def test_find_unused_parameters() -> None:
    """Branch 0 is used everywhere, branch 1 on the last rank only, branch 2 nowhere."""
    size = unidist.world_size()
    model = unidist.wrap_model(Branches(), find_unused_parameters=True, bucket_cap_mb=1e-5)
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(1, 2), [0, 1] if unidist.rank() == size - 1 else [0]).backward()
        grads = [branch.weight.grad for branch in model.module.branches]
        torch.testing.assert_close(grads[0], torch.ones(1, 2))
        torch.testing.assert_close(grads[1], torch.ones(1, 2) / size)
        assert grads[2] is None


def test_unused_parameters_are_named() -> None:
    model = unidist.wrap_model(Branches())
    if unidist.backend_name() == "single":
        model(torch.ones(1, 2), [0, 1]).backward()  # nothing to average, nothing to wait for
        assert model.module.branches[2].weight.grad is None
        return
    with pytest.raises(unidist.UnidistError, match=r"2 parameters .*'branches\.2\.weight', 'branches\.2\.bias'"):
        for _ in range(2):  # DDP notices at the next forward pass
            model(torch.ones(1, 2), [0, 1]).backward()


def test_frozen_parameters() -> None:
    inner = make_model()
    for param in inner[0].parameters():
        param.requires_grad = False
    before = copy.deepcopy(inner[0])
    model = unidist.wrap_model(inner)
    train(model, my_batch, steps=2)
    assert_same(model.module[0], before, rtol=0, atol=0)
    assert_in_step(model)


def test_mixed_dtypes() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kinds = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
            self.parts = nn.ParameterList(nn.Parameter(torch.ones(3, dtype=kind)) for kind in kinds)

        def forward(self, x: float) -> Tensor:
            return torch.stack([(part * x).double().sum() for part in self.parts]).sum()

    model = unidist.wrap_model(Mixed())
    model(float(unidist.rank() + 1)).backward()
    mean = sum(range(1, unidist.world_size() + 1)) / unidist.world_size()
    for part in model.module.parts:
        torch.testing.assert_close(part.grad, torch.full_like(part, mean))


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_compression(compression: str) -> None:
    model = unidist.wrap_model(make_model(), compression=compression)  # type: ignore[arg-type]
    plain = unidist.wrap_model(make_model())
    for wrapped in (model, plain):
        inputs, targets = my_batch(0)
        F.cross_entropy(wrapped(inputs), targets).backward()
    size = unidist.world_size()
    for p, q in zip(model.parameters(), plain.parameters()):
        assert p.dtype == torch.float32 and p.grad is not None
        torch.testing.assert_close(p.grad, q.grad, rtol=2e-2, atol=2e-3)
    if size > 1:
        assert any(not torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters()))  # type: ignore[arg-type]


def test_buffers_follow_rank_0_while_training_and_not_in_evaluation() -> None:
    model = unidist.wrap_model(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    norm = model.module[1]
    for _ in range(3):
        model(torch.randn(4, 2) + unidist.rank()).sum().backward()
    model(torch.randn(4, 2)).sum().backward()
    # The broadcast comes before a forward pass or after it, so another step that changes nothing aligns them.
    before = unidist.broadcast(norm.running_mean)
    norm.momentum = 0.0
    model(torch.randn(4, 2)).sum().backward()
    torch.testing.assert_close(norm.running_mean, before)
    # In evaluation ranks may make different numbers of calls.
    norm.running_mean.fill_(float(unidist.rank()))
    model.eval()
    with torch.no_grad():
        for _ in range(unidist.rank()):
            model(torch.ones(1, 2))
    unidist.barrier()
    assert norm.running_mean.tolist() == [float(unidist.rank())] * 2


def test_buffers_stay_when_asked() -> None:
    model = unidist.wrap_model(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), broadcast_buffers=False)
    model.module[1].running_mean.fill_(float(unidist.rank()))
    model.module[1].momentum = 0.0
    model(torch.ones(4, 2)).sum().backward()
    assert model.module[1].running_mean.tolist() == [float(unidist.rank())] * 2


@pytest.mark.parametrize("uneven", [False, True])
def test_sync_bn_is_batch_norm_of_one_process(uneven: bool) -> None:
    def make() -> nn.Module:
        torch.manual_seed(4)
        return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)).double()

    rank, size = unidist.rank(), unidist.world_size()
    counts = [2 + r if uneven else 3 for r in range(size)]
    parts = torch.randn(sum(counts), 2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).split(
        counts
    )
    model, alone = unidist.wrap_model(make(), sync_bn=True), make()
    # The mean over ranks of size * (my sum) / N is the mean over all samples.
    (model(parts[rank]).square().sum() * size / sum(counts)).backward()
    (alone(torch.cat(parts)).square().sum() / sum(counts)).backward()
    assert_same(model.module, alone)
    for p, q in zip(model.parameters(), alone.parameters()):
        torch.testing.assert_close(p.grad, q.grad)
    model.eval(), alone.eval()
    torch.testing.assert_close(model(parts[rank]), alone(parts[rank]))


def test_sync_bn_evaluates_alone_and_keeps_its_options() -> None:
    """``affine=False``, no running statistics, ``momentum=None``: as torch's own; evaluation is not collective."""
    for options in ({"affine": False}, {"track_running_stats": False}, {"momentum": None}):
        plain = nn.BatchNorm1d(3, **options)  # type: ignore[arg-type]
        inner = nn.Sequential(nn.Linear(2, 3), copy.deepcopy(plain))
        norm = unidist.wrap_model(inner, sync_bn=True).module[1]
        batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
        for _ in range(2):  # equal batches everywhere: the statistics are those of one (but for N - 1)
            torch.testing.assert_close(norm(batch), plain(batch))
        if plain.track_running_stats:
            torch.testing.assert_close(norm.running_mean, plain.running_mean)
        norm.eval(), plain.eval()
        for _ in range(unidist.rank()):
            if plain.running_mean is None:
                torch.testing.assert_close(norm(batch), plain(batch))
            else:
                norm(batch)


def test_group() -> None:
    """Two models trained side by side, each by some of the ranks."""
    rank, size = unidist.rank(), unidist.world_size()
    groups = [unidist.new_group(range(half, size, 2)) for half in range(min(2, size))]
    group = groups[rank % 2]
    torch.manual_seed(rank)
    model = unidist.wrap_model(nn.Linear(1, 1, bias=False), group=group)
    model(torch.tensor([[float(rank)]])).sum().backward()
    assert model.module.weight.grad.item() == pytest.approx(sum(group.ranks) / len(group.ranks))


# ------------------------------------------------------------------------------------ usual uses
def grads_of(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def mean_over_ranks(values: list[float]) -> float:
    return sum(values) / len(values)


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


def test_odd_shapes() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.nothing = nn.Parameter(torch.empty(0, 3))
            self.image = nn.Parameter(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last))
            self.turned = nn.Parameter(torch.ones(2, 5).t())

        def forward(self, x: float) -> Tensor:
            parts = (self.scale, self.nothing, self.image, self.turned)
            return torch.stack([(part * x).sum() for part in parts]).sum()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about strides of gradients
        model = unidist.wrap_model(Odd())
        model(float(unidist.rank())).backward()
    mean = mean_over_ranks([float(r) for r in range(unidist.world_size())])
    for param in model.parameters():
        torch.testing.assert_close(param.grad, torch.full_like(param, mean))


# ------------------------------------------------------------------------------------ bad input
def test_different_models_are_told_on_every_rank() -> None:
    if unidist.world_size() == 1:
        assert unidist.wrap_model(nn.Linear(2, 2)).module.out_features == 2
        return
    last = unidist.rank() == unidist.world_size() - 1
    with pytest.raises(
        unidist.MismatchError, match=r"parameter weight \(2, 2\).*on rank 0, but parameter weight \(3, 2\)"
    ):
        unidist.wrap_model(nn.Linear(2, 3 if last else 2))
    with pytest.raises(unidist.MismatchError, match="nothing more"):
        unidist.wrap_model(nn.Linear(2, 2, bias=not last))


def test_bad_options() -> None:
    with pytest.raises(ValueError, match="requires grad"):
        unidist.wrap_model(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(ValueError, match="compression='int8'"):
        unidist.wrap_model(nn.Linear(2, 2), compression="int8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bucket_cap_mb=0"):
        unidist.wrap_model(nn.Linear(2, 2), bucket_cap_mb=0)


# ------------------------------------------------------------------------------------ optimizer state
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.LBFGS])
def test_broadcast_optimizer_state(kind: type[torch.optim.Optimizer]) -> None:
    model = make_model()
    options = {"momentum": 0.9, "lr": 0.1} if kind is torch.optim.SGD else {"lr": 0.01 + 0.01 * unidist.rank()}
    optimizer = kind(model.parameters(), **options)  # type: ignore[call-arg]

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.full((2, 6), 1.0 + unidist.rank())).square().sum()
        loss.backward()
        return loss.item()

    src = unidist.world_size() - 1
    if unidist.rank() == src:
        optimizer.step(closure)  # the others have no state yet
    weights = copy.deepcopy(model.state_dict())
    unidist.broadcast_optimizer_state(optimizer, src)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in weights.items())
    states = unidist.all_gather_object(optimizer.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(states, [states[src]] * len(states))
    assert states[0]["state"]


def test_broadcast_optimizer_state_before_the_first_step() -> None:
    optimizer = torch.optim.AdamW(make_model().parameters(), lr=0.1 * (unidist.rank() + 1))
    unidist.broadcast_optimizer_state(optimizer)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1) and not optimizer.state


def test_broadcast_optimizer_state_mismatch() -> None:
    if unidist.world_size() > 1:
        params = list(make_model().parameters())[: 2 + unidist.rank()]
        with pytest.raises(unidist.MismatchError, match="parameter groups"):
            unidist.broadcast_optimizer_state(torch.optim.SGD(params, lr=0.1))


# ------------------------------------------------------------------------------ less usual ways to train
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


@pytest.mark.parametrize("compression", [None, "fp16"])
def test_complex_parameters_keep_both_parts(compression: str | None) -> None:
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


def test_a_copy_of_a_wrapped_model_averages_too() -> None:
    model = unidist.wrap_model(seeded())
    loss_of(model, unidist.rank()).backward()
    twin = copy.deepcopy(model)
    twin.zero_grad()
    loss_of(twin, unidist.rank()).backward()
    assert_gradient(twin, mean_gradient(seeded(), loss_of))
    assert not any(p is q for p, q in zip(twin.parameters(), model.parameters()))


def test_a_saved_wrapped_model_loads_and_averages(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(unidist.wrap_model(seeded()), path)
    model = torch.load(path, weights_only=False)
    loss_of(model, unidist.rank()).backward()
    assert_gradient(model, mean_gradient(seeded(), loss_of))


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


def test_wrapping_again() -> None:
    """After unfreezing, say: the first wrapper is gone with its hooks."""
    net = seeded(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)))
    expected = mean_gradient(net, loss_of)
    net[0].requires_grad_(False)
    loss_of(unidist.wrap_model(net), unidist.rank()).backward()
    net.requires_grad_(True)
    model = unidist.wrap_model(net)
    for _ in range(3):
        model.zero_grad()
        loss_of(model, unidist.rank()).backward()
        assert_gradient(model, expected)
    del model
    gc.collect()
    net.zero_grad()
    if unidist.is_main():  # alone, and without waiting for anybody
        loss_of(net, 0).backward()
        local = copy.deepcopy(net)
        local.zero_grad()
        loss_of(local, 0).backward()
        assert_gradient(net, [p.grad for p in local.parameters()])  # type: ignore[misc]


def test_a_wrapped_model_is_freed() -> None:
    net = nn.Linear(3, 1)
    model = unidist.wrap_model(net)
    loss_of(model, unidist.rank()).backward()
    wrapper, module = weakref.ref(model), weakref.ref(net)
    del model, net
    gc.collect()
    assert wrapper() is None and module() is None


def test_wrapping_a_wrapped_model_is_refused() -> None:
    model = unidist.wrap_model(nn.Linear(3, 1))
    with pytest.raises(ValueError, match=r"wrapped already: pass its \.module"):
        unidist.wrap_model(model)


def test_sync_bn_of_a_layer_with_two_names() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.BatchNorm1d(3)
            self.b = self.a

    model = unidist.wrap_model(Shared(), sync_bn=True).module
    assert model.a is model.b and type(model.a).__name__ == "SyncBatchNorm"


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


# ----------------------------------------------------------------------------------- around the model
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch.compile imports it
def test_unwrap() -> None:
    net = nn.Linear(3, 1)
    assert unidist.unwrap(net) is net
    model = unidist.wrap_model(net)
    assert unidist.unwrap(model) is net
    assert unidist.unwrap(torch.compile(model)) is net  # type: ignore[arg-type]
    assert unidist.unwrap(torch.compile(net)) is net  # type: ignore[arg-type]


def test_weights_that_differ_are_named() -> None:
    rank, size = unidist.rank(), unidist.world_size()
    model = unidist.wrap_model(make_model())
    train(model, my_batch)
    unidist.assert_in_sync(model)
    alone = make_model()
    train(alone, my_batch)  # never wrapped: each rank has other weights
    if size == 1:
        unidist.assert_in_sync(alone)
        return
    others = ", ".join(map(str, range(1, size)))
    with pytest.raises(unidist.MismatchError, match=f"'0.weight' of rank 0 differs on ranks? {others}: "):
        unidist.assert_in_sync(alone)
    one = unidist.unwrap(model)
    with torch.no_grad():
        if rank == size - 1:
            one[2].bias[3] += 1e-6
    with pytest.raises(unidist.MismatchError, match=f"'2.bias' of rank 0 differs on rank {size - 1}: "):
        unidist.assert_in_sync(model)


def tokens_of(rank: int, step: int) -> Batch:
    """Another number of samples on each rank and step; none on rank 1 in step 0."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    n = (3 * rank + 2 * step + 1) % 7 if (rank, step) != (1, 0) else 0
    return torch.randn(n, 6, generator=generator), torch.randint(0, 3, (n,), generator=generator)


@pytest.mark.parametrize("window", [1, 3])
def test_global_mean_is_the_loss_of_one_process_with_all_samples(window: int) -> None:
    model = unidist.wrap_model(make_model())
    mine = [tokens_of(unidist.rank(), step) for step in range(window)]
    count = sum(len(labels) for _, labels in mine)
    losses = []
    for step, (inputs, labels) in enumerate(mine):
        with model.no_sync() if step < window - 1 else contextlib.nullcontext():
            loss = unidist.global_mean(F.cross_entropy(model(inputs), labels, reduction="sum"), count)
            loss.backward()
        losses.append(loss.detach())
    alone = make_model()
    everything = [tokens_of(rank, step) for rank in range(unidist.world_size()) for step in range(window)]
    inputs, labels = (torch.cat(parts) for parts in zip(*everything))
    expected = F.cross_entropy(alone(inputs), labels)
    expected.backward()
    assert_gradient(model, [p.grad for p in alone.parameters()])  # type: ignore[misc]
    assert unidist.allreduce_metric(sum(losses)).item() == pytest.approx(expected.item(), rel=1e-5)  # type: ignore[union-attr]


def test_global_mean_of_nothing_and_of_nonsense() -> None:
    nothing = torch.zeros((), requires_grad=True)
    loss = unidist.global_mean(nothing * 2, 0)
    loss.backward()
    assert loss.item() == 0 and nothing.grad is not None and nothing.grad.item() == 0
    with pytest.raises(ValueError, match="below 0 or not finite"):
        unidist.global_mean(nothing, -1 if unidist.rank() == 0 else 5)
