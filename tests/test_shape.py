"""The shape of the code: names, imports, optional packages, docs."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import unidist
from tests.worlds import ROOT, environment, run_world
from unidist.context import BACKENDS

FEATURES = {
    "model", "uneven", "data", "metrics", "meters", "checkpoint", "console", "collectives", "batch_norm", "launch",
}  # fmt: skip
#: What each module of the package may import of it.
BELOW = {
    "errors": set(),
    "tree": set(),
    "seed": set(),
    "knobs": {"errors"},
    "topology": {"errors", "knobs"},
    "backends": {"errors", "topology", "backends"},
    "context": {"errors", "knobs", "topology", "seed", "backends"},
    **{name: {"errors", "knobs", "context", "tree", "backends", *FEATURES} for name in FEATURES},
    "bench": {"bench", "cli", "wrap_model", "hvd"},
    "cli": {"__version__", "errors", "knobs", "topology", "context", "bench", "cli", "compare", "migrate"},
    "migrate": {"hvd", "migrate"},
    "rules": {"migrate"},
    "compare": {"topology", "seed", "hvd", "compare"},
    "hvd": {
        "errors",
        "knobs",
        "topology",
        "context",
        "backends",
        "collectives",
        "model",
        "tree",
        "batch_norm",
        "launch",
        "hvd",
    },
    "common": {"hvd"},
    "__main__": {"cli"},
    "__init__": {"errors", "context", "seed", "backends", *FEATURES},
}
MPI = {path.name for path in (ROOT / "backends").glob("mpi*.py")}
LIBRARIES = {
    "torch.distributed": {"torch_backend.py", "rendezvous.py", *MPI},
    "horovod": {"horovod_backend.py"},
    "mpi4py": MPI,
}
#: These measure and look at the libraries themselves.
LOOKING = {"bench/peers.py", "bench/startup.py", "bench/memory.py", "cli/bench.py", "cli/checkup.py"}
FOLDERS = (
    "unidist",
    "unidist/cli",
    "unidist/bench",
    "unidist/compare",
    "unidist/migrate",
    "unidist/migrate/rules",
    "unidist/data",
    "unidist/hvd",
    "unidist/hvd/common",
    "backends",
)
SOURCES = [path for folder in FOLDERS for path in (ROOT / folder).glob("*.py")]


def imported(path: Path) -> set[str]:
    """Full names of all that a file imports, wherever the import stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_imports_point_down(path: Path) -> None:
    folder = path.parent.name
    layer = path.stem if folder == "unidist" else folder
    for name in imported(path):
        if name.startswith("unidist."):
            assert name.split(".")[1] in BELOW[layer], f"{path.name} imports {name}"
        for library, homes in LIBRARIES.items():
            if f"{folder}/{path.name}" in LOOKING:
                continue
            if name == library or name.startswith(f"{library}."):
                assert path.name in homes, f"{path.name} imports {name}"


def test_features_do_not_ask_which_engine_it_is() -> None:
    for path in (ROOT / "unidist").glob("*.py"):
        if path.stem == "context":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                names = {part.value for part in [node.left, *node.comparators] if isinstance(part, ast.Constant)}
                assert not names & set(BACKENDS), f"{path.name}:{node.lineno}"


def test_public_names() -> None:
    assert unidist.__all__ == sorted(unidist.__all__)
    declared = imported(ROOT / "unidist/__init__.py") - {
        "importlib.import_module",
        "typing.TYPE_CHECKING",
        "typing.Any",
    }
    table = {f"unidist.{module}.{name}" for module, names in unidist._MODULES.items() for name in names}
    assert declared == table and sorted(name.rsplit(".", 1)[1] for name in table) == unidist.__all__
    for name in unidist.__all__:
        assert inspect.getdoc(getattr(unidist, name)), f"{name} has no docstring"


def test_import_needs_torch_alone_and_changes_no_environment() -> None:
    code = (
        "import os, sys; before = dict(os.environ)\n"
        "import unidist\n"
        "assert dict(os.environ) == before\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "assert not loaded & {'horovod', 'mpi4py', 'click', 'rich', 'psutil'}, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=environment("python", {}))


def test_the_second_name_is_refused() -> None:
    done = subprocess.run([sys.executable, "-c", "import backends"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0 and "import unidist.backends" in done.stderr


# ------------------------------------------------------------------------------------ docs
DOCS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("doc", DOCS, ids=lambda path: path.name)
def test_links_lead_somewhere(doc: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", doc.read_text()):
        assert target.startswith("https://") or (doc.parent / target).exists(), target


def test_every_module_is_in_the_architecture_page() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    for path in SOURCES:
        if not path.name.startswith("__") and path.parent.name != "cli":
            assert path.name in page, path


def test_readme_names_every_public_call() -> None:
    page = (ROOT / "README.md").read_text()
    for name in unidist.__all__:
        if inspect.isfunction(getattr(unidist, name)):
            assert name in page or (name.endswith("_object") and "*_object" in page), name


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


def readme_commands() -> list[str]:
    """The indented lines of the README."""
    lines = (ROOT / "README.md").read_text().splitlines()
    return [
        line.split("#")[0].strip()
        for line in lines
        if line.startswith("    ") and "import" not in line and "=" not in line
    ]


def test_readme_commands_are_run_by_tests() -> None:
    """Each command of the README is the one that a test or ``make test`` runs."""
    covered = {
        "make demo": "tests/test_shape.py",
        "make test": ".ci/run",
        "pip install -e .": "Makefile",
        'pip install -e ".[horovod]"': "Makefile",
        "unidist build-horovod --install": "Makefile",
        "unidist doctor --run": "tests/test_doctor.py",
        "unidist bench all --quick": "tests/test_bench.py",
        "unidist migrate examples/digits_horovod.py": "tests/test_migrate.py",
        "unidist compare examples/digits_horovod.py --steps 20": "tests/test_compare_worlds.py",
        "python examples/digits.py": "tests/test_matrix.py",
        "torchrun --nproc-per-node 2 examples/digits.py": "tests/test_matrix.py",
        "horovodrun -np 2 python examples/digits.py": "tests/test_matrix.py",
        "torchrun --nproc-per-node 2 -m unidist.hvd examples/digits_horovod.py": "tests/test_hvd.py",
        "mpirun -np 2 --bind-to none python examples/digits.py": "tests/test_matrix.py",
        "srun -n 2 python examples/digits.py": "tests/test_matrix.py",
    }
    commands = [
        command
        for command in readme_commands()
        if re.match(r"(make|pip|unidist|python|torchrun|horovodrun|mpirun|srun) ", command)
    ]
    assert sorted(commands) == sorted(covered)
    assert "build-horovod --install" in (ROOT / "Makefile").read_text()
    assert "make test" in (ROOT / ".ci/run").read_text()


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
        cwd=ROOT, env=environment("python", {}), capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"epoch 8/8 .*accuracy 3\d\d/357", done.stdout) and "saved digits.pt" in done.stdout
