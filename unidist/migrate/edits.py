"""Changes to a module's tree, collected by the rules and made in one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import libcst as cst

from unidist.migrate.file_report import Remark
from unidist.migrate.syntax import Statement, SyntaxTree

#: From a node whose children have been changed already to its replacement.
Change = Callable[[Any], Any]


class Edits:
    """The changes to a module's nodes, and the remarks for the report."""

    def __init__(self, tree: SyntaxTree) -> None:
        self.tree = tree
        self.remarks: list[Remark] = []
        self._changes: dict[cst.CSTNode, Change] = {}
        self._before: dict[cst.CSTNode, list[Any]] = {}
        self._after: dict[cst.CSTNode, list[Any]] = {}
        self._kept_comments: dict[cst.CSTNode, list[cst.Comment]] = {}
        self._wraps: dict[cst.CSTNode, tuple[cst.CSTNode, cst.With]] = {}
        self._removed: set[cst.CSTNode] = set()

    def replace(self, node: cst.CSTNode, change: Change | cst.CSTNode) -> None:
        """Replace a node; the last call for a node counts."""
        self._changes[node] = change if not isinstance(change, cst.CSTNode) else lambda updated: change

    def is_changed(self, node: cst.CSTNode) -> bool:
        """Return whether a node is replaced or removed."""
        return node in self._changes or node in self._removed

    def is_removed(self, statement: cst.CSTNode) -> bool:
        """Return whether a statement is removed."""
        return statement in self._removed

    def remove(self, statement: Statement) -> None:
        """Remove a statement; its comments stay."""
        if statement in self._removed:
            return
        self._removed.add(statement)
        if isinstance(statement, cst.SimpleStatementLine):
            self.keep_comments(statement, *statement.body)

    def keep_comments(self, statement: Statement, *inside: cst.CSTNode, but: Sequence[cst.CSTNode] = ()) -> None:
        """Keep the comments in some nodes, above their statement; those in ``but`` stay where they are."""
        for node in inside:
            for comment in self.tree.all(cst.Comment, inside=node):
                if not any(self.tree.is_inside(comment, part) for part in but):
                    self._kept_comments.setdefault(statement, []).append(comment)

    def insert(self, statement: cst.CSTNode, new: str | cst.BaseStatement) -> None:
        """Insert a statement before another; that one's leading comments come first."""
        self._before.setdefault(statement, []).append(cst.parse_statement(new) if isinstance(new, str) else new)

    def append(self, statement: cst.CSTNode, new: str) -> None:
        """Insert a statement after another."""
        self._after.setdefault(statement, []).append(cst.parse_statement(new))

    def wrap(self, first: cst.CSTNode, last: cst.CSTNode, header: str) -> None:
        """Put consecutive statements of a block, from ``first`` to ``last``, into ``with HEADER:``."""
        around = cst.ensure_type(cst.parse_statement(f"with {header}:\n    pass"), cst.With)
        self._wraps[first] = (last, around)

    def remark(self, node: cst.CSTNode, what: str, why: str, remedy: str) -> None:
        """Add a remark, once."""
        remark = Remark(self.tree.line(node), what, why, remedy)
        if remark not in self.remarks:
            self.remarks.append(remark)

    def apply(self) -> str:
        """Return the module's new text."""
        return self.tree.module.visit(_ApplyEdits(self, self._touched())).code

    def planned_lines(self) -> set[int]:
        """Return the lines of the old text with a node that is replaced or removed."""
        found = set[int]()
        for node in (*self._changes, *self._removed, *self._kept_comments):
            first = self.tree.line(node)
            found.update(range(first, first + self.tree.text(node).count("\n") + 1))
        return found

    def _touched(self) -> set[int]:
        """Return the nodes with a change in them, by identity: the others need no visit."""
        changes = (self._changes, self._before, self._after, self._kept_comments, self._wraps, self._removed)
        found = {id(self.tree.module)}
        for node in (node for nodes in changes for node in nodes):
            for each in (node, *self.tree.parents(node)):
                if id(each) in found:
                    break
                found.add(id(each))
        return found

    # -------------------------------------------------------------------------------- one block
    def new_body(
        self, original: Sequence[Any], updated: dict[cst.CSTNode, Any]
    ) -> tuple[list[Any], list[cst.EmptyLine]]:
        """Return a block's statements after removals and insertions, and the comments of those removed at its end."""
        result: list[Any] = []
        above: list[cst.EmptyLine] = []
        wrapped: list[Any] = []
        around: tuple[cst.CSTNode, cst.With] | None = None
        for node in original:
            around = self._wraps.get(node, around)
            for statement in self._new_statements(node, updated[node]):
                if isinstance(statement, cst.EmptyLine):
                    above.append(statement)
                    continue
                if above:
                    statement = statement.with_changes(leading_lines=_joined_lines(above, statement.leading_lines))
                    above = []
                (result if around is None else wrapped).append(statement)
            if around is not None and around[0] is node:
                lines, wrapped[0] = wrapped[0].leading_lines, wrapped[0].with_changes(leading_lines=[])
                result.append(around[1].with_changes(body=cst.IndentedBlock(wrapped), leading_lines=lines))
                wrapped, around = [], None
        return result, above if any(line.comment for line in above) else []

    def _new_statements(self, node: cst.CSTNode, new: Any) -> list[Any]:
        """Return the statements that replace one; of a removed one, its comments alone."""
        found = list(new.nodes) if isinstance(new, cst.FlattenSentinel) else [new]
        if node in self._kept_comments:
            comments = [cst.EmptyLine(comment=comment) for comment in self._kept_comments[node]]
            found[0] = found[0].with_changes(leading_lines=[*found[0].leading_lines, *comments])
        before = self._before.get(node, [])
        if before:
            before = [before[0].with_changes(leading_lines=found[0].leading_lines), *before[1:]]
            found[0] = found[0].with_changes(leading_lines=[])
        return [*before, *(_comments(found[0]) if node in self._removed else found), *self._after.get(node, [])]

    def change(self, original: cst.CSTNode, updated: Any) -> Any:
        """Return the replacement of a node."""
        return self._changes[original](updated) if original in self._changes else updated


def _comments(statement: Any) -> list[cst.EmptyLine]:
    """Return the comments of a removed statement."""
    found = list(statement.leading_lines)
    trailing = getattr(statement, "trailing_whitespace", None)
    if trailing is not None and trailing.comment is not None:
        found.append(cst.EmptyLine(comment=trailing.comment))
    return found


def _joined_lines(above: Sequence[cst.EmptyLine], lines: Sequence[cst.EmptyLine]) -> list[cst.EmptyLine]:
    """Return the lines above a removed statement and those above the next one; blank lines are not doubled."""
    if any(line.comment for line in above):
        return [*above, *lines]
    blank = [line for line in lines if line.comment is None]
    return list(lines) if len(blank) >= len(above) else [*above[len(blank) :], *lines]


def _without_blanks(lines: Sequence[cst.EmptyLine]) -> list[cst.EmptyLine]:
    start = next((index for index, line in enumerate(lines) if line.comment), len(lines))
    return list(lines[start:])


class _ApplyEdits(cst.CSTTransformer):
    def __init__(self, edits: Edits, touched: set[int]) -> None:
        super().__init__()
        self._edits = edits
        self._touched = touched
        self._updated: dict[cst.CSTNode, Any] = {}

    def on_visit(self, node: cst.CSTNode) -> bool:
        return id(node) in self._touched

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        if id(original_node) in self._touched and isinstance(original_node, (cst.Module, cst.IndentedBlock)):
            body, rest = self._edits.new_body(original_node.body, self._updated)
            if body and isinstance(original_node, cst.IndentedBlock) and self._edits.is_removed(original_node.body[0]):
                body[0] = body[0].with_changes(leading_lines=_without_blanks(body[0].leading_lines))
            if isinstance(original_node, cst.IndentedBlock) and not body:
                body = [cst.SimpleStatementLine([cst.Pass()])]
            footer = [*rest, *updated_node.footer] if rest else updated_node.footer
            updated_node = updated_node.with_changes(body=body, footer=footer)
        updated_node = self._edits.change(original_node, updated_node)
        if isinstance(original_node, (cst.SimpleStatementLine, cst.BaseCompoundStatement)):
            # ``new_body`` of its block puts it in.
            self._updated[original_node] = updated_node
            return updated_node.nodes[0] if isinstance(updated_node, cst.FlattenSentinel) else updated_node
        return updated_node
