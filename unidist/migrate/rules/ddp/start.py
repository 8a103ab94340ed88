"""Rules for the process group: its start and end, and calls that ask for ranks."""

from __future__ import annotations

import re

import libcst as cst

from unidist.migrate.context import is_constant, replace_zero_test
from unidist.migrate.flow import assignments_of, callers, is_parameter
from unidist.migrate.rules.ddp.names import TorchContext, argument_named, place_of
from unidist.migrate.rules.ddp.places import first_reading, is_by_cuda
from unidist.migrate.syntax import Statement

_PLAIN = {
    "get_rank": "rank",
    "get_world_size": "world_size",
    "get_backend": "backend_name",
    "is_initialized": "is_initialized",
    "destroy_process_group": "shutdown",
    "barrier": "barrier",
}
_WRITE_OUT = "write the arguments out, without * and **, then migrate again"
_GROUPS = ("it is a call within a process group of its own", "unidist.new_group(ranks), and group=")
_ASYNC = (
    "it is asynchronous, and unidist has no asynchronous calls",
    "remove async_op= and wait(), then migrate again",
)


def change_start(context: TorchContext) -> None:
    """``init_process_group`` becomes ``unidist.init()``, with the arguments that the launcher does not give."""
    tree = context.tree
    by_launcher = []
    for call in list(context.calls("init_process_group")):
        arguments = context.arguments(call)
        if arguments is None or not isinstance(tree.parent(call), cst.Expr):
            context.keep(call.func, "its arguments cannot be determined", _WRITE_OUT)
            continue
        for name in ("store", "pg_options"):
            if not is_constant(arguments.get(name), None):
                context.keep(call.func, f"unidist.init() has no {name}=", "remove the argument, then migrate again")
        device = arguments.get("device_id")
        if call.func in context.kept:
            continue
        values = [*_backend(context, arguments.get("backend")), *_rendezvous(context, arguments)]
        if not is_constant(arguments.get("timeout"), None):
            values.append(("timeout", arguments["timeout"]))
        if device is not None and not values:
            context.gone.append(device)
        elif device is not None and not is_constant(device, None):
            values.append(("device", device))
        named = [value.evaluated_value for name, value in values if not name and isinstance(value, cst.SimpleString)]
        context.chooses_device |= not named and not any(name == "device" for name, _ in values)
        by_launcher.append(not any(name == "rank" for name, _ in values))
        context.sets_device.append(not any(name in ("", "device", "rank") for name, _ in values))
        context.rebuild(call, "init", values)
        statement = tree.is_statement(call)
        if statement is not None:
            _place(context, call, statement, values)
        elif isinstance(line := tree.parent(tree.parent(call)), cst.SimpleStatementLine):
            context.starts.append(line)  # it shares its line
    context.by_launcher = bool(by_launcher) and all(by_launcher)
    guards = [guard for start in context.starts if (guard := _guard_of(context, start)) is not None]
    calls = [each for start in (*context.starts, *guards) for each in _calls_around(context, start)]
    context.calls_of_start += [*guards, *calls]


def _guard_of(context: TorchContext, start: cst.CSTNode) -> cst.If | None:
    """``if not dist.is_initialized():`` around a start, after which the world has been started in any case."""
    block = context.tree.block(start)
    guard = context.tree.parent(block) if block is not None else None
    if not isinstance(guard, cst.If) or guard.orelse is not None:
        return None
    return guard if re.fullmatch(r"not [\w.]*is_initialized\(\)", context.text(guard.test)) else None


def _backend(context: TorchContext, node: cst.BaseExpression | None) -> list[tuple[str, cst.BaseExpression]]:
    """The backend, if it is another one than unidist chooses itself: nccl where CUDA is available, else gloo."""
    if is_constant(node, None) or is_by_cuda(context, _constant(context, node)):
        return []
    assert node is not None
    return [("", node)]


def _rendezvous(
    context: TorchContext, arguments: dict[str, cst.BaseExpression]
) -> list[tuple[str, cst.BaseExpression]]:
    """``init_method``, ``rank`` and ``world_size``, unless they are what the launcher says."""
    method, rank, size = (arguments.get(name) for name in ("init_method", "rank", "world_size"))
    url = _constant(context, method)
    by_launcher = isinstance(url, cst.SimpleString) and url.evaluated_value == "env://"
    given = [(name, value) for name, value in (("rank", rank), ("world_size", size)) if not _is_unset(value)]
    same = all(_is_read(context, value, name) for name, value in given)
    if same and (by_launcher or is_constant(method, None)):
        return []
    if method is None or is_constant(method, None):
        method = cst.SimpleString('"env://"')
    return [("init_method", method), *((name, value) for name, value in given if value is not None)]


def _constant(context: TorchContext, node: cst.BaseExpression | None) -> cst.BaseExpression | None:
    """The value of a variable that is assigned once, and is no parameter; else the node."""
    variable = context.tree.variable(node) if isinstance(node, cst.Name) else None
    values = [value for value, _ in assignments_of(context.tree, variable)] if variable else []
    return values[0] if len(values) == 1 and not is_parameter(context.tree, variable) else node


def _is_unset(node: cst.BaseExpression | None) -> bool:
    return is_constant(node, None) or (isinstance(node, cst.UnaryOperation) and is_constant(node.expression, 1))


def _is_read(context: TorchContext, node: cst.BaseExpression | None, name: str) -> bool:
    return place_of(context, node) == name


def _place(
    context: TorchContext, call: cst.Call, statement: Statement, values: list[tuple[str, cst.BaseExpression]]
) -> None:
    """Put ``unidist.init()`` before the statements that read the place, which it gives then."""
    first = first_reading(context, statement, [value for _, value in values])
    context.starts.append(first)
    if first is statement:
        return
    args = [argument_named(name, value.deep_clone()) for name, value in values]
    new = cst.Call(context.unidist_name(call, "init"), args)
    context.edits.insert(first, cst.SimpleStatementLine([cst.Expr(new)]))
    context.edits.remove(statement)


def _calls_around(context: TorchContext, start: cst.CSTNode, depth: int = 3) -> list[cst.CSTNode]:
    """The statements that call the function of the start, which starts the world in any case."""
    tree = context.tree
    function = tree.function(start)
    if not isinstance(function, cst.FunctionDef) or tree.block(start) is not function.body or depth == 0:
        return []
    if any(
        isinstance(each, cst.Return) and tree.position(each) < tree.position(start)
        for each in tree.jumps(function.body)
    ):
        return []
    found: list[cst.CSTNode] = []
    for call in callers(tree, function):
        statement = tree.statement(call)
        if isinstance(statement, cst.SimpleStatementLine):
            found += [statement, *_calls_around(context, statement, depth - 1)]
    return found


def change_plain_calls(context: TorchContext) -> None:
    """``dist.get_rank()`` and the like; ``dist.get_rank() == 0`` is ``unidist.is_main()``."""
    tree = context.tree
    _change_is_available(context)
    for use in list(context.uses(*_PLAIN)):
        name, call = _PLAIN[context.names.symbols[use]], tree.parent(use)
        if not isinstance(call, cst.Call) or call.func is not use:
            context.edits.replace(use, context.unidist_name(use, name))
            context.mark_handled(use)
            continue
        arguments = context.arguments(call)
        if arguments is None or not context.is_world(arguments.get("group")):
            context.keep(use, *_GROUPS)
        elif not is_constant(arguments.get("async_op"), None, False):
            context.keep(use, *_ASYNC)
        elif name == "rank" and replace_zero_test(
            tree, context.edits, call, cst.Call(context.unidist_name(use, "is_main"))
        ):
            context.mark_handled(use)
            context.drop(*(arg.value for arg in call.args))
        else:
            context.rebuild(call, name, [])


def _change_is_available(context: TorchContext) -> None:
    """``dist.is_available() and dist.is_initialized()``; the first is true wherever unidist runs."""
    tree = context.tree
    for call in list(context.calls("is_available")):
        above = tree.parent(call)
        if isinstance(above, cst.BooleanOperation) and isinstance(above.operator, cst.And) and above.left is call:
            context.edits.replace(
                above, lambda updated: updated.right.with_changes(lpar=updated.lpar, rpar=updated.rpar)
            )
            context.drop(call)
        elif isinstance(above, cst.UnaryOperation) and isinstance(above.operator, cst.Not):
            guard = tree.parent(above)
            if isinstance(guard, cst.BooleanOperation) and isinstance(guard.operator, cst.Or) and guard.left is above:
                context.edits.replace(
                    guard, lambda updated: updated.right.with_changes(lpar=updated.lpar, rpar=updated.rpar)
                )
                context.drop(above)
            elif isinstance(guard, cst.If) and guard.orelse is None and tree.block(guard) is not None:
                context.edits.remove(guard)
                context.drop(guard)
