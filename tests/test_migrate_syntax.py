"""How ``unidist.migrate`` lists the nodes of modules; the processes that share the work."""

from __future__ import annotations

import gc
import os
import signal
import time
from pathlib import Path

import libcst as cst
import pytest

from tests.support.migrate_scripts import script
from tests.support.worlds import LEGACY, ROOT
from unidist.migrate import syntax
from unidist.migrate.project import Exports, migrate_files
from unidist.migrate.self_check import fault
from unidist.migrate.syntax import SyntaxTree
from unidist.migrate.workers import results_in_order

pytestmark = pytest.mark.unit
TEXTS = {
    **{path.stem: path.read_text() for path in [*LEGACY[::3], *sorted((ROOT / "examples").glob("*.py"))]},
    **{
        path.stem: path.read_text().split("=== after\n")[0]
        for path in sorted((ROOT / "tests/migrations").glob("*.txt"))[::3]
    },
    **{f"random script {seed}": script(seed) for seed in range(6)},
    "nothing": "",
    "comments": "# a\n\n(  # b\n  f(a,  # c\n    # d\n    b.  # e\n    c)\n)\nif x:  # f\n    pass\n    # g\n# h",
    "line ends": "if a:\r\n    x = '''b\r\nc'''\r\n    y\r\n",
}


def test_fields_that_the_first_node_of_a_class_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syntax, "_fields_of", {})
    names = [node.value for node in SyntaxTree("f'{a}{b:{c}}'").nodes if isinstance(node, cst.Name)]
    assert names == ["a", "b", "c"]


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_the_tree_has_all_nodes_but_white_space_and_punctuation(text: str) -> None:
    tree = SyntaxTree(text)
    listed = {id(node) for node in tree.nodes}
    below: dict[int, list[cst.CSTNode]] = {}

    def walk(node: cst.CSTNode) -> list[cst.CSTNode]:
        """A node and all that is below it; ``below`` has what of it is listed."""
        found = [node]
        for child in node.children:
            assert id(child) not in listed or tree.parent(child) is node
            found += walk(child)
        below[id(node)] = [each for each in found if id(each) in listed]
        return found

    everything = walk(tree.module)
    assert below[id(tree.module)] == tree.nodes
    assert tree.parent(tree.module) is tree.module and tree.span(tree.module) == (0, len(tree.nodes))
    for node in everything:
        if id(node) in listed:
            first, end = tree.span(node)
            assert tree.nodes[first:end] == below[id(node)]
        else:
            assert not isinstance(node, (cst.BaseExpression, cst.BaseStatement, cst.BaseSmallStatement, cst.Comment))


# ------------------------------------------------------------------------------------ several processes
def square(number: int) -> int:
    if number == 13:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 17:
        os._exit(3)
    if number < 4:
        time.sleep(0.05 * (4 - number))
    return number * number


def test_results_are_in_order_and_a_process_that_dies_costs_its_own_item_alone() -> None:
    found = list(results_in_order(square, iter(range(40)), lambda number: -number, processes=3))
    assert found == [{13: -13, 17: -17}.get(number, number * number) for number in range(40)]
    assert set(results_in_order(lambda _: os.getpid(), range(4), lambda _: 0)) == {os.getpid()}
    pids = set(results_in_order(lambda _: os.getpid(), range(40), lambda _: 0, processes=2))
    assert os.getpid() not in pids and 1 <= len(pids) <= 2
    left = results_in_order(square, range(10), lambda _: 0, processes=2)
    next(left)
    left.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_many_files_have_the_same_reports_as_one_at_a_time(tmp_path: Path) -> None:
    paths = [tmp_path / path.name for path in LEGACY]
    for path, legacy in zip(paths, LEGACY):
        path.write_text(legacy.read_text())
    (tmp_path / "broken.py").write_text("import horovod.torch as hvd\nprint 1\n")
    paths.insert(3, tmp_path / "broken.py")
    together = list(migrate_files(paths, "native", Exports()))
    alone = [report for path in paths for report in migrate_files([path], "native", Exports())]
    assert together == alone and [report.path for report in together] == paths
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("after", "planned", "wrong"),
    [
        ("import b\n\ndef f():\n    return b.x + y\n", {1, 4}, None),  # y is not new
        ("import b\n\ndef f():\n    return a.x + y\n", {1}, "the name a would not be defined"),
        ("import b\n\ndef f():\n    return b.x + y\n", {1}, "line 4 would change, which no rule has planned"),
        ("import b\n\ndef f():\nreturn b.x\n", {1, 4}, "it would not parse"),
        ("import b\n\ndef f(a):\n    with b:\n        return a.x + y\n", {1, 3}, None),  # indented
    ],
)
def test_what_is_wrong_with_a_new_text(after: str, planned: set[int], wrong: str | None) -> None:
    assert fault("import a\n\ndef f():\n    return a.x + y\n", after, planned) == wrong
