"""The example of the README, ``make demo``, and the examples that are not in the matrix or in test_checkpoint.py."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.worlds import ROOT, environment, run_world

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.unit
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_each_starts_with_the_command_that_runs_it(example: Path) -> None:
    head = example.read_text().split('"""')[1]
    assert re.search(rf"^    (python|torchrun|horovodrun) .*examples/{example.name}$", head, re.MULTILINE)
    assert os.access(example, os.X_OK) and example.read_text().startswith("#!/usr/bin/env python3\n")


def test_charlm(tmp_path: Path) -> None:
    path = tmp_path / "charlm.pt"
    result = run_world("openmpi", 2, ["examples/charlm.py", "--save", str(path)], backend="horovod")
    assert result.returncode == 0, result.output
    bits = [float(found) for found in re.findall(r"bits per character (\S+)", result.output)]
    # A uniform guess over the letters costs more than 6 bits.
    assert len(bits) == 6 and bits[-1] < bits[0] and bits[-1] < 4.0, bits
    assert set(torch.load(path)) == {"letters", "model"}


@pytest.mark.parametrize(("launcher", "size"), [("python", 1), ("torchrun", 2)])
def test_readme_script_runs(launcher: str, size: int, tmp_path: Path) -> None:
    """The first example as it stands, on one process and on two: it learns, and one rank prints."""
    script = tmp_path / "train.py"
    text = (ROOT / "README.md").read_text().split("```python")[1].split("```")[0]
    script.write_text(text.replace("model.pt", str(tmp_path / "model.pt")))
    result = run_world(launcher, size, [str(script)])
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss (\d\.\d+)", result.output)]
    assert result.returncode == 0 and len(losses) == 5 and losses[-1] < 0.5 * losses[0], result.output
    assert (tmp_path / "model.pt").exists()


def test_make_demo(tmp_path: Path) -> None:
    """``make demo`` in this environment: trains, and says the accuracy and where the model is."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    for name in ("python", "torchrun"):
        (venv / "bin" / name).symlink_to(Path(sys.executable).parent / name)
    for name in ("demo.stamp",):
        (venv / name).touch()
    done = subprocess.run(
        ["make", "-o", str(venv / "demo.stamp"), "demo", f"VENV={venv}"],
        cwd=ROOT, env=environment("python", {}), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"epoch 8/8 .*accuracy 3\d\d/357", done.stdout) and "saved digits.pt" in done.stdout
