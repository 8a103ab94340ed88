"""Calls that a thread of the script's makes: Horovod matches calls by their names, unidist a group's by their order."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from unidist.horovod_names import is_collective
from unidist.migrate.context import Context
from unidist.migrate.flow import callees
from unidist.migrate.syntax import SyntaxTree, argument, called_name, full_name

_IN_THREAD = (
    "a thread of the script's makes this call, which Horovod matches by its name; unidist's calls are matched by their "
    "order, which threads do not keep",
    "keep it; or make `group = unidist.new_group(range(unidist.world_size()))` before the thread starts, and pass "
    "group=group in its calls alone",
)
#: The function among the arguments of calls that start threads: by its name, and by its place.
_NAMES, _PLACES = {"Thread": "target", "Timer": "function"}, {"Timer": 1, "submit": 0, "apply_async": 0}


def keep_calls_of_threads(context: Context) -> None:
    """Keep collective calls in functions that run in threads."""
    functions = list(_in_threads(context.tree))
    for use, symbol in context.names.symbols.items() if functions else ():
        inside = any(context.tree.is_inside(use, function) for function in functions)
        if inside and is_collective(symbol) and context.tree.call_of(use) is not None:
            context.kept[use] = _IN_THREAD


def _in_threads(tree: SyntaxTree) -> Iterator[cst.FunctionDef]:
    """Yield the functions that threads run, and those that they call."""
    names = {full_name(node).rpartition(".")[2] for node in _targets(tree)}
    waiting = [function for function in tree.all(cst.FunctionDef) if function.name.value in names]
    for node in tree.all(cst.ClassDef):
        if any(full_name(base.value).endswith("Thread") for base in node.bases):
            waiting += [each for each in tree.all(cst.FunctionDef, inside=node) if each.name.value == "run"]
    seen: list[cst.FunctionDef] = []
    while waiting:
        function = waiting.pop()
        if not any(function is each for each in seen):
            seen.append(function)
            waiting += [each for call in tree.all(cst.Call, inside=function) for each in callees(tree, call)]
    yield from seen


def _targets(tree: SyntaxTree) -> Iterator[cst.BaseExpression]:
    """Yield what ``Thread(target=...)``, ``Timer(seconds, ...)`` and ``ThreadPoolExecutor.submit(...)`` run."""
    has_pool = "ThreadPool" in tree.module.code
    for call in tree.all(cst.Call):
        name = called_name(call)
        place = _PLACES.get(name)
        if (target := argument(call, _NAMES.get(name, ""))) is not None:
            yield target
        elif place is not None and place < len(call.args) and (has_pool or name == "Timer"):
            yield call.args[place].value
