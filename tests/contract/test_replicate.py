"""``replicate``: the contract of ``wrap_model`` on a model that stays the object that it is."""

import copy
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import unidist
from tests.contract.models import (
    Branches,
    assert_gradient,
    assert_in_step,
    assert_same,
    inputs_of,
    loss_of,
    make_model,
    mean_gradient,
    my_batch,
    seeded,
    train,
    whole_batch,
)


class Parts(nn.Module):
    """A model that is never called as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 1)

    def loss(self, rank: int) -> Tensor:
        result: Tensor = self.b(self.a(inputs_of(rank)).tanh()).pow(2).sum()
        return result


def parts_loss(model: nn.Module, rank: int) -> Tensor:
    assert isinstance(model, Parts)
    return model.loss(rank)


@pytest.mark.parametrize("bucket_cap_mb", [25, 1e-4])
def test_training_is_that_of_one_process(bucket_cap_mb: float) -> None:
    model = make_model()
    attributes = set(vars(model))
    assert unidist.replicate(model, bucket_cap_mb=bucket_cap_mb) is model
    assert set(vars(model)) == attributes and not model._forward_hooks
    train(model, my_batch)
    alone = make_model()
    train(alone, whole_batch)
    assert_same(model, alone, rtol=1e-5, atol=1e-6)
    assert_in_step(model)
    unidist.assert_in_sync(model)


def test_all_start_with_the_first_ranks_parameters_and_buffers() -> None:
    torch.manual_seed(unidist.rank())
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Linear(3, 2).bfloat16())
    model[1].running_mean.fill_(unidist.rank())  # type: ignore[operator, union-attr]
    unidist.replicate(model)
    assert_in_step(model)


def test_calls_of_its_parts() -> None:
    model = unidist.replicate(seeded(Parts))
    for _ in range(2):
        model.zero_grad()
        model.loss(unidist.rank()).backward()
        assert_gradient(model, mean_gradient(seeded(Parts), parts_loss))


def test_an_unused_parameter_counts_as_zero_and_has_a_gradient() -> None:
    """Branch 0 is used everywhere, branch 1 on the last rank only, branch 2 nowhere."""
    size = unidist.world_size()
    model = unidist.replicate(Branches(), bucket_cap_mb=1e-5)
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(1, 2), [0, 1] if unidist.rank() == size - 1 else [0]).backward()
        grads = [branch.weight.grad for branch in model.branches]
        torch.testing.assert_close(grads, [torch.ones(1, 2), torch.ones(1, 2) / size, torch.zeros(1, 2)])


def test_several_models_in_another_order_on_each_rank() -> None:
    """Each rank's loss reaches the models, and their branches, in another order."""
    size, rank = unidist.world_size(), unidist.rank()
    models = [unidist.replicate(Branches(), bucket_cap_mb=1e-5) for _ in range(2)]
    for step in range(3):
        for model in models:
            model.zero_grad()
        x = torch.ones(1, 2)
        for turn in range(2):
            which = (rank + turn) % 2
            x = x * models[which](x, [(rank + step) % 3])
        x.sum().backward()
        for model in models:
            mine = [p.grad for p in model.parameters()]
            assert all(grad is not None for grad in mine)
            theirs = unidist.all_gather_object(mine)
            torch.testing.assert_close(theirs, [mine] * size, rtol=0, atol=0)
            assert sum(bool(branch.bias.grad) for branch in model.branches) == min(size, 3)


def test_backward_passes_of_two_models_in_another_order_on_each_rank() -> None:
    """A model that a rank's pass does not reach is averaged with what that rank has already."""
    models = [unidist.replicate(seeded(Parts)) for _ in range(2)]
    expected = mean_gradient(seeded(Parts), parts_loss)
    for _ in range(2):
        for model in models:
            model.zero_grad()
        for turn in range(2):
            which = (unidist.rank() + turn) % 2
            ((which + 1) * models[which].loss(unidist.rank())).backward()
        for number, model in enumerate(models):
            assert_gradient(model, [(number + 1) * grad for grad in expected])


def test_a_pass_that_reaches_a_model_on_some_ranks_only() -> None:
    size, rank = unidist.world_size(), unidist.rank()
    first, second = (unidist.replicate(seeded(Parts)) for _ in range(2))
    for _ in range(2):
        first.zero_grad(), second.zero_grad()
        loss = first.loss(rank)
        if rank == size - 1:
            loss = loss + second.loss(rank)
        loss.backward()
        assert_gradient(first, mean_gradient(seeded(Parts), parts_loss))
        alone = seeded(Parts)
        (alone.loss(size - 1) / size).backward()
        assert_gradient(second, [p.grad for p in alone.parameters() if p.grad is not None])


def test_parts_that_live_longer_than_the_model() -> None:
    def build() -> list[nn.Module]:
        return list(unidist.replicate(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))))

    torch.manual_seed(3)
    parts = build()
    alone = copy.deepcopy(nn.Sequential(*parts))
    nn.Sequential(*parts)(inputs_of(unidist.rank())).sum().backward()
    assert_gradient(nn.Sequential(*parts), mean_gradient(alone, lambda model, rank: model(inputs_of(rank)).sum()))


def test_models_that_are_trained_in_turns() -> None:
    generator, judge = (unidist.replicate(seeded(lambda: nn.Linear(3, 3))) for _ in range(2))

    def loss(model: nn.Module, rank: int) -> Tensor:
        result: Tensor = judge(model(inputs_of(rank))).pow(2).sum()
        return result

    plain = copy.deepcopy(judge)
    for _ in range(2):
        generator.zero_grad()
        judge.requires_grad_(False)
        loss(generator, unidist.rank()).backward()
        judge.requires_grad_(True)
        assert all(p.grad is None for p in judge.parameters())
        judge_loss: Tensor = judge(generator(inputs_of(unidist.rank())).detach()).pow(2).sum()
        judge_loss.backward()
        expected = mean_gradient(plain, lambda model, rank: model(generator(inputs_of(rank)).detach()).pow(2).sum())
        assert_gradient(judge, expected)
        judge.zero_grad()


def test_no_sync_accumulates() -> None:
    model = unidist.replicate(seeded(Parts))
    for _ in range(2):
        model.zero_grad()
        with unidist.no_sync(model):
            model.loss(unidist.rank()).backward()
            model.loss(unidist.rank()).backward()
        model.loss(unidist.rank()).backward()
        assert_gradient(model, [3 * grad for grad in mean_gradient(seeded(Parts), parts_loss)])


def test_no_sync_of_a_wrapped_model_and_of_none() -> None:
    model = unidist.wrap_model(seeded())
    with unidist.no_sync(model):
        loss_of(model, unidist.rank()).backward()
    loss_of(model, unidist.rank()).backward()
    assert_gradient(model, [2 * grad for grad in mean_gradient(seeded(), loss_of)])
    compiled = torch.compile(unidist.replicate(seeded()), backend="eager")
    replicated = unidist.replicate(torch.compile(seeded(), backend="eager"))
    with unidist.no_sync(compiled), unidist.no_sync(replicated):
        loss_of(replicated, unidist.rank()).backward()
    with unidist.join(compiled, replicated):
        pass
    loss_of(replicated, unidist.rank()).backward()
    assert_gradient(replicated, [2 * grad for grad in mean_gradient(seeded(), loss_of)])
    with pytest.raises(ValueError, match=r"by unidist\.replicate"):
        unidist.wrap_model(unidist.unwrap(replicated))
    with pytest.raises(ValueError, match=r"no_sync\(Linear\).*replicate"), unidist.no_sync(seeded()):
        pass


def test_several_passes_for_one_step_each_average() -> None:
    model = unidist.replicate(seeded(Parts))
    for _ in range(2):
        model.zero_grad()
        for passes in (1, 2, 3):
            model.loss(unidist.rank()).backward()
            assert_gradient(model, [passes * grad for grad in mean_gradient(seeded(Parts), parts_loss)])


@pytest.mark.parametrize("whole", [True, False])
def test_training_goes_on_after_a_backward_pass_that_failed(whole: bool) -> None:
    model = unidist.replicate(seeded(Parts))

    def fail(_: Tensor) -> None:
        raise ArithmeticError("on purpose")

    hidden = model.a(inputs_of(unidist.rank()))
    if whole:  # no gradient has been accumulated yet
        hidden = model.b(hidden)
        hidden.register_hook(fail)
        loss = hidden.pow(2).sum()
    else:
        hidden.register_hook(fail)
        loss = model.b(hidden.tanh()).pow(2).sum()
    with pytest.raises(ArithmeticError, match="on purpose"):
        loss.backward()
    for _ in range(2):
        model.zero_grad()
        model.loss(unidist.rank()).backward()
        assert_gradient(model, mean_gradient(seeded(Parts), parts_loss))


def test_a_pass_that_failed_after_its_first_reductions() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            raise ArithmeticError("on purpose")

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 600), nn.Linear(600, 600), nn.Linear(600, 1))

    model = unidist.replicate(seeded(make), bucket_cap_mb=1)
    for _ in range(3):
        with pytest.raises(ArithmeticError, match="on purpose"):
            model[1:](Fails.apply(model[0](inputs_of(unidist.rank())))).pow(2).sum().mul(7).backward()  # type: ignore[operator, index, no-untyped-call]
        model.zero_grad()
        loss_of(model, unidist.rank()).backward()
        assert_gradient(model, mean_gradient(seeded(make), loss_of))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_everything_checkpointed(use_reentrant: bool) -> None:
    def loss(model: nn.Module, rank: int) -> Tensor:
        assert isinstance(model, Parts)
        hidden = checkpoint(model.a, inputs_of(rank).requires_grad_(), use_reentrant=use_reentrant)
        total: Tensor = checkpoint(model.b, hidden.tanh(), use_reentrant=use_reentrant).pow(2).sum()
        return total

    model = unidist.replicate(seeded(Parts))
    for _ in range(2):
        model.zero_grad()
        loss(model, unidist.rank()).backward()
        assert_gradient(model, mean_gradient(seeded(Parts), loss))


@pytest.mark.parametrize("keep", [lambda grads: grads, lambda grads: [grads[0].detach()]], ids=["all", "memory of one"])
def test_gradients_that_somebody_keeps_stay_as_they_are(keep: Callable[[list[Any]], list[Any]]) -> None:
    model = unidist.replicate(seeded(Parts))
    model.loss(unidist.rank()).backward()
    kept = keep([p.grad for p in model.parameters()])
    before = [grad.clone() for grad in kept]
    model.zero_grad()
    (model.loss(unidist.rank()) * 5).backward()
    torch.testing.assert_close(kept, before, rtol=0, atol=0)


def test_a_gradient_that_is_accumulated_beside_a_new_one() -> None:
    def make() -> nn.Module:
        return nn.Linear(3, 1)

    model = unidist.replicate(seeded(make))
    loss_of(model, unidist.rank()).backward()
    model.bias.grad = None
    loss_of(model, unidist.rank()).backward()
    weight, bias = mean_gradient(seeded(make), loss_of)
    torch.testing.assert_close([model.weight.grad, model.bias.grad], [2 * weight, bias], rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("graph", [False, True])
def test_a_large_parameter_that_one_rank_uses(graph: bool) -> None:
    """It is reduced alone, where autograd has put its gradient, unless that has a graph; zeros where there is none."""
    model = unidist.replicate(nn.ParameterList([torch.full((1024, 1025), 3.0), torch.ones(2)]))
    loss = model[1].sum() + (model[0].square().sum() if unidist.rank() == 0 else 0)
    loss.backward(create_graph=graph)
    assert model[0].grad is not None
    torch.testing.assert_close(model[0].grad.detach(), torch.full((1024, 1025), 6.0 / unidist.world_size()))
    model.zero_grad()


@pytest.mark.parametrize("compression", [None, "fp16", "bf16"])
def test_dtypes_and_compression(compression: Any) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kinds = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64)
            self.parts = nn.ParameterList(nn.Parameter(torch.ones(3, dtype=kind)) for kind in kinds)

    model = unidist.replicate(Mixed(), compression=compression)
    scale = float(unidist.rank() + 1)
    torch.stack([(part * scale).sum().real.double() for part in model.parts]).sum().backward()
    mean = sum(range(1, unidist.world_size() + 1)) / unidist.world_size()
    for part in model.parts:
        assert part.grad is not None and part.grad.dtype == part.dtype
        torch.testing.assert_close(part.grad, torch.full_like(part, mean), rtol=1e-2, atol=1e-2)


def test_a_model_that_is_converted_afterwards() -> None:
    model = unidist.replicate(seeded(Parts))
    model.loss(unidist.rank()).backward()
    model.zero_grad()
    model.double()
    inputs = inputs_of(unidist.rank()).double()
    model.b(model.a(inputs).tanh()).pow(2).sum().backward()
    for param, grad in zip(model.parameters(), mean_gradient(seeded(Parts), parts_loss)):
        assert param.grad is not None
        torch.testing.assert_close(param.grad, grad.double(), rtol=1e-5, atol=1e-6)


def test_gradients_that_are_given_other_memory_are_averaged_all_the_same() -> None:
    def clip(model: nn.Module) -> None:
        for param in model.parameters():
            assert param.grad is not None
            param.grad.data = param.grad.data.clamp(-1, 1)

    for make_parallel in (unidist.replicate, unidist.wrap_model):
        for change in (clip, lambda model: model.double().float()):
            model = make_parallel(nn.Linear(3, 1))
            for step in range(3):
                inputs = inputs_of(unidist.rank())
                model.zero_grad(set_to_none=step == 1)
                model(inputs).pow(2).sum().backward()
                for param in model.parameters():  # whose gradients nobody keeps
                    assert param.grad is not None and torch.equal(param.grad, unidist.broadcast(param.grad))
                if make_parallel is unidist.replicate or change is clip:
                    change(model)


def test_sparse_gradients() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.dense = nn.Embedding(7, 2, sparse=True), nn.Linear(2, 1)

    def loss(model: nn.Module, rank: int) -> Tensor:
        assert isinstance(model, Words)
        result: Tensor = model.dense(model.table(torch.tensor([rank % 7, 3]))).pow(2).sum()
        return result

    model = unidist.replicate(seeded(Words))
    for _ in range(2):
        model.zero_grad()
        loss(model, unidist.rank()).backward()
        for param, grad in zip(model.parameters(), mean_gradient(seeded(Words), loss)):
            assert param.grad is not None
            torch.testing.assert_close(param.grad.to_dense(), grad.to_dense())


def test_clipping_and_loss_scaling_see_averages() -> None:
    model, alone = unidist.replicate(seeded(Parts)), seeded(Parts)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = mean_gradient(alone, parts_loss)
    norm = torch.stack([grad.norm() for grad in expected]).norm()
    scaler.scale(model.loss(unidist.rank())).backward()  # type: ignore[no-untyped-call]
    scaler.unscale_(optimizer)
    torch.testing.assert_close(nn.utils.clip_grad_norm_(model.parameters(), 0.1), norm)


def test_a_parameter_that_is_unfrozen_later_is_an_error_until_replicated_again() -> None:
    model = seeded(Parts)
    model.a.requires_grad_(False)
    unidist.replicate(model)
    model.loss(unidist.rank()).backward()
    assert model.a.weight.grad is None
    model.a.requires_grad_(True)
    with pytest.raises(unidist.UnidistError, match=r"2 parameters, 'a.weight' the first.*unidist.replicate"):
        model.loss(unidist.rank()).backward()
    model.zero_grad()
    unidist.replicate(model)
    model.loss(unidist.rank()).backward()
    assert_gradient(model, mean_gradient(seeded(Parts), parts_loss))


def test_copies_are_plain_models() -> None:
    model = unidist.replicate(seeded(Parts))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        if unidist.rank() == 0:  # its backward pass averages nothing, and waits for nobody
            other.loss(0).backward()
            alone = seeded(Parts)
            alone.loss(0).backward()
            assert_gradient(other, [p.grad for p in alone.parameters() if p.grad is not None])
    model.loss(unidist.rank()).backward()
    assert_gradient(model, mean_gradient(seeded(Parts), parts_loss))


@pytest.mark.usefixtures("no_collector")
def test_a_replicated_model_is_freed() -> None:
    model = unidist.replicate(seeded())
    for _ in range(2):
        loss_of(model, unidist.rank()).backward()
    module, weight = weakref.ref(model), weakref.ref(model.weight)
    del model
    assert module() is None and weight() is None


def test_a_group_of_its_own() -> None:
    rank, size = unidist.rank(), unidist.world_size()
    groups = [unidist.new_group(range(half, size, 2)) for half in range(min(2, size))]
    group = groups[rank % 2]
    model = unidist.replicate(nn.Linear(1, 1, bias=False), group=group)
    model(torch.tensor([[float(rank)]])).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.item() == pytest.approx(sum(group.ranks) / len(group.ranks))


def test_join() -> None:
    """Rank r makes r + 1 steps; a rank that has none left counts as zero."""
    size = unidist.world_size()
    model, alone = unidist.replicate(Branches()), Branches()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
    with pytest.raises(unidist.UnidistError, match=r"inside unidist\.join, which was not given it"), unidist.join():
        model(torch.ones(1, 2), [0]).backward()
    with unidist.join(model, optimizers[0]):
        for step in range(unidist.rank() + 1):
            optimizers[0].zero_grad()
            model(torch.ones(1, 2) * (step + 1), [step % 2]).pow(2).backward()
            optimizers[0].step()
            assert all(p.grad is not None for p in model.parameters())
    for step in range(size):
        optimizers[1].zero_grad()
        (alone(torch.ones(1, 2) * (step + 1), [step % 2]).pow(2) * (size - step) / size).backward()
        optimizers[1].step()
    assert_same(model, alone, rtol=1e-5, atol=1e-6)
    unidist.assert_in_sync(model)
    model.zero_grad()
    F.mse_loss(model(torch.ones(1, 2), [unidist.rank() % 3]), torch.tensor(0.0)).backward()
    grads = unidist.all_gather_object([p.grad for p in model.parameters()])
    torch.testing.assert_close(grads, [grads[0]] * size, rtol=0, atol=0)


def test_what_is_refused() -> None:
    model = unidist.replicate(make_model())
    with pytest.raises(ValueError, match=r"Sequential is data-parallel already, by unidist\.replicate"):
        unidist.wrap_model(model)
    with pytest.raises(ValueError, match="shares parameters with a model that is replicated"):
        unidist.replicate(nn.Sequential(model[0]))
    with pytest.raises(ValueError, match=r"replicate: this .* is wrapped already: pass its \.module"):
        unidist.replicate(unidist.wrap_model(make_model()))
    with pytest.raises(ValueError, match="replicate: no parameter of this model requires grad"):
        unidist.replicate(make_model().requires_grad_(False))
    with pytest.raises(ValueError, match="compression='fp8' is unknown"):
        unidist.replicate(make_model(), compression="fp8")  # type: ignore[arg-type]


def test_parameters_that_are_replaced_are_an_error_and_those_that_are_converted_are_followed() -> None:
    model = unidist.replicate(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
    model.double()
    model(torch.ones(2, 4, dtype=torch.float64) * (unidist.rank() + 1)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    unidist.assert_in_sync(model)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    with pytest.raises(unidist.UnidistError, match=r"replaced or added after unidist\.replicate"):
        optimizer.step()
    unidist.replicate(model)
    model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("make", [unidist.wrap_model, unidist.replicate], ids=["wrap_model", "replicate"])
@pytest.mark.parametrize("wide", [4, 600], ids=["small", "large"])
def test_hooks_that_change_gradients_change_the_average(make: Callable[[nn.Module], nn.Module], wide: int) -> None:
    """Of one that is registered after the model is made data-parallel, too: it runs after this package's own."""

    def double(param: Tensor) -> None:
        assert param.grad is not None
        if param.dim() == 1:
            param.grad.mul_(2)
        else:
            param.grad = 2 * param.grad

    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(6, wide), nn.Tanh(), nn.Linear(wide, wide), nn.Tanh(), nn.Linear(wide, 1))
    model, alone = make(copy.deepcopy(plain)), plain
    hooks = [param.register_post_accumulate_grad_hook(double) for param in unidist.unwrap(model).parameters()]
    for step in range(3):
        model.zero_grad()
        alone.zero_grad()
        model(my_batch(step)[0]).mean().backward()
        (2 * alone(whole_batch(step)[0]).mean()).backward()
        for mine, expected in zip(model.parameters(), alone.parameters()):
            torch.testing.assert_close(mine.grad, expected.grad)
    assert len(hooks) == 6


@pytest.mark.parametrize("registered", ["before", "after"])
def test_an_optimizer_that_steps_in_a_hook_is_an_error(registered: str) -> None:
    model = make_model()

    def step(param: Tensor) -> None:
        param.grad = None

    def register() -> None:
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(step)

    if registered == "before":
        register()
    unidist.replicate(model)
    if registered == "after":
        register()
    if unidist.world_size() > 1:
        with pytest.raises(unidist.UnidistError, match="a hook has removed the gradient of '4"):
            model(my_batch(0)[0]).sum().backward()
