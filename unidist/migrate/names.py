"""Horovod's names in a module: how they get there, by imports and aliases, and what each use means."""

from __future__ import annotations

from dataclasses import dataclass, field

import libcst as cst

from unidist.migrate.flow import assignments, destinations, follow, is_target
from unidist.migrate.syntax import SyntaxTree, bound_name, full_name, imports_of, module_of, of_tree

#: Submodules of horovod.torch whose calls it exports itself.
_SUBMODULES = ("mpi_ops", "functions", "optimizer", "compression", "sync_batch_norm", "process_sets")
#: Functions that import a module by its name.
IMPORTERS = ("import_module", "__import__")


def is_horovod(name: str) -> bool:
    """Return whether a dotted name is Horovod's."""
    return name == "horovod" or name.startswith("horovod.")


def symbol_of(name: str) -> str | None:
    """Return the part of a full name within ``horovod.torch``: ``""`` for the module, ``Compression.fp16``; else None.

    The drop-in's names mean the same.
    """
    for prefix in ("horovod.torch", "unidist.hvd"):
        if name == prefix:
            return ""
        if name.startswith(f"{prefix}."):
            inner, _, rest = name[len(prefix) + 1 :].partition(".")
            return rest if inner in _SUBMODULES else name[len(prefix) + 1 :]
    return None


@dataclass
class Names:
    """Horovod's names in a module."""

    #: Uses of the calls and constants, longest names only: ``hvd.rank``, ``self.hvd.Compression.fp16``, ``rank``.
    symbols: dict[cst.BaseExpression, str] = field(default_factory=dict)
    #: Calls that the script replaces by something of its own: ``hvd.allreduce = traced``.
    replaced: set[str] = field(default_factory=set)
    #: The module itself as a value: ``self.hvd = hvd``, ``if hvd:``.
    modules: list[cst.BaseExpression] = field(default_factory=list)
    #: Names that imports bind to the module or to one of its calls, and that nothing else binds.
    import_only: set[str] = field(default_factory=set)
    #: Variables that hold the module: ``.hvd`` after ``self.hvd = hvd``.
    aliases: set[str] = field(default_factory=set)
    #: Imported names that something else binds too: calls through them stay, on the drop-in.
    rebound: set[str] = field(default_factory=set)
    #: The statements that import Horovod or a part of it.
    imports: list[cst.Import | cst.ImportFrom] = field(default_factory=list)
    #: The calls that do: ``importlib.import_module("horovod.torch")``.
    dynamic_imports: list[cst.Call] = field(default_factory=list)
    #: Where the module is passed on and cannot be followed.
    escapes: list[cst.BaseExpression] = field(default_factory=list)


def find_names(tree: SyntaxTree) -> Names:
    """Return all uses of Horovod's names."""
    names = Names(
        imports=horovod_imports(tree),
        dynamic_imports=[call for call in tree.all(cst.Call) if _imports_module(tree, call)],
    )
    flow, escapes = follow(tree, _starts(tree, names)), names.escapes
    names.aliases, names.escapes = flow.variables, [*escapes, *flow.escapes]
    for node in tree.all((cst.Name, cst.Attribute)):
        if in_import(tree, node) or root_name(node) in names.rebound:
            continue
        found, set_here = _symbol_of_node(tree, names, node), is_target(tree, node)
        above = tree.parent(node)
        longer = isinstance(above, cst.Attribute) and _symbol_of_node(tree, names, above) is not None
        if found is None or longer or (set_here and not (isinstance(node, cst.Attribute) and found)):
            continue
        if not found:
            names.modules.append(node)
            continue
        names.symbols[node] = found
        names.replaced |= {found} if set_here else set()
    names.replaced |= _replaced_by_name(tree, names)
    return names


def _starts(tree: SyntaxTree, names: Names) -> set[str]:
    """Return the variables that are given the module; note names that something else binds, and where it escapes."""
    bound = imported_names(tree)
    in_classes = {bound_name(each.alias) for each in imports_of(tree) if is_in_class(tree, each.node)}
    held = [node for node in tree.all(cst.Name) if any(symbol_of(name) is not None for name in tree.imported(node))]
    also_set = {node.value for node in held if node.value in bound and tree.variable(node) is not None}
    also_set |= {item.name.value for node in tree.all(cst.Global) for item in node.names} & bound
    modules = {root_name(node) for node in held if "" in map(symbol_of, tree.imported(node))}
    names.rebound = _also_bound_elsewhere(tree, bound) | (also_set - modules)
    also_set = (also_set - names.rebound) | (in_classes & bound)
    names.import_only = bound - also_set - names.rebound
    starts = {variable for node in tree.all(cst.Name) if node.value in also_set and (variable := tree.variable(node))}
    starts |= {f".{name}" for name in in_classes & bound}
    for node in tree.all((cst.Name, cst.Attribute, cst.Call)):
        if not in_import(tree, node) and _is_module_as_value(tree, names, node):
            reached = destinations(tree, node)
            starts.update(reached or ())
            names.escapes += [node] if reached is None else []
    return starts


def _is_module_as_value(tree: SyntaxTree, names: Names, node: cst.BaseExpression) -> bool:
    """``hvd`` in ``self.hvd = hvd``, and ``import_module("horovod.torch")``."""
    if isinstance(node, cst.Call) or "" not in map(symbol_of, tree.imported(node)):
        return _imports_module(tree, node)
    return root_name(node) not in names.rebound and not isinstance(tree.parent(node), cst.Attribute)


def _replaced_by_name(tree: SyntaxTree, names: Names) -> set[str]:
    """``setattr(hvd, "allreduce", traced)``, ``patch("horovod.torch.allreduce")``."""
    found = set()
    for call in tree.all(cst.Call):
        strings = [str(arg.value.evaluated_value) for arg in call.args if isinstance(arg.value, cst.SimpleString)]
        last = call.func.attr.value if isinstance(call.func, cst.Attribute) else full_name(call.func)
        if last in ("setattr", "object", "delattr") and any(arg.value in names.modules for arg in call.args):
            found |= set(strings[:1])
        elif last in ("patch", "setattr"):
            found |= {name for each in strings if (name := symbol_of(each))}
    return found


def _also_bound_elsewhere(tree: SyntaxTree, bound: set[str]) -> set[str]:
    """Imported names of Horovod's that other imports, functions, classes or values at module level bind too.

    ``hvd = None`` beside the import does not count.
    """
    found = {
        each.name.value
        for each in tree.all((cst.FunctionDef, cst.ClassDef))
        if tree.function(each) is tree.module
        and not any(isinstance(above, cst.ClassDef) for above in tree.parents(each))
    }
    functions = [tree.function(each) for each in horovod_imports(tree)]
    found |= {
        target.value
        for value, target in assignments(tree)
        if isinstance(target, cst.Name)
        and target.value in bound
        and not _is_module_or_none(tree, value)
        and any(tree.function(target) is each for each in functions)
    }
    others = (each for each in imports_of(tree) if symbol_of(each.name) is None)
    found |= {bound_name(each.alias) for each in others if each.alias.asname or isinstance(each.node, cst.ImportFrom)}
    return found & bound


def _is_module_or_none(tree: SyntaxTree, value: cst.BaseExpression) -> bool:
    if isinstance(value, cst.IfExp):
        return _is_module_or_none(tree, value.body) and _is_module_or_none(tree, value.orelse)
    constant = isinstance(value, cst.Name) and value.value in ("None", "False", "True")
    return constant or _imports_module(tree, value) or any(symbol_of(name) is not None for name in tree.imported(value))


def is_in_class(tree: SyntaxTree, node: cst.CSTNode) -> bool:
    """Return whether an import is a statement of a class, and so binds attributes of the class."""
    return isinstance(tree.parent(tree.parent(tree.parent(node))), cst.ClassDef)


def imported_names(tree: SyntaxTree) -> set[str]:
    """Return names that imports bind to ``horovod.torch``, or to something in it."""
    found = [each for each in imports_of(tree) if symbol_of(each.name) is not None]
    return {each.bound for each in found if isinstance(each.node, cst.ImportFrom) or each.alias.asname}


def horovod_imports(tree: SyntaxTree) -> list[cst.Import | cst.ImportFrom]:
    """Return the statements that import Horovod, or unidist."""

    def modules(node: cst.Import | cst.ImportFrom) -> list[str]:
        return [module_of(node)] if isinstance(node, cst.ImportFrom) else [full_name(each.name) for each in node.names]

    found = tree.all((cst.Import, cst.ImportFrom))
    return [node for node in found if {name.split(".")[0] for name in modules(node)} & {"horovod", "unidist"}]


def _imports_module(tree: SyntaxTree, value: cst.CSTNode) -> bool:
    """``importlib.import_module("horovod.torch")``."""
    if not isinstance(value, cst.Call) or full_name(value.func).split(".")[-1] not in IMPORTERS or not value.args:
        return False
    name = value.args[0].value
    return isinstance(name, cst.SimpleString) and symbol_of(str(name.evaluated_value)) == ""


def in_import(tree: SyntaxTree, node: cst.CSTNode) -> bool:
    """Return whether a node is a part of an import statement."""
    return id(node) in _in_imports(tree)


@of_tree
def _in_imports(tree: SyntaxTree) -> set[int]:
    found: set[int] = set()
    for kind in (cst.Import, cst.ImportFrom):
        for statement in tree.all(kind):
            first, end = tree.span(statement)
            found.update(map(id, tree.nodes[first + 1 : end]))
    return found


def root_name(node: cst.CSTNode) -> str:
    """Return the name that a dotted name begins with; empty for other expressions."""
    while isinstance(node, cst.Attribute):
        node = node.value
    return node.value if isinstance(node, cst.Name) else ""


def _symbol_of_node(tree: SyntaxTree, names: Names, node: cst.CSTNode) -> str | None:
    for name in tree.imported(node):
        if (found := symbol_of(name)) is not None and isinstance(node, (cst.Name, cst.Attribute)):
            return found
    if tree.variable(node) in names.aliases:
        return ""
    if isinstance(node, cst.Attribute):
        above = _symbol_of_node(tree, names, node.value)
        if above is not None and not tree.imported(node):
            return f"{above}.{node.attr.value}" if above else node.attr.value
    return None
