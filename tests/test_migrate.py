"""The codemod: each rule, files of all kinds, and the command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support.worlds import LEGACY, ROOT
from unidist.cli import main
from unidist.migrate.context import Options
from unidist.migrate.module import DEFAULT_OPTIONS, migrate_module

pytestmark = pytest.mark.unit
#: One file for each rule: the code before, after, and what the report says.
RULES = sorted((ROOT / "tests/migrations").glob("*.txt"))
#: What stays is shown beside what changes, but in those about files that stay as a whole.
PARTIAL = Options(partial=True)
#: Those that exercise the imports, which level ``hvd`` changes.
ABOUT_NAMES = [path for path in RULES if re.match("drop_in|elastic|imports|module|names|other|package|star", path.stem)]


# ------------------------------------------------------------------------------------ the rules
def parts(path: Path) -> list[str]:
    """The code before, after, and the report."""
    found = re.split(r"^=== (?:after|report)\n", path.read_text(), flags=re.M)
    order = re.findall(r"^=== .*$", path.read_text(), flags=re.M)
    assert order == ["=== after", "=== report"], (
        f"{path.name} has the lines {order}: write the code before, a line '=== after', the code after, a line "
        "'=== report', and what the report says, if anything"
    )
    return found


@pytest.mark.parametrize("path", RULES, ids=lambda path: path.stem)
def test_rule(path: Path) -> None:
    before, after, report = parts(path)
    options = DEFAULT_OPTIONS if path.stem.startswith(("star", "torch")) else PARTIAL
    code, remarks = migrate_module(before, "native", options=options)
    said = "".join(f"{each.line}: {each.what}\n    {each.why}\n    -> {each.remedy}\n" for each in remarks)
    if os.environ.get("UPDATE"):  # to be read in the diff
        path.write_text(f"{before}=== after\n{code}=== report\n{said}")
        _, after, report = parts(path)
    assert code == after
    assert said == report
    compile(code, path.name, "exec")
    assert migrate_module(code, "native", options=options)[0] == code


def test_no_rule_leaves_a_name_undefined(tmp_path: Path) -> None:
    for path in RULES:
        before, after, _ = parts(path)
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


@pytest.mark.parametrize("path", [*ABOUT_NAMES, *LEGACY], ids=lambda path: path.stem)
def test_level_hvd_moves_imports_and_nothing_else(path: Path) -> None:
    before = path.read_text().split("=== after\n")[0]
    code, _ = migrate_module(before, "hvd")
    compile(code, path.name, "exec")
    if path in ABOUT_NAMES:
        assert migrate_module(code, "hvd")[0] == code
    if path.parent.name == "legacy" and "horovod.torch." not in before.split("import", 1)[1]:
        changed = [line for line in before.splitlines() if line not in code.splitlines()]
        assert len(changed) <= 2 and all("horovod" in line for line in changed), changed


def test_both_levels_lead_to_the_same() -> None:
    """A code base may go to the drop-in first."""
    for path in LEGACY[::4]:
        text = path.read_text()
        by_way = migrate_module(migrate_module(text, "hvd")[0], "native")[0]
        at_once = migrate_module(text, "native")[0]
        assert [line for line in by_way.splitlines() if "import" not in line] == [
            line for line in at_once.splitlines() if "import" not in line
        ]


# ------------------------------------------------------------------------------------ the command
def unidist_migrate(*arguments: str, cwd: Path, status: int = 0) -> str:
    """The output of the command, in this process; with the errors if it is to fail."""
    before = Path.cwd()
    os.chdir(cwd)
    try:
        done = CliRunner().invoke(main, ["migrate", *arguments], catch_exceptions=False)
    finally:
        os.chdir(before)
    assert done.exit_code == status, done.output
    return done.stdout + (done.stderr if status else "")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A small code base under git."""
    directory = tmp_path / "my project"
    (directory / "pkg").mkdir(parents=True)
    (directory / "train.py").write_text((ROOT / "tests/legacy/plain.py").read_text())
    (directory / "pkg/__init__.py").write_text("")
    (directory / "pkg/dist.py").write_text("import horovod.torch as hvd\n\nhvd.init()\n")
    (directory / "pkg/use.py").write_text("from pkg.dist import hvd\n\nprint(hvd.rank())\n")
    (directory / "pkg/elastic.py").write_text("import horovod.torch as hvd\n\nstate = hvd.elastic.TorchState()\n")
    (directory / "other.py").write_text("print('nothing of it')\n")
    (directory / "run.sh").write_text("#!/bin/bash\n# horovodrun is here\nhorovodrun -np 4 python train.py --lr 0.1\n")
    for command in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qm", "legacy"],
    ):
        subprocess.run(["git", *command], cwd=directory, check=True)
    return directory


def texts(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and ".git/" not in str(path)
    }


def test_a_diff_and_a_report_and_nothing_changed(project: Path) -> None:
    before = texts(project)
    output = unidist_migrate(".", cwd=project)
    assert texts(project) == before
    assert "+import unidist\n" in output and "-import horovod.torch as hvd\n" in output
    assert "unidist run -np 4 python train.py --lr 0.1" in output
    assert "elastic training stays on the drop-in: the file trains elastically" in output
    assert "4 files with Horovod: 3 would change, 1 unchanged, 0 could not be read" in output
    # The diff is one that git takes.
    subprocess.run(["git", "apply", "--check", "-"], cwd=project, input=output, text=True, check=True)


def test_counts_and_reasons_alone(project: Path) -> None:
    output = unidist_migrate("--summary", "--report", "report.md", ".", cwd=project)
    assert "optimizers: 1 to plain ones with a data-parallel model, 0 on the drop-in" in output
    assert "1 of 3 Python files free of Horovod" in output and "@@" not in output
    assert "   1  elastic training stays on the drop-in: the file trains elastically" in output
    page = (project / "report.md").read_text()
    assert "### `pkg/elastic.py`" in page and "| 3 | `state = hvd.elastic.TorchState()` |" in page
    names = unidist_migrate("--check", ".", cwd=project, status=1)
    assert "train.py: would change; " in names and "pkg/elastic.py: would change, uses the drop-in; 1 lines" in names
    assert "@@" not in names


UNFORMATTED = """import horovod.torch as hvd
import torch

hvd.init()
rate = torch.tensor([hvd.size() * 0.1, hvd.rank(), 0])
"""
FORMATTED = """import torch
import unidist

unidist.init()
rate = torch.tensor(
    [unidist.world_size() * 0.1, unidist.rank(), 0]
)
"""


@pytest.mark.parametrize(
    "configuration",
    [
        {"pyproject.toml": "[tool.ruff]\nline-length = 60\n"},
        {"pyproject.toml": "[tool.isort]\nprofile = 'black'\n\n[tool.black]\nline-length = 60\n"},
        {".isort.cfg": "[settings]\n", "pyproject.toml": "[tool.black]\nline-length = 60\n"},
        {".pre-commit-config.yaml": "  - id: ruff\n  - id: ruff-format\n", "ruff.toml": "line-length = 60\n"},
    ],
    ids=["ruff", "isort and black", "files of their own", "pre-commit"],
)
def test_the_repositorys_own_formatters(
    configuration: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They format a file that they would have left as it was, and no other."""
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    (tmp_path / ".git").mkdir()
    (tmp_path / "src").mkdir()
    for name, text in configuration.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "src/train.py").write_text(UNFORMATTED)
    (tmp_path / "src/other.py").write_text(UNFORMATTED.replace("import horovod", "import  horovod"))
    unidist_migrate("--write", "--force", ".", cwd=tmp_path)
    assert (tmp_path / "src/train.py").read_text() == FORMATTED
    assert (tmp_path / "src/other.py").read_text().startswith("import unidist\nimport torch\n")


def test_what_changes_is_no_reason_to_stay(tmp_path: Path) -> None:
    loop = "for x in data:\n    model(x).sum().backward()\n    clip_grad_norm_(model.parameters(), 1)\n    o.step()\n"
    (tmp_path / "train.py").write_text(HEAD + OPTIMIZER + loop + "hvd.allreduce_async(x)\n")
    output = unidist_migrate("--partial", ".", cwd=tmp_path)
    summary = unidist_migrate("--partial", "--summary", ".", cwd=tmp_path)
    assert "Horovod may clip before it has averaged" in output and "Horovod may clip" not in summary
    assert "1  unidist has no asynchronous calls" in summary


def test_lines_of_the_new_text(tmp_path: Path) -> None:
    """After --write the report's lines are those of the file as it is now; what stays because of one is said there."""
    text = "import horovod.torch as hvd\nimport torch\n\n\nhvd.init()\nx = hvd.allreduce_async(torch.ones(1))\n"
    (tmp_path / "a.py").write_text(text + "hvd.synchronize(x, hvd.rank())\n")
    why = "; 2 other calls could change, and stay because of this line and 1 more: see --partial\n"
    assert unidist_migrate("a.py", cwd=tmp_path).count(why) == 1
    (tmp_path / "a.py").write_text(text)
    assert "; 1 other call could change, and stays because of this line: " in unidist_migrate("a.py", cwd=tmp_path)
    assert f"     6  {text.splitlines()[-1]}" in unidist_migrate("--partial", "a.py", cwd=tmp_path)
    assert f"     7  {text.splitlines()[-1]}" in unidist_migrate("--partial", "--write", "a.py", cwd=tmp_path)
    assert (tmp_path / "a.py").read_text().splitlines()[6] == text.splitlines()[-1]


def test_a_call_within_a_statement_of_several_lines_is_shown(tmp_path: Path) -> None:
    lines = [
        "import horovod.torch as hvd",
        "hvd.init()",
        "x = sum(",
        "    [",
        "        hvd.allreduce_async(y),",
        "    ]",
        ")",
    ]
    text = "\n".join(lines)
    (tmp_path / "a.py").write_text(text)
    assert "x = sum( ... hvd.allreduce_async\n" in unidist_migrate("--partial", "a.py", cwd=tmp_path)


def test_a_tensor_is_taken_for_floating_point(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import horovod.torch as hvd\n\n\ndef f(x):\n    return hvd.allreduce(x)\n")
    output = unidist_migrate("a.py", cwd=tmp_path)
    assert 'unidist.all_reduce(x, op="mean")' in output and "the tensor is taken for floating-point" in output


HEAD = "import copy\nimport horovod.torch as hvd\nimport torch\n\nhvd.init()\nmodel = torch.nn.Linear(4, 1)\n"
OPTIMIZER = (
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())\n"
)
BROADCAST = "hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n"
LOOP = "for x in data:\n    model(x).sum().backward()\n    optimizer.step()\n"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        # A broadcast after training is not the one of the start.
        (OPTIMIZER + LOOP + BROADCAST, ["replicate", "for x", "broadcast_model_state"]),
        # What reads the weights between sees those of rank 0.
        (BROADCAST + "ema = copy.deepcopy(model)\n" + OPTIMIZER, ["broadcast_model_state", "deepcopy", "replicate"]),
        (BROADCAST + OPTIMIZER + LOOP, ["replicate", "for x"]),
        # Another model of the same name.
        (
            OPTIMIZER + LOOP + "model = torch.nn.Linear(4, 1)\n" + OPTIMIZER + LOOP,
            ["replicate", "for x", "Linear", "replicate", "for x"],
        ),
    ],
)
def test_where_replicate_comes(body: str, expected: list[str]) -> None:
    code, _ = migrate_module(HEAD + body, "native")
    assert re.findall("replicate|for x|broadcast_model_state|deepcopy|Linear", code.split("Linear", 1)[1]) == expected


#: What computes other numbers once gradients are averaged in the backward pass, and may look harmless.
HARMFUL = {
    "an optimizer around Horovod's": (
        "class Meta(torch.optim.Optimizer):\n    def step(self, loss):\n        for p in parameters:\n"
        "            p.grad = torch.autograd.grad(loss, p)[0]\n        self.base.step()\n",
        "a gradient is assigned by hand",
    ),
    "a schedule": (
        "class Noise(torch.optim.lr_scheduler.LRScheduler):\n    def step(self):\n        for p in parameters:\n"
        "            p.grad = p.grad + self.noise()\n",
        "a gradient is assigned by hand",
    ),
    "what is left of the last gradient": ("for p in parameters:\n    p.grad.add_(residual[p])\n", "assigned by hand"),
    "an attribute of a parameter": ("for p in parameters:\n    p.grad.add_(p.residual)\n", "assigned by hand"),
    "a step without synchronize in the other branch": (
        "if args.amp:\n    optimizer.synchronize()\n    with optimizer.skip_synchronize():\n        optimizer.step()\n"
        "else:\n    for p in parameters:\n        p.grad = p.grad + noise.pop()\n    optimizer.step()\n",
        "assigned by hand",
    ),
    "local steps": ("with optimizer.skip_synchronize():\n    optimizer.step()\n", "gradients that are not averaged"),
    "methods of a class of its own": (
        "class Local(torch.optim.SGD):\n    def synchronize(self):\n        pass\n"
        "local = parts['local']\nlocal.synchronize()\nwith local.skip_synchronize():\n    local.step()\n",
        "which optimizer",
    ),
    "another optimizer beside it": (
        "local = DGC(model.parameters())\nlocal.synchronize()\nwith local.skip_synchronize():\n    local.step()\n",
        "which optimizer",
    ),
    "an optimizer of a list": (
        "for o in (parts['a'], prefetcher):\n    o.synchronize()\n    with o.skip_synchronize():\n        pass\n",
        "which optimizer",
    ),
    "passes of an optimizer that cannot be followed": (
        "other = parts['other']\nother.set_backward_passes_per_step(4)\nother.synchronize()\n"
        "with other.skip_synchronize():\n    other.step()\n",
        "which optimizer `other.set_backward_passes_per_step`",
    ),
    "a part that is unfrozen": (
        "class Trainer:\n    def start(self):\n        self.encoder = Encoder()\n"
        "        self.encoder.requires_grad_(False)\n    def go_on(self):\n        self.encoder.requires_grad_(True)\n",
        "frozen or unfrozen",
    ),
    "a parameter by its name": ("p = getattr(model, name)\np.requires_grad = True\n", "frozen or unfrozen"),
}


@pytest.mark.parametrize(("body", "why"), HARMFUL.values(), ids=HARMFUL)
def test_what_looks_harmless(body: str, why: str) -> None:
    code, remarks = migrate_module(HEAD + OPTIMIZER + body, "native")
    assert any(why in each.why for each in remarks) and "replicate" not in code, (code, remarks)


def test_an_optimizer_of_another_module_is_left_alone() -> None:
    body = "from parts import local\nlocal.synchronize()\nwith local.skip_synchronize():\n    local.step()\n"
    code, _ = migrate_module(HEAD + OPTIMIZER + body, "native")
    assert "replicate(model)" in code and code.endswith(body)


def test_a_file_that_makes_no_optimizer_has_no_finding_on_those_of_others() -> None:
    body = "def step(o):\n    o.synchronize()\n    with o.skip_synchronize():\n        o.step(hvd.rank())\n"
    code, remarks = migrate_module("import horovod.torch as hvd\n" + body, "native")
    assert "o.synchronize()" in code and not remarks


def test_a_compression_of_two_optimizers() -> None:
    first = OPTIMIZER.replace("named_parameters())", "named_parameters(), compression=c)")
    second = first.replace("optimizer", "other").replace("model.", "head.")
    code, _ = migrate_module(HEAD + "c = hvd.Compression.none\n" + first + second, "native")
    assert "replicate(model)" in code and "replicate(head)" in code and "c =" not in code
    body = "c = hvd.Compression.none\n" + first + "c = hvd.Compression.fp16\n" + second + BROADCAST
    code, remarks = migrate_module(HEAD + body, "native")
    assert "replicate" not in code and any("`c` is assigned again" in each.why for each in remarks), (code, remarks)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (OPTIMIZER + BROADCAST.replace("root_rank=0", "root_rank=1"), "weights of another rank than 0"),
        (
            "named = list(model.named_parameters())\nnamed += list(head.named_parameters())\n"
            "optimizer = hvd.DistributedOptimizer(make(), named_parameters=named)\n",
            "not visibly model.named_parameters",
        ),
        (
            "if adam:\n    o = torch.optim.Adam([*model.parameters(), *head.parameters()])\nelse:\n"
            "    o = torch.optim.SGD(model.parameters(), lr=1)\no = hvd.DistributedOptimizer(o)\n",
            "which model this one trains",
        ),
        (
            OPTIMIZER + "for x in data:\n    loss = model(x).sum()\n    if not torch.isnan(loss):\n"
            "        loss.backward()\n    optimizer.step()\n",
            "a rank may skip this backward pass",
        ),
        (
            OPTIMIZER + "for x in data:\n    try:\n        model(x).sum().backward()\n    except RuntimeError:\n"
            "        pass\n    optimizer.step()\n",
            "a rank may skip this backward pass",
        ),
        (
            "if amp == 0:\n" + textwrap.indent(OPTIMIZER, "    ") + "for x in data:\n    loss = model(x).sum()\n"
            "    if x.mean() == 0:\n        loss.backward()\n    optimizer.step()\n",
            "a rank may skip this backward pass",
        ),
        ("torch.distributed.init_process_group('nccl')\n" + OPTIMIZER, "also starts torch.distributed's process group"),
        (OPTIMIZER + LOOP + "def f(unidist=1):\n    return unidist\n", "uses the name unidist"),
    ],
)
def test_what_replicate_would_not_do(body: str, why: str) -> None:
    code, remarks = migrate_module(HEAD + body, "native")
    assert any(why in each.why for each in remarks) and "replicate" not in code and "hvd.DistributedOptimizer" in code


@pytest.mark.parametrize(
    "body",
    [
        "    if a:\n        scaler.scale(loss).backward()\n    else:\n        loss.backward()\n    optimizer.step()\n",
        "    if train:\n        loss.backward()\n    if train:\n        optimizer.step()\n",
        "    loss.backward()\n    if i % 2:\n        optimizer.step()\n    scheduler.step()\n",
    ],
)
def test_conditions_that_are_the_same_on_all_ranks(body: str) -> None:
    code, _ = migrate_module(
        f"{HEAD}{OPTIMIZER}for i, x in enumerate(data):\n    loss = model(x).sum()\n{body}", "native"
    )
    assert "unidist.replicate(model)" in code


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # What decides whether there is an optimizer is the same on all ranks.
        (
            "amp = args.amp\nif amp == 0:\n",
            "    if amp == 1:\n        scaled.backward()\n    if amp == 0:\n        loss.backward()\n"
            "    optimizer.step()\n",
        ),
        ("if True:\n", "    loss.backward()\nprint(f'on {hvd}')\n"),
        # Groups of torch's in place of Horovod.
        (
            "try:\n    hvd.init()\nexcept ImportError:\n    torch.distributed.init_process_group('gloo')\nif True:\n",
            "    loss.backward()\n",
        ),
        (
            "if args.horovod:\n",
            "    loss.backward()\nif not args.horovod:\n    torch.distributed.init_process_group('nccl')\n",
        ),
        # A name that nothing sets holds no optimizer.
        ("if True:\n", "    loss.backward()\ndef unused():\n    absent.synchronize()\n"),
    ],
)  # fmt: skip
def test_what_is_no_obstacle(before: str, after: str) -> None:
    wrapped = before + textwrap.indent(OPTIMIZER, "    ")
    code, _ = migrate_module(f"{HEAD}{wrapped}for x in data:\n    loss = model(x).sum()\n{after}", "native")
    assert "unidist.replicate(model)" in code and "hvd" not in code


def test_the_process_group_that_horovod_does_not_start() -> None:
    guard = "if torch.distributed.is_initialized():\n    torch.distributed.all_reduce(x, group=data_parallel)\n"
    for level, said in (("native", True), ("hvd", False)):
        _, remarks = migrate_module(HEAD + OPTIMIZER + guard, level)  # type: ignore[arg-type]
        assert any("was False with Horovod" in each.why for each in remarks) == said


@pytest.mark.parametrize("indent", ["", "    "])
def test_no_sync_where_the_model_has_another_name(indent: str) -> None:
    """A global model has its name in the loop's function, too; one of another function does not."""
    loop = (
        "def train(net, opt):\n    for i, x in enumerate(data):\n        net(x).sum().backward()\n"
        "        if i % 2 == 1:\n            opt.step()\n\n\n"
    )
    make = OPTIMIZER.replace("parameters())\n", "parameters(), backward_passes_per_step=2)\n")
    body = f"model = torch.nn.Linear(4, 1)\n{make}train(model, optimizer)\n"
    start = "def main():\n" if indent else ""
    text = "import horovod.torch as hvd\nimport torch\n\n\n" + loop + start + textwrap.indent(body, indent)
    code, remarks = migrate_module(text, "native")
    assert "unidist.replicate(model)" in code
    assert ("unidist.no_sync(model):" in code) == (not indent) == (not remarks)


OPTIMIZER_FILES = {
    "train.py": "import horovod.torch as hvd\nimport torch\nfrom parts import Net, loop\n\nhvd.init()\n"
    "model = Net()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())\n"
    "loop(model, optimizer)\n",
    "parts.py": "def loop(model, optimizer):\n    model.encoder.loss().backward()\n    optimizer.step()\n",
}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("    pass\n", ""),
        ("    optimizer.synchronize()\n", "parts.py calls a method that only Horovod's optimizers have"),
        ("    p.grad = p.grad + noise\n", "parts.py, a file of the same program, assigns gradients by hand"),
        ("    torch.cuda.synchronize()\n    p.grad = None\n    x = p.grad == y\n", ""),
    ],
)
def test_what_other_files_do_with_an_optimizer(line: str, why: str, tmp_path: Path) -> None:
    for name, text in OPTIMIZER_FILES.items():
        (tmp_path / name).write_text(text + line * (name == "parts.py"))
    # Of another program.
    (tmp_path / "other.py").write_text("def f(optimizer):\n    optimizer.synchronize()\n    p.grad = noise\n")
    output = unidist_migrate("train.py", cwd=tmp_path)
    assert ("+unidist.replicate(model)" in output) == (not why)
    assert why in output


def test_two_files_that_share_a_function_for_their_optimizers(tmp_path: Path) -> None:
    """If one alone became native, the function would clip the other's gradients before they are averaged."""
    wrapped = HEAD + OPTIMIZER
    loop = "def loop(model, optimizer, x):\n    model(x).backward()\n    optimizer.synchronize()\n    clip(model)\n"
    step = "    with optimizer.skip_synchronize():\n        optimizer.step()\n"
    (tmp_path / "first.py").write_text(loop + step + wrapped + "loop(model, optimizer, data)\n")
    (tmp_path / "second.py").write_text("from first import loop\n" + wrapped + "loop(model, optimizer, data)\n")
    output = unidist_migrate(".", cwd=tmp_path)
    assert "replicate" not in output and output.count("+import unidist.hvd as hvd") == 2
    assert "second.py makes an optimizer, too, which this may be" in output
    (tmp_path / "second.py").unlink()
    assert "+unidist.replicate(model)" in unidist_migrate(".", cwd=tmp_path)


def test_write(project: Path) -> None:
    unidist_migrate("--write", ".", cwd=project)
    assert "import unidist\n" in (project / "train.py").read_text()
    # What another file imports from here is still there.
    assert "import unidist.hvd as hvd" in (project / "pkg/dist.py").read_text()
    assert (project / "pkg/elastic.py").read_text().startswith("import unidist.hvd as hvd\n")
    after = texts(project)
    unidist_migrate("--write", "--force", ".", cwd=project)
    assert texts(project) == after


def test_changes_that_are_not_committed(project: Path) -> None:
    (project / "other.py").write_text("print('changed')\n")
    before = texts(project)
    assert "uncommitted" in unidist_migrate("--write", ".", cwd=project, status=1)
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
        "it cannot be written, and is unchanged: File name too long" in said
        and "2 changed, 0 unchanged, 1 could not be" in said
    )
    assert (tmp_path / long).read_text() == script and "import unidist\n" in (tmp_path / "c.py").read_text()
    status = (tmp_path / "a.py").stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (*owner, 0o640)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.py", long, "c.py"]


def test_json(project: Path) -> None:
    report = json.loads(unidist_migrate("--json", ".", cwd=project))
    files = {entry["path"]: entry for entry in report["files"]}
    assert sorted(files) == ["pkg/dist.py", "pkg/elastic.py", "run.sh", "train.py"]
    assert files["pkg/elastic.py"]["uses_drop_in"] and not files["train.py"]["uses_drop_in"]
    assert files["train.py"]["status"] == files["pkg/elastic.py"]["status"] == "changed"
    assert files["pkg/elastic.py"]["findings"][0].keys() == {"line", "what", "why", "remedy", "cell"}
    assert report["summary"]["files"] == 4 and report["to"] == "native" and not report["written"]


def test_variables_that_other_files_use(tmp_path: Path) -> None:
    """An attribute that holds the module is used by another file, with Horovod's names."""
    (tmp_path / "base.py").write_text(
        "import horovod.torch as hvd\n\n\nclass Base:\n    def __init__(self):\n        self.hvd = hvd\n"
        "        self.n = self.hvd.size()\n"
    )
    (tmp_path / "sub.py").write_text(
        "from base import Base\n\n\nclass Sub(Base):\n    def n(self):\n        return self.hvd.size()\n"
    )
    whole = json.loads(unidist_migrate("--json", ".", cwd=tmp_path))
    assert whole["summary"]["use_drop_in"] == 1 and whole["summary"]["free"] == 0
    report = json.loads(unidist_migrate("--write", "--partial", "--json", ".", cwd=tmp_path))["files"]
    assert [entry["path"] for entry in report] == ["base.py"] and "other files call Horovod" in report[0]["findings"][
        0
    ]["why"]
    after = (tmp_path / "base.py").read_text()
    assert (
        "import unidist.hvd as hvd" in after and "self.hvd = hvd" in after and "self.n = unidist.world_size()" in after
    )
    alone = json.loads(unidist_migrate("--json", "--partial", "--to", "native", "base.py", cwd=tmp_path))
    assert alone["summary"]["changed"] == 0


def test_files_that_reach_for_horovod_otherwise(tmp_path: Path) -> None:
    """By a computed name, by Lightning, by the launcher's variables; and Horovod's own sources."""
    (tmp_path / "composed.py").write_text('import importlib\n\nhvd = importlib.import_module(f"horovod.{kind}")\n')
    (tmp_path / "lightning.py").write_text('trainer = Trainer(accelerator="horovod", devices=1)\n')
    (tmp_path / "plugin.py").write_text('"""As with Horovod."""\n\nfrom lightning import HorovodStrategy\n')
    (tmp_path / "environment.py").write_text('import os\n\nrank = int(os.environ["OMPI_COMM_WORLD_RANK"])\n')
    (tmp_path / "third_party/horovod/torch").mkdir(parents=True)
    for name in ("common/util.py", "torch/mpi_ops.py", "torch/__init__.py"):
        (tmp_path / "third_party/horovod" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "third_party/horovod" / name).write_text("import horovod.torch as hvd\n\nhvd.init()\n")
    before = texts(tmp_path)
    report = json.loads(unidist_migrate("--write", "--json", ".", cwd=tmp_path))["files"]
    assert texts(tmp_path) == before
    found = {each["path"]: (each["needs_horovod"], [line["why"] for line in each["findings"]]) for each in report}
    assert found["composed.py"] == (True, ["a module of Horovod's is imported by a computed name"])
    assert found["lightning.py"] == (True, ["with this argument, Lightning imports Horovod"])
    assert found["plugin.py"] == (True, ["the file still imports Horovod"])
    (finding,) = next(each["findings"] for each in report if each["path"] == "plugin.py")
    assert (finding["line"], finding["what"]) == (3, "from lightning import HorovodStrategy")
    assert found["environment.py"] == (False, ["MPI launchers or Horovod set this variable, torchrun does not"])
    assert found["third_party/horovod"] == (False, ["these are Horovod's own sources, which are not migrated"])
    assert len(found) == 5


def test_check(project: Path) -> None:
    unidist_migrate("--check", ".", cwd=project, status=1)
    unidist_migrate("--write", ".", cwd=project)
    unidist_migrate("--check", ".", cwd=project)
    (project / "pkg/elastic.py").write_text("import horovod.spark\n\nhorovod.spark.run()\n")
    unidist_migrate("--check", ".", cwd=project, status=1)  # it imports Horovod


def test_odd_files(tmp_path: Path) -> None:
    """Files that cannot be read are reported and stay; in others, only the migrated lines change."""
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
            cell(
                "%matplotlib inline\n",
                "import horovod.torch as hvd\n",
                "import torch\n",
                "!pip list | grep horovod\n",
                "!pip install -q horovod[pytorch]\n",
                "!horovodrun -np 2 python train.py\n",
                "hvd.init()",
            ),
            cell(),
            cell("%%bash\n", "horovodrun -np 2 python train.py"),
            cell(
                "model = torch.nn.Linear(2, 1)\n",
                "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n",
                "files = !ls",
            ),
            cell(
                "optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())\n",
                "hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # all\n",
                "print('rank %d'\n",
                "      % hvd.rank())",
            ),
            cell("this is broken (horovod"),
            cell("%time handle = hvd.rank()\n", "h = hvd.allreduce_async(torch.ones(1))\n", "model?"),
        ],
        "metadata": {},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    path = tmp_path / "train.ipynb"
    path.write_text(json.dumps(book, indent=1, ensure_ascii=False) + "\n")
    report = json.loads(unidist_migrate("--write", "--partial", "--json", "train.ipynb", cwd=tmp_path))["files"][0]
    after = json.loads(path.read_text())
    sources = ["".join(each["source"]) for each in after["cells"]]
    assert sources[1] == (
        "%matplotlib inline\nimport unidist\nimport unidist.hvd as hvd\nimport torch\n!pip list | grep horovod\n"
        "!pip install -q horovod[pytorch]\n!horovodrun -np 2 python train.py\nunidist.init()"
    )
    assert sources[5] == "unidist.replicate(model)\n# all\nprint('rank %d'\n      % unidist.rank())"
    assert sources[7] == "%time handle = hvd.rank()\nh = hvd.allreduce_async(torch.ones(1))\nmodel?"
    for number in (0, 2, 3, 4, 6):
        assert after["cells"][number] == book["cells"][number]  # type: ignore[index]
    assert path.read_text() == json.dumps(after, indent=1, ensure_ascii=False) + "\n"
    assert {(each["cell"], each["line"]) for each in report["findings"]} == {
        (2, 4), (2, 5), (2, 6), (7, 1), (8, 1), (8, 2),
    }  # fmt: skip
    assert "!unidist run -np 2 python train.py" in [each["remedy"] for each in report["findings"]]


def test_a_magic_above_the_import_of_a_notebook(tmp_path: Path) -> None:
    lines = ["%load_ext autoreload\n", "import horovod.torch as hvd\n", "hvd.init()"]
    cells = [{"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": 1, "source": lines}]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    unidist_migrate("--write", "a.ipynb", cwd=tmp_path)
    cell = json.loads((tmp_path / "a.ipynb").read_text())["cells"][0]
    assert "".join(cell["source"]) == "%load_ext autoreload\nimport unidist\nunidist.init()"


def test_a_large_file_and_many_files(tmp_path: Path) -> None:
    for number in range(100):
        (tmp_path / f"m{number}.py").write_text("print('nothing of it')\n")
    (tmp_path / "large.py").write_text("import horovod.torch as hvd\n" + "x = [hvd.rank(), 1]\n" * 500)
    report = json.loads(unidist_migrate("--json", ".", cwd=tmp_path))
    assert report["summary"] == {
        "files": 1, "changed": 1, "unchanged": 0, "failed": 0, "use_drop_in": 0, "need_horovod": 0, "code": 1,
        "free": 1, "optimizers_native": 0, "optimizers_drop_in": 0, "optimizers_horovod": 0, "loaders": 0,
        "metrics": 0, "findings": 0, "torch": 0, "torch_changed": 0, "torch_unchanged": 0, "torch_failed": 0,
        "models": 0, "models_left": 0,
    }  # fmt: skip


# ------------------------------------------------------------------------------------ the page
def blocks(command: str) -> str:
    """The output that the page shows for a command."""
    page = (ROOT / "docs/migrating.md").read_text()
    return re.split(r"```\w*\n", page.split(f"    {command}\n")[1], maxsplit=2)[1].strip()


def test_the_page_shows_the_diff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # where no formatter is
    assert unidist_migrate("examples/digits_horovod.py", cwd=ROOT).strip() == blocks(
        "unidist migrate examples/digits_horovod.py"
    )


def test_horovod_on_ray() -> None:
    before = (
        "from horovod.ray import RayExecutor\nfrom ray.train.horovod import HorovodTrainer\n"
        "executor = RayExecutor(RayExecutor.create_settings(), num_workers=2)\n"
    )
    code, remarks = migrate_module(before, "native")
    assert code == before.replace("horovod.ray", "unidist.ray", 1)
    assert [(each.line, each.what) for each in remarks] == [(2, "ray.train.horovod.HorovodTrainer")]
