"""The codemod: each rule and what it leaves, files of all kinds, and that what comes out computes the same."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.migrate_mutations import mutated
from tests.support.worlds import LEGACY, ROOT, run_world, shown
from unidist.migrate.native import migrate
from unidist.migrate.tree import imports_horovod

#: One file for each rule: the code before, after, and what the report says.
RULES = sorted((ROOT / "tests/migrations").glob("*.txt"))
#: Idioms that have no counterpart of the same meaning: they stay the drop-in's, for a reason that the report gives.
ON_THE_DROP_IN = {
    "by_hand": "no asynchronous calls",
    "gan": "not assigned to a variable",
    "join_uneven": "join\\(\\) lets ranks run out of batches",
    "lazy_import": "no forward pass of the model is seen",
    "metric_average": "floating-point numbers cannot be seen",
    "subclass": "op=hvd.mpi_ops.Sum",
    "unused_parameters": "takes no part in the forward pass",
}


def uses_drop_in(code: str) -> bool:
    return "unidist.hvd" in code or "from unidist import hvd" in code


# ------------------------------------------------------------------------------------ the rules
@pytest.mark.parametrize("path", RULES, ids=lambda path: path.stem)
def test_rule(path: Path) -> None:
    before, rest = path.read_text().split("=== after\n")
    after, report = rest.split("=== report\n")
    code, findings = migrate(before, "native")
    assert code == after
    said = "".join(f"{each.line}: {each.what}\n    {each.why}\n    -> {each.remedy}\n" for each in findings)
    assert said == report
    compile(code, path.name, "exec")
    assert migrate(code, "native")[0] == code


def test_no_rule_leaves_a_name_undefined(tmp_path: Path) -> None:
    for path in RULES:
        before, after = path.read_text().split("=== report\n")[0].split("=== after\n")
        (tmp_path / f"{path.stem}.before.py").write_text(before)
        (tmp_path / f"{path.stem}.after.py").write_text(after)
    options = "--isolated --no-cache --select F821 --output-format json ."
    command = [sys.executable, "-m", "ruff", "check", *options.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    undefined: dict[str, set[str]] = {}
    for each in json.loads(done.stdout):
        undefined.setdefault(Path(each["filename"]).stem, set()).add(each["message"])
    assert undefined  # some rules begin with a part of a script
    new = {
        path.stem: undefined.get(f"{path.stem}.after", set()) - undefined.get(f"{path.stem}.before", set())
        for path in RULES
    }
    assert not any(new.values()), new


@pytest.mark.parametrize("path", [*RULES, *LEGACY], ids=lambda path: path.stem)
def test_level_hvd_moves_imports_and_nothing_else(path: Path) -> None:
    before = path.read_text().split("=== after\n")[0]
    code, _ = migrate(before, "hvd")
    compile(code, path.name, "exec")
    assert migrate(code, "hvd")[0] == code
    if path.parent.name == "legacy" and "horovod.torch." not in before.split("import", 1)[1]:
        changed = [line for line in before.splitlines() if line not in code.splitlines()]
        assert len(changed) <= 2 and all("horovod" in line for line in changed), changed


def test_both_levels_lead_to_the_same() -> None:
    """A code base may go to the drop-in first."""
    for path in LEGACY:
        text = path.read_text()
        by_way = migrate(migrate(text, "hvd")[0], "native")[0]
        at_once = migrate(text, "native")[0]
        assert [line for line in by_way.splitlines() if "import" not in line] == [
            line for line in at_once.splitlines() if "import" not in line
        ]


# ------------------------------------------------------------------------------------ what comes out computes the same
def trained(folder: Path, scripts: list[Path], launcher: str, backend: str) -> Path:
    """The weights of scripts that run one after another in one world of 2 ranks."""
    folder.mkdir()
    argv = ["tests/programs/run_legacy.py", str(folder), *map(str, scripts)]
    result = run_world(launcher, 2, argv, backend=backend, timeout=300)
    assert result.returncode == 0, result.output[-6000:]
    return folder


def weights(path: Path) -> list[torch.Tensor]:
    """All tensors of a file, in order: a mutant's names may be others."""

    def tensors(part: Any) -> list[torch.Tensor]:
        if isinstance(part, torch.Tensor):
            return [part.double()]
        return [found for inner in part.values() for found in tensors(inner)] if isinstance(part, dict) else []

    return tensors(torch.load(path, weights_only=False))


def distance(left: Path, right: Path) -> float:
    pairs = list(zip(weights(left), weights(right), strict=True))
    assert pairs
    return max(float((a - b).abs().max()) for a, b in pairs)


def test_migrated_scripts_train_the_same(legacy_under_horovod: Path, tmp_path: Path) -> None:
    """Each legacy script under Horovod, and migrated with no edit by hand on gloo and on Horovod."""
    scripts = []
    for path in LEGACY:
        code, findings = migrate(path.read_text(), "native")
        scripts.append(tmp_path / path.name)
        scripts[-1].write_text(code)
        reason = ON_THE_DROP_IN.get(path.stem)
        assert uses_drop_in(code) == (reason is not None), path.name
        assert reason is None or any(re.search(reason, f"{each.what} {each.why}") for each in findings)
        assert imports_horovod(code) == (path.stem == "subclass")  # which asks for horovod.__version__
    table = shown.setdefault(
        "migrated scripts: distance of the weights to those of the legacy script under Horovod", []
    )
    runs = [
        trained(tmp_path / "gloo", scripts, "torchrun", "gloo"),
        trained(tmp_path / "hvd", scripts, "horovodrun", "horovod"),
    ]
    for path in LEGACY:
        gloo, horovod = (distance(legacy_under_horovod / f"{path.stem}.pt", run / f"{path.stem}.pt") for run in runs)
        calls = "drop-in" if path.stem in ON_THE_DROP_IN else "native"
        table.append(f"{path.stem:32} {calls:8} gloo {gloo:.0e}  horovod {horovod:.0e}")
        assert max(gloo, horovod) < 1e-5, table[-1]


def test_scripts_written_otherwise(legacy_under_horovod: Path, tmp_path: Path) -> None:
    """300 mutations of the scripts: every output parses, says what it leaves, and trains as the original does under Horovod."""
    scripts = []
    for seed in range(300):
        path = LEGACY[seed % len(LEGACY)]
        text = mutated(path.read_text(), seed)
        code, findings = migrate(text, "native")
        scripts.append(tmp_path / f"{seed:03}_{path.name}")
        scripts[-1].write_text(code, newline="")
        assert seed % 6 or migrate(code, "native")[0] == code
        assert not uses_drop_in(code) or findings
        if "\r\n" in text:
            assert "\n" not in code.replace("\r\n", "")
    folder = trained(tmp_path / "gloo", scripts, "torchrun", "gloo")
    far = {
        script.stem: distance(legacy_under_horovod / f"{script.stem[4:]}.pt", folder / f"{script.stem}.pt")
        for script in scripts
    }
    shown.setdefault(
        "migrated scripts: distance of the weights to those of the legacy script under Horovod", []
    ).append(f"{len(far)} mutations of them, migrated, on gloo: {max(far.values()):.0e}")
    assert all(each < 1e-5 for each in far.values()), far


def test_random_scripts(tmp_path: Path) -> None:
    """120 scripts put together at random compute the same, migrated, as before on the drop-in, and do not change once more."""
    report = tmp_path / "report.jsonl"
    result = run_world(
        "torchrun", 2, ["-m", "tests.migrate_scripts", "0", "120", str(report)], backend="gloo", timeout=400
    )
    assert result.returncode == 0, result.output[-6000:]
    rows = [json.loads(line) for line in report.read_text().splitlines()]
    wrong = [
        row for row in rows
        if any(each["errors"] != [None, None] or each["distance"] > 2e-5 or not each["settled"] for each in row)
    ]  # fmt: skip
    assert len(rows) == 120 and not wrong, wrong
    native = sum(not row[0]["drop_in"] for row in rows)
    shown.setdefault(
        "migrated scripts: distance of the weights to those of the legacy script under Horovod", []
    ).append(
        f"{len(rows)} random scripts, {native} of them native, on gloo: "
        f"{max(each['distance'] for row in rows for each in row):.0e} from what they compute on the drop-in"
    )


# ------------------------------------------------------------------------------------ the command
def unidist_migrate(*arguments: str, cwd: Path, status: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "unidist", "migrate", *arguments],
        cwd=cwd, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + (done.stderr if status else "")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A small code base under git."""
    folder = tmp_path / "my project"
    (folder / "pkg").mkdir(parents=True)
    (folder / "train.py").write_text((ROOT / "tests/legacy/plain.py").read_text())
    (folder / "pkg/__init__.py").write_text("")
    (folder / "pkg/dist.py").write_text("import horovod.torch as hvd\n\nhvd.init()\n")
    (folder / "pkg/use.py").write_text("from pkg.dist import hvd\n\nprint(hvd.rank())\n")
    (folder / "pkg/elastic.py").write_text("import horovod.torch as hvd\n\nstate = hvd.elastic.TorchState()\n")
    (folder / "other.py").write_text("print('nothing of it')\n")
    (folder / "run.sh").write_text("#!/bin/bash\n# horovodrun is here\nhorovodrun -np 4 python train.py --lr 0.1\n")
    for command in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qm", "legacy"],
    ):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


def texts(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and ".git/" not in str(path)
    }


def test_a_diff_and_a_report_and_nothing_changed(project: Path) -> None:
    before = texts(project)
    output = unidist_migrate(".", cwd=project)
    assert texts(project) == before
    assert "+import unidist\n" in output and "-import horovod.torch as hvd\n" in output
    assert "torchrun --standalone --nproc-per-node 4 train.py --lr 0.1" in output
    assert "elastic training is not in the drop-in" in output
    assert "4 files with Horovod: 2 would change, 2 stay, 0 could not be read" in output
    # The diff is one that git takes.
    subprocess.run(["git", "apply", "--check", "-"], cwd=project, input=output, text=True, check=True)


def test_write(project: Path) -> None:
    unidist_migrate("--write", ".", cwd=project)
    assert "import unidist\n" in (project / "train.py").read_text()
    # What another file imports from here is still there.
    assert "import unidist.hvd as hvd" in (project / "pkg/dist.py").read_text()
    assert (project / "pkg/elastic.py").read_text().startswith("import horovod.torch as hvd\n")
    after = texts(project)
    unidist_migrate("--write", "--force", ".", cwd=project)
    assert texts(project) == after


def test_changes_that_are_not_committed(project: Path) -> None:
    (project / "other.py").write_text("print('changed')\n")
    before = texts(project)
    assert "not committed" in unidist_migrate("--write", ".", cwd=project, status=1)
    assert texts(project) == before
    unidist_migrate("--write", "--force", ".", cwd=project)
    assert texts(project) != before


def test_a_file_that_git_does_not_know(project: Path) -> None:
    (project / "new.py").write_text("import horovod.torch as hvd\n\nhvd.init()\n")
    assert "new.py" in unidist_migrate("--write", "new.py", cwd=project, status=1)


def test_a_git_that_refuses_to_answer(project: Path) -> None:
    (project / ".git/config").write_text("[broken")
    before = texts(project)
    said = unidist_migrate("--write", ".", cwd=project, status=1)
    assert "git status fails in" in said and "bad config line" in said and "--force" in said
    assert texts(project) == before
    unidist_migrate("--write", "--force", ".", cwd=project)
    assert texts(project) != before


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    """The others are, and the report says which."""
    script = "import horovod.torch as hvd\n\nhvd.init()\n"
    long = "b" * 250 + ".py"  # no other name fits beside it
    for name in ("a.py", long, "c.py"):
        (tmp_path / name).write_text(script)
    os.chmod(tmp_path / "a.py", 0o640)
    owner = (12345, 54321) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    os.chown(tmp_path / "a.py", *owner)
    said = unidist_migrate("--write", ".", cwd=tmp_path, status=1)
    assert "changed a.py\n" in said and "changed c.py\n" in said and f"changed {long}" not in said
    assert (
        "it cannot be written, and is as it was: File name too long" in said
        and "2 changed, 0 stay, 1 could not be" in said
    )
    assert (tmp_path / long).read_text() == script and "import unidist\n" in (tmp_path / "c.py").read_text()
    status = (tmp_path / "a.py").stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (*owner, 0o640)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.py", long, "c.py"]


def test_json(project: Path) -> None:
    report = json.loads(unidist_migrate("--json", ".", cwd=project))
    files = {entry["path"]: entry for entry in report["files"]}
    assert sorted(files) == ["pkg/dist.py", "pkg/elastic.py", "run.sh", "train.py"]
    assert files["pkg/elastic.py"]["needs_horovod"] and not files["train.py"]["needs_horovod"]
    assert files["train.py"]["status"] == "changed" and files["pkg/elastic.py"]["status"] == "unchanged"
    assert files["pkg/elastic.py"]["findings"][0].keys() == {"line", "what", "why", "remedy", "cell"}
    assert report["summary"]["files"] == 4 and report["to"] == "native" and not report["written"]


def test_variables_that_other_files_use(tmp_path: Path) -> None:
    """What holds the module here is called by Horovod's names there."""
    (tmp_path / "base.py").write_text(
        "import horovod.torch as hvd\n\n\nclass Base:\n    def __init__(self):\n        self.hvd = hvd\n        self.n = self.hvd.size()\n"
    )
    (tmp_path / "sub.py").write_text(
        "from base import Base\n\n\nclass Sub(Base):\n    def n(self):\n        return self.hvd.size()\n"
    )
    report = json.loads(unidist_migrate("--write", "--json", ".", cwd=tmp_path))["files"]
    assert [entry["path"] for entry in report] == ["base.py"] and "other files make calls" in report[0]["findings"][0][
        "why"
    ]
    after = (tmp_path / "base.py").read_text()
    assert (
        "import unidist.hvd as hvd" in after and "self.hvd = hvd" in after and "self.n = unidist.world_size()" in after
    )
    alone = json.loads(unidist_migrate("--json", "--to", "native", "base.py", cwd=tmp_path))
    assert alone["summary"]["changed"] == 0


def test_files_that_reach_for_horovod_otherwise(tmp_path: Path) -> None:
    """By a name that is put together, by Lightning, by the launcher's variables; and Horovod's own sources."""
    (tmp_path / "composed.py").write_text('import importlib\n\nhvd = importlib.import_module(f"horovod.{kind}")\n')
    (tmp_path / "lightning.py").write_text('trainer = Trainer(accelerator="horovod", devices=1)\n')
    (tmp_path / "plugin.py").write_text("from pytorch_lightning.strategies import HorovodStrategy\n")
    (tmp_path / "environment.py").write_text('import os\n\nrank = int(os.environ["OMPI_COMM_WORLD_RANK"])\n')
    (tmp_path / "third_party/horovod/torch").mkdir(parents=True)
    for name in ("common/util.py", "torch/mpi_ops.py", "torch/__init__.py"):
        (tmp_path / "third_party/horovod" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "third_party/horovod" / name).write_text("import horovod.torch as hvd\n\nhvd.init()\n")
    before = texts(tmp_path)
    report = json.loads(unidist_migrate("--write", "--json", ".", cwd=tmp_path))["files"]
    assert texts(tmp_path) == before
    found = {each["path"]: (each["needs_horovod"], [line["why"] for line in each["findings"]]) for each in report}
    assert found["composed.py"] == (True, ["a module of Horovod's is imported by a name that is put together"])
    assert found["lightning.py"] == (True, ["Lightning imports Horovod itself for it"])
    assert found["plugin.py"] == (True, ["the file still imports Horovod"])
    assert found["environment.py"] == (False, ["the launcher sets this variable, torchrun does not"])
    assert found["third_party/horovod"] == (False, ["these are Horovod's own sources: they are left as they are"])
    assert len(found) == 5


def test_check(project: Path) -> None:
    unidist_migrate("--check", ".", cwd=project, status=1)
    unidist_migrate("--write", ".", cwd=project)
    unidist_migrate("--check", ".", cwd=project, status=1)  # the elastic file imports Horovod
    (project / "pkg/elastic.py").unlink()
    unidist_migrate("--check", ".", cwd=project)


def test_odd_files(tmp_path: Path) -> None:
    """What cannot be read is told of and left; all else is as it was, but for the lines that change."""
    script = "import horovod.torch as hvd\nhvd.init()\n"
    (tmp_path / "crlf.py").write_bytes(b"import horovod.torch as hvd\r\nx = '''a\nb'''\r\nhvd.init()\r\n")
    (tmp_path / "latin.py").write_bytes(
        b"# -*- coding: latin-1 -*-\n# \xe9t\xe9\nimport horovod.torch as hvd\nhvd.init()\n"
    )
    (tmp_path / "bom.py").write_bytes(b"\xef\xbb\xbf" + script.encode())
    (tmp_path / "tabs.py").write_bytes(
        b"def f():\n\timport horovod.torch as hvd\n\thvd.init()\x0c\n\treturn hvd.rank()"
    )
    (tmp_path / "python2.py").write_bytes(b"import horovod.torch as hvd\nprint hvd.rank()\n")
    (tmp_path / "bytes.py").write_bytes(b"import horovod.torch as hvd  # \xff\n")
    (tmp_path / "docs.py").write_bytes(b'"""import horovod.torch as hvd"""\n')
    (tmp_path / "empty.py").write_bytes(b"")
    (tmp_path / "script").write_bytes(b"#!/usr/bin/env python\n" + script.encode())
    (tmp_path / "script").chmod(0o755)
    (tmp_path / "real").mkdir()
    (tmp_path / "real/linked.py").write_text(script)
    (tmp_path / "link.py").symlink_to("real/linked.py")
    (tmp_path / "loop").symlink_to(".")
    before = texts(tmp_path)
    report = json.loads(
        unidist_migrate("--write", "--json", ".", "crlf.py", cwd=tmp_path, status=1).split("\nError")[0]
    )
    files = {entry["path"]: entry for entry in report["files"]}
    assert {path for path, entry in files.items() if entry["status"] == "failed"} == {"python2.py", "bytes.py"}
    assert files["python2.py"]["needs_horovod"] and files["python2.py"]["findings"][0]["line"] == 2
    assert files["bytes.py"]["needs_horovod"] and not files["docs.py"]["needs_horovod"]
    after = texts(tmp_path)
    assert after["crlf.py"] == b"import unidist\r\nx = '''a\nb'''\r\nunidist.init()\r\n"
    assert after["latin.py"] == before["latin.py"].replace(b"horovod.torch as hvd", b"unidist").replace(
        b"hvd.init", b"unidist.init"
    )
    assert after["bom.py"] == b"\xef\xbb\xbfimport unidist\nunidist.init()\n"
    assert after["tabs.py"] == b"def f():\n\timport unidist\n\tunidist.init()\x0c\n\treturn unidist.rank()"
    for name in ("python2.py", "bytes.py", "docs.py", "empty.py"):
        assert after[name] == before[name]
    assert (tmp_path / "script").stat().st_mode & 0o111 and b"unidist.init()" in after["script"]
    assert (tmp_path / "link.py").is_symlink() and (
        tmp_path / "real/linked.py"
    ).read_text() == "import unidist\nunidist.init()\n"
    assert after.keys() == before.keys()


def test_a_notebook(tmp_path: Path) -> None:
    def cell(*lines: str, kind: str = "code") -> dict[str, Any]:
        return {
            "cell_type": kind,
            "metadata": {},
            "source": list(lines),
            **({"outputs": [], "execution_count": 1} if kind == "code" else {}),
        }

    book = {
        "cells": [
            cell("# Training with horovod, é", kind="markdown"),
            cell("%matplotlib inline\n", "import horovod.torch as hvd\n", "import torch\n", "!pip list | grep horovod\n", "hvd.init()"),
            cell(),
            cell("%%bash\n", "horovodrun -np 2 python train.py"),
            cell("model = torch.nn.Linear(2, 1)\n", "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n", "files = !ls"),
            cell("optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())\n", "hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # all\n", "model(x).backward()"),
            cell("this is broken (horovod"),
            cell("%time handle = hvd.rank()\n", "h = hvd.allreduce_async(torch.ones(1))\n", "model?"),
        ],
        "metadata": {}, "nbformat": 4, "nbformat_minor": 5,
    }  # fmt: skip
    path = tmp_path / "train.ipynb"
    path.write_text(json.dumps(book, indent=1, ensure_ascii=False) + "\n")
    report = json.loads(unidist_migrate("--write", "--json", "train.ipynb", cwd=tmp_path))["files"][0]
    after = json.loads(path.read_text())
    sources = ["".join(each["source"]) for each in after["cells"]]
    assert sources[1] == (
        "%matplotlib inline\nimport unidist\nimport unidist.hvd as hvd\nimport torch\n!pip list | grep horovod\nunidist.init()"
    )
    assert sources[5] == "model = unidist.wrap_model(model, broadcast_buffers=False)\n# all\nmodel(x).backward()"
    assert sources[7] == "%time handle = hvd.rank()\nh = hvd.allreduce_async(torch.ones(1))\nmodel?"
    for number in (0, 2, 3, 4, 6):
        assert after["cells"][number] == book["cells"][number]  # type: ignore[index]
    assert path.read_text() == json.dumps(after, indent=1, ensure_ascii=False) + "\n"
    assert {(each["cell"], each["line"]) for each in report["findings"]} == {(7, 1), (8, 1), (8, 2)}


def test_a_large_file_and_many_files(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / f"m{number}.py").write_text("print('nothing of it')\n")
    (tmp_path / "large.py").write_text("import horovod.torch as hvd\n" + "x = [hvd.rank(), 1]\n" * 2000)
    report = json.loads(unidist_migrate("--json", ".", cwd=tmp_path))
    assert report["summary"] == {
        "files": 1, "changed": 1, "unchanged": 0, "failed": 0, "use_drop_in": 0, "need_horovod": 0, "findings": 0
    }  # fmt: skip


# ------------------------------------------------------------------------------------ the page
def blocks(command: str) -> str:
    """The output that the page shows for a command."""
    page = (ROOT / "docs/migrating.md").read_text()
    return re.split(r"```\w*\n", page.split(f"    {command}\n")[1], maxsplit=2)[1].strip()


def test_the_page_shows_the_diff() -> None:
    assert unidist_migrate("examples/digits_horovod.py", cwd=ROOT).strip() == blocks(
        "unidist migrate examples/digits_horovod.py"
    )


def test_the_page_shows_the_proof(tmp_path: Path) -> None:
    for name in ("digits.py", "digits_horovod.py"):
        (tmp_path / name).write_text((ROOT / "examples" / name).read_text())
    (tmp_path / "digits_horovod.py").rename(tmp_path / "legacy.py")
    (tmp_path / "migrated.py").write_text((tmp_path / "legacy.py").read_text())
    unidist_migrate("--write", "migrated.py", cwd=tmp_path, status=0)
    arguments = ["legacy.py", "migrated.py", "--left", "horovod", "--right", "gloo", "-np", "2", "--", "--epochs", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "unidist", "compare", *arguments],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr

    # Other processors round otherwise, and take their time.
    page = blocks(f"unidist compare {' '.join(arguments)}")
    assert "THE SAME: 48 steps, each loss, gradient and weight" in page and "THE SAME: 48 steps" in done.stdout
    for left, right in zip(page.split("largest")[0].split(), done.stdout.split("largest")[0].split(), strict=True):
        if re.fullmatch(r"\d+\.\d+", left):
            assert float(right) == pytest.approx(float(left), rel=1e-3) or float(left) > 5  # seconds
        elif "─" not in left:
            assert left == right
    assert (tmp_path / "compare.json").exists() and (tmp_path / "compare.png").exists()
