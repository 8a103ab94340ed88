"""Whether a tensor is floating-point, as far as the code that makes it shows."""

from __future__ import annotations

import re
from collections.abc import Sequence

import libcst as cst

from unidist.migrate.flow import assignments_of, is_parameter, passed_to
from unidist.migrate.syntax import SyntaxTree, argument, called_name, full_name, of_tree

_FLOAT_METHODS = {
    "float", "double", "half", "bfloat16", "mean", "std", "var", "norm", "softmax", "log_softmax", "sigmoid", "exp",
    "log", "sqrt",
}  # fmt: skip
_INT_METHODS = {"int", "long", "short", "argmax", "argmin", "size", "numel", "dim"}
#: Methods and attributes that keep the dtype.
_SAME = {
    "detach", "clone", "cpu", "cuda", "sum", "view", "reshape", "unsqueeze", "squeeze", "flatten", "contiguous", "max",
    "min", "abs", "item", "data", "grad", "T", "requires_grad_",
}  # fmt: skip
_MAKERS = {"zeros", "ones", "rand", "randn", "empty", "linspace", "eye"}
_VALUES = {"tensor", "as_tensor", "FloatTensor", "full", "Tensor"}
_LOSSES = re.compile(r"(^|\.)(\w*loss\w*|criterion|cross_entropy|\w*Loss)$", re.IGNORECASE)
_PARAMETERS = re.compile(r"\.(named_)?parameters\(")


def is_floating(
    tree: SyntaxTree, node: cst.BaseExpression, *, made_of_numbers: bool = False, depth: int = 6
) -> bool | None:
    """Return True or False if the code shows it, else None.

    Args:
        made_of_numbers: None also for tensors that are not visibly made of numbers in this module, and so may require a
            gradient.
    """

    def inner(each: cst.BaseExpression) -> bool | None:
        return is_floating(tree, each, made_of_numbers=made_of_numbers, depth=depth - 1)

    match node:
        case _ if depth == 0:
            return None
        case cst.Float() | cst.Integer():
            return isinstance(node, cst.Float)
        case cst.UnaryOperation(expression=value):
            return inner(value)
        case cst.List() | cst.Tuple():
            return _widest([inner(element.value) for element in node.elements] or [None])
        case cst.BinaryOperation(left, operator, right):
            divides = isinstance(operator, cst.Divide) and not made_of_numbers
            return divides or _widest([inner(left), inner(right)])
        case cst.Attribute(attr=cst.Name("grad")):
            return None if made_of_numbers else True
        case cst.Attribute(value, cst.Name(name)) if name in _SAME:
            return inner(value)
        case cst.Name() | cst.Attribute():
            return _variable(tree, node, made_of_numbers, depth)
        case cst.Call():
            return _call(tree, node, made_of_numbers, depth)
    return None


def _widest(kinds: Sequence[bool | None]) -> bool | None:
    return True if True in kinds else None if None in kinds else False


def _call(tree: SyntaxTree, call: cst.Call, made_of_numbers: bool, depth: int) -> bool | None:
    name, last, dtype = full_name(call.func), called_name(call), argument(call, "dtype")
    if dtype is not None:
        return _is_floating_dtype(full_name(dtype)) if full_name(dtype) else None
    if (last in _MAKERS and name.startswith("torch.")) or last in ("float", "FloatTensor", "Tensor"):
        return True
    if last in _VALUES and call.args:
        value = call.args[1 if last == "full" and len(call.args) > 1 else 0].value
        found = is_floating(tree, value, depth=depth - 1)
        return False if found is None and made_of_numbers else found
    if last in ("int", "len", "LongTensor", "IntTensor"):
        return False
    if isinstance(call.func, cst.Attribute):
        to = full_name(call.args[0].value) if last == "to" and call.args else ""
        if to.startswith("torch."):
            return _is_floating_dtype(to)
        if last in _SAME or last == "to":
            return is_floating(tree, call.func.value, made_of_numbers=made_of_numbers, depth=depth - 1)
        if made_of_numbers or last in _FLOAT_METHODS | _INT_METHODS:
            return None if made_of_numbers else last in _FLOAT_METHODS
    return True if not made_of_numbers and _LOSSES.search(name) else None


def _is_floating_dtype(name: str) -> bool:
    return re.search("float|half|double", name) is not None


def _variable(tree: SyntaxTree, node: cst.BaseExpression, made_of_numbers: bool, depth: int) -> bool | None:
    variable = tree.variable(node)
    if variable is None:
        return None
    kinds = []
    for value, target in assignments_of(tree, variable):
        unpacked = isinstance(tree.parent(target), cst.Element) and not isinstance(tree.parent(value), cst.Element)
        kinds.append(None if unpacked else is_floating(tree, value, made_of_numbers=made_of_numbers, depth=depth - 1))
    for loop in _loops(tree).get(variable, ()):
        kinds.append(True if not made_of_numbers and _PARAMETERS.search(tree.text(loop.iter)) else None)
    if not made_of_numbers and variable in _divided(tree):
        kinds = [True for _ in kinds]
    if is_parameter(tree, variable):
        given = [] if made_of_numbers else passed_to(tree, variable)
        kinds += [is_floating(tree, value, depth=depth - 1) for value in given] or [None]
    if not kinds or None in kinds:
        return None
    return all(kinds) if len(set(kinds)) == 1 else None


@of_tree
def _loops(tree: SyntaxTree) -> dict[str, list[cst.For]]:
    """Return the loops that set a variable."""
    found: dict[str, list[cst.For]] = {}
    for loop in tree.all(cst.For):
        for variable in {tree.variable(each) for each in tree.all(cst.Name, inside=loop.target)} - {None}:
            found.setdefault(variable or "", []).append(loop)
    return found


@of_tree
def _divided(tree: SyntaxTree) -> set[str | None]:
    """Return the variables to which ``/=`` is applied."""
    return {
        tree.variable(each.target) for each in tree.all(cst.AugAssign) if isinstance(each.operator, cst.DivideAssign)
    }
