"""Rules for calls without arguments, as ``rank()``, and for calls that the script replaces."""

from __future__ import annotations

import libcst as cst

from unidist.migrate.context import Context, replace_zero_test

#: Calls without arguments, and unidist's names for them.
PLAIN_CALLS = {
    "init": "init",
    "shutdown": "shutdown",
    "is_initialized": "is_initialized",
    "rank": "rank",
    "size": "world_size",
    "local_rank": "local_rank",
    "local_size": "local_size",
    "cross_rank": "node_rank",
    "cross_size": "num_nodes",
    "barrier": "barrier",
}
#: The other calls that become unidist's.
_OTHER_CALLS = (
    "allreduce", "allreduce_", "allgather", "allgather_object", "alltoall", "broadcast", "broadcast_",
    "broadcast_object", "broadcast_parameters", "broadcast_optimizer_state", "DistributedOptimizer", "join",
)  # fmt: skip
_REPLACED = (
    "the script replaces this call by a function of its own, which unidist's call would bypass",
    "keep it, or wrap unidist's call by hand",
)
_NOT_IMPORTED = (
    "the variable holds the drop-in for calls that stay, and this function does not import unidist",
    "import unidist where it is used, then migrate again",
)


def keep_replaced_calls(context: Context) -> None:
    """Calls that the script replaces stay (``hvd.allreduce = traced``), and those where unidist cannot be imported."""
    if context.names.replaced:
        context.kept.update(dict.fromkeys(context.uses(*context.names.replaced), _REPLACED))
    if not context.aliases_are_native:
        for use in list(context.uses(*PLAIN_CALLS, *_OTHER_CALLS)):
            if context.is_through_alias(use) and not context.can_import(use):
                context.kept[use] = _NOT_IMPORTED


def change_plain_calls(context: Context) -> None:
    """``hvd.rank()`` and the like; ``hvd.rank() == 0`` is ``unidist.is_main()``."""
    for call in list(context.calls("nccl_built")):
        name = context.unidist_name_for(call.func, "backend_name")
        equal = [cst.ComparisonTarget(cst.Equal(), cst.SimpleString('"nccl"'))]
        context.edits.replace(call, cst.Comparison(cst.Call(name), equal, [cst.LeftParen()], [cst.RightParen()]))
        context.mark_handled(call.func)
    for use in list(context.uses(*PLAIN_CALLS)):
        above = context.tree.parent(use)
        called = isinstance(above, cst.Call) and above.func is use
        if called and isinstance(above, cst.Call) and above.args:
            continue
        is_main = cst.Call(context.unidist_name_for(use, "is_main"))
        is_rank = called and context.symbol(use) == "rank"
        if not (is_rank and replace_zero_test(context.tree, context.edits, above, is_main)):
            context.edits.replace(use, context.unidist_name_for(use, PLAIN_CALLS[context.names.symbols[use]]))
        context.mark_handled(use)
