"""``unidist compare``: its usage, the recorder, and the comparison."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.worlds import ROOT
from unidist.compare.comparison import Comparison, Side, notes, verdict
from unidist.compare.difference import Difference, Tolerance, differences, drift, match
from unidist.compare.naming import names
from unidist.compare.recorder import Recorder
from unidist.compare.recording import OptimizerRecord, RankRecord, Recording, read
from unidist.compare.series import final, largest, points
from unidist.compare.sketch import distances, gap, gaps, sketches

LEGACY, PROGRAMS = ROOT / "tests/legacy", ROOT / "tests/programs"
pytestmark = pytest.mark.unit
CLOSE = Tolerance(1e-4, 1e-6)


# ------------------------------------------------------------------------------------ the command
def test_wrong_usage(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from unidist.cli import main

    script = str(LEGACY / "plain.py")
    for argv, message in [
        (["no.py"], "'no.py' does not exist"),
        ([script, "--left", "smoke"], "'smoke' is"),
        ([script, "--left", "gloo@smoke"], "'smoke' is"),
        ([script, "--right", "drop-in:horovod"], "the drop-in replaces Horovod"),
        ([script, "--json", f"{tmp_path}/no/x.json"], "is not a directory: create it first"),
        ([script, "--plot", "x.txt"], "must end in .png"),
        ([script, "-np", "0"], "0 is not in the range"),
        (["--", script], "Missing argument 'LEFT.py'"),
    ]:
        done = CliRunner().invoke(main, ["compare", *argv])
        assert done.exit_code == 2 and message in done.output, done.output
    if torch.cuda.device_count() < 2:
        done = CliRunner().invoke(main, ["compare", script, "--left", "nccl"])
        assert (
            done.exit_code == 1
            and "the left side (nccl under torchrun) cannot run here: 2 ranks on nccl" in done.output
        )


def test_a_plot_needs_matplotlib_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from unidist.cli import compare as module

    assert module._plot_path(None) == Path("compare.png")
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert module._plot_path(None) is None
    with pytest.raises(module.click.UsageError, match="pip install 'unidist-torch"):
        module._plot_path(Path("x.png"))


# ------------------------------------------------------------------------------------ the recorder
def model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def train(
    change: Callable[[int, nn.Module], None] = lambda step, net: None,
    steps: int = 5,
    lr: float = 0.1,
    factor: float = 1.0,
) -> None:
    """A small training; ``change`` may touch the model between backward and step."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    draw = torch.Generator().manual_seed(1)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        (net(torch.randn(6, 3, generator=draw) * factor).square().mean()).backward()
        change(step, net)
        optimizer.step()


def record(directory: Path, script: Callable[[], None], limit: int | None = None, undo_idle: bool = False) -> Recording:
    directory.mkdir(exist_ok=True)
    with Recorder(directory, 0, limit, undo_idle):
        script()
    return read(directory, 1)


def first(tmp_path: Path, left: Callable[[], None], right: Callable[[], None]) -> Difference | None:
    sides = record(tmp_path / "left", left), record(tmp_path / "right", right)
    return next(differences(*sides, CLOSE), None)


def test_the_first_difference_is_named(tmp_path: Path) -> None:
    def change(at: int, touch: Callable[[nn.Module], None]) -> Callable[[], None]:
        def at_step(step: int, net: nn.Module) -> None:
            if step == at:
                with torch.no_grad():
                    touch(net)

        return lambda: train(at_step)

    def swap(net: nn.Module) -> None:
        weight = net[0].weight  # type: ignore[index]
        weight[0, 0], weight[1, 1] = weight[1, 1].clone(), weight[0, 0].clone()

    assert first(tmp_path, train, train) is None
    for right, kind, step, parameter in [
        (lambda: train(lr=0.11), "weights", 1, None),
        (lambda: train(factor=1.01), "loss", 1, None),
        (change(3, lambda net: net[0].weight.grad.mul_(1.01)), "gradient", 3, "0.weight"),  # type: ignore[index]
        (change(3, lambda net: net[2].bias.add_(1e-3)), "weights", 3, "2.bias"),  # type: ignore[index]
        (change(2, swap), "weights", 2, "0.weight"),
        (change(4, lambda net: net[2].bias.fill_(torch.nan)), "weights", 4, "2.bias"),  # type: ignore[index]
        (lambda: train(steps=7), "steps", 6, None),
        (lambda: train(steps=3), "steps", 4, None),
    ]:
        found = first(tmp_path, train, right)
        assert found and (found.kind, found.step) == (kind, step), found
        assert found.parameter == parameter or not parameter


def test_what_is_different_before_the_first_step_and_after_the_last(tmp_path: Path) -> None:
    def other(net: nn.Module, kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> None:
        kept.append(net)
        optimizer = kind(net.parameters(), lr=0.1)  # type: ignore[call-arg]
        net(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    def shifted(by: float) -> nn.Module:
        net = model()
        with torch.no_grad():
            net[0].bias[2] += by
        return net

    def late() -> None:
        other(model())
        with torch.no_grad():
            kept[-1][2].weight[0, 0] += 0.5

    kept: list[Any] = []
    found = first(tmp_path, lambda: other(model()), lambda: other(shifted(0.01)))
    assert found and (found.kind, found.step, found.parameter) == ("start", 0, "0.bias")
    assert first(tmp_path, lambda: other(model()), lambda: other(shifted(1e-7))) is None
    found = first(tmp_path, lambda: other(model()), late)
    assert found and (found.kind, found.parameter) == ("final", "2.weight")
    ends = final(read(tmp_path / "left", 1), read(tmp_path / "right", 1))
    assert ends and ends.most == pytest.approx(0.5) and ends.parameter == "2.weight"
    found = first(tmp_path, lambda: other(model()), lambda: other(nn.Linear(3, 1)))
    assert found and (found.kind, found.parameter, found.left, found.right) == ("parameters", "0.weight", 12, 0)
    assert final(read(tmp_path / "left", 1), read(tmp_path / "right", 1)) is None
    found = first(tmp_path, lambda: other(model()), lambda: other(model(), torch.optim.Adam))
    assert found and (found.kind, found.step) == ("weights", 1)


def test_optimizers_in_turn_and_losses_between_steps(tmp_path: Path) -> None:
    def gan(second_first: bool = False) -> None:
        nets = model(), model()
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
        for step in range(3):
            for net, optimizer in list(zip(nets, optimizers))[:: -1 if second_first and step else 1]:
                optimizer.zero_grad()
                for _ in range(2):
                    (net(torch.ones(1, 3)) / 2).sum().backward()
                optimizer.step()

    found = record(tmp_path / "a", gan)
    (rank,) = found.ranks
    assert [step.optimizer for step in rank.steps] == [0, 1] * 3 and {len(step.losses) for step in rank.steps} == {2}
    assert found.loss(0) == pytest.approx(sum(rank.steps[0].losses))
    assert [list(trained.names) for trained in rank.optimizers] == [["0.weight", "0.bias", "2.weight", "2.bias"]] * 2
    first = next(differences(found, record(tmp_path / "b", lambda: gan(True)), CLOSE))
    assert (first.kind, first.step, first.left, first.right) == ("order", 3, 0, 1)


def test_steps_that_do_not_train(tmp_path: Path) -> None:
    """Horovod's step with zeros; the one that a scaler leaves out; one inside another; one inside backward."""
    net = model()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    class Outer(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    def script() -> None:
        optimizer = Outer(net.parameters(), lr=0.1)
        for param in net.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()
        for factor in (1.0, torch.inf, 1.0):
            optimizer.zero_grad()
            scaler.scale((net(torch.ones(1, 3)) * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        hook = net[0].weight.register_hook(lambda grad: optimizer.step())
        net(torch.ones(1, 3)).sum().backward()
        hook.remove()
        optimizer.step(lambda: net(torch.ones(1, 3)).sum().backward())

    torch.optim.SGD(model().parameters())  # its step is hooked, as well as that of the class above
    (rank,) = record(tmp_path / "a", script).ranks
    assert rank.idle == 1 and [len(step.losses) for step in rank.steps] == [1, 2, 2]
    assert abs(rank.steps[0].losses[0]) < 2  # not times 64


def test_names_are_the_models_own() -> None:
    net = model()
    wrapped = nn.ModuleDict({"module": nn.ModuleDict({"module": net})})
    groups = [{"params": net[2].parameters()}, {"params": [*net[0].parameters(), nn.Parameter(torch.ones(1))]}]
    assert names(torch.optim.SGD(groups)) == ["2.weight", "2.bias", "0.weight", "0.bias", "group 1, number 2"]
    del wrapped
    twins = model(), model()
    assert names(torch.optim.SGD([param for net in twins for param in net[2].parameters()], lr=1.0)) == [
        "2.weight",
        "2.bias",
        "2.weight #2",
        "2.bias #2",
    ]


def test_the_script_is_not_disturbed(tmp_path: Path) -> None:
    before, exit_, scale = torch.autograd.backward, os._exit, torch.amp.GradScaler.scale
    torch.manual_seed(0)
    train()
    expected = torch.rand(3)
    torch.manual_seed(0)
    with pytest.raises(SystemExit) as ended:
        record(tmp_path / "a", train, limit=2)
    assert ended.value.code == 0 and len(read(tmp_path / "a", 1).ranks[0].steps) == 2
    torch.manual_seed(0)
    record(tmp_path / "a", train)
    assert torch.equal(torch.rand(3), expected)
    assert (torch.autograd.backward, os._exit, torch.amp.GradScaler.scale) == (before, exit_, scale)


# ------------------------------------------------------------------------------------ the comparison
def distance(left: torch.Tensor, right: torch.Tensor) -> float:
    return distances(left.unsqueeze(0), right.unsqueeze(0)).item()


def test_sketches_estimate_distances() -> None:
    draw = torch.Generator().manual_seed(0)
    for shape in [(1,), (3,), (40, 50), (70_000,)]:
        a, d = torch.randn(shape, generator=draw), 1e-5 * torch.randn(shape, generator=draw)
        mine, other = sketches([a, a + d])
        assert 0.3 < distance(mine, other) / d.norm().item() < 3
        assert distance(mine, mine) == 0 and mine[0].item() == pytest.approx(a.norm().item())
    for shape in [(4,), (200, 200)]:
        a = torch.randn(shape, generator=draw)
        one, moved = a.clone(), a.flip(0)
        one.view(-1)[2] += 0.01
        mine, *others = sketches([a, one, moved])
        assert distance(mine, others[0]) == pytest.approx(0.01, rel=0.5) and distance(mine, others[1]) > 0.1
    none, zeros, sparse = sketches([None, torch.zeros(3), torch.eye(3).to_sparse()])
    assert torch.equal(none, zeros) and torch.equal(sparse, sketches([torch.eye(3)])[0])
    assert sketches([torch.zeros(0)])[0][0] == 0 and sketches([torch.tensor([3 + 4j])])[0][0].item() == pytest.approx(5)
    assert sketches([]).shape == (0, 5)
    nan = float("nan")
    pairs = [(nan, nan), (nan, 1.0), (torch.inf, torch.inf), (2.0, 1.0), (torch.inf, 1.0), (torch.inf, -torch.inf)]
    between = [0, torch.inf, 0, 1, torch.inf, torch.inf]
    assert [gap(*pair) for pair in pairs] == between
    assert gaps(*torch.tensor(pairs, dtype=torch.float64).T).tolist() == between


def test_sketches_of_many_tensors_are_those_of_each() -> None:
    """Of other sizes, dtypes and layouts, in any order."""
    draw = torch.Generator().manual_seed(0)
    tensors: list[torch.Tensor | None] = [torch.randn(size, generator=draw) for size in (5, 70_000, 1, 0, 5, 33_000, 5)]
    tensors += [None, torch.eye(3).to_sparse(), torch.ones(5, dtype=torch.float64), torch.tensor([1 + 2j]), None]
    tensors += [torch.randn(8, 9, generator=draw).T, *torch.randn(300, 500, generator=draw)]
    tensors += [torch.ones(5, dtype=torch.bfloat16), torch.randn(5, generator=draw).requires_grad_()]
    together = sketches(tensors)
    for tensor, row in zip(tensors, together, strict=True):
        assert torch.allclose(sketches([tensor])[0], row, rtol=1e-13, atol=0)
    turned = sketches(tensors[::-1]).flip(0)
    assert torch.equal(turned, together)


def test_a_record_of_a_step_is_small(tmp_path: Path) -> None:
    """The names are in the file once; float64 parameters keep their precision."""
    sizes = {}
    for dtype in (torch.float32, torch.float64):
        params = [nn.Parameter(torch.randn(3, 4, dtype=dtype)) for _ in range(100)]

        def script(params: list[nn.Parameter] = params) -> None:
            optimizer = torch.optim.SGD(params, lr=0.1)
            for _ in range(3):
                sum(param.square().sum() for param in params).backward()  # type: ignore[union-attr]
                optimizer.step()

        found = record(tmp_path / str(dtype), script)
        assert torch.equal(found.ranks[0].steps[-1].weights, sketches(params).to(dtype))
        lines = (tmp_path / str(dtype) / "rank-0.records").read_bytes()
        sizes[dtype] = len(lines) - lines.index(b'{"optimizer"')
    assert sizes[torch.float32] < 3 * (2 * 100 * 5 * 4 + 150) < sizes[torch.float64] < 3 * (2 * 100 * 5 * 8 + 150)


def test_parameters_that_are_added_later(tmp_path: Path) -> None:
    def script() -> None:
        net, more = model(), nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(3):
            (net(torch.ones(1, 3)).sum() + more.sum()).backward()
            optimizer.step()
            if step == 0:
                optimizer.add_param_group({"params": [more]})

    assert first(tmp_path, script, script) is None
    (rank,) = read(tmp_path / "left", 1).ranks
    assert [len(each.names) for each in rank.optimizers] == [4, 5] and rank.optimizers[1].start[-1, 0] > 1.4


def test_parameters_match() -> None:
    def trained(**shapes: list[int]) -> OptimizerRecord:
        return OptimizerRecord("SGD", list(shapes), list(shapes.values()), torch.zeros(0, 5))

    assert match(trained(a=[2], b=[3]), trained(b=[3], a=[2])) == [1, 0]
    assert match(trained(a=[2], b=[3]), trained(x=[2], y=[3])) == [0, 1]
    assert match(trained(a=[2], b=[3]), trained(a=[2], b=[4])) is None
    assert match(trained(a=[2], b=[3]), trained(x=[3], y=[2])) is None
    assert match(trained(a=[2]), trained(a=[2], b=[3])) is None


def test_several_ranks(tmp_path: Path) -> None:
    """The loss is a mean; weights are compared rank by rank, and with rank 0's."""
    (one,) = record(tmp_path / "a", train).ranks
    (other,) = record(tmp_path / "b", lambda: train(lr=0.2)).ranks
    shorter = RankRecord(one.optimizers, one.steps[:2])
    twice = replace(one.steps[0], losses=[3 * one.steps[0].losses[0]])
    both = Recording([one, RankRecord(one.optimizers, [twice, *one.steps[1:]])])
    assert both.loss(0) == pytest.approx(2 * one.steps[0].losses[0])
    assert next(differences(both, both, CLOSE), None) is None and drift(both, CLOSE) is None
    mixed = Recording([one, other])
    found = next(differences(Recording([one, one]), mixed, CLOSE))
    assert (found.kind, found.step, found.rank) == ("weights", 1, 1)
    apart = drift(mixed, CLOSE)
    assert apart and (apart.step, apart.rank, apart.parameter) == (1, 1, found.parameter)
    uneven = Recording([one, shorter])
    assert next(differences(uneven, uneven, CLOSE), None) is None and drift(uneven, CLOSE) is None
    found = next(differences(Recording([one, one]), uneven, CLOSE))
    assert (found.kind, found.step, found.rank, found.left, found.right) == ("steps", 3, 1, 5, 2)
    # Rank 0 alone trains another model before.
    own = RankRecord(
        [*other.optimizers, *one.optimizers], [*other.steps, *(replace(step, optimizer=1) for step in one.steps)]
    )
    lonely = Recording([own, one])
    assert next(differences(lonely, lonely, CLOSE), None) is None and drift(lonely, CLOSE) is None
    assert len(points(lonely, lonely)) == 10
    series = points(Recording([one, one]), mixed)
    assert len(series) == 5 and largest(series[:1], "loss") == (0.0, 1) and largest([], "loss") is None
    most = largest(series, "weights")
    assert most and most[0] == max(point.apart["weights"] or 0 for point in series)


def test_verdict_and_notes(tmp_path: Path) -> None:
    (one,) = record(tmp_path / "a", train).ranks
    (other,) = record(tmp_path / "b", lambda: train(lr=0.2)).ranks
    lonely = RankRecord([replace(one.optimizers[0], horovod=True)], one.steps, idle=1)
    left = Side("a.py", "horovod", "openmpi", 1.0, Recording([one] * 3))
    right = Side("b.py", "gloo", "torchrun", 1.0, Recording([lonely, lonely, other]))
    found = Comparison(left, right, None, 1e-6)
    assert verdict(found).startswith("DIFFERENT at step 1: weights of ") and "on rank 2" in verdict(found)
    said = "\n".join(notes(found))
    assert "the ranks of the right side drift apart: after step 1" in said and "left side" not in said
    assert "--right drop-in:gloo runs the script on the drop-in" in said and found.side_with_more_idle_steps == "right"
    undone = Comparison(left, replace(right, recording=left.recording), None, 1e-6, with_idle_steps=found)
    assert verdict(undone).startswith("THE SAME BUT FOR A STEP WITH ZERO GRADIENTS: 5 steps")
    assert "with them, DIFFERENT at step 1: weights of " in "".join(notes(undone))
    assert undone.as_json()["idle_steps_undone"] == "right"
    for recording, text in [
        (Recording([RankRecord(one.optimizers, one.steps[:4])] * 3), "the number of steps of rank 0: left 5, right 4"),
        (
            Recording([RankRecord(one.optimizers, [replace(s, losses=[9.0]) for s in one.steps])] * 3),
            "step 1: the loss: left",
        ),
        (
            Recording([RankRecord([replace(one.optimizers[0], shapes=[[9]] * 4)], one.steps)] * 3),
            "elements of 0.weight: left 12",
        ),
    ]:
        found = Comparison(left, replace(right, recording=recording), None, 1e-6)
        assert text in verdict(found), verdict(found)
        json.dumps(found.as_json(), allow_nan=False)


def test_a_step_with_zero_gradients_is_undone(tmp_path: Path) -> None:
    def adam(zeros: bool, loaded: bool = False) -> None:
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        if zeros:  # as Horovod's broadcast_optimizer_state() does
            for param in net.parameters():
                param.grad = torch.zeros_like(param)
            optimizer.step()
        if loaded:
            other = torch.optim.AdamW(net.parameters(), lr=0.1)
            other.load_state_dict(optimizer.state_dict())
            other.state[net[0].bias]["step"] += 7  # type: ignore[index]
            optimizer.load_state_dict(other.state_dict())
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()

    plain = record(tmp_path / "plain", lambda: adam(False))
    for name, undo, same in (("zeros", False, False), ("undone", True, True)):
        side = record(tmp_path / name, lambda: adam(True), undo_idle=undo)
        assert (next(differences(side, plain, CLOSE), None) is None) == same and side.idle == [1]
    sides = [record(tmp_path / f"loaded {undo}", lambda: adam(True, True), undo_idle=undo) for undo in (False, True)]
    first_weights = [side.ranks[0].steps[0].weights - side.ranks[0].optimizers[0].start for side in sides]
    assert torch.allclose(*first_weights, atol=1e-2)  # the state that was loaded stays


def test_the_tolerance_follows_the_dtype(tmp_path: Path) -> None:
    def half() -> None:
        net = model().bfloat16()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()

    sides = [
        Side("a.py", "gloo", "torchrun", 1.0, record(tmp_path / str(number), run))
        for number, run in enumerate((train, half))
    ]
    rtols = [Comparison(side, side, None, 1e-6).tolerance.rtol for side in sides]
    assert rtols == [1e-4, 2 * torch.finfo(torch.bfloat16).eps]
    assert Comparison(sides[1], sides[1], 1e-3, 1e-6).tolerance.rtol == 1e-3


def test_ranks_without_records(tmp_path: Path) -> None:
    record(tmp_path / "a", train)
    with pytest.raises(ValueError, match=r"2 ranks were started, and records exist of ranks \[0\]"):
        read(tmp_path / "a", 2)
