"""Rules for ``join()``: where all ranks arrive together it is a barrier, elsewhere the file stays on the drop-in."""

from __future__ import annotations

import libcst as cst

from unidist.horovod_names import PLAIN_CALLS, is_collective
from unidist.migrate.context import Context
from unidist.migrate.flow import callers
from unidist.migrate.rules.loaders import has_even_loops, is_even
from unidist.migrate.syntax import Statement, called_name


def keep_calls_beside_join(context: Context) -> None:
    """Keep all collective calls on the drop-in beside an uneven ``join()``: a rank in it serves no others."""
    joins = [use for use in context.uses("join") if not is_barrier(context, context.tree.call_of(use))]
    if not joins:
        return
    for use in list(context.uses()):
        if is_collective(context.names.symbols[use]):
            context.kept[use] = _UNEVEN
            if use not in joins:
                context.covered.add(use)


def change_barriers(context: Context) -> None:
    """Change ``hvd.join()`` where all ranks arrive together."""
    for call in list(context.calls("join")):
        context.edits.replace(call.func, context.unidist_name_for(call.func, "barrier"))
        context.mark_handled(call.func)


#: Calls that return on all ranks at about the same time.
_SYNCHRONIZING = {
    "init", "barrier", "join", "broadcast_parameters", "broadcast_optimizer_state", "broadcast_object", "broadcast",
    "allreduce", "allgather", "allgather_object",
}  # fmt: skip
_UNEVEN = (
    "ranks may reach join() after different numbers of steps, and a rank in hvd.join() takes part in the drop-in's "
    "calls alone: all optimizers and collective calls of this file stay on the drop-in, and those of other files must",
    "unidist.barrier() if all ranks get here together; else train in `with unidist.join(model):`, see "
    "docs/semantics.md",
)
#: What a call between two synchronizing ones may begin with: none of these communicates.
_HARMLESS = ("os", "sys", "time", "logging", "print", "torch", "json", "shutil", "pathlib", "Path", "len", "str", "int")


def is_barrier(context: Context, call: cst.Call | None) -> bool:
    """Return whether all ranks arrive at a ``join()`` together, with no operation in progress."""
    statement = None if call is None or call.args else context.tree.is_statement(call)
    if statement is None:
        return False
    return (
        _is_called_barrier(context, statement)
        or (has_even_loops(context) and not _has_uneven_calls(context))
        or _follows_collective(context, statement)
    )


def _is_called_barrier(context: Context, statement: Statement) -> bool:
    """Return whether the script takes it for one: ``torch.distributed.barrier()`` in the other branch of the condition,
    or a function of that name that does nothing else.
    """
    for above in context.tree.parents(statement):
        if isinstance(above, cst.If):
            names = {called_name(call) for call in context.tree.all(cst.Call, above)}
            if "barrier" in names and above.orelse is not None:
                return True
        if isinstance(above, cst.FunctionDef):
            loops = any(context.tree.all((cst.For, cst.While), above.body))
            return "barrier" in above.name.value.lower() and not loops
    return False


def _has_uneven_calls(context: Context) -> bool:
    """Return whether a loop that may have different numbers of iterations on the ranks makes collective calls."""
    tree = context.tree
    uses = [use for use, symbol in context.names.symbols.items() if is_collective(symbol) and symbol != "join"]
    calls = [call for use in uses for call in callers(tree, tree.function(use))]
    for loop in tree.all((cst.For, cst.While)):
        inside = any(tree.is_inside(each, loop.body) for each in (*uses, *calls))
        if inside and not (isinstance(loop, cst.For) and is_even(context, loop)):
            return True
    return False


def _follows_collective(context: Context, statement: cst.CSTNode) -> bool:
    """Return whether only statements without communication are between a collective call and this one."""
    tree = context.tree
    for each in reversed(tree.siblings(statement)[0]):
        if any(tree.all((cst.For, cst.While), inside=each)):
            return False
        calls = list(tree.all(cst.Call, inside=each))
        top = isinstance(each, cst.SimpleStatementLine)
        if top and any(context.symbol(node.func) in _SYNCHRONIZING for node in calls):
            return True
        for node in calls:
            first = context.text(node.func).split(".")[0].split("(")[0]
            if first not in _HARMLESS and context.symbol(node.func) not in PLAIN_CALLS:
                return False
    return False
