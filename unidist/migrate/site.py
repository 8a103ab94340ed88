"""One module under migration: what the rules know of it and what they have decided."""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

import libcst as cst

import unidist.hvd
from unidist.migrate.code import Code, Statement, dotted
from unidist.migrate.edits import Edits
from unidist.migrate.names import Names

#: The arguments of a call by the names of its parameters.
Arguments = dict[str, cst.BaseExpression]


class Site:
    """What all rules share.

    Args:
        code: the module.
        names: Horovod's names in it.
        through_holders: whether variables that hold the module (``self.hvd``) shall hold unidist; else they hold the drop-in, and
            what goes through them names unidist itself.
    """

    def __init__(self, code: Code, names: Names, through_holders: bool) -> None:
        self.code = code
        self.names = names
        self.edits = Edits(code)
        self.through_holders = through_holders
        self._settled: set[cst.CSTNode] = set()
        #: Uses that stay the drop-in's whatever the rules say: why, and what to do.
        self.kept: dict[cst.BaseExpression, tuple[str, str]] = {}
        self._places = sorted(code.span(use)[0] for use in names.symbols)
        #: Whether code that used no name of Horovod needs the name ``unidist``.
        self.needs_import = False
        self.needs_contextlib = False
        #: Whether names that are imported and stay are worth a word.
        self.reports_exports = False

    # -------------------------------------------------------------------------------- uses
    def uses(self, *symbols: str) -> Iterator[cst.BaseExpression]:
        """The uses of some of Horovod's names that a rule may settle, and none has yet."""
        for node, symbol in self.names.symbols.items():
            if (not symbols or symbol in symbols) and node not in self._settled and node not in self.kept:
                yield node

    def calls(self, *symbols: str) -> Iterator[cst.Call]:
        """The calls among them."""
        for node in self.uses(*symbols):
            parent = self.code.parent(node)
            if isinstance(parent, cst.Call) and parent.func is node:
                yield parent

    def is_through_holder(self, use: cst.BaseExpression) -> bool:
        """Whether a use goes through a variable that holds the module."""
        root = self.root(use)
        by_import = isinstance(root, cst.Name) and root.value in self.names.clean
        return not by_import and "horovod" not in self.code.imported(root)

    def root(self, use: cst.BaseExpression) -> cst.BaseExpression:
        """What a use begins with: the imported name, or the expression that holds the module."""
        while isinstance(use, cst.Attribute) and self.code.variable(use) not in self.names.holders:
            use = use.value
        return use

    def symbol(self, node: cst.CSTNode | None) -> str | None:
        """Horovod's name for an expression, or None."""
        return self.names.symbols.get(node) if isinstance(node, cst.BaseExpression) else None

    def settle(self, node: cst.CSTNode) -> None:
        """All uses in a node are dealt with."""
        first, end = self.code.span(node)
        places = self._places
        for place in places[bisect_left(places, first) : bisect_left(places, end)]:
            self._settled.add(self.code.nodes[place])

    def left(self) -> list[cst.BaseExpression]:
        """The uses that no rule has settled."""
        return [node for node in self.names.symbols if node not in self._settled]

    def is_settled(self, use: cst.CSTNode) -> bool:
        """Whether a rule has dealt with a use."""
        return use in self._settled

    # -------------------------------------------------------------------------------- code
    def native(self, use: cst.BaseExpression, name: str) -> cst.BaseExpression:
        """``unidist.NAME`` in the place of a use."""
        if not self.is_through_holder(use):
            return dotted(f"unidist.{name}")
        return cst.Attribute(self.root(use).deep_clone(), cst.Name(name)) if self.through_holders else self.own(name)

    def own(self, name: str) -> cst.BaseExpression:
        """``unidist.NAME`` where nothing of Horovod stood."""
        self.needs_import = True
        return dotted(f"unidist.{name}")

    def arguments(self, call: cst.Call) -> Arguments | None:
        """The arguments of a call of one of Horovod's functions; None where that cannot be told, as with ``*args``."""
        function = getattr(unidist.hvd, self.symbol(call.func) or "", None)
        if function is None or any(arg.star for arg in call.args):
            return None
        positional = [arg.value for arg in call.args if arg.keyword is None]
        keywords = {arg.keyword.value: arg.value for arg in call.args if arg.keyword is not None}
        try:
            bound: dict[str, Any] = inspect.signature(function).bind(*positional, **keywords).arguments
        except TypeError:
            return None
        return bound

    def text(self, node: cst.CSTNode) -> str:
        """A node's code."""
        return self.code.text(node)

    def note(self, node: cst.CSTNode, why: str, remedy: str, what: str | None = None) -> None:
        """Report a place."""
        if what is None:
            node = self.code.statement(node) or node
            what = self.text(node).splitlines()[0]
        self.edits.note(node, what, why, remedy)

    def keep_comments(self, call: cst.Call, *but: cst.CSTNode) -> None:
        """Put the comments among a call's arguments above its statement, those in some parts excepted."""
        statement = self.code.statement(call)
        if statement is not None:
            self.edits.keep_comments(statement, call, but=but)

    def remove(self, statement: Statement) -> None:
        """Take a statement away, with all uses in it."""
        self.edits.remove(statement)
        self.settle(statement)


def is_constant(node: cst.CSTNode | None, *values: object) -> bool:
    """Whether an expression is one of some constants; the absent argument counts as None."""
    if node is None:
        return None in values
    if not isinstance(node, (cst.Name, cst.Integer, cst.Float)):
        return False
    known = {"None": None, "True": True, "False": False}
    written = node.value
    if written in known:
        return any(value is known[written] for value in values)
    try:
        return any(not isinstance(value, bool) and value is not None and float(written) == value for value in values)
    except ValueError:
        return False
