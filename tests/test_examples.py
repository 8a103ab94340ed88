"""The other examples; digits.py is in the matrix."""

import re
from pathlib import Path

import pytest
import torch

from tests.support.worlds import ROOT, run_world

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_each_starts_with_the_command_that_runs_it(example: Path) -> None:
    head = example.read_text().split('"""')[1]
    assert re.search(rf"^    (torchrun|horovodrun) .*examples/{example.name}$", head, re.MULTILINE)


@pytest.mark.parametrize(
    ("script", "launcher"),
    [("examples/digits_ddp.py", "torchrun"), ("examples/digits_horovod.py", "horovodrun")],
)
def test_raw_scripts_train_the_same_model(script: str, launcher: str, tmp_path: Path) -> None:
    """Raw DDP and raw Horovod on the same data order end where digits.py does."""
    raw, ours = tmp_path / "raw.pt", tmp_path / "ours.pt"
    for path, source in ((raw, script), (ours, "examples/digits.py")):
        result = run_world(launcher, 2, [source, "--save", str(path)])
        assert result.returncode == 0, result.output
        assert re.search(r"epoch 8/8 .*accuracy \d+/357 = 0\.9[5-9]", result.output), result.output
    left, right = torch.load(raw), torch.load(ours)
    assert max((left[name] - right[name]).abs().max().item() for name in left) < 1e-5


@pytest.mark.parametrize(("launcher", "backend"), [("torchrun", "gloo"), ("openmpi", "horovod")])
def test_charlm(launcher: str, backend: str, tmp_path: Path) -> None:
    path = tmp_path / "charlm.pt"
    result = run_world(launcher, 2, ["examples/charlm.py", "--save", str(path)], backend=backend)
    assert result.returncode == 0, result.output
    bits = [float(found) for found in re.findall(r"bits per character (\S+)", result.output)]
    # A uniform guess over the letters costs more than 6 bits.
    assert len(bits) == 6 and bits[-1] < bits[0] and bits[-1] < 4.0, bits
    assert set(torch.load(path)) == {"letters", "model"}
