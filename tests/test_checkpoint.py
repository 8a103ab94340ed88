"""Runs that are killed, and go on elsewhere."""

import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support.worlds import IN_FLOAT64, ROOT, environment, run_world, shown
from unidist.launchers.process import Result, run

TITLE = "checkpoints"
SCRIPT = "examples/digits_resume.py"
BACKENDS = [("torchrun", "gloo"), ("horovodrun", "horovod")]


def train(
    launcher: str, backend: str, size: int, directory: Path, *options: str, program: Sequence[str] = (SCRIPT,)
) -> Result:
    return run_world(launcher, size, [*program, "--checkpoints", str(directory), *options], backend=backend)


def weights(path: Path) -> dict[str, torch.Tensor]:
    model: dict[str, torch.Tensor] = torch.load(path, weights_only=True)["model"]
    return model


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


def losses(output: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+)/\d+ .*loss (\S+)", output)}


def test_killed_at_a_random_moment_50_times(tmp_path: Path) -> None:
    result = run_world("python", 1, ["tests/programs/save_until_killed.py", str(tmp_path), "50"])
    assert result.returncode == 0, result.output
    found = re.search(
        r"killed 50 times, (\d+) of them amid a file; 50 times a whole checkpoint was there; .*", result.output
    )
    assert found and int(found[1]) > 5, result.output  # else the moments were not random enough
    shown.setdefault(TITLE, []).append(f"SIGKILL while saving: {found[0]}")


def test_two_jobs_that_save_to_one_path(tmp_path: Path) -> None:
    """As when a job is requeued while the old one still writes."""
    path = tmp_path / "run-1.pt"
    code = (
        "import torch, unidist; unidist.init('single')\n"
        "for step in range(40):\n"
        f"    unidist.save_checkpoint({str(path)!r}, keep_last=1, weights=torch.full((200_000,), float(step)))\n"
        f"    weights = unidist.load_checkpoint({str(path)!r})['weights']\n"
        "    assert (weights == weights[0]).all()\n"
    )
    command = [sys.executable, "-c", code]
    result = run([command, command], environment("python", {}), timeout=240, cwd=ROOT)
    assert result.returncode == 0, result.output
    assert [file.name for file in tmp_path.iterdir()] == ["run-1.pt"]


@pytest.mark.parametrize(("launcher", "backend"), BACKENDS)
def test_a_rank_killed_in_the_middle_changes_nothing(launcher: str, backend: str, tmp_path: Path) -> None:
    """Accumulation, clipping, AMP, a schedule, dropout: the final weights are those of the unbroken run."""
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    whole = train(launcher, backend, 2, unbroken)
    assert whole.returncode == 0, whole.output
    first = train(launcher, backend, 2, broken, program=("tests/programs/killed.py", "45", SCRIPT))
    assert first.returncode != 0 and "accuracy" not in first.output, first.output
    second = train(launcher, backend, 2, broken)
    assert second.returncode == 0, second.output
    went_on = re.search(r"going on from \S+step-(\d+)\.pt in epoch (\d+)", second.output)
    assert went_on and went_on[1] == "40", second.output
    final = distance(weights(unbroken / "step-144.pt"), weights(broken / "step-144.pt"))
    shown.setdefault(TITLE, []).append(
        f"{SCRIPT} on {backend} ({launcher}): rank 1 killed after step {went_on[1]} in epoch {went_on[2]}, "
        f"distance of the final weights to the unbroken run {final:.0e}"
    )
    assert final <= 1e-6
    assert whole.output.splitlines()[-1] == second.output.splitlines()[-1]


def test_a_run_goes_on_on_other_backends_and_world_sizes(tmp_path: Path) -> None:
    """Horovod at 2 ranks, gloo at 3, one process, Horovod on MPI at 3: with the losses of one unbroken process."""
    options = ("--no-amp", "--dropout", "0", "--every", "1")
    train_in_float64 = partial(train, program=(IN_FLOAT64, SCRIPT))
    unbroken = train_in_float64("python", "single", 1, tmp_path / "unbroken", *options)
    assert unbroken.returncode == 0, unbroken.output
    expected = losses(unbroken.output)
    legs = [
        ("horovodrun", "horovod", 2, 31),
        ("torchrun", "gloo", 3, 63),
        ("python", "single", 1, 100),
        ("openmpi", "horovod", 3, 144),
    ]
    found: dict[int, float] = {}
    for launcher, backend, size, until in legs:
        result = train_in_float64(launcher, backend, size, tmp_path / "moved", *options, "--max-steps", str(until))
        assert result.returncode == 0, result.output
        leg = losses(result.output)
        assert list(leg) == list(range(len(found) + 1, until + 1)), result.output
        found.update(leg)
    assert found.keys() == expected.keys() and len(found) == 144
    worst = max(abs(found[step] - expected[step]) for step in expected)
    final = distance(weights(tmp_path / "unbroken" / "step-144.pt"), weights(tmp_path / "moved" / "step-144.pt"))
    shown.setdefault(TITLE, []).append(
        "in float64, Horovod at 2 ranks -> gloo at 3 -> one process -> Horovod/MPI at 3, each amid an epoch: "
        f"144 losses at most {worst:.0e} from one unbroken process, the final weights {final:.0e}"
    )
    assert worst < 1.5e-6 and final <= 1e-12  # losses have six digits


def test_a_sharded_model_goes_on_on_another_world_size(tmp_path: Path) -> None:
    """FSDP2 at 2 ranks -> FSDP2 at 3, and one process without it."""
    found = []
    for launcher, backend, size, how in (
        ("torchrun", "gloo", 2, "save"),
        ("torchrun", "gloo", 3, "load"),
        ("python", "single", 1, "plain"),
    ):
        result = run_world(launcher, size, ["tests/programs/sharded.py", how, str(tmp_path)], backend=backend)
        assert result.returncode == 0, result.output
        found.append(re.findall(r"STATE (.*)", result.output))
    assert found[0] and found[1] == found[0] and found[2] == found[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run-2", "run-3"]


def test_a_mesh_trains_as_one_process(tmp_path: Path) -> None:
    """Tensor parallelism beside FSDP2, resumed in the middle of an epoch: on the mesh, on another, in one process."""
    result = run_world("torchrun", 4, ["tests/programs/mesh.py", str(tmp_path)], backend="gloo")
    assert result.returncode == 0 and "the same as in one process" in result.output, result.output
