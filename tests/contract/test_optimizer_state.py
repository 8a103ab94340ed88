"""``broadcast_optimizer_state``."""

import copy
import warnings

import pytest
import torch

import unidist
from tests.contract.models import make_model
from unidist.context import current


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


def test_state_of_many_parameters_goes_in_few_broadcasts(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [torch.nn.Parameter(torch.full((3 + i % 2,), 1.0 + unidist.rank())) for i in range(100)]
    params += [torch.nn.Parameter(torch.ones(2, 3).t())]
    optimizer = torch.optim.AdamW(params)
    for param in params:
        param.grad = param.detach().clone()
    optimizer.step()
    backend, calls = current(), []
    real = backend.broadcast
    monkeypatch.setattr(backend, "broadcast", lambda *args: (calls.append(args), real(*args)))
    unidist.broadcast_optimizer_state(optimizer)
    assert len(calls) <= 4
    for state in optimizer.state.values():
        torch.testing.assert_close(state["exp_avg"], torch.full_like(state["exp_avg"], state["exp_avg"].max()))
    unidist.broadcast_model_state(torch.nn.ParameterList(params))
    assert len(calls) <= 5
    assert all(torch.equal(*pair) for pair in zip(params, unidist.all_gather_object(params)[0]))


def test_broadcast_optimizer_state_before_the_first_step() -> None:
    optimizer = torch.optim.AdamW(make_model().parameters(), lr=0.1 * (unidist.rank() + 1))
    unidist.broadcast_optimizer_state(optimizer)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1) and not optimizer.state


def test_a_model_has_no_optimizer_state() -> None:
    with pytest.raises(TypeError, match=r"takes a torch\.optim\.Optimizer, not Linear: .*broadcast_model_state"):
        unidist.broadcast_optimizer_state(torch.nn.Linear(1, 1))  # type: ignore[arg-type]


def test_broadcast_optimizer_state_mismatch() -> None:
    if unidist.world_size() > 1:
        params = list(make_model().parameters())[: 2 + unidist.rank()]
        with pytest.raises(unidist.MismatchError, match="parameter group 0 has"):
            unidist.broadcast_optimizer_state(torch.optim.SGD(params, lr=0.1))


def test_state_of_another_dtype_than_the_parameter() -> None:
    """Which ``load_state_dict`` rounds to that of the parameter."""
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([param], 0.1, momentum=0.9)
    optimizer.state[param]["momentum_buffer"] = torch.full((2,), 1.0009765625 + unidist.rank())
    unidist.broadcast_optimizer_state(optimizer)
    assert optimizer.state[param]["momentum_buffer"].tolist() == [1.0009765625] * 2
