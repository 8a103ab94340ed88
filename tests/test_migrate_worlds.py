"""The codemod: migrated scripts compute the same as the originals, in worlds of 2 ranks."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.migrate_mutations import DDP_MUTATIONS, PROJECT_MUTATIONS, mutated
from tests.support.weights import distance
from tests.support.worlds import LEGACY, LEGACY_DDP, PROJECTS, PROJECTS_DDP, ROOT, free_port, run_world, shown
from tests.test_migrate import blocks, unidist_migrate
from unidist.migrate.module import migrate_module
from unidist.migrate.project import imports_horovod

#: Scripts that stay on the drop-in at least in part, with the reason in the report.
ON_THE_DROP_IN = {
    "by_hand": "no asynchronous calls",
    "join_uneven": "ranks may reach join\\(\\) after different numbers of steps",
    "metric_average": "the tensor is of integers or bool",
    "subclass": "op=hvd.mpi_ops.Sum",
}
DISTANCES = "migrated scripts: distance of the weights to those of the legacy script under Horovod"


def uses_drop_in(code: str) -> bool:
    return "unidist.hvd" in code or "from unidist import hvd" in code


def trained(directory: Path, scripts: list[Path], launcher: str, backend: str) -> Path:
    """The weights of scripts that run one after another in one world of 2 ranks."""
    directory.mkdir()
    argv = ["tests/programs/run_legacy.py", str(directory), *map(str, scripts)]
    result = run_world(launcher, 2, argv, backend=backend, timeout=240 + 2 * len(scripts))
    assert result.returncode == 0, result.output[-6000:]
    return directory


@pytest.mark.parametrize(("launcher", "backend"), [("torchrun", "gloo"), ("horovodrun", "horovod")])
def test_migrated_scripts_train_the_same(
    launcher: str, backend: str, legacy_under_horovod: Path, tmp_path: Path
) -> None:
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
    run = trained(tmp_path / "weights", scripts, launcher, backend)
    for path in LEGACY:
        far = distance(legacy_under_horovod / f"{path.stem}.pt", run / f"{path.stem}.pt")
        calls = "drop-in" if path.stem in ON_THE_DROP_IN else "native"
        table.append(f"{path.stem:32} {calls:8} {backend:8} {far:.0e}")
        assert far < 1e-5, table[-1]


def test_migrated_projects_train_the_same(legacy_under_horovod: Path, tmp_path: Path) -> None:
    """Each project under Horovod, and migrated as a whole with no edit by hand; nothing of Horovod's is left. Mutations
    of their files, too.
    """
    scripts = []
    for path in PROJECTS:
        scripts.append(tmp_path / path.parent.name / path.name)
        migrate_project(path, scripts[-1].parent)
    mutations = []
    for seed in range(int(os.environ.get("UNIDIST_TEST_MUTATIONS", "10"))):
        path = PROJECTS[seed % len(PROJECTS)]
        mutations.append(tmp_path / f"{seed:03}_{path.parent.name}" / path.name)
        migrate_project(path, mutations[-1].parent, seed)
    runs = [
        trained(tmp_path / "on gloo", [*scripts, *mutations], "torchrun", "gloo"),
        trained(tmp_path / "on horovod", scripts, "horovodrun", "horovod"),
    ]
    for path in PROJECTS:
        name = f"{path.parent.name}.pt"
        gloo, horovod = (distance(legacy_under_horovod / name, run / name) for run in runs)
        shown.setdefault(DISTANCES, []).append(f"{path.parent.name:32} project  gloo {gloo:.0e}  horovod {horovod:.0e}")
        assert max(gloo, horovod) < 1e-5, path
    names = [path.parent.name for path in mutations]
    far = {name: distance(legacy_under_horovod / f"{name[4:]}.pt", runs[0] / f"{name}.pt") for name in names}
    shown.setdefault(DISTANCES, []).append(f"{len(far)} mutations of projects, on gloo: {max(far.values()):.0e}")
    assert all(each < 1e-5 for each in far.values()), far


def migrate_project(path: Path, directory: Path, seed: int | None = None) -> None:
    """A migrated copy of a project, of which ``path`` is a file; with a seed, of mutations of its files."""
    shutil.copytree(path.parent, directory, ignore=shutil.ignore_patterns("__pycache__"))
    for number, file in enumerate(sorted(directory.glob("*.py"))):
        if seed is not None:
            file.write_text(mutated(file.read_text(), 100 * seed + number, PROJECT_MUTATIONS), newline="")
    unidist_migrate("--write", ".", cwd=directory)
    for code in (file.read_text() for file in directory.glob("*.py")):
        assert not imports_horovod(code) and not uses_drop_in(code) and "hvd." not in code


def trained_ddp(directory: Path, launcher: str, scripts: list[Path]) -> Path:
    """What scripts of torch.distributed save in a world of 2 ranks, or in one process."""
    (directory / "migrated").mkdir(parents=True, exist_ok=True)
    argv = ["tests/programs/run_ddp.py", str(directory), *map(str, scripts)]
    result = run_world(launcher, 2, argv, timeout=400 + 2 * len(scripts))
    assert result.returncode == 0, result.output[-6000:]
    return directory


def migrated_ddp(directory: Path) -> dict[Path, Path]:
    """The scripts and projects of torch.distributed and DataParallel, each with a migrated copy."""
    for name in ("legacy_ddp", "legacy_ddp_projects"):
        shutil.copytree(ROOT / "tests" / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
    unidist_migrate("--write", ".", cwd=directory)
    return {path: directory / path.relative_to(ROOT / "tests") for path in (*LEGACY_DDP, *PROJECTS_DDP)}


def with_data_parallel(script: Path) -> bool:
    """Whether it trains in one process, on all devices."""
    return "data_parallel" in script.stem


@pytest.fixture(scope="module")
def originals_ddp(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The weights of the originals, by name: under torchrun, or with DataParallel in one process."""
    directory, scripts = tmp_path_factory.mktemp("originals"), [*LEGACY_DDP, *PROJECTS_DDP]
    with_ddp = [path for path in scripts if path.stem != "spawned" and not with_data_parallel(path)]
    trained_ddp(directory, "torchrun", with_ddp)
    trained_ddp(directory, "python", [path for path in scripts if with_data_parallel(path)])
    return {path.stem: path for path in directory.glob("*.pt")}


def test_scripts_of_torch_distributed_train_the_same(originals_ddp: dict[str, Path], tmp_path: Path) -> None:
    """Each original and its migrated copy; nothing of torch's is left."""
    copies = migrated_ddp(tmp_path)
    for path in copies.values():
        calls = r"(?:\bdist|torch\.distributed)\.\w+\(|init_process_group|\bDDP\(|(?<!nn\.)Data\w*Parallel\("
        assert not re.search(calls, path.read_text()), path
    scripts = [path for path in copies.values() if path.stem != "spawned"]
    with_dp = [path for path in scripts if with_data_parallel(path)]
    runs = {"world": ("torchrun", scripts), "alone": ("python", with_dp)}
    pairs = []
    for name, (launcher, paths) in runs.items():
        directory = trained_ddp(tmp_path / name, launcher, paths)
        pairs += [(originals_ddp[name_of(path)], directory / f"migrated/{name_of(path)}.pt") for path in paths]
    assert_close("of DDP and DataParallel, migrated", pairs)


def test_a_script_that_spawns_its_ranks(tmp_path: Path) -> None:
    """mp.spawn imports the main file again."""
    copies = migrated_ddp(tmp_path)
    spawned = next(path for path in copies if path.stem == "spawned")
    pair = (tmp_path / "spawned.pt", tmp_path / "spawned migrated.pt")
    for script, path in zip((spawned, copies[spawned]), pair, strict=True):
        for _ in range(3):
            result = run_world("python", 1, [str(script), str(path), "--dist-url", f"tcp://127.0.0.1:{free_port()}"])
            if script != spawned or "SIGABRT" not in result.output:  # as raw PyTorch may end under load
                break
        assert result.returncode == 0, result.output[-6000:]
    assert_close("that spawns its ranks, migrated", [pair])


def test_mutations_of_torch_distributed(originals_ddp: dict[str, Path], tmp_path: Path) -> None:
    """Each mutation, migrated, trains as the original."""
    scripts = mutations_ddp(tmp_path / "mutations", int(os.environ.get("UNIDIST_TEST_MUTATIONS", "30")))
    world = trained_ddp(tmp_path / "world", "torchrun", scripts)
    pairs = [(originals_ddp[path.stem[4:]], world / f"migrated/{path.stem}.pt") for path in scripts]
    assert_close("mutations of DDP and DataParallel, migrated", pairs)


def assert_close(what: str, pairs: list[tuple[Path, Path]]) -> None:
    """The weights of each pair are the same."""
    far = {f"{right.parent.parent.name}/{right.stem}": distance(left, right) for left, right in pairs}
    shown.setdefault(DISTANCES, []).append(f"{len(pairs)} {what}: {max(far.values()):.0e}")
    assert len(far) == len(pairs) and all(each < 1e-5 for each in far.values()), far


def mutations_ddp(directory: Path, number: int) -> list[Path]:
    """Mutations of the scripts, migrated."""
    directory.mkdir()
    found = []
    scripts = [path for path in LEGACY_DDP if path.stem != "spawned"]
    for seed in range(number):
        path = scripts[seed % len(scripts)]
        code, _ = migrate_module(mutated(path.read_text(), seed, DDP_MUTATIONS), "native")
        assert "import unidist" in code, (seed, path)
        found.append(directory / f"{seed:03}_{path.name}")
        found[-1].write_text(code, newline="")
    return found


def name_of(script: Path) -> str:
    return script.parent.name if script.name == "train.py" else script.stem


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
    report, number = tmp_path / "report.jsonl", int(os.environ.get("UNIDIST_TEST_SCRIPTS", "100"))
    argv = ["-m", "tests.support.migrate_scripts", "0", str(number), str(report)]
    result = run_world("torchrun", 2, argv, backend="gloo", timeout=100 + 3 * number)
    assert result.returncode == 0, result.output[-6000:]
    rows = [json.loads(line) for line in report.read_text().splitlines()]
    wrong = [
        row
        for row in rows
        if any(each["errors"] != [None, None] or each["distance"] > each["limit"] for each in row)
        or not row[0]["stable"]
        or row[0]["undefined"]
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
        timeout=240,
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


def test_a_long_file(tmp_path: Path) -> None:
    """5,000 lines in less than 350 MB."""
    functions = "\n".join(
        f"def work_{number}(model, data, rate={number}):\n"
        "    total = 0.0\n    for index, (x, y) in enumerate(data):\n"
        "        loss = (model(x) - y).pow(2).mean() * rate\n"
        f"        total += loss.item()\n        if index % 10 == {number % 10}:\n"
        f"            print('step', index, total / (index + 1), work_{max(0, number - 1)})\n    return total\n"
        for number in range(560)
    )
    path = tmp_path / "long.py"
    path.write_text(f"{functions}\n{(ROOT / 'tests/legacy/plain.py').read_text()}")
    code = (
        "import sys\nfrom pathlib import Path\nfrom unidist.migrate.project import Exports, migrate_file\n"
        "report = migrate_file(Path(sys.argv[1]), 'native', Exports())\n"
        "assert report.status == 'changed' and 'replicate' in report.after, report.remarks\n"
        "status = Path('/proc/self/status').read_text()\n"  # ru_maxrss is that of the process that started this one
        "print(len(report.before.splitlines()), int(status.split('VmHWM:')[1].split()[0]) // 1024)\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    lines, megabytes = map(int, done.stdout.split())
    assert lines > 5_000 and megabytes < 350
