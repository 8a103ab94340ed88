"""Why a use stays on the drop-in, and what a person may do about it."""

from __future__ import annotations

from collections.abc import Mapping

import libcst as cst

from unidist.horovod_names import PLAIN_CALLS
from unidist.migrate.context import UNKNOWN_ARGUMENTS, Context
from unidist.migrate.file_report import Remark
from unidist.migrate.rules.collectives import COLLECTIVES, has_other_gradient, reduction

#: Why, and what to do.
Reason = tuple[str, str]
_ASYNC = (
    "unidist has no asynchronous calls",
    "for gradients, replicate, which averages them during backward(); else all_reduce, which is synchronous",
)
_HANDLE = (
    "unidist has no asynchronous calls, and so no handles",
    "nothing here: replace the asynchronous call that returns the handle",
)
_PROCESS_SETS = "unidist has groups in place of process sets"
_OTHER_ASYNC = (
    "unidist has no asynchronous calls",
    "the call without _async, and its result in place of the handle's, then migrate again",
)
#: By the beginning of the name; the first that fits.
_REASONS: dict[str, Reason] = {
    "allreduce_async": _ASYNC,
    **dict.fromkeys(("allgather_async", "alltoall_async", "broadcast_async", "reducescatter_async"), _OTHER_ASYNC),
    "alltoall": (
        "with splits, Horovod returns the received rows and how many come from each rank, unidist the rows alone",
        "unidist.all_to_all(tensor, splits) where these numbers are not needed; else keep it",
    ),
    "reducescatter": (
        "where dim 0 has no equal parts Horovod's first ranks get one row more, and unidist raises a ValueError",
        """unidist.reduce_scatter(tensor, op="mean"), or "sum", if dim 0 is a multiple of the number of ranks""",
    ),
    "grouped_": ("unidist has no grouped calls", "one unidist call for each tensor"),
    "synchronize": _HANDLE,
    "poll": _HANDLE,
    "DistributedOptimizer": (
        "it cannot become unidist.replicate(model) where it is not called directly",
        "write unidist.replicate(model) and a plain optimizer by hand, see docs/migrating.md",
    ),
    "Compression": (
        "it is an argument of a call that stays on the drop-in",
        'nothing here: replicate takes compression="fp16" once that call is migrated',
    ),
    "SyncBatchNorm": (
        "unidist converts all BatchNorm layers of a model at once",
        "use torch's BatchNorm layers, and wrap_model(sync_bn=True)",
    ),
    "": ("unidist has no equivalent of this call", "keep it on the drop-in, or rewrite what needs it"),
}
_INTEGERS = (
    "the tensor is of integers or bool: Horovod truncates their average, unidist refuses it",
    "`unidist.allreduce_metric(tensor)` for the exact mean, as float32",
)
_GRADIENT = (
    "a gradient may flow through it: Horovod averages it, unidist sums it",
    "pass tensor.detach() if no gradient is wanted, then migrate again; else keep it",
)
_NO_GRADIENT = (
    "a gradient may flow through it, and unidist's min, max and product have none",
    "pass tensor.detach(), then migrate again",
)
_ADASUM = ("unidist has no Adasum", "keep it: the drop-in has Adasum on every backend")
_REDUCTION = (
    "whether it averages or sums cannot be determined",
    "write op=hvd.Average or op=hvd.Sum, and the name as name=, then migrate again",
)
_OTHER_STATE = (
    "its argument is not visibly the state of a model",
    "unidist.broadcast_model_state(model) for a model's; else unidist.broadcast for each tensor, or broadcast_object",
)
#: Arguments of allreduce that unidist's calls do not have.
_ARGUMENTS: dict[str, Reason] = {
    "prescale_factor": ("unidist has no scale factors", "multiply the tensor before the call"),
    "postscale_factor": ("unidist has no scale factors", "multiply the result"),
    "compression": ("unidist has no compression of single calls", "remove the argument, then migrate again"),
}


def remark_on(context: Context, use: cst.BaseExpression) -> Remark:
    """Return the remark on a use that no rule has handled."""
    why, remedy = _reason(context, use)
    return Remark(context.tree.line(use), context.first_line(use), why, remedy)


def _reason(context: Context, use: cst.BaseExpression) -> Reason:
    if use in context.kept:
        return context.kept[use]
    symbol, call = context.names.symbols[use], context.tree.call_of(use)
    arguments = context.arguments(call) if call is not None else None
    if (reason := _of_process_sets(context, symbol, call, arguments or {})) is not None:
        return reason
    if symbol in ("broadcast_parameters", "broadcast_optimizer_state"):
        staying = (each for each in context.remaining_uses() if context.symbol(each) == "DistributedOptimizer")
        optimizer = next(staying, None)
        return _OTHER_STATE if optimizer is None else _reason(context, optimizer)
    if symbol in ("allreduce", "allreduce_"):
        if arguments is None:
            return UNKNOWN_ARGUMENTS
        for name, reason in _ARGUMENTS.items():
            if name in arguments:
                return reason
        if reduction(context, arguments) is None:
            return _ADASUM if context.symbol(arguments.get("op")) == "Adasum" else _REDUCTION
        assert call is not None
        return _NO_GRADIENT if has_other_gradient(context, call, arguments) else _INTEGERS
    if symbol in COLLECTIVES and call is not None and arguments is None:
        return UNKNOWN_ARGUMENTS
    if arguments is not None and call is not None and has_other_gradient(context, call, arguments):
        return _GRADIENT
    return next(reason for start, reason in _REASONS.items() if symbol.startswith(start))


def _of_process_sets(
    context: Context, symbol: str, call: cst.Call | None, arguments: Mapping[str, cst.BaseExpression]
) -> Reason | None:
    """Return the line to write in place of a process set; None if a call has to do with none."""
    if symbol == "init" and call is not None and call.args:
        return f"{_PROCESS_SETS}, and makes them when they are asked for", "`unidist.init()`"
    if symbol in ("ProcessSet", "add_process_set") and call is not None and call.args:
        ranks = call.args[0].value
        while isinstance(ranks, cst.Call) and context.symbol(ranks.func) == "ProcessSet" and ranks.args:
            ranks = ranks.args[0].value
        return _PROCESS_SETS, f"`unidist.new_group({_in_unidist(context, ranks)})`, by all ranks"
    if "process_set" in arguments:
        group = context.text(arguments["process_set"])
        return _PROCESS_SETS, f"`group={group}`, where that is made by `unidist.new_group(ranks)`"
    return (_PROCESS_SETS, "`unidist.new_group(ranks)`, by all ranks") if "process_set" in symbol.lower() else None


def _in_unidist(context: Context, node: cst.BaseExpression) -> str:
    """Return an expression's code, with unidist's names for the plain calls in it."""
    text = context.text(node)
    for use, symbol in context.names.symbols.items():
        if symbol in PLAIN_CALLS and context.tree.is_inside(use, node):
            text = text.replace(context.text(use), f"unidist.{PLAIN_CALLS[symbol]}")
    return text
