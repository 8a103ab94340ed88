"""The other examples; those that train on the digits are in the matrix and in test_checkpoint.py."""

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


def test_charlm(tmp_path: Path) -> None:
    path = tmp_path / "charlm.pt"
    result = run_world("openmpi", 2, ["examples/charlm.py", "--save", str(path)], backend="horovod")
    assert result.returncode == 0, result.output
    bits = [float(found) for found in re.findall(r"bits per character (\S+)", result.output)]
    # A uniform guess over the letters costs more than 6 bits.
    assert len(bits) == 6 and bits[-1] < bits[0] and bits[-1] < 4.0, bits
    assert set(torch.load(path)) == {"letters", "model"}
