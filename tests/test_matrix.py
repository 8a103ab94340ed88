"""One unmodified script on every launcher and backend: each rank knows its place, and all end with the same weights."""

import re
from pathlib import Path

import pytest
import torch

from tests.support.places import expected, places
from tests.support.worlds import IN_FLOAT64, run_world, shown
from unidist.launchers.table import COMMANDS

TITLE = "matrix: examples/digits.py in float64, distance of the final weights to one process alone"
TOLERANCE = 1e-12
EPOCHS = ("--epochs", "2")
DIGITS = ("tests/programs/place.py", IN_FLOAT64, "examples/digits.py", *EPOCHS)
CELLS = [("python", "gloo", 1), ("python", "mpi", 1)]
CELLS += [(launcher, "gloo", 2) for launcher in COMMANDS]
CELLS += [(launcher, "horovod", 2) for launcher in COMMANDS if not COMMANDS[launcher].drop_in]
CELLS += [(launcher, "mpi", 2) for launcher in COMMANDS if COMMANDS[launcher].mpi]
# For Horovod, these differ from torchrun on one node and horovodrun with a flag in nothing.
CELLS += [("torchrun c10d", "gloo", 2), ("torchrun as torch.distributed.launch", "gloo", 2)]
CELLS += [("torchrun 2 nodes", "gloo", 4), ("torchrun 2 nodes", "horovod", 4)]
CELLS += [("horovodrun-mpi by default", "horovod", 2), ("slurm pmix", "mpi", 2), ("slurm pmi2", "mpi", 2)]
#: Each launcher once.
ONCE = [
    (name, "horovod" if "horovod" in each.package else "mpi" if each.mpi else "gloo", 2)
    for name, each in COMMANDS.items()
]
#: Of them, the one whose processes import PyTorch themselves, as they do in test_launch.py.
FRESH = ("torchrun", "gloo", 2)
#: What ``auto`` picks; elsewhere gloo.
AUTO = {"python": "single", "horovodrun": "horovod", "horovodrun-mpi": "horovod"}
#: Where rank 0's store listens on the address that the others of this host use, and on no other.
LOOPBACK = ("spawn", "horovodrun", "openmpi", "mpich")


Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Weights, int]:
    """The weights of one process that trains on the whole batch, and how many samples it classifies correctly."""
    path = tmp_path_factory.mktemp("alone") / "digits.pt"
    result = run_world("python", 1, [*DIGITS, "--save", str(path)])
    assert result.returncode == 0, result.output
    assert f"1 ranks on single: saved {path}" in result.output
    assert places(result.output) == expected("none", "single", 1)
    return torch.load(path), correct(result.output)


def correct(output: str) -> int:
    """Samples that are classified correctly after the last epoch, of all that there are."""
    return int(re.findall(r"accuracy (\d+)/357", output)[-1])


def distance(weights: Weights, others: Weights) -> float:
    assert weights.keys() == others.keys()
    return max((weights[name] - others[name]).abs().max().item() for name in weights)


@pytest.mark.parametrize(
    ("launcher", "backend", "size"),
    [cell if cell in ONCE else pytest.param(*cell, marks=pytest.mark.variant) for cell in CELLS],
)
def test_digits(
    launcher: str,
    backend: str,
    size: int,
    alone: tuple[Weights, int],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    detected = {"python": "none"}.get(launcher, launcher.split()[0])
    # A proxy that nobody runs is not asked for the launcher's server on this host.
    env = {"http_proxy": "http://127.0.0.1:9"}
    env |= request.getfixturevalue("srun_env") if detected == "slurm" else {}
    path = tmp_path / "digits.pt"
    asked = "auto" if AUTO.get(launcher.split()[0], "gloo") == backend else backend
    result = run_world(
        launcher, size, [*DIGITS, "--save", str(path)], backend=asked, env=env, fresh=(launcher, backend, size) == FRESH
    )
    assert result.returncode == 0, result.output

    assert f"{size} ranks on {backend}: saved {path}" in result.output
    assert places(result.output) == expected(detected, backend, size, nodes=2 if launcher == "torchrun 2 nodes" else 1)
    if launcher in LOOPBACK:
        assert "OPEN TO OTHER HOSTS" not in result.output, result.output
    weights, right = alone
    difference = distance(torch.load(path), weights)
    shown.setdefault(TITLE, []).append(
        f"{launcher:37} {backend:8} {size} ranks: {difference:.1e}, {result.seconds:.0f} s"
    )
    assert difference <= TOLERANCE
    assert correct(result.output) == right
    # One rank speaks.
    assert len(re.findall(r"epoch 2/2", result.output)) == 1


def test_raw_ddp_trains_the_same_model(alone: tuple[Weights, int], tmp_path: Path) -> None:
    """On the same data order, it ends where digits.py does."""
    path = tmp_path / "raw.pt"
    result = run_world("torchrun", 2, [IN_FLOAT64, "examples/digits_ddp.py", *EPOCHS, "--save", str(path)])
    assert result.returncode == 0, result.output
    assert distance(torch.load(path), alone[0]) < TOLERANCE


def test_raw_horovod_trains_the_same_model(alone: tuple[Weights, int], tmp_path: Path) -> None:
    path = tmp_path / "raw.pt"
    argv = [IN_FLOAT64, "examples/digits_horovod.py", *EPOCHS, "--save", str(path)]
    result = run_world("horovodrun", 2, argv, backend="horovod")
    assert result.returncode == 0 and "epoch 2/2" in result.output, result.output
    assert distance(torch.load(path), alone[0]) < TOLERANCE


def test_horovod_without_a_launcher_says_how_to_launch() -> None:
    result = run_world("python", 1, ["examples/digits.py"], backend="horovod")
    assert result.returncode != 0
    assert "horovodrun -np 2 python script.py" in result.output and "torchrun" in result.output
    shown.setdefault(TITLE, []).append("python, horovod: an error that names how to launch")
