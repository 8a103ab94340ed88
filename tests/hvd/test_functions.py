import pytest
import torch
from torch import nn

from tests.hvd.api import REAL, hvd


def other_model(rank: int) -> nn.Module:
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


@pytest.mark.parametrize("how", ["state_dict", "named_list", "list"])
def test_broadcast_parameters(how: str, rank: int, size: int) -> None:
    model, root = other_model(rank), size - 1
    given = {
        "state_dict": model.state_dict(),
        "named_list": list(model.named_parameters()),
        "list": list(model.parameters()),
    }
    hvd.broadcast_parameters(given[how], root_rank=root)
    expected = other_model(root)
    for mine, wanted in zip(model.parameters(), expected.parameters()):
        assert torch.equal(mine, wanted)
    with pytest.raises(ValueError, match=r"params|takes a dict"):
        hvd.broadcast_parameters(model.parameters(), root_rank=root)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 3)).pow(2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_broadcast_optimizer_state(kind: str, wrapped: bool, rank: int, size: int) -> None:
    """State, hyperparameters and step counts of the root."""
    model = other_model(0)
    options = {"lr": 0.1 * (rank + 1), **({"momentum": 0.9} if kind == "SGD" else {})}
    optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
    torch.manual_seed(rank)
    for _ in range(rank + 1):
        train(model, optimizer)
    state = optimizer.state_dict()
    if wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        optimizer.load_state_dict(state)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    mine = torch.cat(
        [
            value.reshape(-1).float()
            for entry in optimizer.state.values()
            for value in entry.values()
            if torch.is_tensor(value)
        ]
    )
    assert torch.equal(hvd.broadcast(mine, 0), mine) and len(mine) > 0


@pytest.mark.skipif(REAL, reason="Horovod's refuses them")
def test_parameters_that_are_none_are_left_out(rank: int) -> None:
    tensor = torch.full((2,), float(rank))
    hvd.broadcast_parameters({"a": None, "b": tensor}, root_rank=0)
    hvd.broadcast_parameters([("a", None), ("b", tensor)], root_rank=0)
    assert not tensor.any()


@pytest.mark.parametrize("wrapped", [True, False])
def test_broadcasting_leaves_zeros_as_gradients(wrapped: bool, rank: int, size: int) -> None:
    """Code that reads ``.grad`` before the first backward pass counts on them."""
    model = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 2), nn.Linear(2, 2).requires_grad_(False))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0, model=model)
    for param in model.parameters():
        assert (param.grad is None) if not param.requires_grad else not param.grad.to_dense().any()
    assert model[0].weight.grad.is_sparse and not model[1].weight.grad.is_sparse
    model(torch.tensor([0, 3])).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_new_optimizer_takes_a_step_with_zero_gradients(wrapped: bool, rank: int, size: int) -> None:
    model = other_model(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    if wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    before = [param.detach().clone() for param in model.parameters()]
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert all(torch.allclose(param, 0.95 * was) for param, was in zip(model.parameters(), before))
    assert {float(entry["step"]) for entry in optimizer.state.values()} == {1.0}


@pytest.mark.skipif(REAL, reason="Horovod decays the weights of the other ranks only")
def test_no_rank_takes_a_step_if_the_root_has_state(rank: int, size: int) -> None:
    model = other_model(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    if rank == 0:
        train(model, optimizer)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    before = [param.detach().clone() for param in model.parameters()]
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert all(torch.equal(param, was) for param, was in zip(model.parameters(), before))


def test_lbfgs_is_refused(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(other_model(0).parameters()), root_rank=0)


@pytest.mark.skipif(REAL, reason="Horovod's takes GPU tensors only")
def test_sync_batch_norm(rank: int, size: int) -> None:
    layer, plain = hvd.SyncBatchNorm(3), nn.BatchNorm1d(3)
    whole = torch.randn(4 * size, 3, generator=torch.Generator().manual_seed(1))
    mine = whole[4 * rank : 4 * rank + 4].clone().requires_grad_()
    everything = whole.clone().requires_grad_()
    out, expected = layer(mine), plain(everything)
    assert torch.allclose(out, expected[4 * rank : 4 * rank + 4], atol=1e-5)
    (out**3).sum().backward()
    (expected**3).sum().backward()
    assert torch.allclose(mine.grad, everything.grad[4 * rank : 4 * rank + 4], atol=1e-4)
    assert torch.allclose(layer.running_var, plain.running_var, atol=1e-5)


@pytest.mark.skipif(REAL, reason="Horovod's takes GPU tensors only")
def test_sync_batch_norm_evaluates_alike(rank: int, size: int) -> None:
    layer = hvd.SyncBatchNorm(3, eps=1e-3, momentum=0.2, affine=False).eval()
    x = torch.randn(2, 3)
    assert torch.allclose(layer(x), x / (1 + 1e-3) ** 0.5)
    with pytest.raises(ValueError, match="2D"):
        layer(torch.ones(3))
