"""Rules for ``allreduce``, ``allgather``, ``broadcast`` and ``alltoall``."""

from __future__ import annotations

import re

import libcst as cst

from unidist.migrate.context import Arguments, Context, is_constant
from unidist.migrate.dtypes import is_floating
from unidist.migrate.flow import is_parameter, values_of
from unidist.migrate.gradients import may_carry_gradient, may_require_gradient

#: Collectives with the same arguments in unidist: the name there, and the first argument.
COLLECTIVES = {
    "allgather": ("all_gather", "tensor"),
    "allgather_object": ("all_gather_object", "obj"),
    "alltoall": ("all_to_all", "tensor"),
    "broadcast": ("broadcast", "tensor"),
    "broadcast_": ("broadcast_", "tensor"),
    "broadcast_object": ("broadcast_object", "obj"),
}
#: Arguments without effect on the result.
_WITHOUT_EFFECT = {"name", "ignore_name_scope"}
OPS = {"Average": "mean", "Sum": "sum", "Min": "min", "Max": "max", "Product": "product"}
_TRUNCATED = (
    "Horovod truncates the average of integers towards 0; allreduce_metric gives the exact mean as float32",
    "nothing, unless this is an integer whose average was to be truncated",
)
_ASSUMED = (
    "the tensor is taken for floating-point; if it is of integers, the call raises a TypeError",
    "nothing; for integers `unidist.allreduce_metric`, which gives the exact mean",
)


def change_collectives(context: Context) -> None:
    """Change ``allgather``, ``alltoall`` and ``broadcast``, also of objects, and ``broadcast_``."""
    for call in list(context.calls(*COLLECTIVES)):
        arguments = context.arguments(call)
        name, first = COLLECTIVES[context.names.symbols[call.func]]
        if arguments is None or first not in arguments or set(arguments) - {first, "root_rank", *_WITHOUT_EFFECT}:
            continue
        if has_other_gradient(context, call, arguments):
            continue
        root = arguments.get("root_rank")
        source = [] if is_constant(root, 0, None) else [("src", arguments["root_rank"])]
        context.rebuild(call, name, [("", arguments[first]), *source])


def has_other_gradient(context: Context, call: cst.Call, arguments: Arguments) -> bool:
    """Return whether a gradient may flow through a call, and would be another one, or none, with unidist's."""
    symbol, tensor = context.symbol(call.func), arguments.get("tensor")
    if tensor is None:
        return False
    if symbol in ("allgather", "broadcast"):
        return may_carry_gradient(context.tree, call, tensor)
    extremes = symbol == "allreduce" and reduction(context, arguments) in ("min", "max", "product")
    return extremes and may_require_gradient(context.tree, call, tensor)


def change_allreduce(context: Context) -> None:
    """Make ``allreduce`` of metrics ``allreduce_metric``, others ``all_reduce``; the default stays the average."""
    for call in list(context.calls("allreduce", "allreduce_")):
        arguments = context.arguments(call)
        if arguments is None or set(arguments) - {"tensor", "average", "op", "compression", *_WITHOUT_EFFECT}:
            continue
        op = reduction(context, arguments)
        if op is None or (
            "compression" in arguments and context.symbol(arguments["compression"]) != "Compression.none"
        ):
            continue
        tensor = arguments["tensor"]
        if has_other_gradient(context, call, arguments):
            continue
        in_place = context.symbol(call.func) == "allreduce_"
        if not in_place and isinstance(context.tree.parent(call), cst.Expr):
            context.rebuild(call, "barrier", [])  # its result is not used: ranks wait for each other
            continue
        metric = op == "mean" and not in_place and _is_metric(context, call, tensor)
        floating = is_floating(context.tree, tensor)
        if (op == "mean" and floating is False) or (not metric and _may_be_bool(context, tensor)):
            continue
        name = "allreduce_metric" if metric else "all_reduce_" if in_place else "all_reduce"
        options = [] if op == ("mean" if metric else "sum") else [("op", cst.SimpleString(f'"{op}"'))]
        context.rebuild(call, name, [("", tensor), *options])
        if op == "mean" and not floating:
            context.remark(call, *(_TRUNCATED if metric else _ASSUMED))


def reduction(context: Context, arguments: Arguments) -> str | None:
    """Return the reduction of a call, by unidist's name; None if it has none or it cannot be determined."""
    average, op = arguments.get("average"), arguments.get("op")
    if op is not None and not is_constant(op, None):
        return OPS.get(context.symbol(op) or "")
    if average is None or is_constant(average, None, True) or _is_name(context, average):
        return "mean"  # hvd.allreduce(x, "name"): any true value means the average
    return "sum" if is_constant(average, False) else None


def _is_name(context: Context, node: cst.BaseExpression, depth: int = 3) -> bool:
    """Return whether an expression is a string: by its form, its variable's value, or its name ``name``."""
    if isinstance(node, (cst.SimpleString, cst.FormattedString, cst.ConcatenatedString)):
        return True
    if isinstance(node, cst.BinaryOperation):
        return _is_name(context, node.left, depth) or _is_name(context, node.right, depth)
    if isinstance(node, cst.Call):
        return context.text(node.func) == "str" or context.text(node.func).endswith(".format")
    if re.search(r"(^|[._])name$", context.text(node)):
        return True
    values = values_of(context.tree, node)
    known = bool(values) and not is_parameter(context.tree, context.tree.variable(node)) and depth > 0
    return known and all(_is_name(context, value, depth - 1) for value in values)


def _is_metric(context: Context, call: cst.Call, tensor: cst.BaseExpression) -> bool:
    """Return whether a call averages a metric: no gradient flows through it, and training does not use the result."""
    text = context.text(tensor)
    above = [
        node.name.value for node in context.tree.parents(call) if isinstance(node, (cst.FunctionDef, cst.ClassDef))
    ]
    if "grad" in text or any("grad" in name.lower() for name in above):
        return False
    parent = context.tree.parent(call)
    item = isinstance(parent, cst.Attribute) and parent.attr.value in ("item", "tolist")
    return (
        item
        or ".detach()" in text
        or ".item()" in text
        or is_floating(context.tree, tensor, made_of_numbers=True) is not None
    )


def _may_be_bool(context: Context, tensor: cst.BaseExpression) -> bool:
    return isinstance(tensor, cst.Comparison) or ".bool()" in context.text(tensor)
