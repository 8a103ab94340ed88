"""``broadcast_optimizer_state``."""

import copy
import warnings

import pytest
import torch

import unidist
from tests.contract.models import make_model


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
