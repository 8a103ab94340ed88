"""Changes one place of the package at a time, and counts which changes no test notices: ``make mutants N=200 SEED=1``.

Each mutant is tested in a copy of the checkout, until a test fails: by the tests that are named for its directory here,
and where these do not decide alone, by those on threads and by worlds of processes on gloo and MPI. What survives is
printed as a diff.
"""

import argparse
import ast
import difflib
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.support.worlds import ROOT

#: The first tests for the modules of a directory or file; the first that fits. CONTRIBUTING.md shows them.
FIRST = {
    "backends/mpi": ["tests/test_contract.py::test_contract[openmpi-mpi-2]", "tests/test_mpi.py"],
    "backends/horovod": ["tests/test_contract.py::test_contract[horovodrun-horovod-2]"],
    "backends/": ["tests/contract/test_collectives.py", "tests/contract/test_world.py"],
    "unidist/gradients": ["tests/contract/test_wrap_model.py", "tests/contract/test_replicate.py"],
    "unidist/collectives": [
        "tests/contract/test_collectives.py",
        "tests/contract/test_metrics.py",
        "tests/contract/test_meters.py",
    ],
    "unidist/data": ["tests/contract/test_shard_loader.py", "tests/test_data.py"],
    "unidist/checkpoint": ["tests/contract/test_checkpoint.py", "tests/test_checkpoint_files.py"],
    "unidist/hvd/operation.py": ["tests/test_hvd.py::test_one_suite_for_both[torchrun-gloo-1]"],
    "unidist/hvd": ["tests/test_negotiation.py", "tests/test_gradient_rounds.py"],
    "unidist/run/hosts.py": ["tests/test_run_options.py", "tests/test_elastic_decisions.py"],
    "unidist/run/elastic.py": ["tests/test_elastic_decisions.py"],
    "unidist/launch": ["tests/test_topology.py"],
    "unidist/migrate/rules": ["tests/test_migrate.py", "tests/test_migrate_torch.py"],
}
#: What those tests decide alone.
DECIDED = ("unidist/hvd", "unidist/run", "unidist/migrate")
#: What tests a mutant that those do not notice.
THEN = [
    ["tests/contract"],
    ["-m", "unit", "--ignore=tests/contract"],
    ["tests/test_contract.py::test_contract[torchrun-gloo-3]"],
    ["tests/test_contract.py::test_contract[openmpi-mpi-2]"],
]
THEN += [
    [
        "tests/test_abort.py",
        "tests/test_trust.py",
        "tests/test_launch.py",
        "tests/test_checkpoint.py",
        "-m",
        "not variant",
    ]
]
PURE = ("negotiation", "messages", "operation", "host_submissions", "response_cache", "rounds")
#: What is changed: directories and files.
PLACES = (
    "backends", "unidist/gradients", "unidist/collectives", "unidist/data", "unidist/checkpoint", "unidist/launch",
    *(f"unidist/hvd/{name}.py" for name in PURE), "unidist/run/hosts.py", "unidist/run/elastic.py",
    "unidist/migrate/rules",
)  # fmt: skip
COMPARISONS = {
    ast.Eq: "!=", ast.NotEq: "==", ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*"}


def mutations(source: str) -> Iterator[tuple[int, int, str]]:
    """Begin, end and new text of each change that can be made to a module."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def at(node: ast.expr | ast.stmt, end: bool = False) -> int:
        line, column = (node.end_lineno, node.end_col_offset) if end else (node.lineno, node.col_offset)
        return starts[line - 1] + column  # type: ignore[operator]

    tree = ast.parse(source)
    docstrings = {id(each.value) for each in ast.walk(tree) if isinstance(each, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left, [op], [right]):
                yield at(left, end=True), at(right), f" {COMPARISONS[type(op)]} "
            case ast.BinOp(left, op, right) if type(op) in ARITHMETIC:
                yield at(left, end=True), at(right), f" {ARITHMETIC[type(op)]} "
            case ast.BoolOp(op, [left, right, *_]):
                yield at(left, end=True), at(right), " and " if isinstance(op, ast.Or) else " or "
            case ast.UnaryOp(ast.Not(), operand):
                yield at(node), at(operand), ""
            case ast.If(test) | ast.While(test) | ast.IfExp(test):
                yield at(test), at(test, end=True), f"(not ({source[at(test) : at(test, end=True)]}))"
            case ast.Constant(bool() | int() as value) if id(node) not in docstrings:
                yield at(node), at(node, end=True), str(not value if isinstance(value, bool) else value + 1)
            case ast.Return(value) if value is not None:
                yield at(value), at(value, end=True), "None"
            case ast.Expr(ast.Call()):
                yield at(node), at(node, end=True), "pass"


def compiles(text: str) -> bool:
    try:
        compile(text, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def draw(count: int, seed: int, places: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The path of a module, and its text with one change."""
    dice = random.Random(seed)
    paths = [
        path
        for place in places
        for path in (sorted((ROOT / place).rglob("*.py")) if (ROOT / place).is_dir() else [ROOT / place])
    ]
    all_changes = [(path, change) for path in paths for change in mutations(path.read_text())]
    while count:
        path, (begin, end, new) = dice.choice(all_changes)
        source = path.read_text()
        text = source[:begin] + new + source[end:]
        if compiles(text):
            count -= 1
            yield str(path.relative_to(ROOT)), text


def killer(path: str, text: str, checkout: Path) -> str:
    """The tests that notice the change; empty if none does."""
    original = (checkout / path).read_text()
    env = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        (checkout / path).write_text(text)
        first = next((tests for name, tests in FIRST.items() if path.startswith(name)))
        for tests in (first, *(() if path.startswith(DECIDED) else THEN)):
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
            try:
                done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, timeout=600)
            except subprocess.TimeoutExpired:
                return "timeout"
            if done.returncode not in (0, 5):
                lines = (line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR")))
                return next(lines, f"pytest ended with {done.returncode}")[:150]  # it cannot be imported, say
        return ""
    finally:
        (checkout / path).write_text(original)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=PLACES, help="directories and files, instead of all")
    options = parser.parse_args()
    survivors = 0
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(options.jobs) as pool:
        checkouts: SimpleQueue[Path] = SimpleQueue()
        for job in range(options.jobs):
            copy = Path(name, f"{job}")
            shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv*", "build"))
            checkouts.put(copy)

        def test(mutant: tuple[str, str]) -> tuple[str, str, str]:
            checkout = checkouts.get()
            try:
                return (*mutant, killer(*mutant, checkout))
            finally:
                checkouts.put(checkout)

        for path, text, why in pool.map(test, draw(options.n, options.seed, options.only)):
            survivors += not why
            before = (ROOT / path).read_text().splitlines()
            diff = list(difflib.unified_diff(before, text.splitlines(), path, n=0, lineterm=""))[2:]
            print(f"{'killed' if why else 'SURVIVED'} {path} {why}", *(() if why else diff), sep="\n  ", flush=True)
    print(f"{options.n - survivors} of {options.n} mutants killed")


if __name__ == "__main__":
    main()
