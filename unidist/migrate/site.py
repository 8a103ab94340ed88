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
from unidist.migrate.flow import callees
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
        #: Code that needs the name ``unidist`` where no name of an import of Horovod's stood.
        self.needing: list[cst.CSTNode] = []
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
        return (
            cst.Attribute(self.root(use).deep_clone(), cst.Name(name)) if self.through_holders else self.own(use, name)
        )

    def own(self, place: cst.CSTNode, name: str) -> cst.BaseExpression:
        """``unidist.NAME`` at a place where no name of an import of Horovod's stood."""
        self.needing.append(place)
        return dotted(f"unidist.{name}")

    def importers(self, place: cst.CSTNode) -> list[cst.Import | cst.ImportFrom]:
        """The imports of Horovod that give a place its names: those of the functions around it, else the module's, unconditional ones first."""
        found = [each for each in self.names.imports if not self._is_in_class(each)]
        for above in self.code.parents(place):
            own = [each for each in found if self.code.function(each) is above]
            if isinstance(above, cst.FunctionDef) and own:
                return own
        outer = [each for each in found if self.code.function(each) is self.code.module]
        return [each for each in outer if self._is_unconditional(each)][:1] or outer

    def may_import(self, place: cst.CSTNode) -> bool:
        """Whether ``import unidist`` may give a place its name: beside an import of Horovod's, or where Horovod is imported in any case."""
        return bool(self.importers(place)) or any(
            isinstance(node, cst.Call) and self.code.function(node) is self.code.module and self._is_unconditional(node)
            for node in self.names.loading
        )

    def is_reached(self, place: cst.CSTNode, depth: int = 4) -> bool:
        """Whether Horovod is seen to be imported whenever a place is executed."""
        if any(self._is_unconditional(each) for each in (*self.names.imports, *self.names.loading)):
            return True
        child = place
        for above in self.code.parents(place):
            if isinstance(above, (cst.Module, cst.IndentedBlock)):
                before = above.body[: next(index for index, each in enumerate(above.body) if each is child) + 1]
                if any(self._uses(each) for each in before if isinstance(each, cst.SimpleStatementLine)):
                    return True
            if (
                isinstance(above, cst.If)
                and child is not above.test
                and self._uses(above.test, modules=child is above.body)
            ):
                return True
            if isinstance(above, cst.Lambda):
                return False
            if isinstance(above, cst.FunctionDef):
                calls = [call for call in self.code.all(cst.Call) if above in callees(self.code, call)]
                return depth > 0 and bool(calls) and all(self.is_reached(call, depth - 1) for call in calls)
            child = above
        return False

    def _uses(self, node: cst.CSTNode, modules: bool = False) -> bool:
        """Whether something of Horovod's is used, or imported, whenever a node is executed; as a condition, whether that asks for the module."""
        wanted = [*self.names.symbols, *self.names.imports, *(self.names.modules if modules else ())]
        return any(
            self.code.is_inside(each, node) and not self._is_by_chance(each, node, negated=each in self.names.modules)
            for each in wanted
        )

    def _is_by_chance(self, node: cst.CSTNode, outer: cst.CSTNode, negated: bool) -> bool:
        """Whether a part is evaluated only sometimes when the whole is; of a module, also whether its absence is asked for."""
        child: cst.CSTNode = node
        for above in (node, *self.code.parents(node)):
            if isinstance(above, (cst.Lambda, cst.IfExp, cst.BaseComp)):
                return True
            if isinstance(above, cst.BooleanOperation):
                joined = isinstance(above.operator, cst.And)
                if (not joined and (negated or child is above.right)) or (
                    joined and not negated and child is above.right
                ):
                    return True
            if negated and isinstance(above, cst.UnaryOperation):
                return True
            if negated and isinstance(above, cst.Comparison):
                operator = above.comparisons[0].operator
                if not isinstance(operator, (cst.IsNot, cst.NotEqual)) or len(above.comparisons) > 1:
                    return True
            if above is outer:
                return False
            child = above
        return False

    def _is_unconditional(self, node: cst.CSTNode) -> bool:
        """Whether a statement of the module's own level is executed in any case."""
        return self.code.parent(self.code.parent(node)) is self.code.module or (
            isinstance(own := self.code.statement(node), cst.SimpleStatementLine)
            and self.code.parent(own) is self.code.module
        )

    def _is_in_class(self, node: cst.CSTNode) -> bool:
        return isinstance(self.code.parent(self.code.parent(self.code.parent(node))), cst.ClassDef)

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
