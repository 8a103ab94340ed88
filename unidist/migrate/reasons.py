"""Why a use stays the drop-in's, and what a person may do."""

from __future__ import annotations

import libcst as cst

from unidist.migrate.calls import has_other_gradient, operation
from unidist.migrate.report import Finding
from unidist.migrate.site import Site

Words = tuple[str, str]
_ASYNC = (
    "unidist has no asynchronous calls",
    "wrap_model averages gradients while backward runs; else all_reduce, which waits",
)
_HANDLE = ("unidist has no asynchronous calls", "see the call that began the operation")
_BELONGS = ("it belongs to an optimizer that stays Horovod's", "see what is said of that optimizer")
_SETS = ("process sets are objects of their own", "unidist.new_group(ranks), and group=")
#: By the beginning of the name; the first that fits.
_WORDS: dict[str, Words] = {
    "allreduce_async": _ASYNC,
    "grouped_": ("unidist has no grouped calls", "one unidist call for each tensor"),
    "synchronize": _HANDLE,
    "poll": _HANDLE,
    "DistributedOptimizer": _BELONGS,
    "Compression": ("it goes to a call that stays", "see that call"),
    "SyncBatchNorm": ("its layers are made one by one", "plain BatchNorm, and wrap_model(sync_bn=True)"),
    "elastic": ("elastic training is not in the drop-in", "keep Horovod for this file"),
    "ProcessSet": _SETS,
    "add_process_set": _SETS,
    "broadcast_object_fn": ("unidist has no call of this meaning", "unidist.broadcast_object"),
    "broadcast_": ("what it changes in place cannot be seen", "tensor.copy_(unidist.broadcast(tensor))"),
    "": ("unidist has no call of this meaning", "keep it, or find another way"),
}
_NUMBERS = (
    "that it holds floating-point numbers cannot be seen, and unidist refuses the mean of whole numbers, which Horovod cuts off",
    "unidist.all_reduce(tensor, 'mean') if they are, allreduce_metric for a figure",
)
_GRADIENT = (
    "a gradient may go through it, which Horovod averages and unidist adds up",
    "pass tensor.detach() if none is wanted, then migrate again; else keep it",
)
_NO_GRADIENT = (
    "a gradient may go through it, and unidist's minimum, maximum and product have none",
    "pass tensor.detach(), then migrate again",
)
_ADASUM = ("unidist has no Adasum", "keep it: the drop-in has it on every engine")
_OPERATION = (
    "whether it asks for the average or for the sum cannot be determined",
    "write op=hvd.Average or op=hvd.Sum, and the name by name=, then migrate again",
)
#: Arguments of allreduce that have no counterpart.
_ARGUMENTS: dict[str, Words] = {
    "prescale_factor": ("factors have no counterpart", "multiply before and after"),
    "postscale_factor": ("factors have no counterpart", "multiply before and after"),
    "process_set": _SETS,
    "compression": ("compression of single calls has no counterpart", "take it out, then migrate again"),
}


def left(site: Site, use: cst.BaseExpression) -> Finding:
    """The finding for a use that no rule has settled."""
    why, remedy = _words(site, use)
    statement = site.code.statement(use)
    shown = site.text(statement or use).splitlines()[0]
    return Finding(site.code.line(use), shown, why, remedy)


def _words(site: Site, use: cst.BaseExpression) -> Words:
    if use in site.kept:
        return site.kept[use]
    symbol, call = site.names.symbols[use], site.code.parent(use)
    arguments = site.arguments(call) if isinstance(call, cst.Call) and call.func is use else None
    if symbol in ("allreduce", "allreduce_"):
        for name, words in _ARGUMENTS.items():
            if arguments is not None and name in arguments:
                return words
        if arguments is not None and operation(site, arguments) is None:
            return _ADASUM if site.symbol(arguments.get("op")) == "Adasum" else _OPERATION
        if arguments is not None and isinstance(call, cst.Call) and has_other_gradient(site, call, arguments):
            return _NO_GRADIENT
        return _NUMBERS if arguments is not None else ("its arguments cannot be told", "write the call out")
    if symbol in ("broadcast_parameters", "broadcast_optimizer_state"):
        stays = any(site.symbol(other) == "DistributedOptimizer" for other in site.left())
        return (
            _BELONGS
            if stays
            else (
                "it sends something else than a model's state",
                "unidist.broadcast for each tensor, or broadcast_object",
            )
        )
    if arguments is not None and "process_set" in arguments:
        return _SETS
    if arguments is not None and isinstance(call, cst.Call) and has_other_gradient(site, call, arguments):
        return _GRADIENT
    return next(words for start, words in _WORDS.items() if symbol.startswith(start))
