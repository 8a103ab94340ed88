"""A module's syntax tree: parents, positions, and what names mean."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cached_property, lru_cache, wraps
from typing import Any, NamedTuple, TypeVar, overload

import libcst as cst
from libcst.helpers import get_full_name_for_node
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider, QualifiedNameSource, Scope, ScopeProvider

Node = TypeVar("Node", bound=cst.CSTNode)
Fact = TypeVar("Fact")
Function = cst.FunctionDef | cst.Lambda | cst.Module
#: The statements of a block.
Statement = cst.SimpleStatementLine | cst.BaseCompoundStatement
Block = cst.Module | cst.IndentedBlock
#: Where and why a rule does not apply.
Problem = tuple[cst.CSTNode, str]
#: Values of fields that are no nodes, and nodes that contain none.
_NO_NODES = {type(None), str, int, bool, cst.MaybeSentinel, cst.SimpleWhitespace, cst.Newline}
#: White space that is left out unless it has a comment.
_LINES = {cst.TrailingWhitespace, cst.EmptyLine}
#: Signs that are left out unless there is a comment beside them.
_PUNCTUATION = {
    cst.Comma, cst.Dot, cst.Colon, cst.Semicolon, cst.AssignEqual, cst.LeftParen, cst.RightParen,
    cst.LeftSquareBracket, cst.RightSquareBracket, cst.LeftCurlyBrace, cst.RightCurlyBrace,
}  # fmt: skip


class SyntaxTree:
    """One module of a legacy code base. Nodes are those of ``module``; the tree is not changed (see ``Edits``).

    Of white space and punctuation, only what has comments counts as nodes.

    Raises:
        libcst.ParserSyntaxError: the text does not parse.
    """

    def __init__(self, text: str) -> None:
        self.module = cst.parse_module(text)
        #: All nodes, parents first, in the order of the text.
        self.nodes: list[cst.CSTNode] = []
        # By a node's identity, as its hash is computed in Python: its index among them.
        self._indices: dict[int, int] = {}
        # By index: that of the parent, and of the first node after the descendants.
        self._parents = array("l")
        self._ends = array("l")
        self._classes: dict[type[cst.CSTNode], list[int]] = {}
        self._list()
        self._kinds: dict[type[cst.CSTNode] | tuple[type[cst.CSTNode], ...], list[int]] = {}
        self._imported: dict[int, frozenset[str]] = {}
        self._variables: dict[int, str | None] = {}
        #: What ``of_tree`` keeps.
        self.facts: dict[Any, Any] = {}

    def _list(self) -> None:
        nodes, indices, parents, classes = self.nodes, self._indices, self._parents, self._classes
        stack: list[tuple[cst.CSTNode, int]] = [(self.module, 0)]
        while stack:
            node, parent = stack.pop()
            index = len(nodes)
            indices[id(node)] = index
            nodes.append(node)
            parents.append(parent)
            classes.setdefault(node.__class__, []).append(index)
            first = len(stack)
            for name in _fields(node):
                value = getattr(node, name)
                kind = value.__class__
                if kind is tuple or kind is list:
                    stack += [(each, index) for each in value if _is_listed(each, each.__class__)]
                elif _is_listed(value, kind):
                    stack.append((value, index))
            stack[first:] = stack[first:][::-1]
        ends = self._ends
        ends.extend(range(1, len(nodes) + 1))
        for index in range(len(nodes) - 1, 0, -1):
            parent = parents[index]
            if ends[parent] < ends[index]:
                ends[parent] = ends[index]

    @cached_property
    def _wrapper(self) -> MetadataWrapper:
        return MetadataWrapper(self.module, unsafe_skip_copy=True)

    @cached_property
    def _positions(self) -> Mapping[cst.CSTNode, CodeRange]:
        return self._wrapper.resolve(PositionProvider)

    @cached_property
    def _scopes(self) -> Mapping[cst.CSTNode, Scope | None]:
        return self._wrapper.resolve(ScopeProvider)

    def _names(self, node: cst.CSTNode, source: QualifiedNameSource) -> frozenset[str]:
        """Return what a name, an attribute or a function may refer to, by full names."""
        scope = self._scopes.get(node)
        found = scope.get_qualified_names_for(node) if scope is not None else ()
        return frozenset(each.name for each in found if each.source is source)

    @overload
    def all(self, kind: type[Node], inside: cst.CSTNode | None = None) -> Iterator[Node]: ...

    @overload
    def all(self, kind: tuple[type[cst.CSTNode], ...], inside: cst.CSTNode | None = None) -> Iterator[Any]: ...

    def all(
        self, kind: type[cst.CSTNode] | tuple[type[cst.CSTNode], ...], inside: cst.CSTNode | None = None
    ) -> Iterator[Any]:
        """Yield the nodes of a class, or of several, in the order of the text."""
        if kind not in self._kinds:
            found = [indices for each, indices in self._classes.items() if issubclass(each, kind)]
            self._kinds[kind] = found[0] if len(found) == 1 else sorted(index for indices in found for index in indices)
        indices = self._kinds[kind]
        first, end = self.span(inside or self.module)
        for index in indices[bisect_left(indices, first) : bisect_left(indices, end)]:
            yield self.nodes[index]

    def jumps(self, inside: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Return the statements that may end an iteration, or the whole loop, early."""
        return self.all((cst.Break, cst.Continue, cst.Return, cst.Raise), inside)

    def strings(self) -> Iterator[tuple[cst.SimpleString, str]]:
        """Return the strings, each with its value."""
        return ((node, str(node.evaluated_value)) for node in self.all(cst.SimpleString))

    def method_calls(self, method: str, inside: cst.CSTNode | None = None) -> Iterator[cst.Call]:
        """Yield the calls of a method of any object."""
        for call in self.all(cst.Call, inside):
            if isinstance(call.func, cst.Attribute) and call.func.attr.value == method:
                yield call

    def call_of(self, function: cst.CSTNode) -> cst.Call | None:
        """Return the call of which an expression is the function."""
        above = self.parent(function)
        return above if isinstance(above, cst.Call) and above.func is function else None

    def method_of(self, use: cst.CSTNode) -> cst.Attribute | None:
        """Return ``x.step`` of its ``x``."""
        above = self.parent(use)
        return above if isinstance(above, cst.Attribute) and above.value is use else None

    def called_method(self, use: cst.CSTNode) -> str:
        """Return ``step`` of the ``x`` in ``x.step()``; empty if no method is called."""
        method = self.method_of(use)
        return method.attr.value if method is not None and self.call_of(method) else ""

    def span(self, node: cst.CSTNode) -> tuple[int, int]:
        """Return a node's index in ``nodes``, and that of the first node after its descendants."""
        index = self._indices[id(node)]
        return index, self._ends[index]

    def parent(self, node: cst.CSTNode) -> cst.CSTNode:
        """Return the parent of a node; the module is its own."""
        index = self._indices.get(id(node))
        return node if index is None else self.nodes[self._parents[index]]

    def parents(self, node: cst.CSTNode, below: cst.CSTNode | None = None) -> Iterator[cst.CSTNode]:
        """Yield the ancestors of a node, nearest first; those below another node alone."""
        while (above := self.parent(node)) is not node and above is not below:
            yield above
            node = above

    def is_inside(self, node: cst.CSTNode, outer: cst.CSTNode) -> bool:
        """Return whether a node is ``outer`` or a descendant of it."""
        first, end = self.span(outer)
        return first <= self._indices[id(node)] < end

    def is_attribute_name(self, name: cst.Name) -> bool:
        """Return whether a name is what follows the dot of an attribute."""
        parent = self.parent(name)
        return isinstance(parent, cst.Attribute) and parent.attr is name

    def line(self, node: cst.CSTNode) -> int:
        """Return the line on which a node begins, from 1."""
        return self.position(node)[0]

    def position(self, node: cst.CSTNode) -> tuple[int, int]:
        """Return line and column; nodes of one function are executed roughly in this order."""
        start = self._positions[node].start
        return start.line, start.column

    def text(self, node: cst.CSTNode) -> str:
        """Return a node as it is written, without the white space and comments before it."""
        if isinstance(node, (cst.SimpleStatementLine, cst.BaseCompoundStatement)):
            node = node.with_changes(leading_lines=[])
        return self.module.code_for_node(node).strip()

    # -------------------------------------------------------------------------------- names
    def imported(self, node: cst.CSTNode) -> frozenset[str]:
        """Return the full names that a dotted name may refer to by imports."""
        found = self._imported.get(id(node))
        if found is None:
            found = self._names(node, QualifiedNameSource.IMPORT) if full_name(node) else frozenset()
            if id(node) in self._indices:
                self._imported[id(node)] = found
        return found

    def variable(self, node: cst.CSTNode) -> str | None:
        """Return the identity of a variable: a name with its scope, or ``.attr`` for that attribute of any object."""
        if not isinstance(node, (cst.Name, cst.Attribute)):
            return None
        if id(node) not in self._variables:
            if id(node) not in self._indices:
                return self._variable(node)
            self._variables[id(node)] = self._variable(node)
        return self._variables[id(node)]

    def _variable(self, node: cst.Name | cst.Attribute) -> str | None:
        if isinstance(node, cst.Attribute):
            return None if self.imported(node) else f".{node.attr.value}"
        if self._is_class_level(node):
            return f".{node.value}"
        return min(self._names(node, QualifiedNameSource.LOCAL), default=None)

    def is_unbound(self, name: cst.Name) -> bool:
        """Return whether nothing in the module binds a name, and no ``import *`` may."""
        stars = any(isinstance(each.names, cst.ImportStar) for each in self.all(cst.ImportFrom))
        return not (stars or self.variable(name) or self.imported(name))

    def _is_class_level(self, node: cst.Name) -> bool:
        """Return whether a name is assigned in a class's body, and so an attribute of the class."""
        for above in self.parents(node):
            if isinstance(above, (cst.AssignTarget, cst.AnnAssign)):
                return isinstance(self.parent(self.parent(self.parent(self.parent(above)))), cst.ClassDef)
            if not isinstance(above, (cst.Tuple, cst.Element)):
                return False
        return False

    # -------------------------------------------------------------------------------- statements
    def statement(self, node: cst.CSTNode) -> Statement | None:
        """Return the statement that contains a node; None if it shares its line with others or with its ``if``."""
        for above in (node, *self.parents(node)):
            if isinstance(above, cst.SimpleStatementSuite):
                return None
            if isinstance(above, cst.SimpleStatementLine):
                return above if len(above.body) == 1 else None
            if isinstance(above, cst.BaseCompoundStatement):
                return above
        return None

    def is_statement(self, call: cst.CSTNode) -> Statement | None:
        """Return the statement that consists of this expression alone."""
        statement = self.statement(call)
        if isinstance(statement, cst.SimpleStatementLine) and isinstance(self.parent(call), cst.Expr):
            return statement
        return None

    def block(self, statement: cst.CSTNode) -> Block | None:
        """Return the block that contains a statement."""
        above = self.parent(statement)
        return above if isinstance(above, (cst.Module, cst.IndentedBlock)) else None

    def siblings(self, statement: cst.CSTNode) -> tuple[list[cst.CSTNode], list[cst.CSTNode]]:
        """Return the statements before and after one in its block; none if it is in no block."""
        block = self.block(statement)
        body: list[cst.CSTNode] = [statement] if block is None else [*block.body]
        index = next(index for index, each in enumerate(body) if each is statement)
        return body[:index], body[index + 1 :]

    def function(self, node: cst.CSTNode) -> Function:
        """Return the function that a node's execution belongs to, or the module."""
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
        """Return the innermost loop around a node, within the same function."""
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
        local = QualifiedNameSource.LOCAL
        return {name: node for node in self.all(cst.FunctionDef) for name in sorted(self._names(node, local))}

    def is_method(self, function: cst.FunctionDef) -> bool:
        """Return whether its first parameter is the object."""
        in_class = isinstance(self.parent(self.parent(function)), cst.ClassDef)
        static = any(full_name(each.decorator) == "staticmethod" for each in function.decorators)
        return in_class and not static


@lru_cache(maxsize=2)
def syntax_tree(text: str) -> SyntaxTree:
    """Return the tree of a module; the same one if a text is asked for again soon.

    Raises:
        libcst.ParserSyntaxError: the text does not parse.
    """
    return SyntaxTree(text)


def of_tree(function: Callable[[SyntaxTree], Fact]) -> Callable[[SyntaxTree], Fact]:
    """Return a function of the tree alone whose result is kept with the tree."""

    @wraps(function)
    def kept(tree: SyntaxTree) -> Fact:
        if function not in tree.facts:
            tree.facts[function] = function(tree)
        found: Fact = tree.facts[function]
        return found

    return kept


class _Fields(cst.CSTVisitor):
    """The fields of a node, in the order of the text."""

    def __init__(self, node: cst.CSTNode) -> None:
        super().__init__()
        self._node = node
        self.names: list[str] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        return node is self._node

    def on_leave(self, original_node: cst.CSTNode) -> None:
        pass

    def on_visit_attribute(self, node: cst.CSTNode, attribute: str) -> None:
        self.names.append(attribute)


_fields_of: dict[type[cst.CSTNode], list[str]] = {}


def _fields(node: cst.CSTNode) -> list[str]:
    """Return the fields of a node with nodes in them, in the order of the text; ``node.children`` copies the node."""
    found = _fields_of.get(node.__class__)
    if found is None:
        visitor = _Fields(node)
        node.visit(visitor)
        # An f-string's format, which comes last, is visited only where there is one.
        others = [each.name for each in fields(node) if not isinstance(getattr(node, each.name), str)]
        found = _fields_of[node.__class__] = list(dict.fromkeys([*visitor.names, *others]))
    return found


def _is_listed(value: Any, kind: type) -> bool:
    """Return whether a field's value is a node that counts."""
    if kind in _NO_NODES:
        return False
    if kind in _LINES:
        return value.comment is not None
    if kind in _PUNCTUATION:
        return any(getattr(value, name).__class__ is not cst.SimpleWhitespace for name in _fields(value))
    return True


def full_name(node: cst.CSTNode) -> str:
    """Return a dotted name as a string; empty for other expressions."""
    # ``isinstance`` is slow for libcst's classes.
    kind = node.__class__
    if kind is cst.Name:
        return node.value  # type: ignore[attr-defined, no-any-return]
    if kind is cst.Attribute:
        value = full_name(node.value)  # type: ignore[attr-defined]
        return f"{value}.{node.attr.value}" if value else ""  # type: ignore[attr-defined]
    return get_full_name_for_node(node) or "" if kind is cst.ImportAlias else ""


def dotted(name: str) -> cst.Attribute | cst.Name:
    """Return a dotted name as code."""
    first, *rest = name.split(".")
    node: cst.Attribute | cst.Name = cst.Name(first)
    for part in rest:
        node = cst.Attribute(node, cst.Name(part))
    return node


def is_pure(node: cst.BaseExpression) -> bool:
    """Return whether evaluating it twice is the same as once: names, attributes, constant subscripts."""
    if isinstance(node, cst.Attribute):
        return is_pure(node.value)
    if isinstance(node, cst.Subscript):
        return is_pure(node.value) and all(
            isinstance(part.slice, cst.Index) and is_pure(part.slice.value) for part in node.slice
        )
    return isinstance(node, (cst.Name, cst.Integer, cst.SimpleString))


def bound_name(alias: cst.ImportAlias) -> str:
    """Return the name that an import binds, dotted if it has no ``as``."""
    return full_name(alias.asname.name if alias.asname else alias.name)


class Imported(NamedTuple):
    """One name of an import statement."""

    node: cst.Import | cst.ImportFrom
    alias: cst.ImportAlias
    #: The full name of what is imported, and the name that this binds: of ``import a.b`` that is ``a``.
    name: str
    bound: str


@of_tree
def imports_of(tree: SyntaxTree) -> list[Imported]:
    """Return what a module imports by its name, which ``import *`` does not."""
    found = []
    for node in tree.all((cst.Import, cst.ImportFrom)):
        prefix = f"{module_of(node)}." if isinstance(node, cst.ImportFrom) else ""
        for alias in names_in(node):
            bound = bound_name(alias) if prefix or alias.asname else full_name(alias.name).split(".")[0]
            found.append(Imported(node, alias, prefix + full_name(alias.name), bound))
    return found


def names_in(node: cst.Import | cst.ImportFrom) -> Sequence[cst.ImportAlias]:
    """Return the names that a statement imports; none of ``import *``."""
    return () if isinstance(node.names, cst.ImportStar) else node.names


def without_trailing_comma(aliases: Sequence[cst.ImportAlias]) -> list[cst.ImportAlias]:
    """Return the names without a comma after the last."""
    return [*aliases[:-1], aliases[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)]


def module_of(node: cst.ImportFrom) -> str:
    """Return the module that names are imported from, with the dots of a relative import."""
    return "." * len(node.relative) + (full_name(node.module) if node.module is not None else "")


def called_name(call: cst.Call) -> str:
    """Return the name of a function or method, without what precedes the last dot."""
    return call.func.attr.value if isinstance(call.func, cst.Attribute) else full_name(call.func)


def iterated(loop: cst.For) -> cst.BaseExpression:
    """Return what a loop iterates over, without ``enumerate`` and progress bars."""
    found = loop.iter
    while isinstance(found, cst.Call) and found.args and called_name(found) in ("enumerate", "tqdm"):
        found = found.args[0].value
    return found


def argument(call: cst.Call, name: str) -> cst.BaseExpression | None:
    """Return what a call passes by a name."""
    return next((arg.value for arg in call.args if arg.keyword is not None and arg.keyword.value == name), None)


def keyword(name: str, value: cst.BaseExpression) -> cst.Arg:
    """Return ``name=value``, or without a name the value alone."""
    equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    return cst.Arg(value, cst.Name(name), equal=equal) if name else cst.Arg(value)


def method(node: cst.BaseExpression, name: str, *values: cst.BaseExpression) -> cst.Call:
    """Return ``node.name(values)``."""
    return cst.Call(cst.Attribute(node, cst.Name(name)), [cst.Arg(value) for value in values])
