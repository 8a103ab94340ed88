"""Rules for collectives: those that change a tensor in place have one in unidist; lists are filled from its results."""

from __future__ import annotations

import libcst as cst

from unidist.migrate.context import UNKNOWN_ARGUMENTS, Arguments, is_constant
from unidist.migrate.gradients import may_require_gradient
from unidist.migrate.rules.ddp.names import ASYNC, GROUP, TorchContext
from unidist.migrate.syntax import is_pure, keyword, method

_OPS = {"SUM": "sum", "AVG": "mean", "MIN": "min", "MAX": "max", "PRODUCT": "product"}
_IN_PLACE = {"all_reduce": "all_reduce_", "reduce": "all_reduce_", "broadcast": "broadcast_"}
#: Unidist's calls, and the arguments that are the list and the value.
_LISTS = {
    "all_gather": ("all_gather", "tensor_list", "tensor"),
    "all_gather_object": ("all_gather_object", "object_list", "obj"),
    "broadcast_object_list": ("broadcast_object", "object_list", "object_list"),
}
_NOT_ALONE = ("it is a part of a larger statement", "call it in a statement of its own, then migrate again")
_OP = ("its op= cannot be determined, or unidist has none like it", "write one of SUM, AVG, MIN, MAX, PRODUCT")
_TARGET = ("the list that it fills is not a variable", "assign it to a variable, then migrate again")
_ROWS = "for _part, _row in zip(parts, rows):\n    _part.copy_(_row)\n"


def change_collectives(context: TorchContext) -> None:
    """Change ``all_reduce``, ``reduce``, ``broadcast``, ``all_gather`` and those of objects."""
    for call in list(context.calls(*_IN_PLACE, *_LISTS)):
        problem = _change(context, call, context.names.symbols[call.func])
        if problem is not None:
            context.keep(call.func, *problem)


def _change(context: TorchContext, call: cst.Call, symbol: str) -> tuple[str, str] | None:
    """Change one call; why it stays if it does."""
    arguments = context.arguments(call)
    if arguments is None:
        return UNKNOWN_ARGUMENTS
    if not is_constant(arguments.get("async_op"), None, False):
        return ASYNC
    if not context.is_world(arguments.get("group")) or "group_src" in arguments or "group_dst" in arguments:
        return GROUP
    return (_in_place if symbol in _IN_PLACE else _into_list)(context, call, symbol, arguments)


def _source(arguments: Arguments) -> list[tuple[str, cst.BaseExpression]]:
    return [] if is_constant(arguments.get("src"), 0, None) else [("src", arguments["src"])]


def _in_place(context: TorchContext, call: cst.Call, symbol: str, arguments: Arguments) -> tuple[str, str] | None:
    """``unidist.all_reduce_(x)``, of ``x.detach()`` where a gradient may be recorded, which torch's call ignores."""
    if not isinstance(context.tree.parent(call), cst.Expr):  # it returns the tensor, and torch's None
        return _NOT_ALONE
    op, tensor = arguments.get("op"), arguments.get("tensor")
    kind, _, name = (context.symbol(op) or "").rpartition(".")
    found = "sum" if op is None else _OPS.get(name) if kind.lower() in ("reduceop", "reduce_op") else None
    if tensor is None or found is None:
        return _OP
    if symbol != "broadcast" and may_require_gradient(context.tree, call, tensor):
        context.edits.replace(tensor, lambda updated: method(updated, "detach"))
    options = _source(arguments) if symbol == "broadcast" else []
    options += [] if found == "sum" else [("op", cst.SimpleString(f'"{found}"'))]
    context.rebuild(call, _IN_PLACE[symbol], [("", tensor), *options])
    return None


def _into_list(context: TorchContext, call: cst.Call, symbol: str, arguments: Arguments) -> tuple[str, str] | None:
    """``parts[:] = unidist.all_gather_object(x)``; tensors are copied into those of the list, as torch does."""
    name, into, of = _LISTS[symbol]
    statement, parts, value = context.tree.is_statement(call), arguments.get(into), arguments.get(of)
    if not isinstance(statement, cst.SimpleStatementLine):
        return _NOT_ALONE
    if parts is None or value is None or not is_pure(parts):
        return _TARGET
    function, target = context.unidist_name(call, name), parts.deep_clone()
    source = [keyword(*each) for each in (_source(arguments) if symbol == "broadcast_object_list" else [])]
    index = next(index for index, arg in enumerate(call.args) if arg.value is value)
    recorded = symbol == "all_gather" and may_require_gradient(context.tree, call, value)

    def change(updated: cst.SimpleStatementLine) -> cst.BaseStatement:
        new = cst.ensure_type(cst.ensure_type(updated.body[0], cst.Expr).value, cst.Call).args[index].value
        if symbol == "all_gather":
            given = method(new, "detach") if recorded else new
            row = cst.Subscript(given, [cst.SubscriptElement(cst.Index(cst.Name("None")))])
            loop = cst.ensure_type(cst.parse_statement(_ROWS), cst.For)
            pairs = cst.Call(cst.Name("zip"), [cst.Arg(target), cst.Arg(cst.Call(function, [cst.Arg(row)]))])
            body = cst.ensure_type(loop.body, cst.IndentedBlock).with_changes(header=updated.trailing_whitespace)
            return loop.with_changes(iter=pairs, body=body, leading_lines=updated.leading_lines)
        whole = cst.Subscript(target, [cst.SubscriptElement(cst.Slice(None, None))])
        assigned = cst.Assign([cst.AssignTarget(whole)], cst.Call(function, [cst.Arg(new), *source]))
        return updated.with_changes(body=[assigned])

    context.edits.replace(statement, change)
    context.drop(*(arg.value for arg in call.args if arg.value is not value))
    context.mark_handled(call.func)
    return None
