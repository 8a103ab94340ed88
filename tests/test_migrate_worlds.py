"""The codemod: migrated scripts compute the same as the originals, in worlds of 2 ranks."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.migrate_mutations import mutated
from tests.support.worlds import LEGACY, PROJECTS, ROOT, distance, run_world, shown
from tests.test_migrate import blocks, unidist_migrate
from unidist.migrate.jobs import find_launches
from unidist.migrate.module import migrate_module
from unidist.migrate.project import imports_horovod

#: Scripts that stay on the drop-in at least in part, with the reason in the report.
ON_THE_DROP_IN = {
    "by_hand": "no asynchronous calls",
    "join_uneven": "ranks may reach join\\(\\) after different numbers of steps",
    "metric_average": "floating-point cannot be determined",
    "subclass": "op=hvd.mpi_ops.Sum",
}
DISTANCES = "migrated scripts: distance of the weights to those of the legacy script under Horovod"


def uses_drop_in(code: str) -> bool:
    return "unidist.hvd" in code or "from unidist import hvd" in code


def trained(directory: Path, scripts: list[Path], launcher: str, backend: str) -> Path:
    """The weights of scripts that run one after another in one world of 2 ranks."""
    directory.mkdir()
    argv = ["tests/programs/run_legacy.py", str(directory), *map(str, scripts)]
    result = run_world(launcher, 2, argv, backend=backend, timeout=300)
    assert result.returncode == 0, result.output[-6000:]
    return directory


def test_migrated_scripts_train_the_same(legacy_under_horovod: Path, tmp_path: Path) -> None:
    """Each legacy script under Horovod, and migrated with no edit by hand on gloo and on Horovod."""
    scripts = []
    for path in LEGACY:
        code, remarks = migrate_module(path.read_text(), "native")
        scripts.append(tmp_path / path.name)
        scripts[-1].write_text(code)
        reason = ON_THE_DROP_IN.get(path.stem)
        assert uses_drop_in(code) == (reason is not None), path.name
        assert reason is None or any(re.search(reason, f"{each.what} {each.why}") for each in remarks)
        assert imports_horovod(code) == (path.stem == "subclass")  # which asks for horovod.__version__
    table = shown.setdefault(DISTANCES, [])
    runs = [
        trained(tmp_path / "gloo", scripts, "torchrun", "gloo"),
        trained(tmp_path / "hvd", scripts, "horovodrun", "horovod"),
    ]
    for path in LEGACY:
        gloo, horovod = (distance(legacy_under_horovod / f"{path.stem}.pt", run / f"{path.stem}.pt") for run in runs)
        calls = "drop-in" if path.stem in ON_THE_DROP_IN else "native"
        table.append(f"{path.stem:32} {calls:8} gloo {gloo:.0e}  horovod {horovod:.0e}")
        assert max(gloo, horovod) < 1e-5, table[-1]


def test_migrated_projects_train_the_same(legacy_under_horovod: Path, tmp_path: Path) -> None:
    """Each project under Horovod, and migrated as a whole with no edit by hand; nothing of Horovod's is left."""
    scripts = []
    for path in PROJECTS:
        directory = tmp_path / path.parent.name
        shutil.copytree(path.parent, directory, ignore=shutil.ignore_patterns("__pycache__"))
        unidist_migrate("--write", ".", cwd=directory)
        for code in (file.read_text() for file in directory.glob("*.py")):
            assert not imports_horovod(code) and not uses_drop_in(code) and "hvd." not in code
        scripts.append(directory / path.name)
    runs = [
        trained(tmp_path / "on gloo", scripts, "torchrun", "gloo"),
        trained(tmp_path / "on horovod", scripts, "horovodrun", "horovod"),
    ]
    for path in PROJECTS:
        name = f"{path.parent.name}.pt"
        gloo, horovod = (distance(legacy_under_horovod / name, run / name) for run in runs)
        shown.setdefault(DISTANCES, []).append(f"{path.parent.name:32} project  gloo {gloo:.0e}  horovod {horovod:.0e}")
        assert max(gloo, horovod) < 1e-5, path


def test_mutations(legacy_under_horovod: Path, tmp_path: Path) -> None:
    """Each mutation, migrated, trains as the original on Horovod, and has remarks if it uses the drop-in."""
    scripts = []
    for seed in range(int(os.environ.get("UNIDIST_TEST_MUTATIONS", "75"))):
        path = LEGACY[seed % len(LEGACY)]
        text = mutated(path.read_text(), seed)
        code, remarks = migrate_module(text, "native")
        scripts.append(tmp_path / f"{seed:03}_{path.name}")
        scripts[-1].write_text(code, newline="")
        assert seed % 6 or migrate_module(code, "native")[0] == code
        assert not uses_drop_in(code) or remarks
        if "\r\n" in text:
            assert "\n" not in code.replace("\r\n", "")
    directory = trained(tmp_path / "gloo", scripts, "torchrun", "gloo")
    far = {
        script.stem: distance(legacy_under_horovod / f"{script.stem[4:]}.pt", directory / f"{script.stem}.pt")
        for script in scripts
    }
    shown.setdefault(DISTANCES, []).append(f"{len(far)} mutations of them, migrated, on gloo: {max(far.values()):.0e}")
    assert all(each < 1e-5 for each in far.values()), far


def test_random_scripts(tmp_path: Path) -> None:
    """Random scripts compute the same migrated as on the drop-in, and a second migration changes nothing."""
    report, number = tmp_path / "report.jsonl", int(os.environ.get("UNIDIST_TEST_SCRIPTS", "40"))
    argv = ["-m", "tests.support.migrate_scripts", "0", str(number), str(report)]
    result = run_world("torchrun", 2, argv, backend="gloo", timeout=100 + 3 * number)
    assert result.returncode == 0, result.output[-6000:]
    rows = [json.loads(line) for line in report.read_text().splitlines()]
    wrong = [
        row
        for row in rows
        if any(each["errors"] != [None, None] or each["distance"] > 2e-5 or not each["stable"] for each in row)
    ]
    assert len(rows) == number and not wrong, wrong
    native = sum(not row[0]["drop_in"] for row in rows)
    shown.setdefault(DISTANCES, []).append(
        f"{len(rows)} random scripts, {native} of them native, on gloo: "
        f"{max(each['distance'] for row in rows for each in row):.0e} from what they compute on the drop-in"
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
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
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


def test_the_torchrun_line_runs(tmp_path: Path) -> None:
    """A shell passes the same arguments and variables to the script as with the launch line."""
    (tmp_path / "show.py").write_text(
        "import os, sys\n"
        "if os.environ['RANK'] == '0': print(sys.argv[1:], os.environ['WORLD_SIZE'], os.environ['A'], flush=True)\n"
    )
    (launch,) = find_launches("mpirun -np 2 -x A='b c' python show.py 'd  e' \"$0\" f\\ g")
    assert launch.torchrun is not None
    line = launch.torchrun.replace("torchrun", f"{shlex.quote(sys.executable)} -m torch.distributed.run")
    result = subprocess.run(["bash", "-c", line, "zero"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "['d  e', 'zero', 'f g'] 2 b c"
