"""Rules for calls without arguments, as ``rank()``, and for calls that the script replaces."""

from __future__ import annotations

import re

import libcst as cst

from unidist.horovod_names import PLAIN_CALLS
from unidist.migrate.context import Context, is_constant
from unidist.migrate.syntax import SyntaxTree

#: The other calls that become unidist's.
OTHER_CALLS = (
    "allreduce", "allreduce_", "allgather", "allgather_object", "alltoall", "broadcast", "broadcast_",
    "broadcast_object", "broadcast_parameters", "broadcast_optimizer_state", "DistributedOptimizer", "join",
    "nccl_built",
)  # fmt: skip
_REPLACED = (
    "the script replaces this call by a function of its own, which unidist's call would bypass",
    "keep it, or wrap unidist's call by hand",
)
_STARTS_TORCH = (
    "the script also starts torch.distributed's process group, which unidist.init() does",
    "remove init_process_group(), or what Horovod is used for, then migrate again",
)
_NCCL_BUILT = (
    "nccl_built() became backend_name() == 'nccl', which is False on backend 'horovod', whatever Horovod is built with",
    "the condition that is meant: torch.cuda.is_available(), say",
)
_NCCL_VERSION = (
    "nccl_built() is NCCL's version where it is not a condition, and unidist has no call for that",
    "torch.cuda.nccl.version(), a tuple of numbers",
)
_BEFORE_INIT = (
    "no init() is called above it, and unidist has no backend before init()",
    "move it below init(), then migrate again",
)
_NOT_IMPORTED = (
    "the variable holds the drop-in for calls that stay, and this function does not import unidist",
    "import unidist where it is used, then migrate again",
)

#: Around a comparison, they bind more closely than ``not``.
_OPERATORS = (cst.Comparison, cst.ComparisonTarget, cst.BinaryOperation, cst.UnaryOperation)
#: A word that needs the parenthesis after it.
_NO_SPACE = re.compile(r"\b(if|while|not|return|assert|and|or|in|else)\(")


def keep_calls(context: Context) -> None:
    """Keep calls that the script replaces (``hvd.allreduce = traced``), those where unidist cannot be imported,
    ``init()`` beside ``init_process_group()``, and ``nccl_built()`` that is no condition or comes before ``init()``.
    """
    for built in list(context.calls("nccl_built")):
        if not _is_condition(context.tree, built):
            context.kept[built.func] = _NCCL_VERSION
        elif _is_before_init(context, built):
            context.kept[built.func] = _BEFORE_INIT
    for start in context.tree.all(cst.Call):
        if "torch.distributed.init_process_group" in context.tree.imported(start.func):
            both = (use for use in context.uses("init") if _are_both_made(context, use, start))
            context.kept.update(dict.fromkeys(both, _STARTS_TORCH))
    if context.names.replaced:
        context.kept.update(dict.fromkeys(context.uses(*context.names.replaced), _REPLACED))
    if not context.aliases_are_native:
        for use in list(context.uses(*PLAIN_CALLS, *OTHER_CALLS)):
            if context.is_through_alias(use) and not context.can_import(use):
                context.kept[use] = _NOT_IMPORTED


def _are_both_made(context: Context, one: cst.CSTNode, other: cst.CSTNode) -> bool:
    """Return whether two calls are made by statements of one block."""
    statements = [context.tree.statement(node) for node in (one, other)]
    blocks = [context.tree.block(each) if isinstance(each, cst.SimpleStatementLine) else None for each in statements]
    return blocks[0] is not None and blocks[0] is blocks[1]


def _is_condition(tree: SyntaxTree, node: cst.CSTNode) -> bool:
    """Return whether only the truth of an expression is used."""
    match tree.parent(node):
        case cst.If(test) | cst.While(test) | cst.Assert(test) | cst.IfExp(test):
            return test is node
        case cst.BooleanOperation() as both:
            return _is_condition(tree, both)
        case around:
            return isinstance(around, cst.UnaryOperation) and isinstance(around.operator, cst.Not)


def _is_before_init(context: Context, node: cst.CSTNode) -> bool:
    """Return whether a node comes before ``init()`` in its function, or is at module level without one above it.

    Functions without ``init()`` are taken to be called after it.
    """
    tree = context.tree
    function = tree.function(node)
    starts = [
        call
        for call in tree.all(cst.Call)
        if (context.symbol(call.func) == "init" or "unidist.init" in tree.imported(call.func))
        and tree.function(call) is function
    ]
    if any(tree.position(call) < tree.position(node) for call in starts):
        return False
    return bool(starts) or function is tree.module


def change_plain_calls(context: Context) -> None:
    """Change ``hvd.rank()`` and the like; ``hvd.rank() == 0`` is ``unidist.is_main()``."""
    for built in list(context.calls("nccl_built")):
        name = context.unidist_name_for(built.func, "backend_name")
        equal = [cst.ComparisonTarget(cst.Equal(), cst.SimpleString('"nccl"'))]
        new = cst.Comparison(cst.Call(name), equal, [cst.LeftParen()], [cst.RightParen()])
        alone = not isinstance(context.tree.parent(built), cst.UnaryOperation) and not built.lpar
        context.edits.replace(built, new.with_changes(lpar=[], rpar=[]) if alone else new)
        context.mark_handled(built.func)
        around = (context.text(each.test) for each in context.tree.parents(built) if isinstance(each, cst.If))
        if "adasum" not in "".join(around).lower():
            context.remark(built, *_NCCL_BUILT)
    for use in list(context.uses(*PLAIN_CALLS)):
        call = context.tree.call_of(use)
        if call is not None and call.args:
            continue
        is_rank = call is not None and context.symbol(use) == "rank"
        if not (is_rank and replace_zero_test(context, call, use)):
            context.edits.replace(use, context.unidist_name_for(use, PLAIN_CALLS[context.names.symbols[use]]))
        context.mark_handled(use)


def replace_zero_test(context: Context, call: cst.CSTNode | None, use: cst.BaseExpression) -> bool:
    """Replace ``rank() == 0``, ``rank() != 0`` or ``not rank()``, by its call; False for other expressions."""
    test = context.tree.parent(call or use)
    match test:
        case cst.UnaryOperation(cst.Not()):
            equal = True
        case cst.Comparison(left, [cst.ComparisonTarget(cst.Equal() | cst.NotEqual() as operator, zero)]) if (
            left is call and is_constant(zero, 0)
        ):
            equal = isinstance(operator, cst.Equal)
            if not equal and isinstance(context.tree.parent(test), _OPERATORS):
                return False
        case _:
            return False
    is_main: cst.BaseExpression = cst.Call(context.unidist_name_for(use, "is_main"))
    new = is_main if equal else cst.UnaryOperation(cst.Not(), is_main)
    if test.lpar and _NO_SPACE.search(context.text(context.tree.statement(test) or test).split("\n")[0]):
        new = new.with_changes(lpar=test.lpar, rpar=test.rpar)
    context.edits.replace(test, new)
    return True
