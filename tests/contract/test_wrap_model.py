"""After ``backward()``, ``.grad`` is the mean over the ranks, whatever the backend."""

import contextlib
import copy
import dataclasses
import gc
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Independent, Normal
from torch.nn.parallel import DistributedDataParallel

import unidist
from tests.contract.models import (
    Branches,
    assert_gradient,
    assert_in_step,
    assert_same,
    loss_of,
    make_model,
    mean_gradient,
    mean_over_ranks,
    my_batch,
    seeded,
    train,
    whole_batch,
)
from tests.support.frames import documented, frames
from unidist.context import current

#: DDP's advice, once per process.
ALL_ARE_USED = pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")


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


@pytest.mark.parametrize("static_graph", [False, True])
def test_after_each_step_all_ranks_have_rank_0_s_buffers(static_graph: bool) -> None:
    norm = nn.BatchNorm1d(2)
    model = unidist.wrap_model(nn.Sequential(nn.Linear(2, 2), norm), static_graph=static_graph)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alone, own = nn.BatchNorm1d(2), []
    norm.register_forward_pre_hook(lambda _, inputs: own.append(inputs[0].detach()))
    for step in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 2) * (unidist.rank() + step + 1)).sum().backward()
        optimizer.step()
        alone(unidist.broadcast(own[-1]))  # rank 0's batch
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            torch.testing.assert_close(getattr(norm, name), getattr(alone, name))
    # In evaluation ranks may make different numbers of calls, with gradients and without.
    norm.running_mean.fill_(float(unidist.rank()))
    model.eval()
    for _ in range(unidist.rank()):
        model(torch.ones(1, 2))
    with torch.no_grad():
        for _ in range(unidist.rank()):
            model(torch.ones(1, 2))
    unidist.barrier()
    assert norm.running_mean.tolist() == [float(unidist.rank())] * 2


def test_buffers_with_several_passes() -> None:
    """Two forward passes, accumulation, a graph that is kept with frozen statistics, and a copy."""
    norm = nn.BatchNorm1d(2)
    model: Any = unidist.wrap_model(nn.Sequential(nn.Linear(2, 2), norm, nn.Linear(2, 1)))

    def batch() -> Tensor:
        return torch.randn(4, 2, generator=torch.Generator().manual_seed(unidist.rank()))

    (model(batch()) + model(batch())).sum().backward()
    assert_same_everywhere(norm)
    with model.no_sync():
        model(batch()).sum().backward()
    model(batch()).sum().backward()
    assert_same_everywhere(norm)
    norm.eval()
    loss = model(batch()).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    model.train()
    with contextlib.suppress(NotImplementedError, RuntimeError):  # a model of a group cannot be copied
        other = copy.deepcopy(model)
        other(batch()).sum().backward()
        assert_same_everywhere(other.module[1])
        assert_same_everywhere(norm)


def assert_same_everywhere(norm: nn.BatchNorm1d) -> None:
    for means in unidist.all_gather_object(norm.running_mean):
        assert torch.equal(means, norm.running_mean)


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
    # A bucket is laid out by the parameters' strides, so ranks that differ in them would mix up their gradients.
    conv = nn.Conv2d(3, 4, 3)
    with pytest.raises(
        unidist.MismatchError, match=r"weight .* strides=\(27, 9, 3, 1\) on rank 0, but .*\(27, 1, 9, 3\)"
    ):
        unidist.wrap_model(conv.to(memory_format=torch.channels_last) if last else conv)
    unidist.broadcast_model_state(conv)  # copies values, whatever the strides


def test_a_memory_format_that_changes_later() -> None:
    """After wrapping, on all ranks or on one: the gradient is the mean, or DDP, which lays out its buckets again,
    raises on all.
    """

    def loss(net: nn.Module, rank: int) -> Tensor:
        images = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(rank))
        return net(images).square().sum()  # type: ignore[no-any-return]

    def passes(changed: bool) -> None:
        inner = seeded(lambda: nn.Conv2d(3, 4, 3))
        expected = mean_gradient(inner, loss)
        model = unidist.wrap_model(inner)
        if changed:
            inner.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        for _ in range(3):
            model.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's own, about strides of gradients
                loss(model, unidist.rank()).backward()
            for param, grad in zip(model.parameters(), expected):
                torch.testing.assert_close(param.grad, grad)

    passes(changed=True)
    is_ddp = isinstance(unidist.wrap_model(nn.Linear(1, 1)), nn.parallel.DistributedDataParallel)
    with contextlib.ExitStack() as stack:
        if is_ddp and unidist.world_size() > 1:
            stack.enter_context(pytest.raises(unidist.MismatchError, match="memory format"))
        passes(changed=unidist.is_main())


@pytest.mark.parametrize("call", ["wrap_model", "replicate", "broadcast_model_state", "assert_in_sync"])
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: len, "builtin_function_or_method"),
        (lambda: [nn.Linear(1, 1)], "list"),
        (lambda: nn.Linear, "the class Linear"),
        (lambda: torch.optim.SGD([torch.ones(1)]), "SGD"),
        (lambda: nn.Linear(1, 1).state_dict(), "OrderedDict"),
    ],
)
def test_what_is_no_model(call: str, make: Callable[[], object], kind: str) -> None:
    with pytest.raises(TypeError, match=rf"{call} takes a torch\.nn\.Module, not {kind}: pass the model itself"):
        getattr(unidist, call)(make())


def test_bad_options() -> None:
    with pytest.raises(ValueError, match="requires grad"):
        unidist.wrap_model(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(ValueError, match="compression='int8'"):
        unidist.wrap_model(nn.Linear(2, 2), compression="int8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bucket_cap_mb=0"):
        unidist.wrap_model(nn.Linear(2, 2), bucket_cap_mb=0)


def test_ddps_own_join() -> None:
    model = unidist.wrap_model(nn.Linear(2, 1, bias=False))
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        pytest.skip("this backend has no DistributedDataParallel")
    with model.join():  # type: ignore[no-untyped-call]
        for _ in range(1 + 3 * unidist.rank()):
            model.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
    assert model.module.weight.grad is not None


def test_models_that_cannot_be_wrapped() -> None:
    with torch.device("meta"):
        meta = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"'weight' is on the meta device.*to_empty"):
        unidist.wrap_model(meta)
    norm = nn.BatchNorm1d(2)
    norm.running_mean = norm.running_mean.to("meta")  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"'running_mean' is on the meta device"):
        unidist.wrap_model(norm)
    with pytest.raises(ValueError, match=r"'weight' has no shape yet"):
        unidist.wrap_model(nn.LazyLinear(2))


def test_attributes_of_the_model_inside() -> None:
    class Lightning(nn.Linear):
        @property
        def broken(self) -> int:
            raise RuntimeError("nobody asked for it")

        def training_step(self, x: Tensor) -> Tensor:
            return self(x).sum()  # type: ignore[no-any-return]

    model = unidist.wrap_model(Lightning(2, 2))
    with pytest.raises(AttributeError, match=r"use model\.module\.training_step.*gradients are not averaged"):
        model.training_step(torch.ones(1, 2))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        model.nothing  # noqa: B018
    assert not hasattr(model, "broken")
    assert not hasattr(model, "training_step") and model.module.training_step(torch.ones(1, 2)).dim() == 0


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


@pytest.mark.usefixtures("no_collector")
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
    net.zero_grad()
    if unidist.is_main():  # alone, and without waiting for anybody
        loss_of(net, 0).backward()
        local = copy.deepcopy(net)
        local.zero_grad()
        loss_of(local, 0).backward()
        assert_gradient(net, [p.grad for p in local.parameters()])  # type: ignore[misc]


@pytest.mark.usefixtures("no_collector")
def test_wrapping_again_after_a_forward_pass_alone() -> None:
    """Large gradients are scaled as they come in: by one wrapper, not by the dropped one as well."""
    net = nn.Linear(1024, 300, bias=False)
    nn.init.zeros_(net.weight)
    model = unidist.wrap_model(net)
    inputs = torch.full((1, 1024), unidist.rank() + 1.0)
    model(inputs)
    model = unidist.wrap_model(unidist.unwrap(model))
    model(inputs).sum().backward()
    mean = (unidist.world_size() + 1) / 2
    assert net.weight.grad is not None and torch.allclose(net.weight.grad, torch.full_like(net.weight, mean))


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("compression", [None, "fp16"])
def test_a_step_and_a_wrapped_model_are_freed(compression: Any) -> None:
    net = nn.Linear(3, 1)
    model = unidist.wrap_model(net, compression=compression)
    for _ in range(3):
        loss_of(model, unidist.rank()).backward()
    unidist.barrier()
    kept = Counter(type(each).__name__ for each in gc.get_objects())
    alive = unidist.world_size() if unidist.backend_name() == "threads" else 1
    assert kept["GradientAverager"] <= alive and not kept["PlainPass"]
    wrapper, module = weakref.ref(model), weakref.ref(net)
    del model, net
    if unidist.backend_name() in ("gloo", "mpi") and compression:
        gc.collect()  # DDP's communication hook is in a cycle of its own
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


def test_a_model_frozen_for_one_pass_passes_gradients_on() -> None:
    """A GAN's discriminator in its generator's step; afterwards it trains as before."""
    front, back = unidist.wrap_model(make_model()), unidist.wrap_model(nn.Linear(3, 1))
    inputs, _ = my_batch(0)
    for _ in range(2):
        back.requires_grad_(False)
        back(front(inputs)).sum().backward()
        assert back.module.weight.grad is None
        assert_same_gradients(front)
        back.requires_grad_(True)
        back(front(inputs).detach()).sum().backward()
        assert_same_gradients(back)
        front.zero_grad()
        back.zero_grad()


def assert_same_gradients(model: nn.Module) -> None:
    for param in model.parameters():
        assert param.grad is not None
        everyone = unidist.all_gather(param.grad.reshape(1, -1))
        assert torch.equal(everyone, everyone[:1].expand_as(everyone)) and everyone.abs().sum() > 0


def test_a_frozen_parameter_that_thaws_is_told() -> None:
    """Nobody would average its gradient; wrapped again, it trains."""
    inner = make_model().requires_grad_(False)
    inner[4].requires_grad_(True)
    model = unidist.wrap_model(inner)
    train(model, my_batch, steps=1)
    inner.requires_grad_(True)
    with torch.no_grad():
        model(my_batch(0)[0])
    with pytest.raises(
        unidist.UnidistError, match=r"4 parameters, '0\.weight' the first, .*wrap_model\(unidist\.unwrap"
    ):
        train(model, my_batch, steps=1)
    model = unidist.wrap_model(unidist.unwrap(model))
    train(model, my_batch, steps=2)
    alone = make_model().requires_grad_(False)
    alone[4].requires_grad_(True)
    train(alone, whole_batch, steps=1)
    train(alone.requires_grad_(True), whole_batch, steps=2)
    assert_same(model.module, alone, rtol=1e-5, atol=1e-6)


def test_a_parameter_frozen_after_wrapping_is_told() -> None:
    model = unidist.wrap_model(make_model())
    train(model, my_batch, steps=2)
    model.module[0].weight.requires_grad_(False)
    if unidist.backend_name() != "single":  # which averages nothing
        with pytest.raises(unidist.UnidistError, match=r"'0\.weight' was frozen .* after unidist\.wrap_model"):
            train(model, my_batch, steps=2)
    model = unidist.wrap_model(unidist.unwrap(model))
    train(model, my_batch, steps=2)


@pytest.mark.parametrize("call", [unidist.wrap_model, unidist.replicate])
def test_a_layer_added_afterwards_is_told(call: Callable[[nn.Module], nn.Module]) -> None:
    inner = make_model()
    model = call(inner)
    train(model, my_batch, steps=1)
    inner.add_module("frozen", nn.Linear(3, 3).requires_grad_(False))
    train(model, my_batch, steps=1)
    inner.add_module("more", nn.Linear(3, 3))
    with pytest.raises(unidist.UnidistError, match=r"replaced or added after unidist"):
        train(model, my_batch, steps=1)


class Words(nn.Module):
    """Two tables with sparse gradients beside a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.table = nn.Embedding(7, 3, sparse=True)
        self.bag = nn.EmbeddingBag(5, 3, mode="sum", sparse=True)
        self.out = nn.Linear(3, 2)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.table(words).sum(1) + self.bag(words % 5))


def words_of(step: int, rank: int) -> Tensor:
    """Other rows on each rank, some of them on several."""
    return torch.randint(0, 7, (2 + rank, 2), generator=torch.Generator().manual_seed(31 * step + rank))


@pytest.mark.parametrize("window", [1, 3])
def test_sparse_gradients(window: int) -> None:
    model, alone = unidist.wrap_model(Words()), Words()
    groups = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, alone)]
    for step in range(4):
        for optimizer in groups:
            optimizer.zero_grad()
        for part in range(window):
            last = part == window - 1
            with contextlib.nullcontext() if last else model.no_sync():
                model(words_of(step + part, unidist.rank())).pow(2).sum().backward()
            for rank in range(unidist.world_size()):
                (alone(words_of(step + part, rank)).pow(2).sum() / unidist.world_size()).backward()
        assert model.module.table.weight.grad.is_sparse
        for optimizer in groups:
            optimizer.step()
    assert_same(model.module, alone, rtol=1e-5, atol=1e-6)
    assert_in_step(model)


def test_sparse_gradients_beside_compressed_ones() -> None:
    model, alone = unidist.wrap_model(Words(), compression="fp16"), Words()
    model(words_of(0, unidist.rank())).pow(2).sum().backward()
    for rank in range(unidist.world_size()):
        (alone(words_of(0, rank)).pow(2).sum() / unidist.world_size()).backward()
    for p, q in zip(model.parameters(), alone.parameters()):
        assert p.grad is not None and q.grad is not None
        torch.testing.assert_close(p.grad.to_dense(), q.grad.to_dense(), rtol=1e-2, atol=1e-2)


def test_sparse_gradients_that_some_ranks_do_not_have() -> None:
    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(4, 2, sparse=True) for _ in range(2))
            self.dense = nn.Linear(2, 1)

        def forward(self, words: Tensor, which: int) -> Tensor:
            return self.dense(self.tables[which](words))

    last = unidist.rank() == unidist.world_size() - 1
    model = unidist.wrap_model(Choice(), find_unused_parameters=True)
    if isinstance(model, nn.parallel.DistributedDataParallel):  # it does not know how
        with pytest.raises(RuntimeError, match="Expected sparse gradient to be defined"):
            model(torch.tensor([1]), 1 if last else 0).sum().backward()
        return
    nn.init.ones_(model.module.dense.weight)
    model(torch.tensor([1]), 1 if last else 0).sum().backward()
    grads = [table.weight.grad for table in model.module.tables]
    assert grads[1].to_dense()[1, 0].item() == pytest.approx(1 / unidist.world_size())
    if unidist.world_size() > 1:
        assert grads[0].to_dense()[1, 0].item() == pytest.approx(1 - 1 / unidist.world_size())
    elif unidist.backend_name() != "single":
        assert grads[0] is None


def test_sparse_gradients_in_a_join() -> None:
    model = unidist.wrap_model(Words())
    with unidist.join(model):
        for step in range(unidist.rank() + 1):
            model.zero_grad()
            model(words_of(step, unidist.rank())).sum().backward()
    if unidist.rank() == unidist.world_size() - 1:
        assert model.module.table.weight.grad.is_sparse
        alone = Words()
        (alone(words_of(unidist.rank(), unidist.rank())).sum() / unidist.world_size()).backward()
        mine, expected = (each.table.weight.grad.to_dense() for each in (model.module, alone))
        torch.testing.assert_close(mine, expected)


def replaced_weights(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.double(),
        lambda model: model.to(torch.bfloat16),
        replaced_weights,
        lambda model: setattr(model, "1", nn.Linear(3, 2)),
    ],
    ids=["double", "bfloat16", "assign", "layer"],
)
def test_parameters_that_are_converted_or_replaced_after_wrapping_are_an_error(change: Any, warm: bool) -> None:
    model = unidist.wrap_model(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
    step = [lambda: model(torch.ones(2, 4, dtype=next(model.parameters()).dtype)).float().sum().backward()]
    if warm:
        step[0]()
    change(model.module)
    with pytest.raises(unidist.UnidistError, match=r"were converted .* replaced or added after unidist.wrap_model"):
        step[0]()
    model = unidist.wrap_model(unidist.unwrap(model))
    step[0]()
    unidist.assert_in_sync(model)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # torch.compile's
def test_a_conversion_after_wrapping_and_compiling_is_an_error() -> None:
    model = unidist.wrap_model(nn.Linear(4, 3))
    compiled = torch.compile(model, backend="eager")
    compiled(torch.ones(2, 4)).sum().backward()
    model.zero_grad()
    model.double()
    with pytest.raises(unidist.UnidistError, match=r"were converted"):
        compiled(torch.ones(2, 4, dtype=torch.float64)).sum().backward()


def test_conversions_that_change_nothing_are_none() -> None:
    model = unidist.wrap_model(make_model())
    for change in (lambda: model.float(), lambda: model.to("cpu"), lambda: model.requires_grad_(True)):
        change()
        train(model, my_batch)
    with torch.no_grad():
        for param in model.parameters():
            param.data = param.data.clone()  # other memory, the same hooks
    train(copy.deepcopy(model), my_batch)
    train(model, my_batch)
    assert_in_step(model)
    weights = {name: param.detach().clone().requires_grad_() for name, param in model.module.named_parameters()}
    inputs, _ = my_batch(0)
    torch.func.functional_call(model.module, weights, (inputs,)).sum().backward()


def test_a_conversion_there_and_back() -> None:
    """It gives each parameter a gradient accumulator without DDP's hooks, and the hooks of other wrappers stay."""
    model = unidist.wrap_model(make_model())
    model.double().float()
    with contextlib.suppress(unidist.UnidistError):
        train(model, my_batch)
    assert_in_step(model)


def test_assert_in_sync_names_the_conversion() -> None:
    if unidist.world_size() == 1:
        return
    model = unidist.wrap_model(make_model())
    model.double()
    with torch.no_grad():
        next(model.parameters()).add_(unidist.rank())
    for given in (model, model.module):
        with pytest.raises(unidist.MismatchError, match=r"differs on rank.*: parameters of this model were converted"):
            unidist.assert_in_sync(given)


def test_no_sync_around_a_backward_pass_alone_is_a_warning_once() -> None:
    if unidist.world_size() == 1:
        return
    model = unidist.wrap_model(seeded())
    expected = mean_gradient(model.module, loss_of)
    loss = loss_of(model, unidist.rank())
    with pytest.warns(UserWarning, match="averages gradients, as its forward pass was outside"), model.no_sync():
        loss.backward()
    assert_gradient(model, expected)
    loss = loss_of(model, 0)
    with unidist.no_sync(model):
        loss.backward()  # a second warning would be an error
    with unidist.no_sync(model):
        loss_of(model, 0).backward()
    loss_of(model, 0).backward()


def test_frames_of_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frames that docs/architecture.md lists, and how many Python calls a parameter costs."""
    layers = nn.Sequential(*(nn.Linear(3, 3) for _ in range(20)))
    model = unidist.wrap_model(layers, broadcast_buffers=False, bucket_cap_mb=600 / 2**20)  # two buckets
    backend, seen, calls = current(), [], 0
    if unidist.world_size() == 1 or isinstance(model, nn.parallel.DistributedDataParallel):
        pytest.skip("gradients are averaged without this package's code")
    start = backend.start_all_reduce
    monkeypatch.setattr(
        backend, "start_all_reduce", lambda *args, **options: [seen.append(frames()), start(*args, **options)][1]
    )

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and "/unidist/gradients/" in frame.f_code.co_filename

    model(torch.ones(1, 3)).sum().backward()  # allocates the bucket
    loss = model(torch.ones(1, 3)).sum()
    before = sys.getprofile()
    sys.setprofile(count)
    loss.backward()
    sys.setprofile(before)
    assert seen[::2] == [documented("A gradient")] * 2 and len(seen) == 4
    assert 40 < calls <= 4 * 40


class ActivatedNorm(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


def test_sync_bn_keeps_hooks_and_refuses_layers_with_a_forward_of_their_own() -> None:
    called: list[int] = []
    norm = nn.BatchNorm1d(2)
    norm.register_forward_hook(lambda *_: called.append(1))
    model = unidist.wrap_model(nn.Sequential(nn.Linear(3, 2), norm), sync_bn=True)
    model(torch.randn(4, 3))
    assert model.module[1] is norm and called == [1]
    replaced, parametrized = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    replaced.forward = lambda x: x  # type: ignore[method-assign]
    nn.utils.parametrize.register_parametrization(parametrized, "weight", nn.Identity())
    for layer in (ActivatedNorm(2), replaced, parametrized):
        other = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), layer)
        with pytest.raises(ValueError, match="is a BatchNorm with a forward of its own or a parametrization"):
            unidist.wrap_model(other, sync_bn=True)
        assert type(other[1]) is nn.BatchNorm1d


@dataclasses.dataclass(slots=True)
class Output:
    loss: Tensor
    logits: Tensor


class SlottedOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Output:
        logits = self.inner(x)
        return Output(logits.sum(), logits)


def test_outputs_in_a_dataclass_with_slots() -> None:
    model = unidist.wrap_model(SlottedOutput())
    model(torch.full((1, 2), unidist.rank() + 1.0)).loss.backward()
    mean = sum(range(1, unidist.world_size() + 1)) / unidist.world_size()
    torch.testing.assert_close(model.module.inner.weight.grad, torch.full((1, 2), mean))


@ALL_ARE_USED
@pytest.mark.parametrize("find_unused_parameters", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    "passes", ["in order", "last first", "one again", "no sync", "with a penalty", "of two models"]
)
def test_several_forward_and_backward_passes(passes: str, norm: bool, find_unused_parameters: bool) -> None:
    """As in adversarial training; each backward pass is averaged."""

    def make() -> nn.Module:
        return seeded(lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3) if norm else nn.Tanh(), nn.Linear(3, 1)))

    def gradients(critic: Any, actor: Any, rank: int) -> list[Tensor | None]:
        x = torch.arange(8.0).view(4, 2).sin() + rank
        for _ in range(2):
            if passes == "with a penalty":
                mixed = (x * 3).requires_grad_()
                outputs = critic(x), critic(x * 2), critic(mixed)
                (slope,) = torch.autograd.grad(outputs[2].sum(), mixed, create_graph=True)
                (outputs[0] - outputs[1] + slope.pow(2).sum(1, keepdim=True)).mean().backward()
            elif passes == "of two models":
                first, second = critic(x), critic(actor(x).tanh().expand(-1, 2))
                first.pow(2).mean().backward()
                second.pow(4).mean().backward()
            else:
                with critic.no_sync() if passes == "no sync" and critic is models[0] else contextlib.nullcontext():
                    first = critic(x)
                losses = [first.pow(2).mean(), critic(x * 2).pow(4).mean()]
                for loss in reversed(losses) if passes == "last first" else losses:
                    loss.backward(retain_graph=passes == "one again")
                if passes == "one again":
                    losses[0].backward()
        return [p.grad for model in (critic, actor) for p in unidist.unwrap(model).parameters()]

    models = [unidist.wrap_model(make(), find_unused_parameters=find_unused_parameters) for _ in range(2)]
    found = gradients(*models, unidist.rank())
    alone = [gradients(make(), make(), rank) for rank in range(unidist.world_size())]
    for grad, *others in zip(found, *alone):
        if grad is not None and others[0] is not None:
            torch.testing.assert_close(grad, torch.stack(others).mean(0), rtol=1e-4, atol=1e-5)
        else:
            assert grad is None and others[0] is None


class Returns(nn.Module):
    """Returns a parameter, as policies do with the logarithm of their deviation."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.deviation = nn.Linear(2, 1), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.mean(x), self.deviation


def test_a_parameter_in_the_output_keeps_no_hook_of_earlier_passes() -> None:
    model = unidist.wrap_model(Returns())
    inside, x = model.module, torch.full((1, 2), unidist.rank() + 1.0)
    for _ in range(4):
        model.zero_grad()
        mean, deviation = model(x)
        (mean.sum() * (deviation.sum() + 1)).backward()
        assert len(inside.deviation._backward_hooks or ()) <= 2
    for grads in unidist.all_gather_object([param.grad for param in inside.parameters()]):
        torch.testing.assert_close(grads, [param.grad for param in inside.parameters()])


class Actions:
    """An output of the user's own class; it refers to itself."""

    def __init__(self, policy: Normal) -> None:
        self.policies, self.parts = [policy], [self]


class Policy(nn.Module):
    """An actor: returns a distribution, or an object that has one."""

    def __init__(self, wrap: Callable[[Normal], Any]) -> None:
        super().__init__()
        self.mean, self.wrap = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(Normal(self.mean(x), 1.0))


@ALL_ARE_USED
@pytest.mark.parametrize(
    "call", [unidist.wrap_model, partial(unidist.wrap_model, find_unused_parameters=True), unidist.replicate]
)
@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda policy: policy, lambda output: output),
        (lambda policy: Independent(policy, 1), lambda output: output.base_dist),
        (lambda policy: SimpleNamespace(policy=policy), lambda output: output.policy),
        (Actions, lambda output: output.policies[0]),
    ],
    ids=["distribution", "distribution of distribution", "namespace", "object"],
)
def test_outputs_in_objects(
    call: Callable[[nn.Module], Any], wrap: Callable[[Normal], Any], unwrap: Callable[[Any], Normal]
) -> None:
    """Each backward pass is averaged, and the buffers follow rank 0's."""
    rank, size = unidist.rank(), unidist.world_size()
    inputs = torch.arange(8.0).view(4, 2).sin()

    def train(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(2):
            policy = unwrap(model(x))
            policy.log_prob(torch.zeros(3)).mean().backward(retain_graph=True)
            policy.mean.pow(4).mean().backward()
        inside = unidist.unwrap(model)
        return inside.mean[0].weight.grad, inside.mean[1].running_mean

    found = train(call(seeded(lambda: Policy(wrap))), inputs + rank)
    alone = [train(seeded(lambda: Policy(wrap)), inputs + other) for other in range(size)]
    torch.testing.assert_close(found[0], torch.stack([grad for grad, _ in alone]).mean(0))
    if call is not unidist.replicate:
        torch.testing.assert_close(found[1], alone[0][1])


def test_parameters_and_buffers_of_unusual_strides() -> None:
    """One element of any stride, lazy conjugates and negatives."""
    model = nn.Linear(3, 2)
    model.one = nn.Parameter(torch.ones(3, 2)[:1, 0])
    model.register_buffer("expanded", torch.tensor(2.0).expand(1))
    model.register_buffer("conjugate", torch.tensor([1 + 2j]).conj())
    model.register_buffer("negative", torch.tensor([1 + 2j]).conj().imag)
    unidist.broadcast_model_state(model)
    unidist.assert_in_sync(model)
    wrapped = unidist.wrap_model(model, find_unused_parameters=True)
    wrapped(torch.ones(1, 3)).sum().backward()
    assert model.conjugate.tolist() == [1 - 2j] and model.negative.tolist() == [-2]


def test_a_large_complex_parameter_with_a_lazy_conjugate_gradient() -> None:
    param = nn.Parameter(torch.zeros(2**19 + 1, dtype=torch.complex64))
    model = unidist.replicate(nn.ParameterList([param]))
    factor = torch.tensor(1 + 1j * unidist.rank())
    (model[0] * factor).real.sum().backward()
    mean = 1 - 1j * (unidist.world_size() - 1) / 2
    torch.testing.assert_close(model[0].grad, torch.full_like(param, mean))


def test_a_backward_pass_after_one_that_failed() -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            raise ValueError("failed")

    model = unidist.wrap_model(nn.Linear(3, 2))
    x = Failing.apply(torch.ones(1, 3, requires_grad=True))
    with pytest.raises(ValueError, match="failed"):
        model(x).sum().backward()
    model.zero_grad()
    if isinstance(model, DistributedDataParallel):
        with pytest.raises(unidist.UnidistError, match=r"backward pass of this model has failed.*wrap_model again"):
            model(torch.ones(1, 3))
    else:
        model(torch.ones(1, 3)).sum().backward()
        torch.testing.assert_close(model.module.weight.grad, torch.ones(2, 3))
