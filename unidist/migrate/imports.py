"""The imports: of unidist where Horovod's names are gone, of the drop-in where some are left."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

import libcst as cst

from unidist.migrate.code import dotted, full_name
from unidist.migrate.names import IMPORTERS, in_import, is_horovod, moved, root_name, symbol
from unidist.migrate.site import Site

_FINDERS = {*IMPORTERS, "find_spec", "importorskip"}
_NO_PLACE = "it has no place in the drop-in, which stands for horovod.torch alone"
_ELSEWHERE = "this file imports it for others, which may import it from here: it is the drop-in's"
_BOUND_OTHERWISE = "this name is bound to something else too: what is called by it stays the drop-in's"
_BY_HAND = "replace it by hand, or keep Horovod for it"
_DROP_IN = ("unidist has no call of this meaning: it is the drop-in's", "keep it, or find another way")
_RUN = ("unidist starts no processes: it is the drop-in's", "start the script with torchrun")


def change_imports(site: Site, exported: Collection[str]) -> None:
    """Move every import of Horovod's; what the drop-in has no name for stays and is reported."""
    imports = _Imports(site, exported)
    for node in site.code.nodes:
        if isinstance(node, cst.Import):
            imports.plain(node)
        elif isinstance(node, cst.ImportFrom):
            imports.names(node)
        elif isinstance(node, cst.Attribute):
            imports.attribute(node)
        elif isinstance(node, cst.SimpleString):
            imports.string(node)
        elif isinstance(node, cst.Name):
            imports.module(node)
    imports.finish()


class _Imports:
    def __init__(self, site: Site, exported: Collection[str]) -> None:
        self._site = site
        #: Names that other files import from this one.
        self._exported = {*exported, *_named_in_strings(site)}
        self._code = site.code
        #: Names by which something of Horovod's is still used.
        self._left = {root_name(use) for use in site.left()} | site.names.kept
        if not site.through_holders:
            self._left |= {root_name(node) for node in site.names.modules}
        #: The names of the bare package, and those that are used without a part of it, as in ``if horovod:``.
        self._packages = {
            full_name(alias.asname.name) if alias.asname else "horovod"
            for node in self._code.all(cst.Import) for alias in node.names if full_name(alias.name) == "horovod"
        }  # fmt: skip
        self._whole = {
            node.value for node in self._code.all(cst.Name) if node.value in self._packages and self._is_whole(node)
        }
        parts = [
            (node, name)
            for node in self._longest()
            for name in self._code.imported(node)
            if name.startswith("horovod.")
        ]
        #: What hangs on the bare package and cannot move, and the names by which something of the drop-in's beside the calls is used.
        self._bare = {name for _, name in parts if moved(name) is None}
        self._others = {root_name(node) for node, name in parts if symbol(name) is None and self._moves(name)}
        self._present = {
            id(self._code.block(statement)) for node in self._code.all(cst.Import)
            if (statement := self._code.statement(node)) and any(full_name(a.name) == "unidist" and not a.asname for a in node.names)
        }  # fmt: skip
        #: Imports beside which ``import unidist`` must stand for code elsewhere.
        self._giving = {each for place in site.needing for each in site.importers(place)}
        self._native = bool(set(site.names.symbols) - set(site.left())) or (
            site.names.modules != [] and site.through_holders
        )

    # -------------------------------------------------------------------------------- statements
    def plain(self, node: cst.Import) -> None:
        """``import horovod.torch as hvd``."""
        aliases: list[cst.ImportAlias] = []
        own = node in self._giving
        for alias in node.names:
            name, bound = full_name(alias.name), full_name(alias.asname.name) if alias.asname else None
            if symbol(name) is None and not is_horovod(name):
                aliases.append(alias)
            elif symbol(name) is not None:
                new, needs_own = self._module(alias, name, bound)
                aliases += new
                own = own or needs_own
            elif name == "horovod":
                new, needs_own = self._package(node, alias, bound or name)
                aliases += new
                own = own or needs_own
            elif moved(name) is not None:
                self._note_other(alias, name)
                aliases.append(alias.with_changes(name=dotted(moved(name) or "")))
            else:
                aliases.append(alias)
                self._note_left(node, name)
        if list(node.names) != aliases or own:
            self._put(node, [node.with_changes(names=_closed(aliases))] if aliases else [], own)

    def _module(self, alias: cst.ImportAlias, name: str, bound: str | None) -> tuple[list[cst.ImportAlias], bool]:
        """What stands for ``horovod.torch``, and whether ``import unidist`` does too."""
        target = moved(name) or name
        if target == name and is_horovod(name):
            self._note_left(alias, name)
            return [alias], False
        kept = alias if target == name else alias.with_changes(name=dotted(target))
        if bound in self._site.names.kept:
            self._note_kept(alias, bound or "")
            return [kept], False
        mixed = bound is not None and bound not in self._site.names.clean
        if mixed and self._site.through_holders:
            return [alias.with_changes(name=cst.Name("unidist"))], False
        first = bound or name.split(".")[0]
        if first in self._left | self._others or (mixed and not self._site.through_holders):
            return [kept], self._native and self._is_used(first) and not mixed
        exported = first in self._exported or not self._is_used(first)
        if exported:
            self._note_exported(alias, first)
        return [kept] if exported else [], self._is_used(first)

    def _package(self, node: cst.Import, alias: cst.ImportAlias, first: str) -> tuple[list[cst.ImportAlias], bool]:
        """What stands for ``horovod`` itself, and whether ``import unidist`` does too."""
        kept, word = [], self._word(first)
        if self._bare:
            kept.append(alias)
            self._note_left(node, "horovod")
        if first in self._left | self._others or (first in self._whole and not self._bare):
            asname = None if word == "unidist.hvd" else cst.AsName(cst.Name(word))
            there = asname is None and any(full_name(each.name) == word and not each.asname for each in node.names)
            kept += [] if there else [cst.ImportAlias(dotted("unidist.hvd"), asname)]
            return kept, asname is not None and self._is_used(first)
        return kept, not kept or self._is_used(first)

    def _word(self, first: str) -> str:
        """What the drop-in is called where the package was called so."""
        renamed = not self._bare and first in self._packages and (first != "horovod" or first in self._whole)
        return first if renamed else "unidist.hvd"

    def _moves(self, name: str) -> bool:
        """Whether a name becomes the drop-in's; what else hangs on the package stays there together."""
        return moved(name) is not None and (not self._bare or name.startswith(("horovod.torch", "horovod.common")))

    def _is_whole(self, node: cst.Name) -> bool:
        parent = self._code.parent(node)
        named = isinstance(parent, cst.Attribute) or (isinstance(parent, cst.Arg) and parent.keyword is node)
        return not named and not in_import(self._code, node)

    def _is_used(self, first: str) -> bool:
        """Whether a name leads to something that is unidist's own from now on."""
        called = any(root_name(use) == first and self._site.is_settled(use) for use in self._site.names.symbols)
        return called or any(root_name(node) == first and self._is_module(node) for node in self._site.names.modules)

    def _is_module(self, node: cst.BaseExpression) -> bool:
        """Whether this is the module itself, as in ``self.hvd = hvd``, and unidist's from now on."""
        return (
            node in self._site.names.modules
            and self._site.through_holders
            and (isinstance(node, cst.Attribute) or root_name(node) in self._site.names.clean)
            and any(symbol(name) == "" for name in self._code.imported(node))
        )

    def names(self, node: cst.ImportFrom) -> None:
        """``from horovod.torch import rank``."""
        module = full_name(node.module) if node.module is not None and not node.relative else ""
        if not is_horovod(module) and symbol(module) is None and module != "unidist":
            return
        if isinstance(node.names, cst.ImportStar):
            if moved(module) is None and is_horovod(module):
                self._note_left(node, f"{module}.*")
            elif is_horovod(module):
                self._put(node, [node.with_changes(module=dotted(moved(module) or module))], node in self._giving)
            return
        renamed: list[cst.Import] = []
        places: dict[str, list[cst.ImportAlias]] = {}
        own = node in self._giving
        for alias in node.names:
            new, needs_own = self._name(node, module, alias)
            own = own or needs_own
            if isinstance(new, cst.Import):
                renamed.append(new)
            elif new is not None:
                places.setdefault(new[0], []).append(new[1])
        if not own and not renamed and places == {module: list(node.names)}:
            return
        statements = [
            node.with_changes(
                module=dotted(place), names=aliases if len(aliases) == len(node.names) else _closed(aliases),
                **({} if len(aliases) == len(node.names) else {"lpar": None, "rpar": None}),
            )
            for place, aliases in places.items()
        ]  # fmt: skip
        self._put(node, [*renamed, *statements], own)

    def _name(
        self, node: cst.ImportFrom, module: str, alias: cst.ImportAlias
    ) -> tuple[cst.Import | tuple[str, cst.ImportAlias] | None, bool]:
        """What stands for one of the names, as a module and a name of it, and whether ``import unidist`` does too."""
        name = full_name(alias.name)
        bound = full_name(alias.asname.name) if alias.asname else name
        whole = f"{module}.{name}"
        meaning, target, used = symbol(whole), moved(whole), self._is_used(bound)
        if bound in self._site.names.kept and target is not None:
            self._note_kept(alias, bound)
        own = False
        if meaning is not None and bound not in self._left:
            if meaning != "" or bound in self._site.names.clean:
                if used and bound not in self._exported:
                    return None, True
                own = used
                if target is not None:
                    self._note_exported(alias, bound)
            elif self._site.through_holders and is_horovod(whole):
                return cst.Import([cst.ImportAlias(cst.Name("unidist"), cst.AsName(cst.Name(bound)))]), False
        if target is None:
            if is_horovod(whole):
                self._note_left(node, whole)
            return (module, alias), own
        if meaning is None:
            self._note_other(alias, whole)
        parent, _, last = target.rpartition(".")
        if last != name:  # `from horovod import torch`: what it is called here stays
            asname = alias.asname or cst.AsName(cst.Name(name))
            alias = alias.with_changes(name=cst.Name(last), asname=None if full_name(asname.name) == last else asname)
        return (parent, alias), own or (meaning == "" and used)

    def _put(self, node: cst.Import | cst.ImportFrom, statements: Sequence[cst.BaseSmallStatement], own: bool) -> None:
        """Other imports in the place of one."""
        statement = self._code.statement(node)
        block = next(above for above in self._code.parents(node) if isinstance(above, (cst.Module, cst.IndentedBlock)))
        added = own and id(block) not in self._present
        if added:
            self._present.add(id(block))
        new = [*([cst.Import([cst.ImportAlias(cst.Name("unidist"))])] if added else []), *statements]
        if statement is None:  # it shares its line
            self._site.edits.replace(node, lambda updated: cst.FlattenSentinel(new or [cst.Pass()]))
        elif not new:
            self._remove(statement)
        else:
            lines = [cst.SimpleStatementLine([each]) for each in new]

            def change(updated: cst.SimpleStatementLine) -> cst.FlattenSentinel[cst.SimpleStatementLine]:
                first = lines[0].with_changes(leading_lines=updated.leading_lines)
                *rest, last = [first, *lines[1:]]
                return cst.FlattenSentinel([*rest, last.with_changes(trailing_whitespace=updated.trailing_whitespace)])

            self._site.edits.replace(statement, change)

    def _remove(self, statement: cst.SimpleStatementLine | cst.BaseCompoundStatement) -> None:
        """Take an import away, and the ``try`` that was there for it alone."""
        above = self._code.parent(self._code.parent(statement))
        alone = (
            isinstance(above, cst.Try)
            and above.orelse is None
            and above.finalbody is None
            and len(above.body.body) == 1
        )
        self._site.edits.remove(above if alone and isinstance(above, cst.Try) else statement)

    # -------------------------------------------------------------------------------- uses
    def attribute(self, node: cst.Attribute) -> None:
        """``horovod.torch.rank()`` after ``import horovod.torch``: the name is part of the import."""
        first, written, parent = root_name(node), full_name(node), self._code.parent(node)
        name = f"horovod{written[len(first) :]}" if first in self._packages else written
        if not name.startswith("horovod.") or name not in self._code.imported(node):
            return
        if self._is_module(node):
            self._site.edits.replace(node, cst.Name("unidist"))
            return
        if isinstance(parent, cst.Attribute) and parent.value is node and moved(f"{name}.{parent.attr.value}"):
            return  # the longest name decides
        if in_import(self._code, node):
            return
        target = moved(name)
        if self._site.edits.is_changed(node) or target is None or not self._moves(name):
            return
        if symbol(name) is None:
            self._note_other(node, name)
        self._site.edits.replace(node, dotted(target.replace("unidist.hvd", self._word(first), 1)))

    def module(self, node: cst.Name) -> None:
        """``self.hvd = hvd``: the module itself."""
        if self._is_module(node):
            self._site.edits.replace(node, lambda updated: updated.with_changes(value="unidist"))

    def string(self, node: cst.SimpleString) -> None:
        """``importlib.import_module("horovod.torch")``."""
        value = node.evaluated_value
        if not isinstance(value, str) or (not is_horovod(value) and value != "unidist.hvd"):
            return
        argument = self._code.parent(node)
        call = self._code.parent(argument)
        finds = isinstance(call, cst.Call) and full_name(call.func).split(".")[-1] in _FINDERS
        reported = any(each.line == self._code.line(node) for each in self._site.edits.findings)
        if (
            not finds
            and not reported
            and is_horovod(value)
            and not isinstance(argument, cst.Expr)
            and self._site.reports_exports
        ):
            self._site.edits.note(node, node.value, "a string names a module of Horovod's", "see what reads it")
        if (
            not isinstance(argument, cst.Arg)
            or not isinstance(call, cst.Call)
            or full_name(call.func).split(".")[-1] not in _FINDERS
        ):
            return
        gone = self._site.through_holders and self._native
        target = "unidist.hvd" if value == "horovod" else moved(value) or (value if value == "unidist.hvd" else None)
        if gone and (value == "horovod" or symbol(value) == ""):
            target = "unidist"
        if target is None:
            self._note_left(node, value)
        elif target != value:
            self._site.edits.replace(node, node.with_changes(value=node.value.replace(value, target)))

    # --------------------------------------------------------------------------------
    def finish(self) -> None:
        """``import unidist`` at the top, for code that needs the name where no import of Horovod's stood."""
        site, module = self._site, self._code.module
        wanted = ["contextlib"] if site.needs_contextlib and not self._imports("contextlib") else []
        if any(not site.importers(place) for place in site.needing) and id(module) not in self._present:
            wanted.append("unidist")
        if not wanted:
            return
        last = None
        for statement in module.body:
            if not _is_head(statement):
                break
            last = statement
        for name in wanted:
            if last is not None:
                site.edits.append(last, f"import {name}")
            else:
                site.edits.insert(module.body[0], f"import {name}")

    def _imports(self, name: str) -> bool:
        return any(
            full_name(alias.name) == name and alias.asname is None
            for node in self._code.all(cst.Import) for alias in node.names
            if self._code.block(self._code.statement(node) or node) is self._code.module
        )  # fmt: skip

    def _longest(self) -> list[cst.Attribute]:
        found = []
        for node in self._code.all(cst.Attribute):
            parent = self._code.parent(node)
            longer = isinstance(parent, cst.Attribute) and self._code.imported(parent)
            if not longer and not in_import(self._code, node):
                found.append(node)
        return found

    def _note_kept(self, alias: cst.ImportAlias, name: str) -> None:
        if self._site.reports_exports:
            self._site.edits.note(alias, name, _BOUND_OTHERWISE, "give one of them another name, then migrate again")

    def _note_exported(self, alias: cst.ImportAlias, name: str) -> None:
        if self._site.reports_exports:
            self._site.edits.note(alias, name, _ELSEWHERE, "import unidist where it is used, then take this line out")

    def _note_other(self, node: cst.CSTNode, name: str) -> None:
        if self._site.reports_exports:
            self._site.edits.note(node, name, *(_RUN if name.endswith(".run") else _DROP_IN))

    def _note_left(self, node: cst.CSTNode, name: str) -> None:
        self._site.edits.note(node, name, _NO_PLACE, _BY_HAND)


def _named_in_strings(site: Site) -> set[str]:
    """Names that ``__all__``, ``eval``, ``exec`` and ``globals()`` have in strings."""
    found: set[str] = set()
    for text in site.code.all(cst.SimpleString):
        argument = site.code.parent(text)
        call = site.code.parent(argument)
        evaluated = isinstance(call, cst.Call) and full_name(call.func) in ("eval", "exec", "getattr", "setattr")
        listed = any(
            isinstance(above, cst.Assign) and site.text(above.targets[0].target) == "__all__"
            for above in site.code.parents(text)
        )
        if evaluated or listed or isinstance(argument, cst.Index):
            found |= set(re.findall(r"\w+", str(text.evaluated_value)))
    return found


def _is_head(statement: cst.CSTNode) -> bool:
    """The docstring and the imports with which a module begins."""
    if not isinstance(statement, cst.SimpleStatementLine):
        return False
    first = statement.body[0]
    docstring = isinstance(first, cst.Expr) and isinstance(first.value, (cst.SimpleString, cst.ConcatenatedString))
    return docstring or isinstance(first, (cst.Import, cst.ImportFrom))


def _closed(aliases: Sequence[cst.ImportAlias]) -> list[cst.ImportAlias]:
    """Without a comma behind the last."""
    return [*aliases[:-1], aliases[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)]
