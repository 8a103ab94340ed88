"""One module under migration: what the rules know of it and what they have decided."""

from __future__ import annotations

from ast import literal_eval
from bisect import bisect_left
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import libcst as cst

from unidist.migrate.drop_in import bound_arguments
from unidist.migrate.edits import Edits
from unidist.migrate.flow import is_parameter, values_of
from unidist.migrate.names import Names, in_import, is_in_class, symbol_of
from unidist.migrate.syntax import Statement, SyntaxTree, dotted, full_name, keyword


@dataclass
class Refusal(Exception):
    """Why the optimizers of a module stay Horovod's."""

    node: cst.CSTNode
    why: str
    remedy: str = "write unidist.replicate(model) and a plain optimizer by hand, see docs/migrating.md"


#: What there is to migrate from.
ORIGINS = ("horovod", "ddp", "dataparallel", "apex")
#: Why a call stays that does not show its arguments, and what to do.
UNKNOWN_ARGUMENTS = (
    "its arguments cannot be determined",
    "write them out in a call, without *, ** and functools.partial, then migrate again",
)
#: The arguments of a call by the names of its parameters.
Arguments = dict[str, cst.BaseExpression]


class Elsewhere(NamedTuple):
    """What other files of the same program do; each the name of a file, empty if there is none."""

    #: It makes an optimizer of Horovod's.
    optimizer: str = ""
    #: It calls a method that only Horovod's optimizers have.
    optimizer_method: str = ""
    #: It assigns gradients by hand.
    gradient: str = ""
    #: Why the process group that it uses is not started by unidist; no file's name.
    start: str = ""


class Options(NamedTuple):
    """What the user has said."""

    #: A file in which something stays on the drop-in has unidist's own calls, too. Else it stays there as a whole.
    partial: bool = False
    #: What is migrated from: ``horovod``, ``ddp`` (torch.distributed), ``dataparallel``, ``apex``.
    origins: frozenset[str] = frozenset(ORIGINS)


class Context:
    """What all rules share: the module, Horovod's names in it, and the edits so far.

    Args:
        tree: the module.
        names: Horovod's names in it.
        exported: names that other files import from this one.
        native: whether calls become unidist's own; else the imports alone change, to the drop-in.
        aliases_are_native: whether variables that hold the module (``self.hvd``) will hold unidist. Else they hold the
            drop-in, and migrated calls through them name unidist itself.
        elsewhere: what other files do.
        options: what the user has said.
    """

    def __init__(
        self,
        tree: SyntaxTree,
        names: Names,
        exported: Collection[str] = (),
        native: bool = False,
        aliases_are_native: bool = False,
        elsewhere: Elsewhere = Elsewhere(),  # noqa: B008  (immutable)
        options: Options = Options(),  # noqa: B008
    ) -> None:
        self.tree = tree
        self.names = names
        self.exported = exported
        self.native = native
        self.aliases_are_native = aliases_are_native
        self.elsewhere = elsewhere
        self.options = options
        self.edits = Edits(tree)
        self._handled: set[cst.CSTNode] = set()
        self._use_indices = sorted(tree.span(use)[0] for use in names.symbols)
        #: Uses that stay on the drop-in whatever other rules decide: why, and what to do.
        self.kept: dict[cst.BaseExpression, tuple[str, str]] = {}
        #: Uses that the remark on another use covers.
        self.covered: set[cst.BaseExpression] = set()
        #: Nodes whose new code names unidist and which Horovod's import did not serve before.
        self.needs_unidist: list[cst.CSTNode] = []
        self.needs_contextlib = False
        #: Nodes that are not in the new text, beside the uses that are handled.
        self.gone: list[cst.CSTNode] = []

    # -------------------------------------------------------------------------------- uses
    def uses(self, *symbols: str) -> Iterator[cst.BaseExpression]:
        """Yield the uses of some of Horovod's names, or of all, that no rule has handled and that need not stay."""
        for node, symbol in self.names.symbols.items():
            if (not symbols or symbol in symbols) and node not in self._handled and node not in self.kept:
                yield node

    def calls(self, *symbols: str) -> Iterator[cst.Call]:
        """Yield the calls among them."""
        for node in self.uses(*symbols):
            parent = self.tree.parent(node)
            if isinstance(parent, cst.Call) and parent.func is node:
                yield parent

    def is_through_alias(self, use: cst.BaseExpression) -> bool:
        """Return whether a use goes through an alias of the module, as ``self.hvd.rank``."""
        root = self.root(use)
        by_import = isinstance(root, cst.Name) and root.value in self.names.import_only
        return not by_import and "horovod" not in self.tree.imported(root)

    @cached_property
    def renamed(self) -> frozenset[str]:
        """Variables that hold the module by an import, and None without it: they get the name ``unidist``."""
        tree = self.tree
        if not self.aliases_are_native or any(
            name.value == "unidist" and not in_import(tree, name) for name in tree.all(cst.Name)
        ):
            return frozenset()
        declarations: list[cst.Global | cst.Nonlocal] = [*tree.all(cst.Global), *tree.all(cst.Nonlocal)]
        declared = {item.name.value for node in declarations for item in node.names}
        fixed = {*self.names.import_only, *self.names.rebound, *self.exported, *declared}
        found = (
            tree.variable(name)
            for name in tree.all(cst.Name)
            if name.value not in fixed and "" in map(symbol_of, tree.imported(name)) and not in_import(tree, name)
        )
        return frozenset(variable for variable in found if variable is not None and not variable.startswith("."))

    @cached_property
    def renamed_names(self) -> frozenset[str]:
        """The names of those variables; imports of other scopes that bind one of them get the name, too."""
        return frozenset(variable.rpartition(".")[2] for variable in self.renamed)

    def is_renamed(self, node: cst.BaseExpression) -> bool:
        """Return whether a name that holds the module gets the name ``unidist``."""
        imported = isinstance(node, cst.Name) and node.value in self.renamed_names and self.tree.imported(node)
        return bool(imported) or self.tree.variable(node) in self.renamed

    def root(self, use: cst.BaseExpression) -> cst.BaseExpression:
        """Return what a use starts with: the imported name, or the alias."""
        while isinstance(use, cst.Attribute) and self.tree.variable(use) not in self.names.aliases:
            use = use.value
        return use

    def symbol(self, node: cst.CSTNode | None) -> str | None:
        """Return Horovod's name for an expression, or None."""
        return self.names.symbols.get(node) if isinstance(node, cst.BaseExpression) else None

    def mark_handled(self, node: cst.CSTNode) -> None:
        """Record that a rule has decided about all uses in a node."""
        first, end = self.tree.span(node)
        indices = self._use_indices
        for index in indices[bisect_left(indices, first) : bisect_left(indices, end)]:
            self._handled.add(self.tree.nodes[index])

    def remaining_uses(self) -> list[cst.BaseExpression]:
        """Return the uses that no rule has handled."""
        return [node for node in self.names.symbols if node not in self._handled]

    def is_handled(self, use: cst.CSTNode) -> bool:
        """Return whether a rule has handled a use."""
        return use in self._handled

    def is_whole_world(self, size: cst.BaseExpression | None, rank: cst.BaseExpression | None) -> bool:
        """Return whether arguments of a sampler are the number of processes and this one's rank."""
        return (self._rank_or_size(size), self._rank_or_size(rank)) == ("size", "rank")

    def _rank_or_size(self, node: cst.BaseExpression | None) -> str | None:
        """``size`` or ``rank``, for such a call or for a variable that is assigned only that."""
        if isinstance(node, cst.Call):
            return self.symbol(node.func)
        values = values_of(self.tree, node)
        return self._rank_or_size(values[0]) if len(values) == 1 and isinstance(values[0], cst.Call) else None

    def value_of(self, node: cst.BaseExpression | None) -> cst.BaseExpression | None:
        """Return what the variable is assigned, if only once and not as a parameter; else the expression itself."""
        if not isinstance(node, cst.Name) or is_parameter(self.tree, self.tree.variable(node)):
            return node
        values = values_of(self.tree, node)
        return values[0] if len(values) == 1 else node

    # -------------------------------------------------------------------------------- code
    def unidist_name_for(self, use: cst.BaseExpression, name: str) -> cst.BaseExpression:
        """Return ``unidist.NAME``, to replace a use: through the same alias, if that holds unidist."""
        if not self.is_through_alias(use) or self.is_renamed(self.root(use)):
            return dotted(f"unidist.{name}")
        if self.aliases_are_native:
            node = self.root(use).deep_clone()
            for part in name.split("."):
                node = cst.Attribute(node, cst.Name(part))
            return node
        return self.unidist_name(use, name)

    def unidist_name(self, node: cst.CSTNode, name: str) -> cst.BaseExpression:
        """Return ``unidist.NAME`` in the new code of a node that did not use a name that Horovod's import binds."""
        self.needs_unidist.append(node)
        return dotted(f"unidist.{name}")

    def imports_for(self, node: cst.CSTNode) -> list[cst.Import | cst.ImportFrom]:
        """Return the imports of Horovod in whose scope a node is: the innermost function's, else the module's.

        Of several in the module, an unconditional one alone.
        """
        found = [each for each in self.names.imports if not is_in_class(self.tree, each)]
        for above in self.tree.parents(node):
            inner = [each for each in found if self.tree.function(each) is above]
            if isinstance(above, cst.FunctionDef) and inner:
                return inner
        outer = [each for each in found if self.tree.function(each) is self.tree.module]
        return [each for each in outer if self._is_unconditional(each)][:1] or outer

    def can_import(self, node: cst.CSTNode) -> bool:
        """Return whether ``import unidist`` can serve a node: beside an import of Horovod, or where it always runs."""
        return bool(self.imports_for(node)) or any(
            self.tree.function(call) is self.tree.module and self._is_unconditional(call)
            for call in self.names.dynamic_imports
        )

    def _is_unconditional(self, node: cst.CSTNode) -> bool:
        """Return whether a statement of the module's own level is executed in any case."""
        return self.tree.parent(self.tree.parent(node)) is self.tree.module or (
            isinstance(statement := self.tree.statement(node), cst.SimpleStatementLine)
            and self.tree.parent(statement) is self.tree.module
        )

    def arguments(self, call: cst.Call) -> Arguments | None:
        """Return the arguments of a call of Horovod's, by parameter; None if they are not known, as with ``*args``."""
        return bound_arguments(self.symbol(call.func) or "", call)

    def text(self, node: cst.CSTNode) -> str:
        """Return a node's code."""
        return self.tree.text(node)

    def first_line(self, node: cst.CSTNode) -> str:
        """Return the first line of a node's statement, and the node's own where that is another one."""
        first = self.text(self.tree.statement(node) or node).splitlines()[0]
        own = self.text(node).splitlines()[0]
        return first if own in first else f"{first} ... {own}"

    def remark(self, node: cst.CSTNode, why: str, remedy: str, what: str | None = None) -> None:
        """Add a remark on a node; it shows ``first_line``, or ``what``."""
        if what is None:
            node, what = self.tree.statement(node) or node, self.first_line(node)
        self.edits.remark(node, what, why, remedy)

    def root_of(self, node: cst.BaseExpression) -> cst.BaseExpression:
        """Return the root of an expression: ``a`` of ``a.b[0].c``."""
        while isinstance(node, (cst.Attribute, cst.Subscript)):
            node = node.value
        return node

    def is_bound_at(self, node: cst.BaseExpression, at: cst.CSTNode) -> bool:
        """Return whether a dotted name, as it is written at its own place, means the same at another."""
        tree, root = self.tree, self.root_of(node)
        here, there = tree.function(node), tree.function(at)
        if tree.is_inside(node, at) or here is there:
            return True
        if full_name(root) == "self":
            return (
                isinstance(here, cst.FunctionDef)
                and isinstance(there, cst.FunctionDef)
                and tree.parent(here) is tree.parent(there)
            )
        variable = tree.variable(root)
        local = (name for name in tree.all(cst.Name, inside=there) if name.value == full_name(root))
        return (
            variable is not None
            and ".<locals>." not in variable
            and all(tree.variable(name) == variable for name in local if not tree.is_attribute_name(name))
        )

    def keep_comments(self, call: cst.Call, *but: cst.CSTNode) -> None:
        """Keep the comments among a call's arguments, above its statement; those in ``but`` stay where they are."""
        statement = self.tree.statement(call)
        if statement is not None:
            self.edits.keep_comments(statement, call, but=but)

    def drop(self, *nodes: cst.CSTNode | None) -> None:
        """Note that nodes are not in the new text; the uses in them are handled."""
        for node in nodes:
            if node is not None:
                self.gone.append(node)
                self.mark_handled(node)

    def rebuild(self, call: cst.Call, name: str, values: Collection[tuple[str, cst.BaseExpression]]) -> None:
        """Replace a call by one of unidist's; values that are arguments of the call keep the edits inside them."""
        kept = [value for _, value in values]
        self.keep_comments(call, *kept)
        # Not within the edit, which is applied after the imports are changed: they must know that it needs unidist.
        function = self.unidist_name_for(call.func, name)

        def change(updated: cst.Call) -> cst.Call:
            new = {before.value: after.value for before, after in zip(call.args, updated.args)}
            args = [keyword(each, new.get(value, value)) for each, value in values]
            return cst.Call(function, args, lpar=updated.lpar, rpar=updated.rpar)

        self.edits.replace(call, change)
        self.mark_handled(call.func)
        self.drop(*(arg.value for arg in call.args if all(arg.value is not each for each in kept)))

    def remove(self, statement: Statement) -> None:
        """Remove a statement; the uses in it are handled."""
        self.edits.remove(statement)
        self.mark_handled(statement)


def is_constant(node: cst.CSTNode | None, *values: object) -> bool:
    """Return whether an expression is one of some constants; an absent argument counts as None."""
    if not isinstance(node, (cst.Name, cst.Integer, cst.Float, type(None))):
        return False
    try:
        found = None if node is None else literal_eval(node.value)
    except ValueError:  # a variable
        return False
    return any(found == value and isinstance(found, bool) == isinstance(value, bool) for value in values)
