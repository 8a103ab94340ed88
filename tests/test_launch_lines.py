"""``unidist.migrate.launch_lines``: the lines that start or install Horovod, in files of all kinds."""

from __future__ import annotations

import random
import shlex
from pathlib import Path

import pytest

from tests.support.worlds import ROOT
from unidist.migrate.launch_lines import launch_lines
from unidist.migrate.project import Exports, migrate_files
from unidist.run import options

pytestmark = pytest.mark.unit
INSTALLED = "unidist-torch in its place, once no file imports Horovod"
IMAGE = "an image with PyTorch, and pip install unidist-torch"
BUILD = "remove it with Horovod"
OPERATOR = "keep it, or use templates/kubernetes.yaml"


def stays(script: str) -> bool | None:
    return {"old.py": True, "pkg.old": True, "t.py": False}.get(script)


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("horovodrun -np 4 python t.py", "unidist run -np 4 python t.py"),
        ("  time nohup /usr/bin/horovodrun -np 4 -H a:2,b:2 python -u t.py --lr 1", "time nohup unidist run -np 4 -H"),
        ("CMD='horovodrun -np 2 python t.py'", "CMD='unidist run -np 2 python t.py'"),
        ("docker run img bash -c 'horovodrun -np 2 python t.py'", "docker run img bash -c 'unidist run -np 2 python"),
        ("horovodrun -np 4 python old.py", "unidist run --hvd -np 4 python old.py"),
        ("horovodrun -np 4 python -m pkg.old", "unidist run --hvd -np 4 python -m pkg.old"),
        ('command: ["horovodrun", "-np", "2", "python", "old.py"]', 'command: ["unidist", "run", "--hvd", "-np", "2",'),
        ("- horovodrun", "- unidist run"),
        ("\t@horovodrun -np $(NP) python t.py", "@unidist run -np $(NP) python t.py"),
        ("mpirun -np 4 -x A=1 python t.py", "keep it"),
        ("mpiexec.hydra -n 4 python old.py", "python -m unidist.hvd old.py"),
        ("horovod[pytorch]>=0.21,<0.29  # training", INSTALLED),
        ("horovod", INSTALLED),
        ("  - conda-forge::horovod=0.28", INSTALLED),
        ('dependencies = ["torch", "horovod>=0.28", "tqdm"]', INSTALLED),
        ('horovod = {version = "^0.28"}', INSTALLED),
        ("-e git+https://github.com/horovod/horovod.git#egg=horovod", INSTALLED),
        ("RUN HOROVOD_WITH_PYTORCH=1 pip install --no-cache-dir horovod[pytorch]==0.28.1", INSTALLED),
        ("ENV HOROVOD_GPU_OPERATIONS=NCCL", BUILD),
        ("FROM horovod/horovod:0.28.1", IMAGE),
        ('  "image": "x.amazonaws.com/horovod:latest",', IMAGE),
        ("kind: MPIJob", OPERATOR),
    ],
)
def test_a_line_that_is_found(line: str, instead: str) -> None:
    (remark,) = launch_lines(f"one\n{line}\n", stays, lists=True)
    assert remark.line == 2 and remark.what == line.strip() and remark.remedy.startswith(instead)
    if "unidist run" in remark.remedy and "'" not in line and "@" not in line and not line.startswith("- "):
        argv = shlex.split(remark.remedy)
        given = options.parse(argv[argv.index("run") + 1 :])
        assert given.num_proc in (2, 4) and given.command[0] == "python"


@pytest.mark.parametrize(
    "line",
    [
        "# horovodrun -np 2 python t.py", "echo horovodrun -np 2 python t.py", "which horovodrun && x",
        "command -v horovodrun", "horovodrun-tools", "mpirun -np 2 ./a.out", "torchrun --nproc-per-node 2 t.py",
        "# pip install horovod", "horovod-tools", "rm -rf horovod/build", "name: horovodx", "pip list | grep horovod",
        "export HOROVOD_FUSION_THRESHOLD=1",
    ],
)  # fmt: skip
def test_a_line_that_is_none(line: str) -> None:
    assert launch_lines(line, stays, lists=True) == []


def test_a_script_on_another_line_and_one_that_is_not_found() -> None:
    text = "mpirun -np 8 \\\n  -x A \\\n  python old.py\nhorovodrun -np 2 \\\n  python missing.py\nhorovod\n"
    first, second = launch_lines(text, stays, lists=False)
    assert (first.line, first.remedy) == (1, "python -m unidist.hvd old.py")
    assert second.line == 4 and "--hvd for a script that still imports Horovod" in second.why


def test_a_project(tmp_path: Path) -> None:
    """Launch lines follow the scripts that they start."""
    files = {
        "train.py": (ROOT / "tests/legacy/plain.py").read_text(),
        "lightning.py": 'trainer = Trainer(strategy="horovod")\n',
        "launch.py": (
            '"""Run it by horovodrun -np 2 python launch.py"""\nimport os, subprocess, sys\n\nn = 4\n'
            'subprocess.run(["horovodrun", "-np", str(n), sys.executable, "train.py", f"--lr={0.1 * n}", *sys.argv])\n'
            'os.system(f"horovodrun -np {n} python lightning.py")\nprint("usage: horovodrun -np 2 python x.py")\n'
        ),
        "setup.py": 'from setuptools import setup\n\nsetup(install_requires=["torch", "horovod>=0.22"])\n',
        "jobs/run.sh": "horovodrun -np 4 --hostfile hosts python train.py\nmpirun -np 2 python /app/lightning.py\n",
        "Makefile": "clean:\n\trm -rf horovod\n",
        "data.json": '{"command": "horovodrun -np 2 python t.py"}' + " " * 1_000_000,
        "notes": "horovodrun -np 2 python train.py\nit's not Python\n",
        "script": "import horovod.torch as hvd\n\nhvd.init()\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    reports = {
        str(report.path.relative_to(tmp_path)): report
        for report in migrate_files([tmp_path / name for name in files], "native", Exports())
    }
    assert sorted(reports) == sorted({*files} - {"Makefile", "data.json"})
    assert reports["script"].status == "changed" and reports["notes"].status == "unchanged"
    found = {name: [(each.line, each.remedy) for each in reports[name].remarks] for name in reports}
    assert found["notes"] == [(1, "unidist run -np 2 python train.py")]
    assert found["launch.py"] == [
        (
            5,
            'subprocess.run(["unidist", "run", "-np", str(n), sys.executable, "train.py", f"--lr={0.1 * n}", '
            "*sys.argv])",
        ),
        (6, 'os.system(f"unidist run --hvd -np {n} python lightning.py")'),
    ]
    assert found["setup.py"] == [(3, INSTALLED)]
    assert found["jobs/run.sh"] == [
        (1, "unidist run -np 4 --hostfile hosts python train.py"),
        (2, "python -m unidist.hvd /app/lightning.py"),
    ]


def test_no_text_raises() -> None:
    draw = random.Random(2)
    pieces = [
        *"\"'\\#|&[]{}<>:,\n \t$-", "\n  ", "- ", "command: ", "args:\n", "RUN ", "CMD [", "horovodrun ", "mpirun",
        "-np ", "2 ", "python ", "t.py", "key: |\n", ": >\n", "{{ x }}", "${{", "horovod", "==1", "pip install ",
        "$$", "\t@",
    ]  # fmt: skip
    for number in range(1000):
        text = "".join(draw.choices(pieces, k=draw.randint(1, 40)))
        for remark in launch_lines(text, stays, lists=number % 2 == 0):
            assert 1 <= remark.line <= text.count("\n") + 1 and remark.what and remark.why and remark.remedy
