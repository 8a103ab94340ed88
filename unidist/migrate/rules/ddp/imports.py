"""What comes after the rules: ``import unidist``, and no import that nothing uses any more."""

from __future__ import annotations

import re
from collections.abc import Collection

import libcst as cst

from unidist.migrate.edits import Edits
from unidist.migrate.names import in_import, root_name
from unidist.migrate.rules.ddp.names import imports_of, symbol_of
from unidist.migrate.syntax import Statement, SyntaxTree, dotted, full_name


def tidy_imports(before: SyntaxTree, text: str, exported: Collection[str]) -> str:
    """The new text with ``import unidist``, and without the imports whose last use the rules have removed."""
    tree = SyntaxTree(text)
    edits = Edits(tree)
    old, new = _used_names(before), _used_names(tree)
    unused = {alias for _, alias, name, bound in imports_of(tree) if _is_unused(name, bound, old, new, exported)}
    place = _change(tree, edits, unused, new)
    if "unidist" in {name.partition(".")[0] for name in new} and not _imports_unidist(tree):
        _add(tree, edits, place)
    after = edits.apply()
    return after if text[:1].isspace() else after.lstrip("\r\n")


def _used_names(tree: SyntaxTree) -> set[str]:
    """The names that are used outside of imports, each with and without what follows its dots; also in
    ``__all__`` and annotations."""
    found: set[str] = set()
    for node in tree.all((cst.Name, cst.Attribute)):
        if in_import(tree, node) or (isinstance(node, cst.Name) and tree.is_attribute_name(node)):
            continue
        name = full_name(node)
        while name:
            found.add(name)
            name = name.rpartition(".")[0]
    for text in tree.all(cst.SimpleString):
        if any(isinstance(each, cst.Assign) and "__all__" in tree.text(each) for each in tree.parents(text)):
            found.add(str(text.evaluated_value))
        if any(isinstance(each, cst.Annotation) for each in tree.parents(text)):
            found.update(re.findall(r"\w+", str(text.evaluated_value)))
    return found


def _is_unused(name: str, bound: str, old: set[str], new: set[str], exported: Collection[str]) -> bool:
    """Whether the new text has no use of an import that the old one had, or of a library that it migrates from."""
    migrated = symbol_of(name) is not None
    if bound in exported or name.startswith("unidist"):
        return False
    if migrated and name.startswith(f"{bound}."):  # import torch.distributed
        return not any(each == name or each.startswith(f"{name}.") for each in new)
    return bound not in new and (migrated or bound in old)


def _change(tree: SyntaxTree, edits: Edits, unused: set[cst.ImportAlias], new: set[str]) -> Statement | None:
    """Remove the unused imports; the first of torch.distributed's, at the module's own level, is the place for ours."""
    place: Statement | None = None
    removed: list[Statement] = []
    names = {bound for _, alias, _, bound in imports_of(tree) if alias not in unused}
    for node in tree.all((cst.Import, cst.ImportFrom)):
        statement = tree.statement(node)
        if isinstance(node.names, cst.ImportStar) or statement is None:
            continue
        kept = [alias for alias in node.names if alias not in unused]
        if len(kept) == len(node.names):
            continue
        migrated = any(
            symbol_of(name) is not None for each, alias, name, _ in imports_of(tree) if each is node and alias in unused
        )
        plain = isinstance(node, cst.Import)
        binds_torch = plain and any(alias.asname is None and root_name(alias.name) == "torch" for alias in node.names)
        if binds_torch and not kept and "torch" in new and "torch" not in names:
            kept = [cst.ImportAlias(dotted("torch"))]  # import torch.distributed alone
            names.add("torch")
        elif migrated and place is None and tree.block(statement) is tree.module:
            place = statement
        if kept:
            kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
            parentheses = {} if len(kept) > 1 or plain else {"lpar": None, "rpar": None}
            edits.replace(node, node.with_changes(names=kept, **parentheses))
        else:
            edits.remove(statement)
            removed.append(statement)
    for block in tree.all(cst.Try):
        _remove_try(tree, edits, block, removed, new)
    return place


def _remove_try(tree: SyntaxTree, edits: Edits, block: cst.Try, removed: list[Statement], new: set[str]) -> None:
    """Remove a ``try`` whose imports are all gone, if nothing uses what the rest of it sets."""
    if not all(any(each is one for one in removed) for each in block.body.body):
        return
    parts: list[cst.CSTNode] = [*block.handlers, *(part for part in (block.orelse, block.finalbody) if part)]
    for part in parts:
        for target in tree.all((cst.AssignTarget, cst.AnnAssign), inside=part):
            if full_name(target.target) in new - {full_name(target.target)} or _is_read(tree, target, block):
                return
    edits.remove(block)


def _is_read(tree: SyntaxTree, target: cst.AssignTarget | cst.AnnAssign, block: cst.Try) -> bool:
    name = full_name(target.target)
    return any(
        each.value == name and not tree.is_inside(each, block) and not in_import(tree, each)
        for each in tree.all(cst.Name)
    )


def _imports_unidist(tree: SyntaxTree) -> bool:
    return any(
        bound == "unidist" and tree.block(tree.statement(node) or node) is tree.module
        for node, _, _, bound in imports_of(tree)
    )


def _add(tree: SyntaxTree, edits: Edits, place: Statement | None) -> None:
    """Add ``import unidist`` in a place, or after the imports with which the module begins."""
    if place is not None:
        edits.insert(place, "import unidist")
        return
    last: Statement | None = None
    for each in tree.module.body:
        first = each.body[0] if isinstance(each, cst.SimpleStatementLine) else None
        docstring = isinstance(first, cst.Expr) and isinstance(first.value, (cst.SimpleString, cst.ConcatenatedString))
        if not (docstring or isinstance(first, (cst.Import, cst.ImportFrom))):
            break
        last = each
    if last is not None:
        edits.append(last, "import unidist")
    elif tree.module.body:
        edits.insert(tree.module.body[0], "import unidist")
