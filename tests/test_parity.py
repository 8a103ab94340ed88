"""What a training script does, on every backend: the same final weights."""

from pathlib import Path

import pytest
import torch

import unidist
import unidist.testing
from tests.support.parity import CASES
from tests.support.worlds import run_world, shown

TOLERANCE = 1e-5
#: Each rank normalises its own part of the batch, so that one process has other weights.
BETWEEN_BACKENDS = {"BatchNorm, buffers of rank 0"}
#: Horovod on MPI makes the same calls as on Gloo; its weights are compared in test_matrix.py.
BACKENDS = {"gloo": ("torchrun", "gloo"), "horovod": ("horovodrun", "horovod"), "mpi": ("openmpi", "mpi")}
Weights = dict[str, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Weights]:
    """The final weights of every case in every world."""
    directory = tmp_path_factory.mktemp("parity")
    found = {}
    worlds = [("single", "python", "single", 1)]
    worlds += [(label, *how, 3) for label, how in BACKENDS.items()]
    for label, launcher, backend, size in worlds:
        path = directory / f"{label}{size}.pt"
        program = ["-m", "tests.support.parity", str(path)]
        argv = ["-m", "mpi4py", *program] if launcher in ("openmpi", "mpich") else program
        result = run_world(launcher, size, argv, backend=backend, timeout=300)
        assert result.returncode == 0, result.output
        found[label, size] = torch.load(path)
    return found


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max((ours[name].double() - theirs[name].double()).abs().max().item() for name in ours)


@pytest.mark.parametrize("name", CASES)
def test_final_weights_are_the_same(name: str, trained: dict[tuple[str, int], Weights]) -> None:
    figures = []
    for (label, size), weights in trained.items():
        if label == "single":
            continue
        reference = ("gloo", size) if name in BETWEEN_BACKENDS else ("single", 1)
        if (label, size) != reference:
            figures.append(((label, size), distance(weights[name], trained[reference][name])))
    line = "  ".join(f"{label} {size}: {value:.0e}" for (label, size), value in figures)
    beside = "gloo" if name in BETWEEN_BACKENDS else "one process"
    title = "parity: distance of the final weights after 12 steps (limit 1e-5)"
    shown.setdefault(title, []).append(f"{name:47} to {beside:11} {line}")
    assert all(value <= TOLERANCE for _, value in figures), line


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # torch.compile's
@pytest.mark.parametrize("name", CASES)
def test_final_weights_are_the_same_on_threads(name: str) -> None:
    def train() -> dict[str, torch.Tensor]:
        model = CASES[name]()
        unidist.assert_in_sync(model)
        return unidist.unwrap(model).state_dict()

    found = {}
    for size in (1, 2, 3):
        with unidist.testing.world(size) as world:
            found[size] = world.run(train)[0]
    reference = 3 if name in BETWEEN_BACKENDS else 1
    assert all(distance(weights, found[reference]) <= TOLERANCE for size, weights in found.items() if size >= reference)


def test_the_tolerance_tells_training_together_from_training_apart(
    trained: dict[tuple[str, int], Weights], tmp_path: Path
) -> None:
    """A rank that never averages ends farther away, in every case."""
    result = run_world("python", 1, ["-m", "tests.support.parity", str(tmp_path / "apart.pt"), "2"], backend="single")
    assert result.returncode == 0, result.output
    apart = torch.load(tmp_path / "apart.pt")
    together = trained["single", 1]
    assert apart.keys() == together.keys() == CASES.keys()
    distances = {name: distance(apart[name], together[name]) for name in CASES}
    assert all(value > 2 * TOLERANCE for value in distances.values()), distances
