"""Ranks that run out of data at different steps."""

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import unidist


def make_model(**options: bool) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def steps_of(rank: int) -> int:
    """Each rank has another number of batches; rank 0, whose buffers the others follow, has the fewest."""
    return 1 + 2 * rank


def batch_of(rank: int, step: int) -> Tensor:
    return torch.randn(2 + rank, 3, generator=torch.Generator().manual_seed(100 * rank + step))


def alone(loss: Callable[[nn.Module, int], Tensor], steps: int | None = None) -> nn.Module:
    """One process that takes the steps of all ranks, with the mean of their losses; a rank without data counts 0."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps_of(unidist.world_size() - 1) if steps is None else steps):
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()
    return model


def assert_same_weights(left: nn.Module, right: nn.Module) -> None:
    for p, q in zip(left.parameters(), right.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_gradients_are_the_mean_over_the_whole_world() -> None:
    model = unidist.wrap_model(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for p in model.parameters():  # a step before the block, after which DDP lays out its buckets anew
        assert p.grad is None
    with unidist.join(model, optimizer):
        for step in range(steps_of(unidist.rank())):
            optimizer.zero_grad()
            model(batch_of(unidist.rank(), step)).pow(2).mean().backward()
            optimizer.step()

    def loss(model: nn.Module, step: int) -> Tensor:
        losses = [
            model(batch_of(rank, step)).pow(2).mean() for rank in range(unidist.world_size()) if step < steps_of(rank)
        ]
        return torch.stack(losses).sum() / unidist.world_size()

    assert_same_weights(model, alone(loss))
    unidist.assert_in_sync(model)
    states = unidist.all_gather_object(optimizer.state_dict()["state"])
    torch.testing.assert_close(states, [states[0]] * len(states), rtol=0, atol=0)
    # Afterwards the model trains as before.
    optimizer.zero_grad()
    model(torch.full((1, 3), float(unidist.rank()))).sum().backward()
    grads = unidist.all_gather_object([p.grad for p in model.parameters()])
    torch.testing.assert_close(grads, [grads[0]] * len(grads), rtol=0, atol=0)


def test_a_join_after_ordinary_steps() -> None:
    model = unidist.wrap_model(make_model())
    for _ in range(2):
        model(batch_of(0, 0)).sum().backward()
    with unidist.join(model):
        for step in range(unidist.rank()):
            model(batch_of(0, step)).sum().backward()
    model(batch_of(0, 0)).sum().backward()
    unidist.assert_in_sync(model)


def test_global_mean_is_exact_over_all_samples() -> None:
    model = unidist.wrap_model(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with unidist.join(model, optimizer):
        for step in range(steps_of(unidist.rank())):
            optimizer.zero_grad()
            batch = batch_of(unidist.rank(), step)
            unidist.global_mean(model(batch).pow(2).sum(), len(batch)).backward()
            optimizer.step()

    def loss(model: nn.Module, step: int) -> Tensor:
        ranks = [rank for rank in range(unidist.world_size()) if step < steps_of(rank)]
        return model(torch.cat([batch_of(rank, step) for rank in ranks])).pow(2).mean()

    assert_same_weights(model, alone(loss))


def test_accumulation_windows_of_different_numbers() -> None:
    """Micro-batches in ``no_sync`` are nobody else's business: ranks meet at the end of each one's window."""
    model = unidist.wrap_model(nn.Linear(1, 1, bias=False))
    nn.init.zeros_(model.module.weight)
    rank, size = unidist.rank(), unidist.world_size()
    with unidist.join(model):
        for window in range(1 + rank):
            model.zero_grad()
            for _ in range(rank):
                with model.no_sync():
                    model(torch.ones(1, 1)).sum().backward()
            model(torch.ones(1, 1)).sum().backward()
            expected = sum(1 + other for other in range(size) if window <= other) / size
            assert model.module.weight.grad.item() == pytest.approx(expected)


def test_one_backward_pass_of_a_forward_pass_inside_no_sync_and_one_outside() -> None:
    """Whether the gradients are averaged depends on the last forward pass outside ``no_sync`` whose output is
    reached.
    """
    model = unidist.wrap_model(nn.Linear(1, 1, bias=False))
    with unidist.join(model):
        first = model(torch.full((1, 1), unidist.rank() + 1.0))
        with model.no_sync():
            second = model(torch.full((1, 1), unidist.rank() + 1.0))
        (first + second).sum().backward()
        assert model.module.weight.grad.item() == pytest.approx(unidist.world_size() + 1)


def test_a_model_is_freed_after_join() -> None:
    model = unidist.wrap_model(nn.Linear(1, 1))
    with unidist.join(model):
        model(torch.ones(1, 1)).sum().backward()
    dropped = weakref.ref(model)
    gc.collect()
    gc.disable()
    del model
    gc.enable()
    assert dropped() is None


def test_metrics_and_collectives_inside() -> None:
    rank, size = unidist.rank(), unidist.world_size()
    model = unidist.wrap_model(make_model())
    with unidist.join(model):
        for step in range(1 + rank):
            left = [other for other in range(size) if step <= other]
            figures = {"loss": float(rank), "grid": torch.tensor([1.0, float(rank)])}
            mean = unidist.allreduce_metric(figures)
            assert mean["loss"] == pytest.approx(sum(left) / len(left))
            torch.testing.assert_close(mean["grid"], torch.tensor([1.0, sum(left) / len(left)]))
            assert unidist.allreduce_metric(2**60, op="sum") == 2**60 * len(left)
            assert unidist.allreduce_metric(rank, op="min") == left[0]
            assert unidist.allreduce_metric(float(rank), op="max") == left[-1]
            assert unidist.all_reduce(torch.tensor([2.0])).item() == 2.0 * len(left)
            assert unidist.all_reduce(torch.tensor([2], dtype=torch.int16), "product").item() == 2 ** len(left)
            assert unidist.all_reduce(torch.tensor([rank - 5], dtype=torch.int64), "max").item() == left[-1] - 5
            assert unidist.all_reduce(torch.tensor([rank + 5.0]), "min").item() == left[0] + 5
            assert not unidist.all_reduce(torch.tensor(rank != left[-1]), "and").item()
            assert unidist.broadcast(torch.tensor(float(rank)), src=size - 1).item() == size - 1
            unidist.barrier()


def test_buffers_follow_a_rank_that_still_has_data() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model = unidist.wrap_model(inner)
    with unidist.join(model):
        for _ in range(1 + unidist.rank()):
            model(torch.full((3, 2), unidist.rank() + 1.0)).sum().backward()
    assert inner[1].num_batches_tracked.item() == unidist.world_size()
    means = unidist.all_gather_object(inner[1].running_mean.tolist())
    assert all(mean == means[0] for mean in means)


def test_sync_bn_counts_the_samples_that_are_there() -> None:
    rank, size = unidist.rank(), unidist.world_size()
    model = unidist.wrap_model(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), sync_bn=True)
    reference = copy.deepcopy(model.module[0]), nn.BatchNorm1d(2)
    with unidist.join(model):
        for step in range(1 + rank):
            output = model(batch_of(rank, step))
            everyone = torch.cat([batch_of(other, step) for other in range(size) if step <= other])
            expected = reference[1](reference[0](everyone))
            start = sum(2 + other for other in range(step, rank))
            torch.testing.assert_close(output, expected[start : start + 2 + rank], rtol=1e-4, atol=1e-5)
            output.sum().backward()


def test_unused_parameters_and_two_models() -> None:
    rank, size = unidist.rank(), unidist.world_size()
    first = unidist.wrap_model(
        nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(3)), find_unused_parameters=True
    )
    first.module.forward = lambda x, used: sum(first.module[i](x) for i in used)
    second = unidist.wrap_model(nn.Linear(1, 1, bias=False))
    with unidist.join(first, second):
        for step in range(1 + rank):
            left = [other for other in range(size) if step <= other]
            first.zero_grad(), second.zero_grad()
            first(torch.ones(1, 1), [0, 1] if rank == size - 1 else [0]).sum().backward()
            second(torch.ones(1, 1)).sum().backward()
            grads = [branch.weight.grad for branch in first.module]
            assert grads[0].item() == pytest.approx(len(left) / size) and grads[1].item() == pytest.approx(1 / size)
            assert (grads[2] is None) and second.module.weight.grad.item() == pytest.approx(len(left) / size)


def test_a_group_of_its_own() -> None:
    rank, size = unidist.rank(), unidist.world_size()
    group = [unidist.new_group(range(half, size, 2)) for half in range(min(2, size))][rank % 2]
    model = unidist.wrap_model(nn.Linear(1, 1, bias=False), group=group)
    if size > 1:
        with pytest.raises(ValueError, match=r"is data-parallel over \[.*\]; pass its group"), unidist.join(model):
            pass
    with unidist.join(model, group=group):
        for step in range(1 + rank):
            left = [other for other in group.ranks if step <= other]
            model.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            assert model.module.weight.grad.item() == pytest.approx(len(left) / len(group.ranks))
            if len(group.ranks) > 1:
                with pytest.raises(unidist.UnidistError, match="calls inside the block must use its group"):
                    unidist.all_reduce(torch.ones(1))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch.compile imports it
def test_what_is_refused() -> None:
    model = unidist.wrap_model(make_model())
    with pytest.raises(TypeError, match="not int"), unidist.join(3):
        pass
    with pytest.raises(TypeError, match=r"given to unidist\.replicate; a copy"), unidist.join(model.module):
        pass
    with (
        pytest.raises(ValueError, match="static_graph"),
        unidist.join(unidist.wrap_model(make_model(), static_graph=True)),
    ):
        pass
    unknown = pytest.raises(unidist.UnidistError, match=r"which was not given it: unidist.join\(model, \.\.\.\)")
    with unidist.join(), unknown:
        model(batch_of(0, 0))
    with pytest.raises(TypeError, match=r"wrap_model\(torch.compile\(model\)\)"), unidist.join(torch.compile(model)):
        pass
    refused = pytest.raises(unidist.UnidistError, match=r"all_gather, or an .*move it out of the block")
    with unidist.join(model), refused:
        unidist.all_gather_object(1)
    if unidist.world_size() == 1:
        return
    expected = r"rank 0 called all_reduce \(sum\) of 1 torch.float32, and rank 1"
    with pytest.raises(unidist.MismatchError, match=expected), unidist.join(model):
        unidist.all_reduce(torch.ones(1 if unidist.rank() == 0 else 2))
    expected = r"rank 0 called broadcast from rank 0 of \d+ torch.uint8, and rank 1 broadcast from rank 1 of"
    with pytest.raises(unidist.MismatchError, match=expected), unidist.join(model):
        unidist.broadcast(torch.ones(1), src=min(unidist.rank(), 1))
    assert unidist.all_reduce(torch.ones(1)).item() == unidist.world_size()


class Output:
    """Hides its tensors from whoever looks for them."""

    __slots__ = ("logits",)

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Hiding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = make_model()

    def forward(self, x: Tensor) -> Output:
        return Output(self.body(x))


def test_a_model_whose_output_hides_its_tensors() -> None:
    model = unidist.wrap_model(Hiding())
    with unidist.join(model):
        for _ in range(2):
            model.zero_grad()
            model(batch_of(unidist.rank(), 0)).logits.sum().backward()
    grads = unidist.all_gather_object([p.grad for p in model.parameters()])
    torch.testing.assert_close(grads, [grads[0]] * len(grads), rtol=0, atol=0)


def test_gradients_of_the_input_alone_are_local() -> None:
    """Saliency maps and gradient penalties: no parameter is reached, nothing is averaged, inside a join and outside."""
    model = unidist.wrap_model(make_model())
    x = batch_of(0, 0).requires_grad_()
    for block in (contextlib.nullcontext(), unidist.join(model)):
        with block:
            for _ in range(2):
                (grad,) = torch.autograd.grad(model(x).sum(), x)
                assert grad.abs().sum() > 0
            model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_nothing_to_do() -> None:
    with unidist.join():
        pass
    assert unidist.all_gather_object(1) == [1] * unidist.world_size()
