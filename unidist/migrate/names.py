"""Horovod's names in a module: how it gets hold of them, and what each use means."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import libcst as cst

from unidist.hvd.alias import drop_in_name
from unidist.migrate.code import Code, full_name
from unidist.migrate.flow import assignments, destinations, follow, is_target

#: Where horovod.torch keeps the calls that it has under its own name too.
_INNER = ("mpi_ops", "functions", "optimizer", "compression", "sync_batch_norm", "process_sets")
#: What code calls to import a module by its name.
IMPORTERS = ("import_module", "__import__")


@cache
def moved(name: str) -> str | None:
    """The drop-in's name for one of Horovod's; None where it has none."""
    if name in ("horovod.run", "horovod.runner.run"):
        return "unidist.hvd.run"
    if name == "horovod.runner":
        return "unidist.hvd"
    target = drop_in_name(name)
    return target if target is not None and _is_there(target) else None


def _is_there(name: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    module, _, last = name.rpartition(".")
    try:
        found: object = import_module(module)
    except ImportError:
        return "." in module and _is_there(module) and hasattr(_found(module), last)
    try:
        return hasattr(found, last) or find_spec(name) is not None
    except (ImportError, NotImplementedError):  # hvd.elastic says that it is not there yet
        return False


def _found(name: str) -> object:
    module, _, last = name.rpartition(".")
    return getattr(import_module(module), last)


def is_horovod(name: str) -> bool:
    """Whether a dotted name is Horovod's."""
    return name == "horovod" or name.startswith("horovod.")


def symbol(name: str) -> str | None:
    """A full name's part within ``horovod.torch``: ``""`` for the module, ``allreduce``, ``Compression.fp16``; else None.

    The drop-in's names mean the same.
    """
    for prefix in ("horovod.torch", "unidist.hvd"):
        if name == prefix:
            return ""
        if name.startswith(f"{prefix}."):
            inner, _, rest = name[len(prefix) + 1 :].partition(".")
            return rest if inner in _INNER else name[len(prefix) + 1 :]
    return None


@dataclass
class Names:
    """Horovod's names in a module."""

    #: Uses of the calls and constants, longest names only: ``hvd.rank``, ``self.hvd.Compression.fp16``, ``rank``.
    symbols: dict[cst.BaseExpression, str] = field(default_factory=dict)
    #: Calls that the script puts something else in the place of: ``hvd.allreduce = traced``.
    replaced: set[str] = field(default_factory=set)
    #: The module itself as a value: ``self.hvd = hvd``, ``if hvd:``.
    modules: list[cst.BaseExpression] = field(default_factory=list)
    #: Names that are bound to the module, or to one of its calls, by imports and nothing else.
    clean: set[str] = field(default_factory=set)
    #: Variables that hold the module, by assignment or beside it.
    holders: set[str] = field(default_factory=set)
    #: Names that are bound to something else too: what is called by them stays, and is the drop-in's.
    kept: set[str] = field(default_factory=set)
    #: The statements that import it, or something in it.
    imports: list[cst.Import | cst.ImportFrom] = field(default_factory=list)
    #: The calls that do so by its name.
    loading: list[cst.Call] = field(default_factory=list)
    #: Where the module goes and cannot be followed.
    escapes: list[cst.BaseExpression] = field(default_factory=list)


def find(code: Code) -> Names:
    """All uses of Horovod's names."""
    names = Names(imports=_imports(code), loading=[call for call in code.all(cst.Call) if _imports_module(code, call)])
    bound = imported_names(code)
    set_otherwise = {
        node.value for node in code.all(cst.Name)
        if node.value in bound and code.variable(node) is not None and any(symbol(name) is not None for name in code.imported(node))
    }  # fmt: skip
    set_otherwise |= {item.name.value for node in code.all(cst.Global) for item in node.names} & bound
    modules = {root_name(node) for node in code.all(cst.Name) if "" in map(symbol, code.imported(node))}
    names.kept = _bound_otherwise(code, bound) | (set_otherwise - modules)
    set_otherwise -= names.kept
    in_classes = _imported_in_classes(code) & bound
    set_otherwise |= in_classes
    names.clean = bound - set_otherwise - names.kept
    starts = {
        variable for node in code.all(cst.Name)
        if node.value in set_otherwise and (variable := code.variable(node))
    }  # fmt: skip
    starts |= {f".{name}" for name in in_classes}
    for node in code.nodes:
        if not isinstance(node, (cst.Name, cst.Attribute, cst.Call)) or in_import(code, node):
            continue
        is_module = any(symbol(name) == "" for name in code.imported(node)) and not isinstance(node, cst.Call)
        if is_module and root_name(node) in names.kept:
            continue
        if (is_module and not isinstance(code.parent(node), cst.Attribute)) or _imports_module(code, node):
            reached = destinations(code, node)
            starts |= set(reached or ())
            if reached is None:
                names.escapes.append(node)
    flow = follow(code, starts)
    names.holders, names.escapes = flow.variables, [*names.escapes, *flow.escapes]
    for node in code.nodes:
        if not isinstance(node, (cst.Name, cst.Attribute)) or in_import(code, node):
            continue
        if is_target(code, node) and not (isinstance(node, cst.Attribute) and _symbol(code, names, node)):
            continue
        if root_name(node) in names.kept:
            continue
        found = _symbol(code, names, node)
        if found is None or (
            isinstance(code.parent(node), cst.Attribute) and _symbol(code, names, code.parent(node)) is not None
        ):
            continue
        if found:
            names.symbols[node] = found
            names.replaced |= {found} if is_target(code, node) else set()
        else:
            names.modules.append(node)
    names.replaced |= _replaced_by_name(code, names)
    return names


def _replaced_by_name(code: Code, names: Names) -> set[str]:
    """``setattr(hvd, "allreduce", traced)``, ``patch("horovod.torch.allreduce")``."""
    found = set()
    for call in code.all(cst.Call):
        strings = [str(arg.value.evaluated_value) for arg in call.args if isinstance(arg.value, cst.SimpleString)]
        last = call.func.attr.value if isinstance(call.func, cst.Attribute) else full_name(call.func)
        if last in ("setattr", "object", "delattr") and any(arg.value in names.modules for arg in call.args):
            found |= set(strings[:1])
        elif last in ("patch", "setattr"):
            found |= {name for each in strings if (name := symbol(each))}
    return found


def _bound_otherwise(code: Code, bound: set[str]) -> set[str]:
    """Names of Horovod's that other imports, functions, classes or values of the module's own level bind too; None is no value."""
    definitions: list[cst.FunctionDef | cst.ClassDef] = [*code.all(cst.FunctionDef), *code.all(cst.ClassDef)]
    found = {
        each.name.value for each in definitions
        if code.function(each) is code.module and not any(isinstance(above, cst.ClassDef) for above in code.parents(each))
    }  # fmt: skip
    found |= {
        target.value for value, target in assignments(code)
        if isinstance(target, cst.Name) and target.value in bound and not _is_module_or_none(code, value)
        and any(code.function(target) is code.function(each) for each in _imports(code))
    }  # fmt: skip
    for node in code.nodes:
        if not isinstance(node, (cst.Import, cst.ImportFrom)) or isinstance(node.names, cst.ImportStar):
            continue
        module = f"{full_name(node.module)}." if isinstance(node, cst.ImportFrom) and node.module else ""
        for alias in node.names:
            if symbol(module + full_name(alias.name)) is None and (alias.asname or module):
                found.add(full_name(alias.asname.name) if alias.asname else full_name(alias.name))
    return found & bound


def _is_module_or_none(code: Code, value: cst.BaseExpression) -> bool:
    if isinstance(value, cst.IfExp):
        return _is_module_or_none(code, value.body) and _is_module_or_none(code, value.orelse)
    constant = isinstance(value, cst.Name) and value.value in ("None", "False", "True")
    return constant or _imports_module(code, value) or any(symbol(name) is not None for name in code.imported(value))


def _imported_in_classes(code: Code) -> set[str]:
    """Names that are imported in the body of a class, and are its attributes."""
    return {
        full_name(alias.asname.name) if alias.asname else full_name(alias.name)
        for node in code.nodes if isinstance(node, (cst.Import, cst.ImportFrom)) and not isinstance(node.names, cst.ImportStar)
        for alias in node.names
        if isinstance(code.parent(code.parent(code.parent(node))), cst.ClassDef)
    }  # fmt: skip


def imported_names(code: Code) -> set[str]:
    """Names that imports bind to ``horovod.torch``, or to something in it."""
    found = set()
    for statement in code.nodes:
        if isinstance(statement, cst.Import):
            for alias in statement.names:
                if symbol(full_name(alias.name)) is not None and alias.asname:
                    found.add(full_name(alias.asname.name))
        elif (
            isinstance(statement, cst.ImportFrom)
            and statement.module
            and not isinstance(statement.names, cst.ImportStar)
        ):
            for alias in statement.names:
                if symbol(f"{full_name(statement.module)}.{full_name(alias.name)}") is not None:
                    found.add(full_name(alias.asname.name) if alias.asname else full_name(alias.name))
    return found


def _imports(code: Code) -> list[cst.Import | cst.ImportFrom]:
    """The statements that import Horovod, or unidist."""
    found: list[cst.Import | cst.ImportFrom] = []
    for node in code.nodes:
        if isinstance(node, cst.Import):
            modules = [full_name(alias.name) for alias in node.names]
        elif isinstance(node, cst.ImportFrom) and node.module is not None and not node.relative:
            modules = [full_name(node.module)]
        else:
            continue
        if any(is_horovod(name) or name.split(".")[0] == "unidist" for name in modules):
            found.append(node)
    return found


def _imports_module(code: Code, value: cst.CSTNode) -> bool:
    """``importlib.import_module("horovod.torch")``."""
    if not isinstance(value, cst.Call) or full_name(value.func).split(".")[-1] not in IMPORTERS or not value.args:
        return False
    name = value.args[0].value
    return isinstance(name, cst.SimpleString) and symbol(str(name.evaluated_value)) == ""


def in_import(code: Code, node: cst.CSTNode) -> bool:
    """Whether a node is a part of an import statement."""
    return any(isinstance(above, (cst.Import, cst.ImportFrom)) for above in code.parents(node))


def root_name(node: cst.CSTNode) -> str:
    """The name that a dotted name begins with; empty for other expressions."""
    while isinstance(node, cst.Attribute):
        node = node.value
    return node.value if isinstance(node, cst.Name) else ""


def _symbol(code: Code, names: Names, node: cst.CSTNode) -> str | None:
    for name in code.imported(node):
        if (found := symbol(name)) is not None and isinstance(node, (cst.Name, cst.Attribute)):
            return found
    if code.variable(node) in names.holders:
        return ""
    if isinstance(node, cst.Attribute):
        above = _symbol(code, names, node.value)
        if above is not None and not code.imported(node):
            return f"{above}.{node.attr.value}" if above else node.attr.value
    return None
