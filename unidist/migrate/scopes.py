"""What names refer to: the variables of which scope, or what is imported.

The results are those of libcst's ``QualifiedNameProvider``, which copies the tree three times to find them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import libcst as cst

ScopeKind = Literal["module", "function", "class", "comprehension"]
Comprehension = cst.ListComp | cst.SetComp | cst.DictComp | cst.GeneratorExp


class Meaning(NamedTuple):
    """What a name may refer to, by full names."""

    #: ``function.<locals>.name``
    local: frozenset[str] = frozenset()
    #: ``horovod.torch.rank``
    imported: frozenset[str] = frozenset()


@dataclass
class _Bindings:
    """The places of a scope where a name is bound, in the order of the text."""

    scope: _Scope
    #: The imports. Numbers are those of the statements of the scope that had bound names before.
    imports: list[tuple[int, cst.Import | cst.ImportFrom]] = field(default_factory=list)
    #: Definitions, parameters and targets of assignments, by identity, and the number of the first.
    others: set[int] = field(default_factory=set)
    first: int | None = None

    def meaning(self, name: str, before: int | None = None) -> Meaning:
        """What a dotted name that begins with this one refers to, by the bindings before a number, or by all."""
        is_local = self.first is not None and (before is None or self.first < before)
        nodes = [node for number, node in self.imports if before is None or number < before]
        imported = frozenset(each for node in nodes for each in _imported_names(node, name))
        return Meaning(self.local(name) if is_local else frozenset(), imported)

    def local(self, name: str) -> frozenset[str]:
        """The full name of a variable of this scope."""
        return frozenset([f"{self.scope.prefix}.{name}" if self.scope.prefix else name])

    def has(self, before: int) -> bool:
        """Whether there is one before a number."""
        numbers = [self.first, *(number for number, _ in self.imports[:1])]
        return any(number is not None and number < before for number in numbers)


class _Use(NamedTuple):
    """A place where a name is read."""

    name: cst.Name
    scope: _Scope
    number: int
    #: The whole attribute that begins with the name, as ``horovod.torch.rank`` with ``horovod``.
    attribute: cst.Attribute | None


class _Scope:
    def __init__(self, kind: ScopeKind, parent: _Scope | None, name: str = "") -> None:
        self.kind = kind
        self.parent = parent
        self.root: _Scope = self if parent is None else parent.root
        above = "" if parent is None else parent.prefix
        last = {"function": "<locals>", "comprehension": "<comprehension>"}.get(kind, "")
        self.prefix: str = ".".join(part for part in (above, name, last) if part)
        self.bindings: dict[str, _Bindings] = {}
        #: Where the names of ``global`` and ``nonlocal`` are looked up.
        self.elsewhere: dict[str, _Scope] = {}
        #: Of statements that have bound names.
        self.number = 0

    def bind(self, name: str, node: cst.CSTNode) -> None:
        scope = self._owner(name)
        bindings = scope.bindings.setdefault(name, _Bindings(scope))
        if isinstance(node, (cst.Import, cst.ImportFrom)):
            bindings.imports.append((scope.number, node))
        else:
            bindings.others.add(id(node))
            bindings.first = scope.number if bindings.first is None else bindings.first

    def _owner(self, name: str) -> _Scope:
        """The scope in which an assignment sets the name."""
        other = self.elsewhere.get(name)
        return self if other is None else other._visible._owner(name)

    @property
    def _visible(self) -> _Scope:
        """This scope, or the next one whose names inner scopes see: not those of a class."""
        return self if self.kind != "class" or self.parent is None else self.parent._visible

    def knows(self, name: str) -> bool:
        """Whether a name is bound here or further out."""
        if name in self.elsewhere:
            return self.elsewhere[name].knows(name)
        if name in self.bindings:
            return True
        return self.parent is not None and self.parent._visible.knows(name)

    def find(self, name: str) -> _Bindings | None:
        """The bindings to which a name refers"""
        if name in self.elsewhere:
            return self.elsewhere[name]._visible.find(name)
        if name in self.bindings:
            return self.bindings[name]
        return None if self.parent is None else self.parent._visible.find(name)


class Scopes:
    """The scopes of a module.

    Args:
        nodes: all nodes, parents first, in the order of the text.
        ends: for each, the index of the first node after its descendants.
        indices: the indices by the nodes' identities.
    """

    def __init__(self, nodes: Sequence[cst.CSTNode], ends: Sequence[int], indices: Mapping[int, int]) -> None:
        self._nodes, self._ends, self._indices = nodes, ends, indices
        self._scope = _Scope("module", None)
        #: By identity: the scope in which a name, an attribute or a function is looked up; the uses of names.
        self._scopes: dict[int, _Scope] = {}
        self._uses: dict[int, tuple[str, _Use]] = {}
        #: For each call around the current node, the outermost attribute around it.
        self._attributes: list[cst.Attribute | None] = [None]
        #: Whether the module imports a dotted name.
        self._dotted = False
        self._found: list[_Use] = []
        self._visit(nodes[0])
        for use in self._found:
            name, node = self._longest(use)
            self._uses[id(node)] = name, use
        self._found = []

    def names(self, node: cst.CSTNode) -> Meaning:
        """What a name, an attribute or a function refers to; nothing for others."""
        scope = self._scopes.get(id(node))
        if scope is None:
            return Meaning()
        if id(node) in self._uses:
            return _meaning_of_use(*self._uses[id(node)])
        name = _full_name(node)
        bindings = _longest_known(scope, name)
        if bindings is None:
            return Meaning()
        return bindings.meaning(name) if id(node) not in bindings.others else Meaning(bindings.local(name))

    def _longest(self, use: _Use) -> tuple[str, cst.CSTNode]:
        """The dotted name that an import binds and a use begins with; else the name itself."""
        if use.attribute is not None and self._dotted:
            for name, node in _dotted_names(use.attribute):
                if use.scope.knows(name):
                    return name, node
        return use.name.value, use.name

    # -------------------------------------------------------------------------------- the pass over the tree
    def _children(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        index = self._indices[id(node)]
        end, index = self._ends[index], index + 1
        while index < end:
            yield self._nodes[index]
            index = self._ends[index]

    def _visit_all(self, *nodes: cst.CSTNode | None) -> None:
        for node in nodes:
            if node is not None:
                self._visit(node)

    def _visit(self, node: cst.CSTNode, sets: bool = False) -> None:
        """Note the bindings and uses in a node.

        Args:
            sets: whether it is the target of an assignment.
        """
        kind = node.__class__
        if kind is cst.Name:
            self._name(node, sets)  # type: ignore[arg-type]
        elif kind in _VISITS:
            _VISITS[kind](self, node)
        else:
            for child in self._children(node):
                self._visit(child, sets)
        if kind in _COUNTED:
            self._scope.number += 1

    def _name(self, node: cst.Name, sets: bool) -> None:
        self._scopes[id(node)] = self._scope
        if sets:
            self._scope.bind(node.value, node)
        else:
            self._found.append(_Use(node, self._scope, self._scope.number, self._attributes[-1]))

    def _attribute(self, node: cst.Attribute) -> None:
        self._scopes[id(node)] = self._scope
        if self._attributes[-1] is None:
            self._attributes[-1] = node
        self._visit(node.value)
        if self._attributes[-1] is node:
            self._attributes[-1] = None

    def _call(self, node: cst.Call) -> None:
        self._attributes.append(None)
        self._visit_all(node.func, *node.args)
        self._attributes.pop()

    def _argument(self, node: cst.Arg) -> None:
        self._visit(node.value)

    def _subscript(self, node: cst.Subscript) -> None:
        self._visit_all(node.value, *node.slice)

    def _lambda(self, node: cst.Lambda) -> None:
        self._in_scope(_Scope("function", self._scope), node.params, node.body)

    def _for(self, node: cst.For) -> None:
        self._visit(node.target, sets=True)
        self._scope.number += 1
        self._visit_all(node.iter, node.body, node.orelse)

    def _assignment(self, node: cst.Assign) -> None:
        for target in node.targets:
            self._visit(target.target, sets=True)
        self._visit(node.value)

    def _with_target(self, node: cst.AnnAssign | cst.AugAssign | cst.NamedExpr | cst.CompFor) -> None:
        for child in self._children(node):
            self._visit(child, sets=child is node.target)

    def _as(self, node: cst.AsName) -> None:
        self._visit(node.name, sets=True)

    def _in_scope(self, scope: _Scope, *nodes: cst.CSTNode | None) -> None:
        outer, self._scope = self._scope, scope
        self._visit_all(*nodes)
        self._scope = outer

    def _definition(self, node: cst.FunctionDef | cst.ClassDef) -> None:
        outer = self._scope
        outer.bind(node.name.value, node)
        self._scopes[id(node)] = self._scopes[id(node.name)] = outer
        if isinstance(node, cst.ClassDef):
            self._visit_all(*node.decorators, *node.bases, *node.keywords)
            self._in_scope(_Scope("class", outer, node.name.value), *node.body.body)
        else:
            self._in_scope(_Scope("function", outer, node.name.value), node.params, node.body)
            self._visit_all(*node.decorators, node.returns)

    def _parameter(self, node: cst.Param) -> None:
        own = self._scope
        own.bind(node.name.value, node)
        self._scopes[id(node.name)] = own
        assert own.parent is not None
        self._in_scope(own.parent, node.default, node.annotation)

    def _comprehension(self, node: Comprehension) -> None:
        first = node.for_in
        self._visit(first.iter)
        outer, self._scope = self._scope, _Scope("comprehension", self._scope)
        self._visit(first.target, sets=True)
        self._scope.number += 1
        self._visit_all(*first.ifs, first.inner_for_in)
        self._visit_all(*((node.key, node.value) if isinstance(node, cst.DictComp) else (node.elt,)))
        self._scope = outer

    def _import(self, node: cst.Import | cst.ImportFrom) -> None:
        if isinstance(node.names, cst.ImportStar):
            return
        for alias in node.names:
            name = _full_name(alias.name)
            if alias.asname is not None:
                self._scope.bind(_full_name(alias.asname.name), node)
                continue
            self._dotted |= "." in name
            while name:
                self._scope.bind(name, node)
                name = name.rpartition(".")[0]

    def _declaration(self, node: cst.Global | cst.Nonlocal) -> None:
        scope = self._scope
        if scope.parent is not None:
            for item in node.names:
                scope.elsewhere[item.name.value] = scope.root if isinstance(node, cst.Global) else scope.parent


#: The nodes whose children are not all read in the order of the text, by class: ``isinstance`` is slow for libcst's.
_VISITS: dict[type[cst.CSTNode], Callable[[Scopes, Any], None]] = {
    cst.Attribute: Scopes._attribute,
    cst.Arg: Scopes._argument,
    cst.Call: Scopes._call,
    cst.Subscript: Scopes._subscript,
    cst.FunctionDef: Scopes._definition,
    cst.ClassDef: Scopes._definition,
    cst.Lambda: Scopes._lambda,
    cst.Param: Scopes._parameter,
    cst.ListComp: Scopes._comprehension,
    cst.SetComp: Scopes._comprehension,
    cst.DictComp: Scopes._comprehension,
    cst.GeneratorExp: Scopes._comprehension,
    cst.Import: Scopes._import,
    cst.ImportFrom: Scopes._import,
    cst.Global: Scopes._declaration,
    cst.Nonlocal: Scopes._declaration,
    cst.For: Scopes._for,
    cst.Assign: Scopes._assignment,
    cst.AnnAssign: Scopes._with_target,
    cst.AugAssign: Scopes._with_target,
    cst.NamedExpr: Scopes._with_target,
    cst.CompFor: Scopes._with_target,
    cst.AsName: Scopes._as,
}
#: Nodes after which later uses in their scope see what they have bound.
_COUNTED = {
    cst.AnnAssign, cst.AsName, cst.Assign, cst.AugAssign, cst.ClassDef, cst.CompFor, cst.FunctionDef, cst.Global,
    cst.Import, cst.ImportFrom, cst.NamedExpr, cst.Nonlocal, cst.Parameters, cst.WithItem,
}  # fmt: skip


def _meaning_of_use(name: str, use: _Use) -> Meaning:
    """What a name refers to where it is read: in its own scope to what is bound before, if something is."""
    scope = use.scope
    bindings = scope.find(name)
    if bindings is None or bindings.scope is not scope:
        return Meaning() if bindings is None else bindings.meaning(name)
    if bindings.has(use.number):
        return bindings.meaning(name, use.number)
    further_out = scope.parent.find(name) if scope.parent is not None else None
    return Meaning() if further_out is None else further_out.meaning(name)


def _longest_known(scope: _Scope, name: str) -> _Bindings | None:
    """The bindings of a dotted name, or of the longest beginning of it that has some."""
    while name and not scope.knows(name):
        name = name.rpartition(".")[0]
    return scope.find(name) if name else None


def _imported_names(node: cst.Import | cst.ImportFrom, name: str) -> Iterator[str]:
    """The full names to which a dotted name refers by an import."""
    assert not isinstance(node.names, cst.ImportStar)
    module = ""
    if isinstance(node, cst.ImportFrom):
        module = "." * len(node.relative) + (_full_name(node.module) if node.module is not None else "")
        module += "." if module and not module.endswith(".") else ""
    for alias in node.names:
        imported = _full_name(alias.name)
        while imported:
            bound = _full_name(alias.asname.name) if alias.asname is not None else imported
            if name == bound or name.startswith(f"{bound}."):
                yield f"{module}{imported}{name[len(bound) :]}"
                break
            imported = imported.rpartition(".")[0]


def _dotted_names(node: cst.BaseExpression) -> Iterator[tuple[str, cst.CSTNode]]:
    """``a.b.c``, ``a.b`` and ``a``, with their nodes; for a call, those of the function."""
    if isinstance(node, cst.Name):
        yield node.value, node
    elif isinstance(node, cst.Attribute):
        if isinstance(node.value, cst.Call):
            yield from _dotted_names(node.value.func)
            return
        inner = list(_dotted_names(node.value))
        if inner:
            yield f"{inner[0][0]}.{node.attr.value}", node
            yield from inner


def _full_name(node: Any) -> str:
    """A dotted name, or the name of a function; of other expressions, no name that can be bound."""
    kind = node.__class__
    if kind is cst.Name:
        name: str = node.value
    elif kind is cst.Attribute:
        name = f"{_full_name(node.value) or '?'}.{node.attr.value}"
    else:
        name = node.name.value if kind is cst.FunctionDef or kind is cst.ClassDef else ""
    return name
