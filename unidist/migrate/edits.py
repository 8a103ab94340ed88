"""Changes to a module's tree, collected by the rules and made in one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import libcst as cst

from unidist.migrate.code import Code, Statement
from unidist.migrate.report import Finding

#: From a node whose parts have been changed already to what takes its place.
Change = Callable[[Any], Any]


class Edits:
    """What shall become of the nodes of a module, and what a person must look at."""

    def __init__(self, code: Code) -> None:
        self.code = code
        self.findings: list[Finding] = []
        self._changes: dict[cst.CSTNode, Change] = {}
        self._before: dict[cst.CSTNode, list[Any]] = {}
        self._after: dict[cst.CSTNode, list[Any]] = {}
        self._said: dict[cst.CSTNode, list[cst.Comment]] = {}
        self._wraps: dict[cst.CSTNode, tuple[cst.CSTNode, cst.With]] = {}
        self._removed: set[cst.CSTNode] = set()

    def replace(self, node: cst.CSTNode, change: Change | cst.CSTNode) -> None:
        """Put something in a node's place. The last word counts."""
        self._changes[node] = change if not isinstance(change, cst.CSTNode) else lambda updated: change

    def is_changed(self, node: cst.CSTNode) -> bool:
        """Whether a rule has spoken of a node."""
        return node in self._changes or node in self._removed

    def is_removed(self, statement: cst.CSTNode) -> bool:
        """Whether a statement goes away."""
        return statement in self._removed

    def remove(self, statement: Statement) -> None:
        """Take a statement away; its comments stay."""
        self._removed.add(statement)
        if isinstance(statement, cst.SimpleStatementLine):
            self.keep_comments(statement, *statement.body)

    def keep_comments(self, statement: Statement, *inside: cst.CSTNode, but: Sequence[cst.CSTNode] = ()) -> None:
        """Put the comments in some nodes above their statement, those of some parts excepted."""
        for node in inside:
            for comment in self.code.all(cst.Comment, inside=node):
                if not any(self.code.is_inside(comment, part) for part in but):
                    self._said.setdefault(statement, []).append(comment)

    def insert(self, statement: cst.CSTNode, new: str | cst.BaseStatement) -> None:
        """Put a statement before another; the comments there are above it then."""
        self._before.setdefault(statement, []).append(cst.parse_statement(new) if isinstance(new, str) else new)

    def append(self, statement: cst.CSTNode, new: str) -> None:
        """Put a statement behind another."""
        self._after.setdefault(statement, []).append(cst.parse_statement(new))

    def wrap(self, first: cst.CSTNode, last: cst.CSTNode, header: str) -> None:
        """Put the statements of a block from one to another into ``with HEADER:``."""
        around = cst.ensure_type(cst.parse_statement(f"with {header}:\n    pass"), cst.With)
        self._wraps[first] = (last, around)

    def note(self, node: cst.CSTNode, what: str, why: str, remedy: str) -> None:
        """Tell of a place."""
        finding = Finding(self.code.line(node), what, why, remedy)
        if finding not in self.findings:
            self.findings.append(finding)

    def apply(self) -> str:
        """The module's new text."""
        return self.code.module.visit(_Pass(self)).code

    # -------------------------------------------------------------------------------- one block
    def body(self, original: Sequence[Any], updated: dict[cst.CSTNode, Any]) -> tuple[list[Any], list[cst.EmptyLine]]:
        """A block's statements after removals and insertions, and the comments that are left at its end."""
        result: list[Any] = []
        above: list[cst.EmptyLine] = []
        wrapped: list[Any] = []
        around: tuple[cst.CSTNode, cst.With] | None = None
        for node in original:
            around = self._wraps.get(node, around)
            for statement in self._became(node, updated[node]):
                if isinstance(statement, cst.EmptyLine):
                    above.append(statement)
                    continue
                if above:
                    statement = statement.with_changes(leading_lines=_joined(above, statement.leading_lines))
                    above = []
                (result if around is None else wrapped).append(statement)
            if around is not None and around[0] is node:
                lines, wrapped[0] = wrapped[0].leading_lines, wrapped[0].with_changes(leading_lines=[])
                result.append(around[1].with_changes(body=cst.IndentedBlock(wrapped), leading_lines=lines))
                wrapped, around = [], None
        return result, above if any(line.comment for line in above) else []

    def _became(self, node: cst.CSTNode, new: Any) -> list[Any]:
        """The statements in a statement's place; comments alone where it is gone."""
        found = list(new.nodes) if isinstance(new, cst.FlattenSentinel) else [new]
        if node in self._said:
            said = [cst.EmptyLine(comment=comment) for comment in self._said[node]]
            found[0] = found[0].with_changes(leading_lines=[*found[0].leading_lines, *said])
        before = self._before.get(node, [])
        if before:
            before = [before[0].with_changes(leading_lines=found[0].leading_lines), *before[1:]]
            found[0] = found[0].with_changes(leading_lines=[])
        return [*before, *(_comments(found[0]) if node in self._removed else found), *self._after.get(node, [])]

    def change(self, original: cst.CSTNode, updated: Any) -> Any:
        """What takes a node's place."""
        return self._changes[original](updated) if original in self._changes else updated


def _comments(statement: Any) -> list[cst.EmptyLine]:
    """What was said of a statement that is gone."""
    found = list(statement.leading_lines)
    trailing = getattr(statement, "trailing_whitespace", None)
    if trailing is not None and trailing.comment is not None:
        found.append(cst.EmptyLine(comment=trailing.comment))
    return found


def _joined(above: Sequence[cst.EmptyLine], lines: Sequence[cst.EmptyLine]) -> list[cst.EmptyLine]:
    """What stood above a statement that is gone, and what stands above the next; blank lines once."""
    if any(line.comment for line in above):
        return [*above, *lines]
    blank = [line for line in lines if line.comment is None]
    return list(lines) if len(blank) >= len(above) else [*above[len(blank) :], *lines]


def _without_blanks(lines: Sequence[cst.EmptyLine]) -> list[cst.EmptyLine]:
    start = next((index for index, line in enumerate(lines) if line.comment), len(lines))
    return list(lines[start:])


class _Pass(cst.CSTTransformer):
    def __init__(self, edits: Edits) -> None:
        super().__init__()
        self._edits = edits
        self._updated: dict[cst.CSTNode, Any] = {}

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        if isinstance(original_node, (cst.Module, cst.IndentedBlock)):
            body, rest = self._edits.body(original_node.body, self._updated)
            if body and isinstance(original_node, cst.IndentedBlock) and self._edits.is_removed(original_node.body[0]):
                body[0] = body[0].with_changes(leading_lines=_without_blanks(body[0].leading_lines))
            if isinstance(original_node, cst.IndentedBlock) and not body:
                body = [cst.SimpleStatementLine([cst.Pass()])]
            footer = [*rest, *updated_node.footer] if rest else updated_node.footer
            updated_node = updated_node.with_changes(body=body, footer=footer)
        updated_node = self._edits.change(original_node, updated_node)
        if isinstance(original_node, (cst.SimpleStatementLine, cst.BaseCompoundStatement)):
            # Its block puts it into its place.
            self._updated[original_node] = updated_node
            return updated_node.nodes[0] if isinstance(updated_node, cst.FlattenSentinel) else updated_node
        return updated_node
