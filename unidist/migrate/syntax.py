"""A module's syntax tree with what libcst's metadata knows of it: parents, positions, scopes of names."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from functools import cached_property
from typing import Any, TypeVar

import libcst as cst
from libcst.helpers import get_full_name_for_node
from libcst.metadata import (
    MetadataWrapper,
    PositionProvider,
    QualifiedNameProvider,
    QualifiedNameSource,
)

Node = TypeVar("Node", bound=cst.CSTNode)
Function = cst.FunctionDef | cst.Lambda | cst.Module
#: The statements of a block.
Statement = cst.SimpleStatementLine | cst.BaseCompoundStatement
Block = cst.Module | cst.IndentedBlock
#: Where and why a rule does not apply.
Problem = tuple[cst.CSTNode, str]


class SyntaxTree:
    """One module of a legacy code base. Nodes are those of ``module``; the tree is not changed (see ``Edits``).

    Raises:
        libcst.ParserSyntaxError: the text does not parse.
    """

    def __init__(self, text: str) -> None:
        wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
        self.module = wrapper.module
        metadata = wrapper.resolve_many((PositionProvider, QualifiedNameProvider))
        self._positions: Any = metadata[PositionProvider]
        self._qualified: Any = metadata[QualifiedNameProvider]
        self._parents: dict[cst.CSTNode, cst.CSTNode] = {}
        #: All nodes, parents first, in the order of the text.
        self.nodes: list[cst.CSTNode] = []
        #: A node's index among them, and that of the first node after its descendants.
        self._spans: dict[cst.CSTNode, tuple[int, int]] = {}
        self._list(self.module)
        self._kinds: dict[type[cst.CSTNode], list[int]] = {}

    def _list(self, root: cst.CSTNode) -> None:
        stack: list[tuple[cst.CSTNode, bool]] = [(root, False)]
        while stack:
            node, over = stack.pop()
            if over:
                self._spans[node] = (self._spans[node][0], len(self.nodes))
                continue
            self._spans[node] = (len(self.nodes), 0)
            self.nodes.append(node)
            stack.append((node, True))
            children = node.children
            self._parents.update(dict.fromkeys(children, node))
            stack.extend((child, False) for child in reversed(children))

    def all(self, kind: type[Node], inside: cst.CSTNode | None = None) -> Iterator[Node]:
        """The nodes of a class, in the order of the text."""
        if kind not in self._kinds:
            self._kinds[kind] = [index for index, node in enumerate(self.nodes) if isinstance(node, kind)]
        indices = self._kinds[kind]
        first, end = self._spans[inside or self.module]
        for index in indices[bisect_left(indices, first) : bisect_left(indices, end)]:
            node = self.nodes[index]
            assert isinstance(node, kind)
            yield node

    def jumps(self, inside: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """The statements that may end an iteration, or the whole loop, early."""
        for kind in (cst.Break, cst.Continue, cst.Return, cst.Raise):
            yield from self.all(kind, inside)

    def method_calls(self, method: str, inside: cst.CSTNode | None = None) -> Iterator[cst.Call]:
        """The calls of a method of any object."""
        for call in self.all(cst.Call, inside):
            if isinstance(call.func, cst.Attribute) and call.func.attr.value == method:
                yield call

    def span(self, node: cst.CSTNode) -> tuple[int, int]:
        """A node's index in ``nodes``, and that of the first node after its descendants."""
        return self._spans[node]

    def parent(self, node: cst.CSTNode) -> cst.CSTNode:
        """The parent of a node; the module is its own."""
        return self._parents.get(node, node)

    def parents(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """The ancestors of a node, nearest first."""
        while (above := self.parent(node)) is not node:
            yield above
            node = above

    def is_inside(self, node: cst.CSTNode, outer: cst.CSTNode) -> bool:
        """Whether a node is ``outer`` or a descendant of it."""
        first, end = self._spans[outer]
        return first <= self._spans[node][0] < end

    def is_attribute_name(self, name: cst.Name) -> bool:
        """Whether a name is what follows the dot of an attribute."""
        parent = self.parent(name)
        return isinstance(parent, cst.Attribute) and parent.attr is name

    def line(self, node: cst.CSTNode) -> int:
        """The line on which a node begins, from 1."""
        return int(self._positions[node].start.line)

    def position(self, node: cst.CSTNode) -> tuple[int, int]:
        """Line and column; nodes of one function are executed roughly in this order."""
        start = self._positions[node].start
        return start.line, start.column

    def text(self, node: cst.CSTNode) -> str:
        """A node as it is written, without the white space and comments before it."""
        if isinstance(node, (cst.SimpleStatementLine, cst.BaseCompoundStatement)):
            node = node.with_changes(leading_lines=[])
        return self.module.code_for_node(node).strip()

    # -------------------------------------------------------------------------------- names
    def imported(self, node: cst.CSTNode) -> set[str]:
        """The full names that a dotted name may refer to by imports."""
        return self._names(node, QualifiedNameSource.IMPORT) if full_name(node) else set()

    def variable(self, node: cst.CSTNode) -> str | None:
        """The identity of a variable: a name with its scope, or ``.attr`` for that attribute of any object."""
        if isinstance(node, cst.Attribute):
            return None if self.imported(node) else f".{node.attr.value}"
        if not isinstance(node, cst.Name):
            return None
        if self._is_class_level(node):
            return f".{node.value}"
        return next(iter(sorted(self._names(node, QualifiedNameSource.LOCAL))), None)

    def _is_class_level(self, node: cst.Name) -> bool:
        """Whether a name is assigned in a class's body, and so an attribute of the class."""
        for above in self.parents(node):
            if isinstance(above, (cst.AssignTarget, cst.AnnAssign)):
                return isinstance(self.parent(self.parent(self.parent(self.parent(above)))), cst.ClassDef)
            if not isinstance(above, (cst.Tuple, cst.Element)):
                return False
        return False

    def _names(self, node: cst.CSTNode, source: QualifiedNameSource) -> set[str]:
        found = self._qualified.get(node, ())
        return {each.name for each in (found() if callable(found) else found) if each.source is source}

    # -------------------------------------------------------------------------------- statements
    def statement(self, node: cst.CSTNode) -> Statement | None:
        """The statement that contains a node; None if it shares its line with others or with its ``if``."""
        for above in (node, *self.parents(node)):
            if isinstance(above, cst.SimpleStatementSuite):
                return None
            if isinstance(above, cst.SimpleStatementLine):
                return above if len(above.body) == 1 else None
            if isinstance(above, cst.BaseCompoundStatement):
                return above
        return None

    def is_statement(self, call: cst.CSTNode) -> Statement | None:
        """The statement that consists of this expression alone."""
        statement = self.statement(call)
        if isinstance(statement, cst.SimpleStatementLine) and isinstance(self.parent(call), cst.Expr):
            return statement
        return None

    def block(self, statement: cst.CSTNode) -> Block | None:
        """The block that contains a statement."""
        above = self.parent(statement)
        return above if isinstance(above, (cst.Module, cst.IndentedBlock)) else None

    def function(self, node: cst.CSTNode) -> Function:
        """The function that a node's execution belongs to, or the module."""
        child = node
        for above in self.parents(node):
            # Defaults and decorators are evaluated where the function is made.
            if isinstance(above, cst.Module) or (
                isinstance(above, (cst.FunctionDef, cst.Lambda)) and child is above.body
            ):
                return above
            child = above
        return self.module

    def loop(self, node: cst.CSTNode) -> cst.For | cst.While | None:
        """The innermost loop around a node, within the same function."""
        child = node
        for above in self.parents(node):
            if isinstance(above, (cst.FunctionDef, cst.Lambda)):
                return None
            if isinstance(above, (cst.For, cst.While)) and child is above.body:
                return above
            child = above
        return None

    @cached_property
    def functions(self) -> dict[str, cst.FunctionDef]:
        """Functions and methods by their qualified names."""
        return {
            name: node for node in self.all(cst.FunctionDef) for name in self._names(node, QualifiedNameSource.LOCAL)
        }

    def is_method(self, function: cst.FunctionDef) -> bool:
        """Whether its first parameter is the object."""
        in_class = isinstance(self.parent(self.parent(function)), cst.ClassDef)
        static = any(full_name(each.decorator) == "staticmethod" for each in function.decorators)
        return in_class and not static


def full_name(node: cst.CSTNode) -> str:
    """A dotted name as a string; empty for other expressions."""
    if isinstance(node, cst.Attribute):
        value = full_name(node.value)
        return f"{value}.{node.attr.value}" if value else ""
    if isinstance(node, cst.ImportAlias):
        return get_full_name_for_node(node) or ""
    return node.value if isinstance(node, cst.Name) else ""


def dotted(name: str) -> cst.Attribute | cst.Name:
    """A dotted name as code."""
    first, *rest = name.split(".")
    node: cst.Attribute | cst.Name = cst.Name(first)
    for part in rest:
        node = cst.Attribute(node, cst.Name(part))
    return node


def is_pure(node: cst.BaseExpression) -> bool:
    """Whether evaluating it twice is the same as once: names, attributes, constant subscripts."""
    if isinstance(node, cst.Attribute):
        return is_pure(node.value)
    if isinstance(node, cst.Subscript):
        return is_pure(node.value) and all(
            isinstance(part.slice, cst.Index) and is_pure(part.slice.value) for part in node.slice
        )
    return isinstance(node, (cst.Name, cst.Integer, cst.SimpleString))


def argument(call: cst.Call, name: str) -> cst.BaseExpression | None:
    """What a call passes by a name."""
    return next((arg.value for arg in call.args if arg.keyword is not None and arg.keyword.value == name), None)


def keyword(name: str, value: cst.BaseExpression) -> cst.Arg:
    """``name=value``."""
    equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    return cst.Arg(value, cst.Name(name), equal=equal)
