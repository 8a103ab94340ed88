"""The rule for imports: of unidist for migrated names, of the drop-in for names that are still used."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import takewhile

import libcst as cst

from unidist.migrate.context import Context
from unidist.migrate.drop_in import drop_in_name_of
from unidist.migrate.edits import Edits
from unidist.migrate.flow import references
from unidist.migrate.names import IMPORTERS, in_import, is_horovod, root_name, symbol_of
from unidist.migrate.syntax import (
    Statement,
    called_name,
    dotted,
    full_name,
    imports_of,
    module_of,
    without_trailing_comma,
)

_LOOKUPS = {*IMPORTERS, "find_spec", "importorskip"}
_NOT_IN_DROP_IN = (
    "the drop-in replaces horovod.torch, and does not have this",
    "replace it by hand, or keep Horovod for it",
)
_REEXPORTED = (
    "other files may import this name from here, so it stays, as the drop-in's",
    "import unidist where it is used, then remove this line",
)
_REBOUND = (
    "this name is also bound to something else, so calls through it stay on the drop-in",
    "give one of them another name, then migrate again",
)
_STRING = ("a string names a module of Horovod's", "check what the string is used for")
_DROP_IN = ("unidist has no equivalent, so it is imported from the drop-in", "keep it, or rewrite what needs it")
_RUN = (
    "horovod.run() starts processes on any hosts, and unidist.spawn() on this one, so it stays, as the drop-in's",
    "`unidist.spawn(fn, np, args)` on one host, else start the script by `unidist run`, then migrate again",
)
_SPARKDL = ("sparkdl", "sparkdl.horovod")
#: Modules of unidist that have the names of Horovod's, and what they have.
_OWN = {
    *("unidist.spark", "unidist.spark.run", "unidist.spark.run_elastic"),
    *("unidist.ray", "unidist.ray.RayExecutor", "unidist.ray.ElasticRayExecutor"),
}
#: Why a file stays on the drop-in although each of its calls has an equivalent.
STAYS = {why for why, _ in (_REEXPORTED, _REBOUND, _DROP_IN, _RUN)}


def change_imports(context: Context) -> None:
    """Change every import of Horovod; what the drop-in does not have stays, with a remark."""
    if not context.names.symbols and _is_migrated(context):
        return
    imports = _Imports(context)
    for node in context.tree.nodes:
        if isinstance(node, cst.Import):
            imports.import_statement(node)
        elif isinstance(node, cst.ImportFrom):
            imports.from_import(node)
        elif isinstance(node, cst.Attribute):
            imports.attribute(node)
        elif isinstance(node, cst.SimpleString):
            imports.string(node, str(node.evaluated_value))
        elif isinstance(node, cst.Name):
            imports.module(node)
    for variable in context.renamed:
        imported = [node for node in context.names.modules if context.is_renamed(node)]
        for node in (*references(context.tree).get(variable, ()), *imported):
            context.edits.replace(node, lambda updated: updated.with_changes(value="unidist"))
    imports.finish()


def _is_migrated(context: Context) -> bool:
    """Return whether nothing of Horovod's is imported any more, so that the imports are as an earlier run left them."""
    named = [module_of(node) for node in context.tree.all(cst.ImportFrom)]
    return not any(is_horovod(name) for name in (*named, *(each.name for each in imports_of(context.tree))))


class _Imports:
    def __init__(self, context: Context) -> None:
        self._context = context
        #: Names that other files import from this one.
        self._exported = {*context.exported, *_named_in_strings(context)}
        self._tree = context.tree
        self._read = {name.value for name in context.tree.all(cst.Name) if not in_import(context.tree, name)}
        #: Names through which the drop-in is still used.
        self._still_used = {root_name(use) for use in context.remaining_uses()} | context.names.rebound
        if not context.aliases_are_native:
            self._still_used |= {root_name(node) for node in context.names.modules}
        #: The names of the package ``horovod`` itself, and those that are used alone, as in ``if horovod:``.
        self._packages = {each.bound for each in imports_of(self._tree) if each.name == "horovod"}
        self._used_whole = {
            node.value
            for node in self._tree.all(cst.Name)
            if node.value in self._packages and self._is_used_whole(node)
        }
        longest = [node for node in self._longest_attributes() if node not in context.gone]
        parts = [(node, name) for node in longest for name in self._tree.imported(node) if name.startswith("horovod.")]
        #: Attributes of the package that the drop-in does not have; names of the package with attributes that it has,
        #: beside the calls.
        self._unmovable = {name for _, name in parts if drop_in_name_of(name) is None}
        self._other_parts_used = {
            root_name(node) for node, name in parts if symbol_of(name) is None and self._can_move(name)
        }
        self._blocks_with_unidist = {
            id(self._tree.block(statement))
            for each in imports_of(self._tree)
            if each.name == "unidist" and not each.alias.asname and (statement := self._tree.statement(each.node))
        }
        #: Imports that need ``import unidist`` beside them for code elsewhere.
        self._imports_to_extend = {each for node in context.needs_unidist for each in context.imports_for(node)}
        self._native = bool(set(context.names.symbols) - set(context.remaining_uses()))

    # -------------------------------------------------------------------------------- statements
    def import_statement(self, node: cst.Import) -> None:
        """Change ``import horovod.torch as hvd``."""
        aliases: list[cst.ImportAlias] = []
        needs_unidist_too = node in self._imports_to_extend
        for alias in node.names:
            name, bound = full_name(alias.name), full_name(alias.asname.name) if alias.asname else None
            if self._is_unused(node, name, bound or name.split(".")[0]):
                continue
            if symbol_of(name) is None and not is_horovod(name):
                aliases.append(alias)
            elif symbol_of(name) is not None:
                new, needs_own = self._module(alias, name, bound)
                aliases += new
                needs_unidist_too = needs_unidist_too or needs_own
            elif name == "horovod":
                new, needs_own = self._package(node, alias, bound or name)
                aliases += new
                needs_unidist_too = needs_unidist_too or needs_own
            elif drop_in_name_of(name) is not None:
                self._remark_drop_in(alias, name)
                aliases.append(alias.with_changes(name=dotted(drop_in_name_of(name) or "")))
            else:
                aliases.append(alias)
                self._remark(node, name, _NOT_IN_DROP_IN)
        if any(full_name(alias.name) == "unidist" and alias.asname is None for alias in aliases):
            needs_unidist_too = False
        if list(node.names) != aliases or needs_unidist_too:
            self._replace_import(
                node, [node.with_changes(names=without_trailing_comma(aliases))] if aliases else [], needs_unidist_too
            )

    def _module(self, alias: cst.ImportAlias, name: str, bound: str | None) -> tuple[list[cst.ImportAlias], bool]:
        """Return what replaces ``horovod.torch``, and whether ``import unidist`` is needed beside it."""
        target = drop_in_name_of(name) or name
        if target == name and is_horovod(name):
            self._remark(alias, name, _NOT_IN_DROP_IN)
            return [alias], False
        kept = alias if target == name else alias.with_changes(name=dotted(target))
        if bound in self._context.names.rebound:
            self._remark(alias, bound or "", _REBOUND)
            return [kept], False
        mixed = bound is not None and bound not in self._context.names.import_only
        if mixed and self._context.aliases_are_native:
            if bound in self._context.renamed_names:
                return [cst.ImportAlias(cst.Name("unidist"))], False
            return [alias.with_changes(name=cst.Name("unidist"))], False
        first = bound or name.split(".")[0]
        if first in self._still_used | self._other_parts_used or (mixed and not self._context.aliases_are_native):
            return [kept], self._native and self._is_used(first) and not mixed
        exported = first in self._exported or not self._is_used(first)
        if exported:
            self._remark(alias, first, _REEXPORTED)
        return [kept] if exported else [], self._is_used(first)

    def _is_unused(self, node: cst.CSTNode, name: str, bound: str) -> bool:
        """Return whether neither this file nor another one uses what an import of Horovod binds.

        One in a ``try`` may show whether Horovod is there.
        """
        if not self._context.native or not is_horovod(name) or {bound, "*"} & (self._read | self._exported):
            return False
        return not any(isinstance(above, cst.Try) for above in self._tree.parents(node))

    def _is_gone(self, bound: str) -> bool:
        """Return whether all uses of a name are gone, beside those that are handled."""
        tree, named = self._tree, (each for each in self._tree.all(cst.Name) if each.value == bound)
        names = [each for each in named if not (in_import(tree, each) or tree.is_attribute_name(each))]
        return bound not in self._exported and bool(names) and all(each in self._context.gone for each in names)

    def _package(self, node: cst.Import, alias: cst.ImportAlias, first: str) -> tuple[list[cst.ImportAlias], bool]:
        """Return what replaces ``horovod`` itself, and whether ``import unidist`` is needed beside it."""
        kept, word = [], self._drop_in_name(first)
        if self._unmovable:
            kept.append(alias)
            self._remark(node, "horovod", _NOT_IN_DROP_IN)
        if first in self._still_used | self._other_parts_used or (first in self._used_whole and not self._unmovable):
            asname = None if word == "unidist.hvd" else cst.AsName(cst.Name(word))
            is_present = asname is None and any(full_name(each.name) == word and not each.asname for each in node.names)
            kept += [] if is_present else [cst.ImportAlias(dotted("unidist.hvd"), asname)]
            return kept, asname is not None and self._is_used(first)
        return kept, not kept or self._is_used(first)

    def _drop_in_name(self, first: str) -> str:
        """Return the drop-in's name in code that called the package by this one."""
        renamed = not self._unmovable and first in self._packages and (first != "horovod" or first in self._used_whole)
        return first if renamed else "unidist.hvd"

    def _can_move(self, name: str) -> bool:
        """Return whether a name becomes the drop-in's; beside one that cannot, only those of the supported parts do."""
        return drop_in_name_of(name) is not None and (
            not self._unmovable or name.startswith(("horovod.torch", "horovod.common"))
        )

    def _is_used_whole(self, node: cst.Name) -> bool:
        parent = self._tree.parent(node)
        named = isinstance(parent, cst.Attribute) or (isinstance(parent, cst.Arg) and parent.keyword is node)
        return not named and not in_import(self._tree, node)

    def _is_used(self, first: str) -> bool:
        """Return whether a name leads to a migrated use."""
        called = any(root_name(use) == first and self._context.is_handled(use) for use in self._context.names.symbols)
        return called or any(root_name(node) == first and self._is_module(node) for node in self._context.names.modules)

    def _is_module(self, node: cst.BaseExpression) -> bool:
        """Return whether a node is the module itself, as in ``self.hvd = hvd``, and becomes unidist."""
        return (
            node in self._context.names.modules
            and self._context.aliases_are_native
            and (isinstance(node, cst.Attribute) or root_name(node) in self._context.names.import_only)
            and any(symbol_of(name) == "" for name in self._tree.imported(node))
        )

    def from_import(self, node: cst.ImportFrom) -> None:
        """Change ``from horovod.torch import rank``."""
        module = full_name(node.module) if node.module is not None and not node.relative else ""
        if module in _SPARKDL:
            self._from_sparkdl(node, module)
        if not is_horovod(module) and symbol_of(module) is None and module != "unidist":
            return
        if isinstance(node.names, cst.ImportStar):
            if drop_in_name_of(module) is None and is_horovod(module):
                self._remark(node, f"{module}.*", _NOT_IN_DROP_IN)
            elif is_horovod(module):
                self._replace_import(
                    node,
                    [node.with_changes(module=dotted(drop_in_name_of(module) or module))],
                    node in self._imports_to_extend,
                )
            return
        renamed: list[cst.Import] = []
        by_module: dict[str, list[cst.ImportAlias]] = {}
        needs_unidist_too = node in self._imports_to_extend
        for alias in node.names:
            new, needs_own = self._from_import_name(node, module, alias)
            needs_unidist_too = needs_unidist_too or needs_own
            if isinstance(new, cst.Import):
                renamed.append(new)
            elif new is not None:
                by_module.setdefault(new[0], []).append(new[1])
        if not needs_unidist_too and not renamed and by_module == {module: list(node.names)}:
            return
        statements = [
            node.with_changes(
                module=dotted(module_name),
                names=aliases if len(aliases) == len(node.names) else without_trailing_comma(aliases),
                **({} if len(aliases) == len(node.names) else {"lpar": None, "rpar": None}),
            )
            for module_name, aliases in by_module.items()
        ]
        self._replace_import(node, [*renamed, *statements], needs_unidist_too)

    def _from_sparkdl(self, node: cst.ImportFrom, module: str) -> None:
        """Change ``from sparkdl import HorovodRunner``; sparkdl has much else."""
        names = [] if isinstance(node.names, cst.ImportStar) else [full_name(alias.name) for alias in node.names]
        if names and all(drop_in_name_of(f"{module}.{name}") for name in names):
            self._replace_import(node, [node.with_changes(module=dotted(drop_in_name_of(module) or module))], False)

    def _from_import_name(
        self, node: cst.ImportFrom, module: str, alias: cst.ImportAlias
    ) -> tuple[cst.Import | tuple[str, cst.ImportAlias] | None, bool]:
        """Return what replaces one name, as a module and a name of it, and whether ``import unidist`` is needed too."""
        name = full_name(alias.name)
        bound = full_name(alias.asname.name) if alias.asname else name
        whole = f"{module}.{name}"
        if self._is_unused(node, whole, bound):
            return None, False
        if self._is_gone(bound):
            return None, True
        meaning, target, used = symbol_of(whole), drop_in_name_of(whole), self._is_used(bound)
        if bound in self._context.names.rebound and target is not None:
            self._remark(alias, bound, _REBOUND)
        needs_unidist_too = False
        if meaning is not None and bound not in self._still_used:
            if meaning != "" or bound in self._context.names.import_only:
                if used and bound not in self._exported:
                    return None, True
                needs_unidist_too = used
                if target is not None:
                    self._remark(alias, bound, _REEXPORTED)
            elif self._context.aliases_are_native and is_horovod(whole):
                asname = None if bound in self._context.renamed_names else cst.AsName(cst.Name(bound))
                return cst.Import([cst.ImportAlias(cst.Name("unidist"), asname)]), False
        if target is None:
            if is_horovod(whole):
                self._remark(node, whole, _NOT_IN_DROP_IN)
            return (module, alias), needs_unidist_too
        if meaning is None:
            self._remark_drop_in(alias, whole)
        parent, _, last = target.rpartition(".")
        if last != name:  # `from horovod import torch`: what it is called here stays
            asname = alias.asname or cst.AsName(cst.Name(name))
            alias = alias.with_changes(name=cst.Name(last), asname=None if full_name(asname.name) == last else asname)
        return (parent, alias), needs_unidist_too or (meaning == "" and used)

    def _replace_import(
        self, node: cst.Import | cst.ImportFrom, statements: Sequence[cst.BaseSmallStatement], needs_unidist_too: bool
    ) -> None:
        """Replace an import by others, and by ``import unidist`` if that is needed and not there yet."""
        statement = self._tree.statement(node)
        block = next(above for above in self._tree.parents(node) if isinstance(above, (cst.Module, cst.IndentedBlock)))
        added = needs_unidist_too and id(block) not in self._blocks_with_unidist
        if added:
            self._blocks_with_unidist.add(id(block))
        new = [*([cst.Import([cst.ImportAlias(cst.Name("unidist"))])] if added else []), *statements]
        if statement is None:  # it shares its line
            self._context.edits.replace(node, lambda updated: cst.FlattenSentinel(new or [cst.Pass()]))
        elif not new:
            self._remove(statement)
        else:
            lines = [cst.SimpleStatementLine([each]) for each in new]

            def change(updated: cst.SimpleStatementLine) -> cst.FlattenSentinel[cst.SimpleStatementLine]:
                first = lines[0].with_changes(leading_lines=updated.leading_lines)
                *rest, last = [first, *lines[1:]]
                return cst.FlattenSentinel([*rest, last.with_changes(trailing_whitespace=updated.trailing_whitespace)])

            self._context.edits.replace(statement, change)

    def _remove(self, statement: Statement) -> None:
        """Remove an import, with a ``try`` that contains nothing else."""
        match self._tree.parent(self._tree.parent(statement)):
            case cst.Try(cst.IndentedBlock([_]), orelse=None, finalbody=None) as alone:
                self._context.edits.remove(alone)
            case _:
                self._context.edits.remove(statement)

    # -------------------------------------------------------------------------------- uses
    def attribute(self, node: cst.Attribute) -> None:
        """Change ``horovod.torch.Compression`` after ``import horovod.torch``, where it stays on the drop-in."""
        first, written = root_name(node), full_name(node)
        name = f"horovod{written[len(first) :]}" if first in self._packages else written
        if not name.startswith("horovod.") or name not in self._tree.imported(node):
            return
        if self._is_module(node):
            self._context.edits.replace(node, cst.Name("unidist"))
            return
        longer = self._tree.method_of(node)
        if longer is not None and drop_in_name_of(f"{name}.{longer.attr.value}"):
            return  # the longest name decides
        if in_import(self._tree, node) or node in self._context.gone:
            return
        target = drop_in_name_of(name)
        if self._context.edits.is_changed(node) or target is None or not self._can_move(name):
            return
        if symbol_of(name) is None:
            self._remark_drop_in(node, name)
        self._context.edits.replace(node, dotted(target.replace("unidist.hvd", self._drop_in_name(first), 1)))

    def module(self, node: cst.Name) -> None:
        """Change ``self.hvd = hvd``: the module itself."""
        if self._is_module(node):
            self._context.edits.replace(node, lambda updated: updated.with_changes(value="unidist"))

    def string(self, node: cst.SimpleString, value: str) -> None:
        """Change ``importlib.import_module("horovod.torch")``."""
        if not is_horovod(value) and value != "unidist.hvd":
            return
        argument = self._tree.parent(node)
        call = self._tree.parent(argument)
        if not isinstance(call, cst.Call) or called_name(call) not in _LOOKUPS:
            reported = any(each.line == self._tree.line(node) for each in self._context.edits.remarks)
            if is_horovod(value) and not (reported or isinstance(argument, cst.Expr)):
                self._remark(node, node.value, _STRING)
            return
        target = drop_in_name_of(value) or {"horovod": "unidist.hvd", "unidist.hvd": value}.get(value)
        if self._context.aliases_are_native and self._native and (value == "horovod" or symbol_of(value) == ""):
            target = "unidist"
        if target is None:
            self._remark(node, value, _NOT_IN_DROP_IN)
        elif target != value:
            self._context.edits.replace(node, node.with_changes(value=node.value.replace(value, target)))

    # --------------------------------------------------------------------------------
    def finish(self) -> None:
        """Add ``import unidist`` at the top for code that no import of Horovod serves, and ``import contextlib``."""
        context = self._context
        unserved = [node for node in context.needs_unidist if not context.imports_for(node)]
        if context.needs_contextlib and not self._imports("contextlib"):
            add_import(context.edits, "contextlib")
        if unserved and id(self._tree.module) not in self._blocks_with_unidist:
            add_import(context.edits, "unidist")

    def _imports(self, name: str) -> bool:
        return any(
            each.name == name and each.alias.asname is None and isinstance(each.node, cst.Import)
            for each in imports_of(self._tree)
            if self._tree.block(self._tree.statement(each.node) or each.node) is self._tree.module
        )

    def _longest_attributes(self) -> Iterator[cst.Attribute]:
        for node in self._tree.all(cst.Attribute):
            parent = self._tree.parent(node)
            longer = isinstance(parent, cst.Attribute) and self._tree.imported(parent)
            if not longer and not in_import(self._tree, node):
                yield node

    def _remark_drop_in(self, node: cst.CSTNode, name: str) -> None:
        if drop_in_name_of(name) not in _OWN:
            self._remark(node, name, _RUN if name.endswith(".run") else _DROP_IN)

    def _remark(self, node: cst.CSTNode, name: str, reason: tuple[str, str]) -> None:
        if self._context.native or reason is _NOT_IN_DROP_IN:
            self._context.edits.remark(node, name, *reason)


def _named_in_strings(context: Context) -> set[str]:
    """Return names in the strings of ``__all__``, ``eval``, ``exec`` and ``globals()``."""
    found: set[str] = set()
    for text, value in context.tree.strings():
        argument = context.tree.parent(text)
        call = context.tree.parent(argument)
        evaluated = isinstance(call, cst.Call) and full_name(call.func) in ("eval", "exec", "getattr", "setattr")
        listed = any(
            isinstance(above, cst.Assign) and context.text(above.targets[0].target) == "__all__"
            for above in context.tree.parents(text)
        )
        if evaluated or listed or isinstance(argument, cst.Index):
            found |= set(re.findall(r"\w+", value))
    return found


def add_import(edits: Edits, name: str, before: Statement | None = None) -> None:
    """Add ``import NAME`` before a statement, or after the docstring and imports with which the module begins."""
    body = edits.tree.module.body
    head = list(takewhile(_is_head, body))
    if before is None and head:
        edits.append(head[-1], f"import {name}")
    elif before is not None or body:
        edits.insert(before or body[0], f"import {name}")


def _is_head(statement: cst.CSTNode) -> bool:
    """Return whether a statement is the docstring or one of the imports at the beginning of a module."""
    if not isinstance(statement, cst.SimpleStatementLine):
        return False
    first = statement.body[0]
    docstring = isinstance(first, cst.Expr) and isinstance(first.value, (cst.SimpleString, cst.ConcatenatedString))
    return docstring or isinstance(first, (cst.Import, cst.ImportFrom))
