"""Data flow within a module: where a value may go, through assignments, arguments and results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import libcst as cst

from unidist.migrate.syntax import SyntaxTree, full_name, of_tree

#: Functions that read a value and keep no reference to it.
INSPECTING = {"print", "isinstance", "type", "id", "repr", "str", "len", "hasattr", "bool", "callable"}

#: What reads a value and keeps no reference to it.
_READING = (
    cst.Attribute, cst.Call, cst.Expr, cst.If, cst.While, cst.Assert, cst.Comparison, cst.ComparisonTarget,
    cst.UnaryOperation, cst.BooleanOperation, cst.FormattedStringExpression,
)  # fmt: skip


@dataclass
class Flow:
    """The variables that may hold a value, and their uses."""

    variables: set[str] = field(default_factory=set)
    #: Each use, in the order of the text; assignments to the variables are not among them.
    uses: list[cst.BaseExpression] = field(default_factory=list)
    #: Uses that pass the value on to where it cannot be followed.
    escapes: list[cst.BaseExpression] = field(default_factory=list)
    #: Values that are assigned to the variables, each with its target.
    assigned: list[tuple[cst.BaseExpression, cst.BaseExpression]] = field(default_factory=list)


def follow(tree: SyntaxTree, variables: Iterable[str]) -> Flow:
    """Follow what some variables hold."""
    flow = Flow()
    waiting = list(variables)
    by_variable = references(tree)
    while waiting:
        variable = waiting.pop()
        if variable in flow.variables:
            continue
        flow.variables.add(variable)
        for node in by_variable.get(variable, ()):
            if is_target(tree, node):
                continue
            flow.uses.append(node)
            found = destinations(tree, node)
            if found is None:
                flow.escapes.append(node)
            else:
                waiting += found
    flow.uses.sort(key=tree.position)
    flow.assigned = [pair for pair in assignments(tree) if tree.variable(pair[1]) in flow.variables]
    return flow


def is_on_the_way(tree: SyntaxTree, before: cst.CSTNode, node: cst.CSTNode) -> bool:
    """Return whether one node is before another in the same function, and not in another branch of an ``if``."""
    if tree.function(before) is not tree.function(node) or tree.position(before) > tree.position(node):
        return False
    both = (above for above in tree.parents(before) if isinstance(above, cst.If) and tree.is_inside(node, above))
    return all(tree.is_inside(before, above.body) == tree.is_inside(node, above.body) for above in both)


@of_tree
def references(tree: SyntaxTree) -> dict[str, list[cst.BaseExpression]]:
    """Return all nodes that read or set a variable, by variable."""
    found: dict[str, list[cst.BaseExpression]] = {}
    for node in tree.all((cst.Name, cst.Attribute)):
        if _is_part_of_name(tree, node):
            continue
        if (variable := tree.variable(node)) is not None:
            found.setdefault(variable, []).append(node)
    return found


def _is_part_of_name(tree: SyntaxTree, node: cst.CSTNode) -> bool:
    parent = tree.parent(node)
    named = (cst.Attribute, cst.FunctionDef, cst.ClassDef, cst.Param, cst.NameItem, cst.ImportAlias, cst.AsName)
    if isinstance(parent, cst.Attribute):
        return parent.attr is node
    if isinstance(parent, cst.Arg):
        return parent.keyword is node
    return isinstance(parent, named) and getattr(parent, "name", None) is node


def is_target(tree: SyntaxTree, node: cst.CSTNode) -> bool:
    """Return whether a variable is set here."""
    parent = tree.parent(node)
    while isinstance(parent, (cst.Element, cst.Tuple, cst.List, cst.StarredElement)):
        node, parent = parent, tree.parent(parent)
    if isinstance(parent, (cst.For, cst.CompFor, cst.AnnAssign, cst.AugAssign, cst.NamedExpr)):
        return parent.target is node
    return isinstance(parent, (cst.AssignTarget, cst.Del)) or (isinstance(parent, cst.AsName) and parent.name is node)


@of_tree
def assignments(tree: SyntaxTree) -> list[tuple[cst.BaseExpression, cst.BaseExpression]]:
    """Return each value with each target that ``=`` assigns it to; tuples element by element."""
    found: list[tuple[cst.BaseExpression, cst.BaseExpression]] = []
    for node in tree.all((cst.Assign, cst.AnnAssign, cst.NamedExpr)):
        if isinstance(node, cst.Assign):
            for target in node.targets:
                found += _unpacked(node.value, target.target)
        elif node.value is not None:
            found.append((node.value, node.target))
    return found


def assignments_of(tree: SyntaxTree, variable: str) -> list[tuple[cst.BaseExpression, cst.BaseExpression]]:
    """Return those to one variable."""
    return _assignments_by_variable(tree).get(variable, [])


def values_of(tree: SyntaxTree, node: cst.CSTNode | None) -> list[cst.BaseExpression]:
    """Return what a variable is assigned; nothing for other expressions."""
    variable = tree.variable(node) if node is not None else None
    return [value for value, _ in assignments_of(tree, variable)] if variable else []


def targets_of(tree: SyntaxTree, variable: str | None) -> list[cst.BaseExpression]:
    """Return the places that set a variable."""
    return [use for use in references(tree).get(variable or "", ()) if is_target(tree, use)]


def uses_of(tree: SyntaxTree, variable: str | None) -> list[cst.BaseExpression]:
    """Return the places that read a variable."""
    return [use for use in references(tree).get(variable or "", ()) if not is_target(tree, use)]


@of_tree
def _assignments_by_variable(tree: SyntaxTree) -> dict[str, list[tuple[cst.BaseExpression, cst.BaseExpression]]]:
    found: dict[str, list[tuple[cst.BaseExpression, cst.BaseExpression]]] = {}
    for pair in assignments(tree):
        if (variable := tree.variable(pair[1])) is not None:
            found.setdefault(variable, []).append(pair)
    return found


def _unpacked(
    value: cst.BaseExpression, target: cst.BaseExpression
) -> Iterator[tuple[cst.BaseExpression, cst.BaseExpression]]:
    sequence = (cst.Tuple, cst.List)
    if isinstance(target, sequence) and isinstance(value, sequence) and len(target.elements) == len(value.elements):
        for to, source in zip(target.elements, value.elements):
            yield from _unpacked(source.value, to.value)
    elif isinstance(target, sequence):
        for element in target.elements:
            yield value, element.value
    else:
        yield value, target


def destinations(tree: SyntaxTree, node: cst.BaseExpression) -> list[str] | None:
    """Return the variables to which a use passes the value; None if it goes somewhere unknown."""
    parent = tree.parent(node)
    if isinstance(parent, _READING):
        return []
    if isinstance(parent, cst.IfExp) and parent.test is node:
        return []
    if isinstance(parent, cst.Arg):
        return _parameters(tree, parent)
    if isinstance(parent, cst.Param) and parent.default is node:
        return [name for name in [tree.variable(parent.name)] if name]
    if isinstance(parent, (cst.Assign, cst.AnnAssign)):
        return _targets(tree, node)
    if isinstance(parent, cst.Return):
        return result_variables(tree, parent, None)
    if isinstance(parent, cst.Element) and isinstance(whole := tree.parent(parent), cst.Tuple):
        index = list(whole.elements).index(parent)
        above = tree.parent(whole)
        if isinstance(above, cst.Return):
            return result_variables(tree, above, index)
        if isinstance(above, cst.Assign):
            return _targets(tree, node)
    return None


def _targets(tree: SyntaxTree, value: cst.BaseExpression) -> list[str] | None:
    names = [tree.variable(target) for found, target in assignments(tree) if found is value]
    return [name for name in names if name] if names and all(names) else None


def _parameters(tree: SyntaxTree, argument: cst.Arg) -> list[str] | None:
    call = tree.parent(argument)
    if not isinstance(call, cst.Call):
        return [] if isinstance(call, cst.ClassDef) else None
    if full_name(call.func) in INSPECTING:
        return []
    called = callees(tree, call)
    if not called or argument.star:
        return None
    found = []
    for function in called:
        parameter = parameter_of(tree, function, call, argument)
        if parameter is None:
            return None
        found.append(parameter)
    return found


def callees(tree: SyntaxTree, call: cst.Call) -> list[cst.FunctionDef]:
    """Return the functions of this module that a call may call."""
    if isinstance(call.func, cst.Name):
        name = tree.variable(call.func)
        found = [tree.functions.get(name or ""), tree.functions.get(f"{name}.__init__")]
        return [function for function in found if function is not None]
    if isinstance(call.func, cst.Attribute) and not tree.imported(call.func):
        return _methods(tree).get(call.func.attr.value, [])
    return []


@of_tree
def _methods(tree: SyntaxTree) -> dict[str, list[cst.FunctionDef]]:
    found: dict[str, list[cst.FunctionDef]] = {}
    for function in tree.functions.values():
        if tree.is_method(function):
            found.setdefault(function.name.value, []).append(function)
    return found


def callers(tree: SyntaxTree, function: cst.CSTNode) -> list[cst.Call]:
    """Return the calls of this module that may call a function of it."""
    return _callers(tree).get(id(function), [])


@of_tree
def _callers(tree: SyntaxTree) -> dict[int, list[cst.Call]]:
    found: dict[int, list[cst.Call]] = {}
    for call in tree.all(cst.Call):
        for function in {id(each) for each in callees(tree, call)}:
            found.setdefault(function, []).append(call)
    return found


def parameter_of(tree: SyntaxTree, function: cst.FunctionDef, call: cst.Call, argument: cst.Arg) -> str | None:
    """Return the parameter, as a variable, that receives an argument."""
    names = [each.name.value for each in (*function.params.posonly_params, *function.params.params)]
    keywords = [*names, *(each.name.value for each in function.params.kwonly_params)]
    if argument.keyword is not None:
        name = argument.keyword.value if argument.keyword.value in keywords else None
    elif any(each.star for each in call.args):
        name = None
    else:
        index = list(call.args).index(argument) + tree.is_method(function)
        name = names[index] if index < len(names) else None
    qualified = _qualified_names(tree).get(id(function))
    return f"{qualified}.<locals>.{name}" if name and qualified else None


def passed_to(tree: SyntaxTree, variable: str) -> list[cst.BaseExpression]:
    """Return what the calls of this module pass for a parameter."""
    return _passed(tree).get(variable, [])


@of_tree
def _passed(tree: SyntaxTree) -> dict[str, list[cst.BaseExpression]]:
    found: dict[str, list[cst.BaseExpression]] = {}
    for call in tree.all(cst.Call):
        for function in callees(tree, call):
            for argument in call.args:
                if (parameter := parameter_of(tree, function, call, argument)) is not None:
                    found.setdefault(parameter, []).append(argument.value)
    return found


@of_tree
def _qualified_names(tree: SyntaxTree) -> dict[int, str]:
    return {id(function): name for name, function in reversed(tree.functions.items())}


def is_parameter(tree: SyntaxTree, variable: str | None) -> bool:
    """Return whether a variable is a parameter of some function."""
    return variable in _all_parameters(tree)


@of_tree
def _all_parameters(tree: SyntaxTree) -> set[str | None]:
    return {tree.variable(each.name) for each in tree.all(cst.Param)}


def result_variables(tree: SyntaxTree, statement: cst.Return, index: int | None) -> list[str] | None:
    """Return the variables to which the calls of a function assign its result."""
    function = tree.function(statement)
    calls = callers(tree, function)
    if not isinstance(function, cst.FunctionDef) or not calls:
        return None
    found = []
    for call in calls:
        parent = tree.parent(call)
        if not isinstance(parent, cst.Assign):
            return None
        for target in parent.targets:
            part: cst.BaseExpression | None = target.target
            if index is not None:
                whole = isinstance(part, (cst.Tuple, cst.List)) and index < len(part.elements)
                part = part.elements[index].value if whole and isinstance(part, (cst.Tuple, cst.List)) else None
            variable = tree.variable(part) if part is not None else None
            if variable is None:
                return None
            found.append(variable)
    return found
