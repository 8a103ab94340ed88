"""Parameters that are frozen or unfrozen after their optimizer has been made, which ``replicate`` refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from unidist.migrate.context import Context, is_constant
from unidist.migrate.flow import Flow, callers, is_target, values_of
from unidist.migrate.rules.loaders import training_loops
from unidist.migrate.syntax import Statement, called_name

_FROZEN = "some parameters are frozen or unfrozen after DistributedOptimizer, which unidist refuses"
_REMEDY = "move that line above DistributedOptimizer, then migrate again; if it must change while training, keep it"
#: Calls whose result is a tensor of the script's own.
_NEW_TENSORS = {
    "clone", "detach", "tensor", "as_tensor", "from_numpy", "zeros", "ones", "rand", "randn", "rand_like",
    "zeros_like",
}  # fmt: skip
#: Calls whose result is an input, unless their text names a part of a model.
_COMPUTING = _NEW_TENSORS | {"cat", "stack", "interpolate", "cuda", "to", "float", "contiguous", "view", "choice"}
#: What a loop over parameters is over, and a part of a model is called.
_OF_MODEL = re.compile(r"param|module|children|layer|model|net|weight|bias|embed", re.IGNORECASE)


def frozen_later(context: Context, flow: Flow, before: Statement) -> Iterator[tuple[cst.CSTNode, str, str]]:
    """Yield changes of ``requires_grad`` after a statement, unless they are made to all parameters of a model."""
    changes = list(_changes(context))
    parts = [node for node in changes if not _is_of_whole_model(context, node, flow)]
    for node in changes:
        # All parameters require a gradient again: some more than before, if some were frozen.
        if parts and not _is_all_before(context, node, before):
            yield node, _FROZEN, _REMEDY


def _changes(context: Context) -> Iterator[cst.Attribute]:
    """Yield the changes of ``requires_grad`` of what may be a parameter."""
    for node in context.tree.all(cst.Attribute):
        is_set = node.attr.value == "requires_grad" and is_target(context.tree, node)
        made = isinstance(node.value, cst.Call) and called_name(node.value) in _NEW_TENSORS
        computed = made or isinstance(node.value, cst.BinaryOperation)
        other = computed or _is_of_batch(context, node.value) or _is_input(context, node)
        if (is_set or node.attr.value == "requires_grad_") and not other:
            yield node


def _is_of_batch(context: Context, node: cst.BaseExpression) -> bool:
    """Return whether a variable is set by a loop that trains, over something else than the parts of a model."""
    variable = context.tree.variable(node)
    for loop in training_loops(context.tree) if variable else ():
        targets = {context.tree.variable(name) for name in context.tree.all(cst.Name, inside=loop.target)}
        if variable in targets and not _OF_MODEL.search(context.text(loop.iter)):
            return True
    return False


def _is_input(context: Context, node: cst.Attribute) -> bool:
    """Return whether a gradient is asked for of a variable to which only computed values are assigned, and from nothing
    that is named like a part of a model.
    """
    tree, values = context.tree, values_of(context.tree, node.value)
    match tree.parent(node):
        case cst.AssignTarget() as target:
            wanted = is_constant(cst.ensure_type(tree.parent(target), cst.Assign).value, True)
        case cst.Call(args=args):
            wanted = all(is_constant(each.value, True) for each in args)
        case _:
            wanted = False
    return wanted and bool(values) and all(_is_computed(context, value) for value in values)


def _is_computed(context: Context, value: cst.BaseExpression) -> bool:
    match value:
        case cst.BinaryOperation():
            return True
        case cst.IfExp(body=first, orelse=second):
            return all(isinstance(each, cst.Name) or _is_computed(context, each) for each in (first, second))
        case cst.Call():
            return called_name(value) in _COMPUTING and not _OF_MODEL.search(context.text(value))
    return False


def _is_all_before(context: Context, node: cst.CSTNode, before: Statement) -> bool:
    """Return whether a node is executed before a statement only."""
    tree = context.tree
    function, own = tree.function(node), tree.function(before)
    calls = [node] if function is own else callers(tree, function)
    return bool(calls) and all(
        tree.function(call) is own and tree.position(call) < tree.position(before) for call in calls
    )


def _is_of_whole_model(context: Context, node: cst.Attribute, flow: Flow) -> bool:
    tree = context.tree
    if node.attr.value == "requires_grad_":
        return isinstance(node.value, cst.Name) or node.value in flow.uses
    loop, statement = tree.loop(node), tree.statement(node)
    match loop:
        case cst.For(iter=cst.Call(cst.Attribute(cst.Name(), cst.Name("parameters")))) if statement is not None:
            return tree.block(statement) is loop.body
    return False
