"""Whether a tensor holds floating-point numbers, as far as the code that makes it tells."""

from __future__ import annotations

import re

import libcst as cst

from unidist.migrate.code import Code, argument, full_name
from unidist.migrate.flow import assignments, callees, is_parameter, parameter_of

_FLOAT_METHODS = {"float", "double", "half", "bfloat16", "mean", "std", "var", "norm", "softmax", "log_softmax", "sigmoid", "exp", "log", "sqrt"}  # fmt: skip
_INT_METHODS = {"int", "long", "short", "argmax", "argmin", "size", "numel", "dim"}
#: Methods whose result has the dtype of what they are called on.
_SAME = {"detach", "clone", "cpu", "cuda", "sum", "view", "reshape", "unsqueeze", "squeeze", "flatten", "contiguous", "max", "min", "abs", "item", "data", "grad", "T", "requires_grad_"}  # fmt: skip
_MAKERS = {"zeros", "ones", "rand", "randn", "empty", "linspace", "eye"}
_VALUES = {"tensor", "as_tensor", "FloatTensor", "full", "Tensor"}
_LOSSES = re.compile(r"(^|\.)(\w*loss\w*|criterion|cross_entropy|\w*Loss)$", re.IGNORECASE)
_PARAMETERS = re.compile(r"\.(named_)?parameters\(")


def is_floating(code: Code, node: cst.BaseExpression, *, made: bool = False, depth: int = 6) -> bool | None:
    """True or False where the code shows it, else None.

    Args:
        made: ask whether the code shows that the tensor was made here, of numbers, and takes part in no gradient; then a
            tensor of either kind gives True or False.
    """
    if depth == 0:
        return None

    def inner(each: cst.BaseExpression) -> bool | None:
        return is_floating(code, each, made=made, depth=depth - 1)

    if isinstance(node, cst.Float):
        return True
    if isinstance(node, cst.Integer):
        return False
    if isinstance(node, cst.UnaryOperation):
        return inner(node.expression)
    if isinstance(node, (cst.List, cst.Tuple)):
        kinds = [inner(element.value) for element in node.elements]
        return True if True in kinds else (False if kinds and None not in kinds else None)
    if isinstance(node, cst.BinaryOperation):
        kinds = [inner(node.left), inner(node.right)]
        if isinstance(node.operator, cst.Divide) and not made:
            return True
        return True if True in kinds else (False if None not in kinds else None)
    if isinstance(node, cst.Attribute):
        if node.attr.value == "grad":
            return None if made else True
        return inner(node.value) if node.attr.value in _SAME else _variable(code, node, made, depth)
    if isinstance(node, cst.Name):
        return _variable(code, node, made, depth)
    if isinstance(node, cst.Call):
        return _call(code, node, made, depth)
    return None


def _call(code: Code, call: cst.Call, made: bool, depth: int) -> bool | None:
    name = full_name(call.func)
    last = name.split(".")[-1] if name else call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
    dtype = argument(call, "dtype")
    if dtype is not None:
        written = full_name(dtype)
        return None if not written else "float" in written or "double" in written or "half" in written
    if last in _MAKERS and name.startswith("torch."):
        return True
    if last == "float":
        return True
    if last in _VALUES and call.args:
        if last in ("FloatTensor", "Tensor"):
            return True
        value = call.args[1 if last == "full" and len(call.args) > 1 else 0].value
        found = is_floating(code, value, depth=depth - 1)
        return False if found is None and made else found
    if last in ("int", "len", "LongTensor", "IntTensor"):
        return False
    if isinstance(call.func, cst.Attribute):
        if made and last not in _SAME and last != "to":
            return None
        if last in _FLOAT_METHODS:
            return True
        if last in _INT_METHODS:
            return False
        if last == "to" and (to := full_name(call.args[0].value) if call.args else "").startswith("torch."):
            return "float" in to or "half" in to or "double" in to
        if last in _SAME or last == "to":
            return is_floating(code, call.func.value, made=made, depth=depth - 1)
    return True if not made and _LOSSES.search(name) else None


def _variable(code: Code, node: cst.BaseExpression, made: bool, depth: int) -> bool | None:
    variable = code.variable(node)
    if variable is None:
        return None
    kinds = []
    for value, target in assignments(code):
        if code.variable(target) == variable:
            unpacked = isinstance(code.parent(target), cst.Element) and not isinstance(code.parent(value), cst.Element)
            kinds.append(None if unpacked else is_floating(code, value, made=made, depth=depth - 1))
    for loop in code.all(cst.For):
        targets = [each for each in code.all(cst.Name, inside=loop.target) if code.variable(each) == variable]
        if targets:
            kinds.append(True if not made and _PARAMETERS.search(code.text(loop.iter)) else None)
    for each in code.all(cst.AugAssign):
        if code.variable(each.target) == variable and not made:
            kinds = [True if isinstance(each.operator, cst.DivideAssign) else kind for kind in kinds]
    if is_parameter(code, variable):
        kinds += [None] if made else _from_callers(code, variable, depth)
    if not kinds or None in kinds:
        return None
    return all(kinds) if len(set(kinds)) == 1 else None


def _from_callers(code: Code, variable: str, depth: int) -> list[bool | None]:
    """What the calls in this file pass for a parameter."""
    kinds: list[bool | None] = []
    for call in code.all(cst.Call):
        for function in callees(code, call):
            for passed in call.args:
                if parameter_of(code, function, call, passed) == variable:
                    kinds.append(is_floating(code, passed.value, depth=depth - 1))
    return kinds or [None]
