"""Rules for the process group: its start and end, and calls that ask for ranks."""

from __future__ import annotations

import re

import libcst as cst

from unidist.migrate.context import UNKNOWN_ARGUMENTS, Arguments, is_constant
from unidist.migrate.flow import callers
from unidist.migrate.rules.calls import replace_zero_test
from unidist.migrate.rules.ddp.names import ASYNC, GROUP, TorchContext, place_of
from unidist.migrate.rules.ddp.places import first_reading, is_by_cuda
from unidist.migrate.syntax import Statement, keyword

_PLAIN = {
    "get_rank": "rank",
    "get_world_size": "world_size",
    "get_backend": "backend_name",
    "is_initialized": "is_initialized",
    "destroy_process_group": "shutdown",
    "barrier": "barrier",
}
#: Arguments of a call, each with its keyword; empty if it has none.
Values = list[tuple[str, cst.BaseExpression]]


def change_start(context: TorchContext) -> None:
    """Make ``init_process_group`` ``unidist.init()``, with the arguments that the launcher does not give."""
    by_launcher = []
    for call in list(context.calls("init_process_group")):
        arguments = context.arguments(call)
        if arguments is None or not isinstance(context.tree.parent(call), cst.Expr):
            context.keep(call.func, *UNKNOWN_ARGUMENTS)
            continue
        for name in ("store", "pg_options"):
            if not is_constant(arguments.get(name), None):
                context.keep(call.func, f"unidist.init() has no {name}=", "remove the argument, then migrate again")
        if call.func not in context.kept:
            by_launcher.append(_start(context, call, arguments))
    context.by_launcher = bool(by_launcher) and all(by_launcher)
    guards = [guard for start in context.starts if (guard := _guard_of(context, start)) is not None]
    calls = [each for start in (*context.starts, *guards) for each in _calls_around(context, start)]
    context.calls_of_start += [*guards, *calls]


def _start(context: TorchContext, call: cst.Call, arguments: Arguments) -> bool:
    """Replace one; whether the launcher says which rank this is."""
    tree, device = context.tree, arguments.get("device_id")
    values = [*_backend(context, arguments.get("backend")), *_rendezvous(context, arguments)]
    if not is_constant(arguments.get("timeout"), None):
        values.append(("timeout", arguments["timeout"]))
    if device is not None and not values:
        context.gone.append(device)
    elif device is not None and not is_constant(device, None):
        values.append(("device", device))
    named = [value.evaluated_value for name, value in values if not name and isinstance(value, cst.SimpleString)]
    given = {name for name, _ in values}
    context.chooses_device |= not named and "device" not in given
    context.sets_device.append(not given & {"", "device", "rank"})
    context.rebuild(call, "init", values)
    statement = tree.is_statement(call)
    if statement is not None:
        _place(context, call, statement, values)
    elif isinstance(line := tree.parent(tree.parent(call)), cst.SimpleStatementLine):
        context.starts.append(line)  # it shares its line
    return "rank" not in given


def _guard_of(context: TorchContext, start: cst.CSTNode) -> cst.If | None:
    """``if not dist.is_initialized():`` around a start, after which the world has been started in any case."""
    block = context.tree.block(start)
    guard = context.tree.parent(block) if block is not None else None
    if not isinstance(guard, cst.If) or guard.orelse is not None:
        return None
    return guard if re.fullmatch(r"not [\w.]*is_initialized\(\)", context.text(guard.test)) else None


def _backend(context: TorchContext, node: cst.BaseExpression | None) -> Values:
    """Return the backend, if it is another one than unidist chooses itself: nccl where CUDA is available, else gloo."""
    if node is None or is_constant(node, None) or is_by_cuda(context, context.value_of(node)):
        return []
    return [("", node)]


def _rendezvous(context: TorchContext, arguments: Arguments) -> Values:
    """``init_method``, ``rank`` and ``world_size``, unless they are what the launcher says."""
    method = arguments.get("init_method", cst.Name("None"))
    url = context.value_of(method)
    by_launcher = isinstance(url, cst.SimpleString) and url.evaluated_value == "env://"
    names = [name for name in ("rank", "world_size") if not _is_unset(arguments.get(name))]
    same = all(place_of(context, arguments[name]) == name for name in names)
    if same and (by_launcher or is_constant(method, None)):
        return []
    if is_constant(method, None):
        method = cst.SimpleString('"env://"')
    return [("init_method", method), *((name, arguments[name]) for name in names)]


def _is_unset(node: cst.BaseExpression | None) -> bool:
    return is_constant(node, None) or (isinstance(node, cst.UnaryOperation) and is_constant(node.expression, 1))


def _place(context: TorchContext, call: cst.Call, statement: Statement, values: Values) -> None:
    """Put ``unidist.init()`` before the statements that read the place, which it gives then."""
    first = first_reading(context, statement, [value for _, value in values])
    context.starts.append(first)
    if first is statement:
        return
    args = [keyword(name, value.deep_clone()) for name, value in values]
    new = cst.Call(context.unidist_name(call, "init"), args)
    context.edits.insert(first, cst.SimpleStatementLine([cst.Expr(new)]))
    context.edits.remove(statement)


def _calls_around(context: TorchContext, start: cst.CSTNode, depth: int = 3) -> list[cst.CSTNode]:
    """Return the statements that call the function of the start, which starts the world in any case."""
    tree = context.tree
    function = tree.function(start)
    if not isinstance(function, cst.FunctionDef) or tree.block(start) is not function.body or depth == 0:
        return []
    if any(tree.position(each) < tree.position(start) for each in tree.all(cst.Return, function.body)):
        return []
    found: list[cst.CSTNode] = []
    for call in callers(tree, function):
        statement = tree.statement(call)
        if isinstance(statement, cst.SimpleStatementLine):
            found += [statement, *_calls_around(context, statement, depth - 1)]
    return found


def change_plain_calls(context: TorchContext) -> None:
    """Change ``dist.get_rank()`` and the like; ``dist.get_rank() == 0`` is ``unidist.is_main()``."""
    _change_is_available(context)
    for use in list(context.uses(*_PLAIN)):
        name, call = _PLAIN[context.names.symbols[use]], context.tree.call_of(use)
        if call is None:
            context.edits.replace(use, context.unidist_name(use, name))
            context.mark_handled(use)
            continue
        arguments = context.arguments(call)
        if arguments is None or not context.is_world(arguments.get("group")):
            context.keep(use, *GROUP)
        elif not is_constant(arguments.get("async_op"), None, False):
            context.keep(use, *ASYNC)
        elif name == "rank" and replace_zero_test(context, call, use):
            context.drop(use, *(arg.value for arg in call.args))
        else:
            context.rebuild(call, name, [])


def _change_is_available(context: TorchContext) -> None:
    """``dist.is_available() and dist.is_initialized()``; the first is true wherever unidist runs."""
    tree = context.tree
    for call in list(context.calls("is_available")):
        above = tree.parent(call)
        guard = tree.parent(above)
        match above, guard:
            case (cst.BooleanOperation(left, cst.And()), _) if left is call:
                _keep_right(context, above, call)
            case (cst.UnaryOperation(cst.Not()), cst.BooleanOperation(left, cst.Or())) if left is above:
                _keep_right(context, guard, above)
            case (cst.UnaryOperation(cst.Not()), cst.If(orelse=None)) if tree.block(guard) is not None:
                context.edits.remove(cst.ensure_type(guard, cst.If))
                context.drop(guard)


def _keep_right(context: TorchContext, operation: cst.CSTNode, left: cst.CSTNode) -> None:
    """``b`` in place of ``a and b``."""
    context.edits.replace(operation, lambda updated: updated.right.with_changes(lpar=updated.lpar, rpar=updated.rpar))
    context.drop(left)
