"""``unidist compare`` in real worlds."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.worlds import PYTHON, ROOT, environment, with_torch
from unidist.compare.recording import read

LEGACY, PROGRAMS = ROOT / "tests/legacy", ROOT / "tests/programs"


def compare(directory: Path, *argv: Any, **env: str) -> subprocess.CompletedProcess[str]:
    command = [PYTHON, "-m", "unidist", "compare", *map(str, argv)]
    whole = environment("python", {"COLUMNS": "300", "PYTHONPATH": str(ROOT), **with_torch(), **env})
    return subprocess.run(command, cwd=directory, env=whole, capture_output=True, text=True, timeout=300)


def test_unchanged_scripts_on_horovod_and_on_the_drop_in(tmp_path: Path) -> None:
    """Two optimizers with the same names, scaled losses, several losses per step, weight decay, uneven ranks."""
    scripts = [
        LEGACY / f"{name}.py" for name in ("plain", "gan", "grad_scaler", "accumulation", "subclass", "join_uneven")
    ]
    for side in ("left", "right"):
        (tmp_path / side).mkdir()
    done = compare(tmp_path, PROGRAMS / "run_legacy.py", "--json", "all.json", "--", "{side}", *scripts)
    assert done.returncode == 0 and "THE SAME: 41 steps" in done.stdout, done.stdout + done.stderr
    assert "drop-in:gloo" in done.stdout and "wrote all.json and compare.png" in done.stdout
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in (tmp_path / "right").iterdir()} == {f"{path.stem}.pt" for path in scripts}
    found = json.loads((tmp_path / "all.json").read_text())
    assert found["agree"] and found["first_difference"] is None and found["final"]["relative"] < 1e-5
    assert [point["optimizer"] for point in found["steps"][6:12]] == [1, 2] * 3
    left, right = found["sides"]["left"], found["sides"]["right"]
    # plain.py and grad_scaler.py broadcast the state of an optimizer that is new.
    assert left["idle_steps"] == right["idle_steps"] == [2, 2]
    assert [[len(losses) for losses in side["losses"]] for side in (left, right)] == [[41, 40]] * 2
    assert {len(losses) for losses in left["losses"][0][24:30]} == {2}
    assert all(0.5 < losses[0] < 2 for losses in left["losses"][0][18:24])  # not 1024 times that
    kinds = ["SGD", "RMSprop", "RMSprop", "SGD", "SGD", "AdamW", "SGD"]
    assert [trained["kind"] for trained in right["optimizers"]] == kinds
    assert list(right["optimizers"][0]["parameters"]) == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_the_example_of_the_readme(tmp_path: Path) -> None:
    """A script that imports a module beside it, stopped after --steps."""
    done = compare(tmp_path, ROOT / "examples/digits_horovod.py", "--steps", "20", "--plot", "d.svg")
    assert done.returncode == 0 and "THE SAME: 20 steps" in done.stdout, done.stdout + done.stderr
    assert not (tmp_path / "digits.pt").exists() and (tmp_path / "d.svg").exists()
    assert json.loads((tmp_path / "compare.json").read_text())["arguments"] == []


def test_one_weight_that_a_migrated_script_changes(tmp_path: Path) -> None:
    argv = [LEGACY / "plain.py", PROGRAMS / "migrated.py", "--left", "horovod", "--right", "gloo", "-np", "2"]
    done = compare(tmp_path, *argv, "--", "{side}.pt", "nudge")
    assert done.returncode == 1 and "DIFFERENT at step 4 (before it, no more than" in done.stdout, (
        done.stdout + done.stderr
    )
    assert "weights of 2.bias: norms: left 0.397" in done.stdout and "another optimizer or its state" in done.stdout
    found = json.loads((tmp_path / "compare.json").read_text())
    first = found["first_difference"]
    assert (first["kind"], first["step"], first["parameter"], first["parameters"]) == ("weights", 4, "2.bias", 1)
    assert first["distance"] == pytest.approx(0.01, rel=0.5) and not found["agree"]
    assert max(value for point in found["steps"][:3] for value in point["apart"].values()) < 1e-6
    saved = [torch.load(tmp_path / f"{side}.pt") for side in ("left-again", "right")]  # undone
    most = max((saved[0][name] - saved[1][name]).abs().max().item() for name in saved[0])
    assert found["final"]["most"] == pytest.approx(most)


def test_ranks_that_drift_apart(tmp_path: Path) -> None:
    """Two more launchers and another backend; sides that are wrong in the same way agree."""
    argv = ["--left", "gloo@spawn", "--right", "mpi", PROGRAMS / "migrated.py", "--", "{side}.pt", "never averages"]
    done = compare(tmp_path, *argv)
    assert done.returncode == 0 and "THE SAME: 6 steps" in done.stdout, done.stdout + done.stderr
    assert "the ranks of the left side drift apart: after step 1, " in done.stdout
    assert "the ranks of the right side drift apart" in done.stdout


def test_a_side_that_fails_or_does_not_train(tmp_path: Path) -> None:
    done = compare(tmp_path, "--left", "gloo", PROGRAMS / "migrated.py", "--", "{side}.pt", "crash")
    assert done.returncode == 1 and "the left side (gloo under torchrun) ended with status 1" in done.stderr
    assert "RuntimeError: this script fails" in done.stderr and not list(tmp_path.iterdir())
    (tmp_path / "empty.py").write_text("import time, sys; time.sleep(float(sys.argv[1]))")
    done = compare(tmp_path, "--left", "gloo", "-np", "1", "empty.py", "--", "0")
    assert done.returncode == 1 and "no training step was recorded on rank 0" in done.stderr
    done = compare(tmp_path, "--left", "gloo", "-np", "1", "--timeout", "2", "empty.py", "--", "60")
    assert done.returncode == 1 and "did not end within 2 s (--timeout)" in done.stderr


def test_a_script_runs_as_by_itself(tmp_path: Path) -> None:
    """Its arguments, modules and files, and an exit without cleanup; worker processes record nothing."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code/neighbour.py").write_text("steps = 3")
    (tmp_path / "here.txt").write_text("")
    (tmp_path / "code/script.py").write_text(
        "import os, random, sys, neighbour, numpy, torch\n"
        "from torch.utils.data import DataLoader\n"
        "if __name__ == '__main__':\n"
        "    assert sys.argv == ['code/script.py', '--steps', '9', '--'] and os.path.exists('here.txt'), sys.argv\n"
        "    assert __file__.endswith('code/script.py')\n"
        "    print(random.random(), numpy.random.rand(), torch.rand(1).item())\n"
        "    net = torch.nn.Linear(1, 1)\n"
        "    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "    for x in DataLoader(torch.ones(neighbour.steps, 1), num_workers=1):\n"
        "        net(x).sum().backward(); optimizer.step()\n"
        "    os._exit(0)\n"
    )
    command = [sys.executable, "-m", "unidist.compare", "--seed", "3", ".", "code/script.py", "--steps", "9", "--"]
    env = environment("python", {"PYTHONPATH": str(ROOT)})
    runs = [subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True) for _ in range(2)]
    assert runs[0].returncode == 0 and runs[0].stdout == runs[1].stdout != "", runs[0].stderr
    found = read(tmp_path, 1)
    assert found.steps == 3 and [len(params) for params in found.final] == [2]
