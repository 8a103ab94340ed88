"""Migrate one module: apply the rules in their order, and remark on every use that they leave."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import libcst as cst

from unidist.migrate.context import Context
from unidist.migrate.file_report import Remark
from unidist.migrate.names import find_names, is_horovod
from unidist.migrate.reasons import remark_on
from unidist.migrate.rules import NATIVE_RULES, RULES_OF_ALL_LEVELS
from unidist.migrate.syntax import SyntaxTree

Level = Literal["native", "hvd"]
_USED_ELSEWHERE = "other files call Horovod through this variable, so it holds the drop-in"
_ESCAPES = "the module is passed on and cannot be followed, so all variables that hold it hold the drop-in"


def migrate_module(text: str, level: Level, exported: Collection[str] = ()) -> tuple[str, list[Remark]]:
    """The module's new text, and what a person must look at.

    Args:
        text: the module.
        level: ``native`` for unidist's own calls, ``hvd`` for the drop-in's imports alone.
        exported: names that other files import from this one; they stay.

    Raises:
        libcst.ParserSyntaxError: the text does not parse.
    """
    tree = SyntaxTree(text)
    names = find_names(tree)
    elastic = [use for use, symbol in names.symbols.items() if symbol.startswith("elastic")]
    if elastic:
        unchanged = Context(tree, names)
        return text, [remark_on(unchanged, use) for use in elastic]
    used_elsewhere = names.aliases & {*exported, *(f".{name}" for name in exported)}
    native_aliases = level == "native" and not names.escapes and not used_elsewhere
    context = Context(tree, names, exported, level == "native", native_aliases)
    if level == "native" and not _has_star_import(context):
        for rule in NATIVE_RULES:
            rule(context)
        if native_aliases and any(map(context.is_through_alias, context.remaining_uses())):
            # An alias holds one module: unidist if all calls through it migrate, else the drop-in.
            context = Context(tree, names, exported, native=True)
            for rule in NATIVE_RULES:
                rule(context)
        for node in names.modules[:1] if used_elsewhere else ():
            context.remark(node, _USED_ELSEWHERE, "import unidist where it is used", tree.text(node))
        for node in names.escapes:
            context.remark(node, _ESCAPES, "import unidist where it is used", tree.text(node))
        _remark_on_remaining(context)
    for rule in RULES_OF_ALL_LEVELS:
        rule(context)
    return context.edits.apply(), sorted(context.edits.remarks, key=lambda remark: remark.line)


def _remark_on_remaining(context: Context) -> None:
    """One remark for each line with a use that no rule has handled and that has none yet."""
    tree = context.tree
    lines = {remark.line for remark in context.edits.remarks}
    for use in context.remaining_uses():
        calls = [node for node in tree.parents(use) if isinstance(node, cst.Call) and node is not tree.parent(use)]
        remark = remark_on(context, use)
        # The remark on a call covers its arguments.
        if use in context.covered or any(call.func in context.names.symbols for call in calls):
            continue
        if remark.line not in lines:
            context.edits.remarks.append(remark)
            lines.add(remark.line)


def _has_star_import(context: Context) -> bool:
    """Whether ``from horovod.torch import *`` brings in names that no tool can list."""
    for node in context.tree.all(cst.ImportFrom):
        if isinstance(node.names, cst.ImportStar) and node.module and is_horovod(context.text(node.module)):
            why = "which names `import *` brings in cannot be determined"
            context.remark(node, why, "import the names that are used, then migrate again")
            return True
    return False
