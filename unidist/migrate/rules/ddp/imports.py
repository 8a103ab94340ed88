"""What comes after the rules: ``import unidist``, and no import that nothing uses any more."""

from __future__ import annotations

import re
from collections.abc import Collection

import libcst as cst

from unidist.migrate.edits import Edits
from unidist.migrate.names import in_import, root_name
from unidist.migrate.rules.ddp.names import symbol_of
from unidist.migrate.rules.imports import add_import
from unidist.migrate.syntax import (
    Statement,
    SyntaxTree,
    dotted,
    full_name,
    imports_of,
    names_in,
    syntax_tree,
    without_trailing_comma,
)


def tidy_imports(before: SyntaxTree, text: str, exported: Collection[str]) -> str:
    """Return the new text with ``import unidist``, and without the imports whose last use the rules have removed."""
    tree = syntax_tree(text)
    edits = Edits(tree)
    old, new = _used_names(before), _used_names(tree)
    unused = {alias for _, alias, name, bound in imports_of(tree) if _is_unused(name, bound, old, new, exported)}
    place = _change(tree, edits, unused, new)
    if "unidist" in {name.partition(".")[0] for name in new} and not _imports_unidist(tree):
        add_import(edits, "unidist", place)
    after = edits.apply()
    return after if text[:1].isspace() else after.lstrip("\r\n")


def _used_names(tree: SyntaxTree) -> set[str]:
    """Return the names that are used outside of imports, each with and without what follows its dots; also in
    ``__all__`` and annotations."""
    found: set[str] = set()
    for node in tree.all((cst.Name, cst.Attribute)):
        if in_import(tree, node) or (isinstance(node, cst.Name) and tree.is_attribute_name(node)):
            continue
        name = full_name(node)
        while name:
            found.add(name)
            name = name.rpartition(".")[0]
    for text, value in tree.strings():
        if any(isinstance(each, cst.Assign) and "__all__" in tree.text(each) for each in tree.parents(text)):
            found.add(value)
        if any(isinstance(each, cst.Annotation) for each in tree.parents(text)):
            found.update(re.findall(r"\w+", value))
    return found


def _is_unused(name: str, bound: str, old: set[str], new: set[str], exported: Collection[str]) -> bool:
    """Return whether the new text has no use of an import that the old one had, or of a library that is migrated."""
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
    names = {each.bound for each in imports_of(tree) if each.alias not in unused}
    gone = [each for each in imports_of(tree) if each.alias in unused]
    for node in dict.fromkeys(each.node for each in gone):
        statement = tree.statement(node)
        if statement is None:
            continue
        kept = [alias for alias in names_in(node) if alias not in unused]
        plain = isinstance(node, cst.Import)
        binds_torch = plain and any(each.asname is None and root_name(each.name) == "torch" for each in names_in(node))
        migrated = any(each.node is node and symbol_of(each.name) is not None for each in gone)
        if binds_torch and not kept and "torch" in new and "torch" not in names:
            kept = [cst.ImportAlias(dotted("torch"))]  # import torch.distributed alone
            names.add("torch")
        elif migrated and place is None and tree.block(statement) is tree.module:
            place = statement
        if kept:
            parentheses = {} if len(kept) > 1 or plain else {"lpar": None, "rpar": None}
            edits.replace(node, node.with_changes(names=without_trailing_comma(kept), **parentheses))
        else:
            edits.remove(statement)
            removed.append(statement)
    for block in tree.all(cst.Try):
        if all(any(each is one for one in removed) for each in block.body.body) and not _sets_names(tree, block, new):
            edits.remove(block)
    return place


def _sets_names(tree: SyntaxTree, block: cst.Try, new: set[str]) -> bool:
    """Return whether the other parts of a ``try`` set what something else reads."""
    targets = {
        full_name(target.target)
        for part in (*block.handlers, block.orelse, block.finalbody)
        if part is not None
        for target in tree.all((cst.AssignTarget, cst.AnnAssign), inside=part)
    }
    read = (each for each in tree.all(cst.Name) if not tree.is_inside(each, block) and not in_import(tree, each))
    return any(each.value in targets for each in read)


def _imports_unidist(tree: SyntaxTree) -> bool:
    return any(
        bound == "unidist" and tree.block(tree.statement(node) or node) is tree.module
        for node, _, _, bound in imports_of(tree)
    )
