"""One unmodified script, every launcher, every engine, the same weights."""

import re
from pathlib import Path

import pytest
import torch

from tests.support.worlds import missing, run_world, shown
from unidist.launchers.table import COMMANDS

TOLERANCE = 1e-5
MPI = ["horovodrun-mpi", "openmpi", "mpich", "slurm pmix", "slurm pmi2"]
MULTI = [*COMMANDS, "torchrun c10d", "torchrun 2 nodes", "torchrun as torch.distributed.launch"]
CELLS = [("python", "single", 1), ("python", "gloo", 1), ("python", "mpi", 1)]
CELLS += [(name, b, 2) for name in MULTI for b in ("gloo", "horovod")] + [(name, "mpi", 2) for name in MPI]
# Horovod sees no difference between the ways to call torchrun on one node.
CELLS = [
    (launcher, backend, size)
    for launcher, backend, size in CELLS
    if backend != "horovod" or launcher not in ("torchrun c10d", "torchrun as torch.distributed.launch")
]


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of one process that trains on the whole batch."""
    path = tmp_path_factory.mktemp("alone") / "digits.pt"
    result = run_world("python", 1, ["examples/digits.py", "--save", str(path)])
    assert result.returncode == 0, result.output
    weights: dict[str, torch.Tensor] = torch.load(path)
    return weights


@pytest.mark.parametrize(("launcher", "backend", "size"), CELLS)
def test_digits(
    launcher: str,
    backend: str,
    size: int,
    alone: dict[str, torch.Tensor],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    absent = missing(launcher)
    if absent:
        pytest.skip(absent)
    env = request.getfixturevalue("srun_env") if launcher.startswith("slurm") else {}
    path = tmp_path / "digits.pt"
    result = run_world(launcher, size, ["examples/digits.py", "--save", str(path)], backend=backend, env=env)
    assert result.returncode == 0, result.output

    assert f"{size} ranks on {backend}: saved {path}" in result.output
    correct, seen = map(int, re.findall(r"accuracy (\d+)/(\d+)", result.output)[-1])
    weights = torch.load(path)
    assert weights.keys() == alone.keys()
    difference = max((weights[name] - alone[name]).abs().max().item() for name in alone)
    shown.setdefault("matrix: examples/digits.py, distance of the final weights to one process alone", []).append(
        f"{launcher:18} {backend:8} {size} ranks: {difference:.1e}, accuracy {correct}/{seen}, {result.seconds:.0f} s"
    )
    assert difference <= TOLERANCE
    assert seen == 357 and correct / seen >= 0.95
    # One rank speaks.
    assert len(re.findall(r"epoch 8/8", result.output)) == 1


def test_horovod_without_a_launcher_says_how_to_launch() -> None:
    result = run_world("python", 1, ["examples/digits.py"], backend="horovod")
    assert result.returncode != 0
    assert "horovodrun -np 2 python script.py" in result.output and "torchrun" in result.output
    shown.setdefault("matrix: examples/digits.py, distance of the final weights to one process alone", []).append(
        "python             horovod         : an error that names how to launch"
    )
