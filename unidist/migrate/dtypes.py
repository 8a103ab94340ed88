"""Whether a tensor is floating-point, as far as the code that makes it shows."""

from __future__ import annotations

import re
from collections.abc import Sequence

import libcst as cst

from unidist.migrate.flow import assignments_of, is_parameter, passed_to
from unidist.migrate.syntax import SyntaxTree, argument, full_name, of_tree

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
    """True or False if the code shows it, else None.

    Args:
        made_of_numbers: None also for tensors that are not visibly made of numbers in this module, and so may require a
            gradient.
    """
    if depth == 0:
        return None

    def inner(each: cst.BaseExpression) -> bool | None:
        return is_floating(tree, each, made_of_numbers=made_of_numbers, depth=depth - 1)

    if isinstance(node, (cst.Float, cst.Integer)):
        return isinstance(node, cst.Float)
    if isinstance(node, cst.UnaryOperation):
        return inner(node.expression)
    if isinstance(node, (cst.List, cst.Tuple)):
        kinds = [inner(element.value) for element in node.elements]
        return _widest(kinds) if kinds else None
    if isinstance(node, cst.BinaryOperation):
        divides = isinstance(node.operator, cst.Divide) and not made_of_numbers
        return divides or _widest([inner(node.left), inner(node.right)])
    if isinstance(node, cst.Attribute) and node.attr.value == "grad":
        return None if made_of_numbers else True
    if isinstance(node, cst.Attribute) and node.attr.value in _SAME:
        return inner(node.value)
    if isinstance(node, (cst.Name, cst.Attribute)):
        return _variable(tree, node, made_of_numbers, depth)
    return _call(tree, node, made_of_numbers, depth) if isinstance(node, cst.Call) else None


def _widest(kinds: Sequence[bool | None]) -> bool | None:
    return True if True in kinds else None if None in kinds else False


def _call(tree: SyntaxTree, call: cst.Call, made_of_numbers: bool, depth: int) -> bool | None:
    name = full_name(call.func)
    last = name.split(".")[-1] if name else call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
    dtype = argument(call, "dtype")
    if dtype is not None:
        written = full_name(dtype)
        return re.search("float|half|double", written) is not None if written else None
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
            return re.search("float|half|double", to) is not None
        if last in _SAME or last == "to":
            return is_floating(tree, call.func.value, made_of_numbers=made_of_numbers, depth=depth - 1)
        if made_of_numbers or last in _FLOAT_METHODS | _INT_METHODS:
            return None if made_of_numbers else last in _FLOAT_METHODS
    return True if not made_of_numbers and _LOSSES.search(name) else None


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
        kinds += [None] if made_of_numbers else _from_callers(tree, variable, depth)
    if not kinds or None in kinds:
        return None
    return all(kinds) if len(set(kinds)) == 1 else None


@of_tree
def _loops(tree: SyntaxTree) -> dict[str, list[cst.For]]:
    """The loops that set a variable."""
    found: dict[str, list[cst.For]] = {}
    for loop in tree.all(cst.For):
        for variable in {tree.variable(each) for each in tree.all(cst.Name, inside=loop.target)} - {None}:
            found.setdefault(variable or "", []).append(loop)
    return found


@of_tree
def _divided(tree: SyntaxTree) -> set[str | None]:
    """The variables to which ``/=`` is applied."""
    return {
        tree.variable(each.target) for each in tree.all(cst.AugAssign) if isinstance(each.operator, cst.DivideAssign)
    }


def _from_callers(tree: SyntaxTree, variable: str, depth: int) -> list[bool | None]:
    """The dtypes of the arguments that the calls in this file pass for a parameter."""
    return [is_floating(tree, value, depth=depth - 1) for value in passed_to(tree, variable)] or [None]
