"""Migrate one module of torch.distributed, ``nn.DataParallel`` or apex: all of it, or nothing."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

import libcst as cst

from unidist.migrate.context import Elsewhere, Options
from unidist.migrate.file_report import Remark
from unidist.migrate.names import in_import
from unidist.migrate.rules.ddp.collectives import change_collectives
from unidist.migrate.rules.ddp.data_parallel import change_data_parallel
from unidist.migrate.rules.ddp.imports import tidy_imports
from unidist.migrate.rules.ddp.names import HARMLESS, TorchContext, symbol_of
from unidist.migrate.rules.ddp.places import change_places
from unidist.migrate.rules.ddp.samplers import change_samplers
from unidist.migrate.rules.ddp.start import change_plain_calls, change_start
from unidist.migrate.rules.ddp.wrapping import change_models
from unidist.migrate.syntax import imports_of, syntax_tree

#: Text without one of these has nothing to migrate, by what it is migrated from.
_NAMED = {
    "ddp": r"torch\.distributed|torch import .*\bdistributed|DistributedDataParallel",
    "dataparallel": r"\bDataParallel\b",
    "apex": r"\bapex\b",
}
_RULES = (
    change_start,
    change_samplers,
    change_collectives,
    change_models,
    change_plain_calls,
    change_places,
    change_data_parallel,
)
#: Calls without which the others make no sense.
_DECISIVE = {"init_process_group", "DistributedDataParallel", "apex.parallel.DistributedDataParallel"}
_FSDP = (
    "FSDP divides the model among the ranks, and unidist's models are whole",
    "keep it: unidist.init() need not run",
)
_REASONS = {
    "fsdp": _FSDP,
    "_composable": _FSDP,
    "tensor": ("tensor parallelism divides the model among the ranks", "keep it"),
    "algorithms.Join": ("unidist.join takes models and optimizers", "with unidist.join(model, optimizer):"),
    "algorithms.join": ("unidist.join takes models and optimizers", "with unidist.join(model, optimizer):"),
    "optim": ("it divides the optimizer's state among the ranks", "keep it, or use a plain optimizer"),
    "new_group": ("it makes a process group of its own", "unidist.new_group(ranks), and group= in the calls"),
    "rpc": ("unidist has no remote calls", "keep it"),
    "apex.amp": (
        "apex.amp is replaced by torch.amp, which converts other operations",
        "torch.autocast('cuda') around the forward pass and torch.amp.GradScaler, then migrate again",
    ),
    "apex": ("unidist has no equivalent of this part of apex", "replace it by torch's own, then migrate again"),
    "DistributedDataParallel": ("it is used without being called", "call it where it is used, then migrate again"),
    "ReduceOp": ("it is an argument of a call that stays", "nothing here: migrate that call"),
    "": ("the module is passed on as a value, and cannot be followed", "import it where it is used"),
}
_START = "migrate it together with the file that starts the process group, or call unidist.init() there"
_OTHER = ("unidist has no equivalent of this call", "keep it, or rewrite what needs it")
_REBOUND = ("this name is also bound to something else", "give one of them another name, then migrate again")
_TAKEN = ("the file uses the name unidist for something of its own", "rename it, then migrate again")
_LEFT = ("it is inside of what another rule replaces", "assign it to a variable before, then migrate again")
_STAR = ("which names `import *` brings in cannot be determined", "import the names that are used, then migrate again")


def names_torch(text: str, options: Options) -> bool:
    """Return whether a text names what it may be migrated from."""
    patterns = [pattern for origin, pattern in _NAMED.items() if origin in options.origins]
    return bool(patterns) and re.search("|".join(patterns), text) is not None


def migrate_torch_module(
    text: str, exported: Collection[str], elsewhere: Elsewhere, options: Options
) -> tuple[str, list[Remark]]:
    """Return the module's new text, and what a person must look at.

    If something cannot be migrated, the module stays as it is, and the remarks say why; with ``options.partial`` only
    if it is the start of the world or the wrapping of a model.

    Raises:
        libcst.ParserSyntaxError: the text does not parse.
    """
    tree = syntax_tree(text)
    context = TorchContext(tree, exported, elsewhere, options)
    if not context.names.symbols:
        return text, [remark for remark in _problems_of_names(context) if remark.why == _STAR[0]]
    for rule in _RULES:
        rule(context)
    reasons = _first_of_each(sorted([*_reasons(context), *context.refusals], key=lambda remark: remark.line))
    blocked = [use for use in context.remaining_uses() if context.names.symbols[use] in _DECISIVE]
    if not context.needs_unidist or (reasons and (blocked or context.refusals or not options.partial)):
        return text, reasons
    after = tidy_imports(tree, context.edits.apply(), exported)
    left = None if reasons else _left(after, elsewhere, options)
    if left is not None:
        return text, [Remark(1, left, *_LEFT)]
    return after, sorted([*context.edits.remarks, *reasons], key=lambda remark: remark.line)


def _left(text: str, elsewhere: Elsewhere, options: Options) -> str | None:
    """Return a use in the new text that is not to stay."""
    context = TorchContext(syntax_tree(text), (), elsewhere, options)
    return next((context.text(use) for use in context.names.symbols if not _may_stay(context, use)), None)


def _first_of_each(remarks: list[Remark]) -> list[Remark]:
    """Return one finding for each reason."""
    found: dict[str, Remark] = {}
    for remark in remarks:
        found.setdefault(remark.why, remark)
    return list(found.values())


def _reasons(context: TorchContext) -> Iterator[Remark]:
    """Yield why uses stay."""
    tree, lines = context.tree, set[int]()
    yield from _problems_of_names(context)
    uses = context.remaining_uses()
    for use in uses:
        symbol = context.names.symbols[use]
        line = tree.line(tree.statement(use) or use)
        outer = any(
            isinstance(node, cst.Call) and node.func in uses and node.func is not use for node in tree.parents(use)
        )
        if _may_stay(context, use) or outer or line in lines:
            continue
        why, remedy = context.kept.get(use) or next(
            (reason for start, reason in _REASONS.items() if symbol == start or symbol.startswith(f"{start}.")), _OTHER
        )
        lines.add(line)
        yield Remark(tree.line(use), context.first_line(use), why, remedy)
    first = next((use for use in context.names.symbols if not _needs_no_group(context, use)), None)
    if context.elsewhere.start and context.needs_unidist and first is not None:
        yield Remark(tree.line(first), context.first_line(first), context.elsewhere.start, _START)


def _may_stay(context: TorchContext, use: cst.BaseExpression) -> bool:
    stays = context.names.symbols[use] in ("DistributedSampler", "convert_sync_batchnorm")
    return stays or _needs_no_group(context, use)


def _needs_no_group(context: TorchContext, use: cst.BaseExpression) -> bool:
    symbol = context.names.symbols[use]
    asked = symbol == "is_available" and isinstance(context.tree.parent(use), cst.Call)
    return asked or symbol in HARMLESS or symbol.startswith("elastic.") or symbol == "DataParallel"


def _problems_of_names(context: TorchContext) -> Iterator[Remark]:
    tree = context.tree
    bound = {bound for _, _, name, bound in imports_of(tree) if symbol_of(name) is not None and bound != "torch"}
    for node in tree.all(cst.ImportFrom):
        if isinstance(node.names, cst.ImportStar) and node.module and symbol_of(context.text(node.module)) is not None:
            yield Remark(tree.line(node), context.first_line(node), *_STAR)
    for name in tree.all(cst.Name):
        if in_import(tree, name) or tree.is_attribute_name(name):
            continue
        if name.value in bound and tree.variable(name) is not None and not isinstance(tree.parent(name), cst.Arg):
            yield Remark(tree.line(name), context.first_line(name), *_REBOUND)
            return
        if name.value == "unidist" and not tree.imported(name):
            yield Remark(tree.line(name), context.first_line(name), *_TAKEN)
            return
