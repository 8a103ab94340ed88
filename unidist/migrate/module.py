"""Migrate one module: apply the rules in their order, and remark on every use that they leave."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

import libcst as cst

from unidist.migrate.comments import rewrite_comments
from unidist.migrate.context import Context, Elsewhere, Options
from unidist.migrate.file_report import Remark
from unidist.migrate.names import Names, find_names, in_import, is_horovod
from unidist.migrate.reasons import remark_on
from unidist.migrate.rules import NATIVE_RULES, RULES_OF_ALL_LEVELS
from unidist.migrate.rules.imports import STAYS
from unidist.migrate.rules.optimizers import CHANGED_HOROVOD
from unidist.migrate.self_check import fault
from unidist.migrate.syntax import SyntaxTree, module_of, syntax_tree
from unidist.migrate.torch_module import migrate_torch_module, names_torch

Level = Literal["native", "hvd"]
_USED_ELSEWHERE = "other files call Horovod through this variable, so it holds the drop-in"
_NAME_IS_TAKEN = "the file uses the name unidist for something of its own, so all calls stay on the drop-in"
_UNSOUND = "this tool would break the file, and so does not use unidist's own calls in it: {}"
_ASKED_FOR = (
    "the file asks whether Horovod is there, and so imports the drop-in",
    "`import unidist`, which is there wherever the migrated program runs",
)
_STAR = ("which names `import *` brings in cannot be determined", "import the names that are used, then migrate again")
_ESCAPES = "the module is passed on and cannot be followed, so all variables that hold it hold the drop-in"


_DROP_IN = re.compile(
    r"^\s*(?:from\s+unidist\.hvd\b|import\s+(?:[\w.]+\s*(?:as\s+\w+\s*)?,\s*)*unidist\.hvd\b|from\s+unidist\s+import\s.*\bhvd\b)"
    r"|(?:import_module|__import__)\(\s*['\"]unidist\.hvd\b",
    re.MULTILINE,
)
_HOROVOD = re.compile(
    r"horovod|HOROVOD_|unidist\.hvd|unidist import .*\bhvd\b|OMPI_COMM_WORLD_|PMIX?_RANK|MV2_COMM_WORLD_"
)
_USES_HOROVOD = re.compile(
    r"^[^#\n]*import\b.*\b(?:horovod|hvd)\b|^[^#\n]*from horovod|import_module\(\s*['\"]horovod", re.M
)
#: Of a migration of which the user has said nothing.
DEFAULT_OPTIONS = Options()


def migrate_module(
    text: str,
    level: Level,
    exported: Collection[str] = (),
    elsewhere: Elsewhere = Elsewhere(),  # noqa: B008  (immutable)
    options: Options = DEFAULT_OPTIONS,
) -> tuple[str, list[Remark]]:
    """Return the module's new text, and what a person must look at.

    If something stays on the drop-in, all of the module does, and the remarks say why, unless ``options.partial``.

    Args:
        text: the module.
        level: ``native`` for unidist's own calls, ``hvd`` for the drop-in's imports alone.
        exported: names that other files import from this one; they stay.
        elsewhere: what other files do with this one's optimizers and gradients.
        options: what the user has said.

    Raises:
        libcst.ParserSyntaxError: the text does not parse.
    """
    after, remarks = text, list[Remark]()
    if "horovod" in options.origins and (_HOROVOD.search(text) or not names_torch(text, options)):
        after, remarks = _migrate_horovod(text, level, exported, elsewhere, options)
    if level == "native" and after == text and names_torch(text, options) and not _USES_HOROVOD.search(text):
        after, more = migrate_torch_module(text, exported, elsewhere, options)
        remarks = sorted([*remarks, *more], key=lambda remark: remark.line)
    if wrong := fault(text, after):
        return text, [_unsound(wrong)]
    return after, remarks


def _unsound(wrong: str) -> Remark:
    return Remark(1, "", _UNSOUND.format(wrong), "migrate it by hand, and report the file as a fault of unidist")


def _migrate_horovod(
    text: str, level: Level, exported: Collection[str], elsewhere: Elsewhere, options: Options
) -> tuple[str, list[Remark]]:
    tree = syntax_tree(text)
    names = find_names(tree)
    migrate = partial(_migrate, tree, names, exported, elsewhere, options)
    if level == "native" and (other := _other_unidist(tree)) is not None:
        after, remarks, _ = migrate("hvd")
        line = tree.text(tree.statement(other) or other).splitlines()[0]
        return after, [*remarks, Remark(tree.line(other), line, _NAME_IS_TAKEN, "rename it, then migrate again")]
    after, remarks, reasons = migrate(level)
    if changed := [replace(remark, why=CHANGED_HOROVOD) for remark in reasons if CHANGED_HOROVOD in remark.why]:
        return tree.module.code, changed
    if (reasons or imports_drop_in(after)) and not options.partial:
        reasons = reasons or [remark for remark in remarks if remark.why in STAYS] or _imported(tree, names)
        reasons = _with_count(reasons, _calls(tree, names) - _calls(left := syntax_tree(after), find_names(left)))
        after, remarks, _ = migrate("hvd")
    elif level == "native" and after != text and not _names_horovod(after):
        after = rewrite_comments(after)
    reasons = [replace(remark, stays=True) for remark in reasons]
    return after, sorted([*remarks, *reasons], key=lambda remark: remark.line)


def _calls(tree: SyntaxTree, names: Names) -> int:
    return sum(tree.call_of(use) is not None for use in names.symbols)


def _with_count(reasons: list[Remark], others: int) -> list[Remark]:
    """Return the reasons; the first one says how many other calls could change."""
    if others < 1 or not reasons:
        return reasons
    first, *more = sorted(reasons, key=lambda remark: remark.line)
    lines = "this line" if not more else f"this line and {len(more)} more"
    stay = f"{others} other calls could change, and stay" if others > 1 else "1 other call could change, and stays"
    return [replace(first, remedy=f"{first.remedy}; {stay} because of {lines}: see --partial"), *more]


def _imported(tree: SyntaxTree, names: Names) -> list[Remark]:
    return [Remark(tree.line(node), tree.text(node), *_ASKED_FOR) for node in names.imports[:1]]


def _names_horovod(code: str) -> bool:
    """Return whether a module still imports Horovod or the drop-in."""
    return imports_drop_in(code) or _USES_HOROVOD.search(code) is not None


def _other_unidist(tree: SyntaxTree) -> cst.Name | None:
    """Return where a module that imports Horovod uses the name ``unidist`` for something of its own."""
    imports = [node for node in (*tree.all(cst.Import), *tree.all(cst.ImportFrom)) if "horovod" in tree.text(node)]
    own = (name for name in tree.all(cst.Name) if name.value == "unidist" and not tree.imported(name))
    return next((name for name in own if not in_import(tree, name)), None) if imports else None


def imports_drop_in(code: str) -> bool:
    """Return whether a module imports the drop-in."""
    return _DROP_IN.search(code) is not None


def _migrate(
    tree: SyntaxTree,
    names: Names,
    exported: Collection[str],
    elsewhere: Elsewhere,
    options: Options,
    level: Level,
) -> tuple[str, list[Remark], list[Remark]]:
    """Return the module's new text, remarks on what has changed, and why something stays on the drop-in."""
    used_elsewhere = names.aliases & {*exported, *(f".{name}" for name in exported)}
    native_aliases = level == "native" and not names.escapes and not used_elsewhere
    context = Context(tree, names, exported, level == "native", native_aliases, elsewhere, options)
    reasons = _star_imports(context) if level == "native" else []
    if level == "native" and not reasons:
        for rule in NATIVE_RULES:
            rule(context)
        if native_aliases and any(map(context.is_through_alias, context.remaining_uses())):
            # An alias holds one module: unidist if all calls through it migrate, else the drop-in.
            context = Context(tree, names, exported, native=True, elsewhere=elsewhere, options=options)
            for rule in NATIVE_RULES:
                rule(context)
        held = [(node, _USED_ELSEWHERE) for node in names.modules[:1] if used_elsewhere]
        held += [(node, _ESCAPES) for node in names.escapes]
        for node, why in held:
            reasons.append(Remark(tree.line(node), tree.text(node), why, "import unidist where it is used"))
        reasons += _reasons_of_remaining(context)
    for rule in RULES_OF_ALL_LEVELS:
        rule(context)
    after = context.edits.apply()
    if wrong := fault(tree.module.code, after, context.edits.planned_lines()):
        return tree.module.code, [], [_unsound(wrong)]
    return after, context.edits.remarks, reasons


def _reasons_of_remaining(context: Context) -> Iterator[Remark]:
    """Yield one for each line with a use that no rule has handled."""
    tree, lines = context.tree, set[int]()
    for use in context.remaining_uses():
        calls = [node for node in tree.parents(use) if isinstance(node, cst.Call) and node is not tree.parent(use)]
        remark = remark_on(context, use)
        # The remark on a call covers its arguments.
        if use in context.covered or any(call.func in context.names.symbols for call in calls):
            continue
        if remark.line not in lines:
            yield remark
            lines.add(remark.line)


def _star_imports(context: Context) -> list[Remark]:
    """Return each ``from horovod.torch import *``, which brings in names that no tool can list."""
    tree = context.tree
    stars = [node for node in tree.all(cst.ImportFrom) if isinstance(node.names, cst.ImportStar) and node.module]
    return [Remark(tree.line(node), tree.text(node), *_STAR) for node in stars if is_horovod(module_of(node))]
