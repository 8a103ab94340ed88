"""The shape of the code: names, imports, optional packages, docs."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import unidist
from tests.conftest import NEEDED, VARIANTS, pytest_cmdline_main, stale
from tests.support.worlds import ROOT, environment
from unidist import horovod_names, hvd
from unidist.context import BACKENDS

pytestmark = pytest.mark.unit
#: The only files, or directories, that import torch.distributed. What else imports what: [importlinter] in setup.cfg.
TORCH_DISTRIBUTED = (
    "backends/torch_distributed.py",
    "backends/process_groups.py",
    "backends/rendezvous.py",
    "backends/mpi",
    "unidist/checkpoint/shards.py",
    "unidist/gradients/ddp.py",
    "unidist/cli/checkup.py",
)
#: The only files that import modules by names of strings, which the import linter does not see.
BY_NAME = {
    "unidist/__init__.py": "public names, at their first use",
    "unidist/moved.py": "earlier names of modules",
    "unidist/context.py": "backends",
    "unidist/cli/__init__.py": "commands",
    "unidist/compare/__main__.py": "numpy",
    "unidist/hvd/alias.py": "modules of the drop-in by Horovod's names",
    "unidist/hvd/as_horovod/horovod/__init__.py": "horovod, which is the drop-in then",
    "unidist/hvd/as_horovod/sparkdl/__init__.py": "sparkdl, the same",
}
#: Of other libraries, and beginning with "_" though they are documented.
DOCUMENTED = {"_asdict", "_exit", "_fields_", "_getframe", "_current_frames", "_replace"}
#: Names of other modules, by which a private name is theirs whatever this package has.
FOREIGN = ("torch", "dist.", "cst.", "hvd.")
SOURCES = [*(ROOT / "unidist").rglob("*.py"), *(ROOT / "backends").rglob("*.py")]
SOURCES = [path for path in SOURCES if not path.is_relative_to(ROOT / "unidist/backends")]  # a link


def imported(path: Path) -> set[str]:
    """Full names of all that a file imports, wherever the import is."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_imports_of_torch_distributed_and_by_name() -> None:
    by_name = set()
    for path in SOURCES:
        home = str(path.relative_to(ROOT))
        for name in imported(path):
            if name == "torch.distributed" or name.startswith("torch.distributed."):
                assert home.startswith(TORCH_DISTRIBUTED), f"{home} imports {name}"
        if "import_module(" in path.read_text() and not home.startswith("unidist/migrate"):  # text of users
            by_name.add(home)
    assert by_name == BY_NAME.keys()


def test_imports_point_down() -> None:
    """The contracts of setup.cfg, as make lint checks them."""
    found = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"],
        cwd=ROOT, capture_output=True, text=True, env=environment("python", {}),
    )  # fmt: skip
    assert found.returncode == 0 and "kept, 0 broken" in found.stdout, found.stdout + found.stderr


def test_private_names_of_other_libraries_are_in_a_table() -> None:
    nodes = [node for path in SOURCES for node in ast.walk(ast.parse(path.read_text()))]
    own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}
    own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    used = {
        alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("unidist")
        for alias in node.names
    }
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    own |= {
        node.attr
        for node in attributes
        if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) in ("self", "cls")
    }
    used |= {node.attr for node in attributes if node.attr not in own or ast.unparse(node.value).startswith(FOREIGN)}
    private = {name for name in used if re.match(r"_[^_]", name)} - DOCUMENTED
    table = set(re.findall(r"^\| `(_\w+)` \|", (ROOT / "docs/upgrading.md").read_text(), re.MULTILINE))
    assert len(table) > 20 and private - table == set() and table - private == set()


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "unidist" else ("unidist", *parts)).removesuffix(".__init__")


def depends_on(body: Iterable[ast.AST], modules: Collection[str]) -> Iterator[str]:
    """The modules that are imported anywhere in a piece of code, if only when a function is called; types aside."""
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from depends_on(node.orelse, modules)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            names = [(f"{node.module}.{alias.name}", node.module or "") for alias in node.names]
            yield from (full if full in modules else module for full, module in names if module in modules)
        else:
            yield from depends_on(ast.iter_child_nodes(node), modules)


def test_no_import_circles() -> None:
    paths = {module_name(path): path for path in SOURCES}
    graph = {name: set(depends_on(ast.parse(path.read_text()).body, paths)) - {name} for name, path in paths.items()}
    for name in graph:  # Warshall: every path, through one module after another
        for targets in graph.values():
            targets |= graph[name] if name in targets else set()
    circles = {
        frozenset(other for other in graph[name] if name in graph[other]) for name in graph if name in graph[name]
    }
    assert not circles, [sorted(circle) for circle in circles]


#: Names that several modules have: Horovod's beside torch's or unidist's.
TWINS = {"SyncBatchNorm", "State", "ObjectState"}


def test_a_public_class_has_a_name_of_its_own() -> None:
    homes: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module_name(path))
    twins = {name: modules for name, modules in homes.items() if len(modules) > 1}
    assert twins.keys() == TWINS, twins


def test_no_module_hides_a_public_name() -> None:
    """``import unidist.spawn`` would bind a module of that name over the function."""
    modules = {path.stem for path in SOURCES if path.parent == ROOT / "unidist"}
    packages = {path.parent.name for path in SOURCES if path.parent.parent == ROOT / "unidist"}
    assert not (modules | packages) & set(unidist.__all__)


def test_features_do_not_ask_which_backend_it_is() -> None:
    for path in (ROOT / "unidist").glob("*.py"):
        if path.stem == "context":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                names = {part.value for part in [node.left, *node.comparators] if isinstance(part, ast.Constant)}
                assert not names & set(BACKENDS), f"{path.name}:{node.lineno}"


def test_public_names() -> None:
    assert len(unidist.__all__) > 50 and {"init", "wrap_model", "Mean", "Group"} <= set(unidist.__all__)
    assert unidist.__all__ == sorted(unidist.__all__) and "print" not in unidist.__all__ and unidist.print is not print
    with pytest.raises(AttributeError, match="module 'unidist' has no attribute 'wrap_modl'"):
        unidist.wrap_modl  # noqa: B018


def test_names_of_horovods_say_what_there_is_instead() -> None:
    with pytest.raises(AttributeError, match=r"'size'; Horovod's hvd\.size is unidist\.world_size\(\): docs/hvd-to-"):
        unidist.size  # noqa: B018
    assert horovod_names.hint("wrap_modl") == ""
    instead = {**horovod_names.PLAIN_CALLS, **horovod_names._OTHERS}
    for name, text in instead.items():
        assert hasattr(hvd, name) and hasattr(unidist, re.split(r"\W", text)[0]), name
        assert not hasattr(unidist, name) or text == name, name


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    """As PyTorch's: "Return the rank", not "The rank"."""
    for name in unidist.__all__:
        assert inspect.getdoc(getattr(unidist, name)), f"{name} has no docstring"
    nouns = re.compile(r"(The|A|An|Whether|What|How|Why|Where|All|Each|Every|This|Its|Those)\b")
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                is_property = any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
                assert is_property or not nouns.match(ast.get_docstring(node) or ""), f"{path}:{node.lineno}"


def test_modules_are_found_by_their_earlier_names() -> None:
    from unidist.moved import _NEW_NAMES

    assert len(_NEW_NAMES) > 20
    for old, new in _NEW_NAMES.items():
        sys.modules.pop(old, None)
        with pytest.warns(DeprecationWarning, match=f"the module {old} is {new} now"):
            assert importlib.import_module(old) is importlib.import_module(new)
    from unidist.training.model import wrap_model

    del sys.modules["unidist.model"]
    with pytest.warns(DeprecationWarning):
        from unidist.model import wrap_model as found  # type: ignore[import-not-found]
    assert found is wrap_model is unidist.wrap_model


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


def test_the_tests_of_lists_exist() -> None:
    for test in (*VARIANTS, *(name for _, name in NEEDED)):
        file, name = test.partition("[")[0].split("::")
        assert f"def {name}" in (ROOT / "tests" / file).read_text(), test
    assert not stale  # with their parameters


# ------------------------------------------------------------------------------------ docs
DOCS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("doc", DOCS, ids=lambda path: path.name)
def test_links_lead_somewhere(doc: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", doc.read_text()):
        assert target.startswith("https://") or (doc.parent / target).exists(), target


def test_every_module_is_in_the_architecture_page() -> None:
    words = re.findall(r"[\w./]+", (ROOT / "docs/architecture.md").read_text())
    names = [path.name for path in SOURCES if not path.name.startswith("__") and path.parent.name != "cli"]
    for name in names:
        assert len([word for word in words if Path(word).name == name]) >= names.count(name), name


def test_readme_names_every_public_call() -> None:
    page = (ROOT / "README.md").read_text()
    for name in unidist.__all__:
        if inspect.isfunction(getattr(unidist, name)):
            assert name in page or (name.endswith("_object") and "*_object" in page), name


def test_workers_of_pytest_alone_start_no_workers() -> None:
    """Each parses the command line anew: three workers would have started three more each."""
    source = pytest.Config.ArgsSource
    for worker, expected in (({}, 3), ({"workerinput": {}}, None)):
        option = SimpleNamespace(markexpr="", keyword="", numprocesses=None, usepdb=False)
        config: Any = SimpleNamespace(option=option, args_source=source.TESTPATHS, ArgsSource=source, **worker)
        pytest_cmdline_main(config)
        assert (option.numprocesses, option.markexpr) == (expected, "not variant")
