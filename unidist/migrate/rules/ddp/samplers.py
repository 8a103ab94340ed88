"""The rule for samplers that stay: they are told the rank and the number of processes."""

from __future__ import annotations

from functools import partial

import libcst as cst

from unidist.migrate.context import UNKNOWN_ARGUMENTS, is_constant
from unidist.migrate.rules.ddp.names import TorchContext
from unidist.migrate.rules.loaders import change_loaders
from unidist.migrate.syntax import keyword


def change_samplers(context: TorchContext) -> None:
    """Make ``DistributedSampler`` and its loader ``shard_loader``; others get ``unidist.rank()``."""
    change_loaders(context)
    for call in list(context.calls("DistributedSampler")):
        arguments = context.arguments(call)
        if arguments is None:
            context.keep(call.func, *UNKNOWN_ARGUMENTS)
            continue
        missing = [
            keyword(name, cst.Call(context.unidist_name(call, function)))
            for name, function in (("num_replicas", "world_size"), ("rank", "rank"))
            if is_constant(arguments.get(name), None)
        ]
        if missing and not context.edits.is_removed(context.tree.statement(call) or call):
            context.edits.replace(call, partial(_with, call, missing))
    for use in list(context.uses("DistributedSampler")):
        context.mark_handled(use)


def _with(call: cst.Call, missing: list[cst.Arg], updated: cst.Call) -> cst.Call:
    """Return a sampler with more arguments; those that were None are left out."""
    names = [arg.keyword.value for arg in missing if arg.keyword is not None]
    kept = [
        after
        for before, after in zip(call.args, updated.args)
        if not is_constant(before.value, None) or (before.keyword is not None and before.keyword.value not in names)
    ]
    kept[-1:] = [arg.with_changes(comma=cst.MaybeSentinel.DEFAULT) for arg in kept[-1:]]
    return updated.with_changes(args=[*kept, *missing])
