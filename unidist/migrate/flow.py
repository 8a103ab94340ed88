"""Where in a module a value may go: through assignments, arguments and results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import libcst as cst

from unidist.migrate.code import Code, full_name

#: Functions that look at a value and keep nothing of it.
LOOKING = {"print", "isinstance", "type", "id", "repr", "str", "len", "hasattr", "bool", "callable"}


@dataclass
class Flow:
    """The variables that may hold a value, and what is done with them."""

    variables: set[str] = field(default_factory=set)
    #: Each use, in the order of the text; assignments to the variables are not among them.
    uses: list[cst.BaseExpression] = field(default_factory=list)
    #: Uses by which the value goes where it cannot be followed.
    escapes: list[cst.BaseExpression] = field(default_factory=list)
    #: Values that are assigned to the variables, each with its target.
    assigned: list[tuple[cst.BaseExpression, cst.BaseExpression]] = field(default_factory=list)


def follow(code: Code, variables: Iterable[str], skip: Callable[[cst.CSTNode], bool] = lambda node: False) -> Flow:
    """Follow what some variables hold.

    Args:
        skip: uses that are not to be followed or counted.
    """
    flow = Flow()
    waiting = list(variables)
    references = code_references(code)
    while waiting:
        variable = waiting.pop()
        if variable in flow.variables:
            continue
        flow.variables.add(variable)
        for node in references.get(variable, ()):
            if is_target(code, node) or skip(node):
                continue
            flow.uses.append(node)
            found = destinations(code, node)
            if found is None:
                flow.escapes.append(node)
            else:
                waiting += found
    flow.uses.sort(key=code.place)
    flow.assigned = [pair for pair in assignments(code) if code.variable(pair[1]) in flow.variables]
    return flow


@lru_cache(maxsize=2)
def code_references(code: Code) -> dict[str, list[cst.BaseExpression]]:
    """Every place where a variable is read or set, by variable."""
    found: dict[str, list[cst.BaseExpression]] = {}
    for node in code.nodes:
        if not isinstance(node, (cst.Name, cst.Attribute)) or _is_part_of_name(code, node):
            continue
        if (variable := code.variable(node)) is not None:
            found.setdefault(variable, []).append(node)
    return found


def _is_part_of_name(code: Code, node: cst.CSTNode) -> bool:
    parent = code.parent(node)
    named = (cst.Attribute, cst.FunctionDef, cst.ClassDef, cst.Param, cst.NameItem, cst.ImportAlias, cst.AsName)
    if isinstance(parent, cst.Attribute):
        return parent.attr is node
    if isinstance(parent, cst.Arg):
        return parent.keyword is node
    return isinstance(parent, named) and getattr(parent, "name", None) is node


def is_target(code: Code, node: cst.CSTNode) -> bool:
    """Whether a variable is set here."""
    parent = code.parent(node)
    while isinstance(parent, (cst.Element, cst.Tuple, cst.List, cst.StarredElement)):
        node, parent = parent, code.parent(parent)
    if isinstance(parent, (cst.For, cst.CompFor, cst.AnnAssign, cst.AugAssign, cst.NamedExpr)):
        return parent.target is node
    return isinstance(parent, (cst.AssignTarget, cst.Del)) or (isinstance(parent, cst.AsName) and parent.name is node)


@lru_cache(maxsize=2)
def assignments(code: Code) -> list[tuple[cst.BaseExpression, cst.BaseExpression]]:
    """Each value with each target that it goes to by ``=``; tuples part by part."""
    found: list[tuple[cst.BaseExpression, cst.BaseExpression]] = []
    for node in code.nodes:
        if isinstance(node, cst.Assign):
            for target in node.targets:
                found += _pairs(node.value, target.target)
        elif isinstance(node, (cst.AnnAssign, cst.NamedExpr)) and node.value is not None:
            found.append((node.value, node.target))
    return found


def _pairs(
    value: cst.BaseExpression, target: cst.BaseExpression
) -> Iterator[tuple[cst.BaseExpression, cst.BaseExpression]]:
    sequence = (cst.Tuple, cst.List)
    if isinstance(target, sequence) and isinstance(value, sequence) and len(target.elements) == len(value.elements):
        for left, right in zip(target.elements, value.elements):
            yield from _pairs(right.value, left.value)
    elif isinstance(target, sequence):
        for element in target.elements:
            yield value, element.value
    else:
        yield value, target


def destinations(code: Code, node: cst.BaseExpression) -> list[str] | None:
    """The variables that a use hands the value to; None where it goes somewhere unknown."""
    parent = code.parent(node)
    if isinstance(parent, (cst.Attribute, cst.Call, cst.Expr, cst.If, cst.While, cst.Assert)):
        return []
    if isinstance(parent, (cst.Comparison, cst.ComparisonTarget, cst.UnaryOperation, cst.BooleanOperation)):
        return []
    if isinstance(parent, cst.IfExp) and parent.test is node:
        return []
    if isinstance(parent, cst.Arg):
        return _parameters(code, parent)
    if isinstance(parent, cst.Param) and parent.default is node:
        return [name for name in [code.variable(parent.name)] if name]
    if isinstance(parent, (cst.Assign, cst.AnnAssign)):
        return _targets(code, node)
    if isinstance(parent, cst.Return):
        return results(code, parent, None)
    if isinstance(parent, cst.Element) and isinstance(whole := code.parent(parent), cst.Tuple):
        place = list(whole.elements).index(parent)
        above = code.parent(whole)
        if isinstance(above, cst.Return):
            return results(code, above, place)
        if isinstance(above, cst.Assign):
            return _targets(code, node)
    return None


def _targets(code: Code, value: cst.BaseExpression) -> list[str] | None:
    names = [code.variable(target) for found, target in assignments(code) if found is value]
    return [name for name in names if name] if names and all(names) else None


def _parameters(code: Code, argument: cst.Arg) -> list[str] | None:
    call = code.parent(argument)
    if not isinstance(call, cst.Call):
        return [] if isinstance(call, cst.ClassDef) else None
    if full_name(call.func) in LOOKING:
        return []
    called = callees(code, call)
    if not called or argument.star:
        return None
    found = []
    for function in called:
        parameter = parameter_of(code, function, call, argument)
        if parameter is None:
            return None
        found.append(parameter)
    return found


def callees(code: Code, call: cst.Call) -> list[cst.FunctionDef]:
    """The functions of this module that a call may mean."""
    if isinstance(call.func, cst.Name):
        name = code.variable(call.func)
        found = [code.functions.get(name or ""), code.functions.get(f"{name}.__init__")]
        return [function for function in found if function is not None]
    if isinstance(call.func, cst.Attribute) and not code.imported(call.func):
        return [
            function for function in code.functions.values()
            if function.name.value == call.func.attr.value and code.is_method(function)
        ]  # fmt: skip
    return []


def parameter_of(code: Code, function: cst.FunctionDef, call: cst.Call, argument: cst.Arg) -> str | None:
    """The variable in which a function finds an argument."""
    names = [each.name.value for each in (*function.params.posonly_params, *function.params.params)]
    keywords = [*names, *(each.name.value for each in function.params.kwonly_params)]
    if argument.keyword is not None:
        name = argument.keyword.value if argument.keyword.value in keywords else None
    elif any(each.star for each in call.args):
        name = None
    else:
        place = list(call.args).index(argument) + code.is_method(function)
        name = names[place] if place < len(names) else None
    qualified = next((each for each, node in code.functions.items() if node is function), None)
    return f"{qualified}.<locals>.{name}" if name and qualified else None


def is_parameter(code: Code, variable: str | None) -> bool:
    """Whether a variable is a parameter of some function."""
    return any(code.variable(each.name) == variable for each in code.all(cst.Param))


def results(code: Code, statement: cst.Return, place: int | None) -> list[str] | None:
    """The variables to which the calls of a function assign its result."""
    function = code.function(statement)
    calls = [call for call in code.all(cst.Call) if any(each is function for each in callees(code, call))]
    if not isinstance(function, cst.FunctionDef) or not calls:
        return None
    found = []
    for call in calls:
        parent = code.parent(call)
        if not isinstance(parent, cst.Assign):
            return None
        for target in parent.targets:
            part: cst.BaseExpression | None = target.target
            if place is not None:
                whole = isinstance(part, (cst.Tuple, cst.List)) and place < len(part.elements)
                part = part.elements[place].value if whole and isinstance(part, (cst.Tuple, cst.List)) else None
            variable = code.variable(part) if part is not None else None
            if variable is None:
                return None
            found.append(variable)
    return found
