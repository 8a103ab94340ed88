"""One module, migrated: the rules in their order, and what they leave."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import libcst as cst

from unidist.migrate.calls import (
    COLLECTIVES,
    PLACE,
    change_allreduce,
    change_barriers,
    change_collectives,
    change_places,
    keep_joined,
)
from unidist.migrate.code import Code, full_name
from unidist.migrate.imports import change_imports
from unidist.migrate.loaders import change_loaders
from unidist.migrate.names import find, is_horovod
from unidist.migrate.notices import report_surroundings
from unidist.migrate.optimizers import change_optimizers
from unidist.migrate.reasons import left
from unidist.migrate.report import Finding
from unidist.migrate.site import Site

Level = Literal["native", "hvd"]
_HELD = "other files make calls through a variable that holds the module: there it is the drop-in"
_OTHERS = (
    "allreduce", "allreduce_", "broadcast_", "broadcast_parameters", "broadcast_optimizer_state", "DistributedOptimizer", "join",
)  # fmt: skip
_REPLACED = (
    "the script puts a function of its own in this call's place, which unidist's would pass by",
    "keep it, or put the function around unidist's call, by hand",
)
_NOT_IMPORTED = (
    "the variable holds the drop-in for calls that stay, and this function does not import unidist",
    "import unidist where it is used, then migrate again",
)
_ESCAPES = "the module goes where it cannot be followed: there, and in the variables that hold it, it is the drop-in"


def migrate(text: str, level: Level, exported: Collection[str] = ()) -> tuple[str, list[Finding]]:
    """The module's new text, and what a person must look at.

    Args:
        exported: names that other files import from this one; they stay.

    Raises:
        libcst.ParserSyntaxError: it does not parse.
    """
    code = Code(text)
    names = find(code)
    if any(symbol.startswith("elastic") for symbol in names.symbols.values()):
        return text, [
            left(Site(code, names, False), node)
            for node, symbol in names.symbols.items()
            if symbol.startswith("elastic")
        ]
    held_elsewhere = names.holders & {*exported, *(f".{name}" for name in exported)}
    site = Site(code, names, through_holders=level == "native" and not names.escapes and not held_elsewhere)
    if level == "native" and not _is_hidden(site):
        _apply_rules(site)
        if site.through_holders and any(site.is_through_holder(use) for use in site.left()):
            # One variable cannot hold both modules.
            site = Site(code, names, through_holders=False)
            _apply_rules(site)
        for node in names.modules[:1] if held_elsewhere else ():
            site.note(node, _HELD, "import unidist where it is used", code.text(node))
        for node in names.escapes:
            site.note(node, _ESCAPES, "import unidist where it is used", code.text(node))
        told = {each.line for each in site.edits.findings}
        for use in site.left():
            calls = [
                above for above in code.parents(use) if isinstance(above, cst.Call) and above is not code.parent(use)
            ]
            finding = left(site, use)
            # A part of a call that is told of needs no word of its own.
            if finding.line not in told and not any(call.func in names.symbols for call in calls):
                site.edits.findings.append(finding)
                told.add(finding.line)
    report_surroundings(site)
    site.reports_exports = level == "native"
    if names.symbols or not _is_of_the_drop_in_alone(code):
        change_imports(site, exported)
    findings = sorted(site.edits.findings, key=lambda finding: finding.line)
    return site.edits.apply(), findings


def _is_of_the_drop_in_alone(code: Code) -> bool:
    """Whether no name of Horovod's is imported any more: where nothing is called either, the module is as an earlier run left it."""
    plain = [full_name(alias.name) for node in code.all(cst.Import) for alias in node.names]
    named = [full_name(node.module) for node in code.all(cst.ImportFrom) if node.module is not None]
    return not any(is_horovod(name) for name in (*plain, *named))


def _apply_rules(site: Site) -> None:
    site.kept = dict.fromkeys(site.uses(*site.names.replaced), _REPLACED) if site.names.replaced else {}
    if not site.through_holders:
        for use in site.uses(*PLACE, *COLLECTIVES, *_OTHERS):
            if site.is_through_holder(use) and not site.may_import(use):
                site.kept[use] = _NOT_IMPORTED
    keep_joined(site)
    change_optimizers(site)
    change_barriers(site)
    change_loaders(site)
    change_collectives(site)
    change_allreduce(site)
    change_places(site)


def _is_hidden(site: Site) -> bool:
    """Whether names come in by ``from horovod.torch import *``, so that they cannot be told from others."""
    for node in site.code.all(cst.ImportFrom):
        star = isinstance(node.names, cst.ImportStar) and node.module is not None
        if star and is_horovod(site.text(node.module or node)):
            site.note(
                node,
                "names imported by * cannot be told from others",
                "import the names that are used, then migrate again",
            )
            return True
    return False
