"""The codemod on scripts of torch.distributed, DataParallel and apex: several files, options, the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.migrate_mutations import DDP_MUTATIONS, mutated
from tests.support.worlds import LEGACY_DDP, ROOT
from tests.test_migrate import blocks, unidist_migrate
from unidist.migrate.context import Options
from unidist.migrate.module import migrate_module

pytestmark = pytest.mark.unit
START = 'import torch.distributed as dist\n\n\ndef start():\n    dist.init_process_group("nccl")\n'
GROUPS = 'import torch.distributed as dist\n\n\ndef start():\n    dist.init_process_group("nccl", store=own())\n'
RANKS = "import start\nimport torch.distributed as dist\n\nstart.start()\nprint(dist.get_rank())\n"


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"start.py": START, "train.py": RANKS}, ""),
        ({"start.py": GROUPS, "train.py": RANKS}, "start.py starts the process group by torch.distributed, and stays"),
        ({"train.py": RANKS}, "no file of its program visibly starts the process group"),
        ({"train.py": RANKS, "other.py": START}, "no file of its program visibly starts the process group"),
        ({"start.py": "import unidist\n\n\ndef start():\n    unidist.init()\n", "train.py": RANKS}, ""),
    ],
)
def test_a_file_that_another_one_starts(files: dict[str, str], why: str, tmp_path: Path) -> None:
    """``unidist.rank()`` needs ``unidist.init()``: without it, ``is_initialized()`` would be False in silence."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    output = unidist_migrate("train.py", cwd=tmp_path)
    assert ("+print(unidist.rank())" in output) == (not why)
    assert why in output


MIXED = """\
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
model = DistributedDataParallel(Net(){options})
print(dist.get_rank())
dist.send(x, 1)
"""


def test_all_of_a_file_or_nothing() -> None:
    """Some of it only if the user asks for that, and never without the models."""
    text = MIXED.format(options="")
    code, remarks = migrate_module(text, "native")
    assert code == text and [each.line for each in remarks] == [7]
    code, remarks = migrate_module(text, "native", options=Options(partial=True))
    assert "unidist.wrap_model(Net())" in code and "\nimport torch.distributed as dist\n" in f"\n{code}"
    assert "print(unidist.rank())\ndist.send(x, 1)" in code and [each.line for each in remarks] == [7]
    text = MIXED.format(options=", mixed_precision=policy")
    for partial in (False, True):
        code, remarks = migrate_module(text, "native", options=Options(partial=partial))
        assert code == text and "mixed_precision" in remarks[0].why


def test_from(tmp_path: Path) -> None:
    (tmp_path / "ddp.py").write_text(START)
    (tmp_path / "hvd.py").write_text("import horovod.torch as hvd\n\nhvd.init()\n")
    (tmp_path / "dp.py").write_text((ROOT / "tests/legacy_ddp/data_parallel.py").read_text())

    def found(*arguments: str) -> set[str]:
        report = json.loads(unidist_migrate("--json", *arguments, ".", cwd=tmp_path))
        return {each["path"] for each in report["files"] if each["status"] == "changed"}

    assert found() == {"ddp.py", "hvd.py", "dp.py"}
    assert found("--from", "ddp") == {"ddp.py"}
    assert found("--from", "horovod,dataparallel") == {"hvd.py", "dp.py"}
    assert found("--to", "hvd") == {"hvd.py"}
    assert "--from tf is unknown" in unidist_migrate("--from", "ddp,tf", ".", cwd=tmp_path, status=2)


def test_the_report_counts_them(tmp_path: Path) -> None:
    (tmp_path / "ddp.py").write_text(MIXED.format(options="").replace("dist.send(x, 1)\n", ""))
    (tmp_path / "stays.py").write_text(MIXED.format(options=""))
    (tmp_path / "nothing.py").write_text("# of torch.distributed and DataParallel\n")
    output = unidist_migrate("--summary", "--report", "report.md", ".", cwd=tmp_path)
    assert "2 files with torch.distributed, DataParallel or apex: 1 would change, 1 unchanged, 0 could not" in output
    assert "models: 1 to wrap_model, 1 as they are" in output and "with Horovod" not in output
    assert "   1  unidist has no equivalent of this call" in output
    assert "### `stays.py`" in (tmp_path / "report.md").read_text()
    names = unidist_migrate("--check", ".", cwd=tmp_path, status=1)
    assert "ddp.py: would change; 0 lines" in names and "stays.py: unchanged; 1 lines" in names
    unidist_migrate("--write", ".", cwd=tmp_path)
    unidist_migrate("--check", ".", cwd=tmp_path)


@pytest.mark.parametrize("path", LEGACY_DDP, ids=lambda path: path.stem)
def test_a_second_migration_changes_nothing(path: Path) -> None:
    code, _ = migrate_module(path.read_text(), "native")
    assert code != path.read_text() and "unidist" in code
    compile(code, path.name, "exec")
    assert migrate_module(code, "native")[0] == code


def test_mutations_parse() -> None:
    for seed in range(24):
        path = LEGACY_DDP[seed % len(LEGACY_DDP)]
        text = mutated(path.read_text(), seed, DDP_MUTATIONS)
        compile(text, path.name, "exec")
        code, _ = migrate_module(text, "native")
        compile(code, path.name, "exec")
        assert migrate_module(code, "native")[0] == code, (seed, path)


def test_the_page_shows_the_diff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # where no formatter is
    assert unidist_migrate("examples/digits_ddp.py", cwd=ROOT).strip() == blocks(
        "unidist migrate examples/digits_ddp.py"
    )
