"""``unwrap``, ``assert_in_sync`` and ``global_mean``."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import unidist
from tests.contract.models import Batch, assert_gradient, make_model, my_batch, train
from unidist.collectives.agreement import first_difference


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


def test_equal_bytes_of_another_shape_differ() -> None:
    rank, last = unidist.rank(), unidist.world_size() - 1
    model = nn.Linear(2, 3, bias=False) if rank == last else nn.Linear(3, 2, bias=False)
    nn.init.ones_(model.weight)
    if last:
        with pytest.raises(unidist.MismatchError, match="'weight' of rank 0 differs"):
            unidist.assert_in_sync(model)


def test_the_first_difference_between_lists() -> None:
    rank, last = unidist.rank(), unidist.world_size() - 1
    names = [f"parameter {i}" for i in range(1000)]
    assert first_difference(names) is None and first_difference([]) is None
    assert first_difference([-(2**63), 2**63 - 1]) is None
    if last == 0:
        return
    changed = [*names[:7], "another", *names[8:900]]
    assert first_difference(changed if rank == last else names) == (7, ["parameter 7"] * last + ["another"])
    assert first_difference(names if rank == last else names[:10]) == (10, [None] * last + ["parameter 10"])
    assert first_difference([0, -(2**63)] if rank == last else [0, 2**63 - 1]) == (
        1,
        [2**63 - 1] * last + [-(2**63)],
    )


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
    with pytest.raises(ValueError, match="negative or not finite"):
        unidist.global_mean(nothing, -1 if unidist.rank() == 0 else 5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_sharded_models_are_refused() -> None:
    if not torch.distributed.is_initialized():
        pytest.skip("FSDP2 needs torch.distributed, and this backend does not start it")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(nn.Linear(4, 6), mesh=init_device_mesh("cpu", (unidist.world_size(),)))
    for call in (unidist.wrap_model, unidist.assert_in_sync):
        with pytest.raises(ValueError, match=r"'weight' is a DTensor.*train without wrap_model"):
            call(model)
