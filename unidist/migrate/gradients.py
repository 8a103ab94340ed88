"""Gradients that a script assigns, and the calls through which they flow.

Horovod and ``replicate`` average what ``backward()`` accumulates, and nothing else. In the backward passes of
``allgather`` and ``broadcast``, Horovod averages gradients and unidist sums them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

import libcst as cst

from unidist.migrate.context import is_constant
from unidist.migrate.flow import assignments, assignments_of, callees, is_parameter, is_target, references, targets_of
from unidist.migrate.names import in_import
from unidist.migrate.syntax import Problem, SyntaxTree, argument, called_name, full_name

_ASSIGNED = "a gradient is assigned by hand, and unidist does not average it"
_SECOND = "backward(create_graph=True) keeps a graph of gradients, which averaging in place would break"
_SKIPPED = (
    "a rank may skip this backward pass and still make the step: Horovod averages in step(), unidist in backward(),"
    " where the others would wait"
)
_LBFGS = "LBFGS calls the closure as often as each rank's own loss requires, so ranks would wait for each other"
#: In-place methods that scale or clip a gradient, in the same way on all ranks.
_SCALING = {
    "mul_", "div_", "true_divide_", "zero_", "clamp_", "clip_", "clamp_min_", "clamp_max_", "nan_to_num_", "neg_",
    "sign_", "renorm_", "masked_fill_", "detach_", "requires_grad_", "squeeze_", "unsqueeze_",
}  # fmt: skip
#: Calls whose result may contain another tensor, beside the gradient or instead of it.
_ADDING = re.compile(
    r"^(add\w*|sub\w*|rsub|lerp|where|copysign|maximum|minimum|index_\w+|scatter\w*|cat|stack|einsum)_?$"
)
#: Methods that weight decay may apply to a parameter before it is added to the gradient.
_DECAY = {"data", "detach", "clone", "sign", "mul", "abs", "float", "to"}
_RANDOM = re.compile(r"rand|normal|uniform|bernoulli|noise|dropout|multinomial")
#: Methods that return numbers or detached tensors; all methods whose results require no gradient; functions that
#: convert to numbers; functions that make tensors of numbers.
_TO_NUMBERS = {"item", "tolist", "numpy", "detach"}
_DETACHING = _TO_NUMBERS | {
    "argmax", "argmin", "argsort", "long", "int", "bool", "byte", "size", "numel", "dim", "nonzero", "eq", "ne", "gt",
    "lt", "ge", "le", "isnan",
}  # fmt: skip
_CONVERSIONS = {"float", "int", "bool", "len"}
_MAKING = {
    "tensor", "from_numpy", "arange", "zeros", "ones", "full", "empty", "rand", "randn", "randint", "randperm",
    "linspace", "eye", "Tensor", "FloatTensor", "DoubleTensor", "HalfTensor", "LongTensor", "IntTensor", "ByteTensor",
    "zeros_like", "ones_like", "rand_like", "randn_like", "empty_like",
}  # fmt: skip
#: Classes of optimizers, and what the ``step()`` of one that wraps another calls.
_OF_OPTIMIZERS = re.compile(r"torch\.optim\.(?!lr_scheduler|swa_utils)")
_STEPS_OR_GRADIENTS = re.compile(r"(?<!super\(\))\.step$|\.backward$|\bgrad$")
_ZEROS = re.compile(r"zeros_like\(|new_zeros\(|torch\.zeros\(|\.zero_\(\)$")


def gradient_problems(tree: SyntaxTree, same: Collection[str] = ()) -> Iterator[Problem]:
    """Yield gradients that ``replicate`` would not average as Horovod: both watch what ``backward()`` accumulates.

    Args:
        same: variables that are the same on all ranks.
    """
    yield from _assigned_by_hand(tree)
    yield from _of_lbfgs(tree)
    for call in tree.method_calls("backward"):
        if _is_given(call, "create_graph", 2 if _is_of_tensor(tree, call) else 3):
            yield call, _SECOND
        if _may_be_skipped(tree, call, same):
            yield call, _SKIPPED


def assigns_gradients(tree: SyntaxTree) -> bool:
    """Return whether a module assigns gradients by hand."""
    return any(True for _ in _assigned_by_hand(tree))


def _may_be_skipped(tree: SyntaxTree, backward: cst.Call, same: Collection[str]) -> bool:
    """Return whether a condition or an exception may skip a backward pass, and not the step that follows it."""
    function = tree.function(backward)
    all_steps = steps_of(tree)
    steps = [call for call in all_steps if tree.function(call) is function]
    if all_steps and not steps:
        return _may_return_without(tree, backward)
    child: cst.CSTNode = backward
    for above in tree.parents(backward, below=function) if steps else ():
        if isinstance(above, (cst.For, cst.While)):
            return False
        inside = any(tree.is_inside(step, above) for step in steps)
        if isinstance(above, cst.Try) and child is above.body and not inside and above.handlers:
            return True
        if isinstance(above, (cst.If, cst.IfExp)) and child is not above.test and not inside:
            guards = {tree.text(each.test) for step in steps for each in tree.parents(step) if isinstance(each, cst.If)}
            known = tree.text(above.test) in guards or _reads_only(tree, above.test, same)
            if not (known or _has_backward_otherwise(tree, above, child)):
                return True
        child = above
    return False


def _may_return_without(tree: SyntaxTree, backward: cst.Call) -> bool:
    """Return whether a function without a step may end before its backward pass: by an exception that it handles, or if
    there is no loss.
    """
    function = tree.function(backward)
    arguments = {each.name.value for each in function.params.params} if isinstance(function, cst.FunctionDef) else set()
    child: cst.CSTNode = backward
    for above in tree.parents(backward, below=function):
        match above:
            case cst.Try(body, handlers) if child is body:
                if any(not isinstance(_last(each.body), cst.Raise) for each in handlers):
                    return True
            case cst.If(cst.Comparison(cst.Name(name), [cst.ComparisonTarget(cst.IsNot(), cst.Name("None"))]), body):
                if child is body and name in arguments:
                    return True
        child = above
    return False


def _last(block: cst.BaseSuite) -> cst.CSTNode:
    """Return the last simple statement of a block, or its last compound one."""
    statement = block.body[-1]
    return statement.body[-1] if isinstance(statement, cst.SimpleStatementLine) else statement


def _reads_only(tree: SyntaxTree, test: cst.BaseExpression, variables: Collection[str]) -> bool:
    """Return whether a condition depends on some variables alone."""
    read = {tree.variable(node) for node in tree.all((cst.Name, cst.Attribute), inside=test)}
    return bool(variables) and read <= set(variables) and not any(tree.all(cst.Call, inside=test))


def _has_backward_otherwise(tree: SyntaxTree, branch: cst.If | cst.IfExp, taken: cst.CSTNode) -> bool:
    """Return whether the other branch of a condition calls ``backward()``, too."""
    other = branch.body if taken is branch.orelse else branch.orelse
    return other is not None and any(tree.method_calls("backward", other))


def steps_of(tree: SyntaxTree) -> list[cst.Call]:
    """Return the calls of ``step()`` that are not a schedule's."""
    return [call for call in tree.method_calls("step") if "sched" not in full_name(call.func).lower()]


# ------------------------------------------------------------------------------------ gradients that are assigned
def _assigned_by_hand(tree: SyntaxTree) -> Iterator[Problem]:
    return (problem for problem in _assigned_anywhere(tree) if not _is_in_step(tree, problem[0]))


def _is_in_step(tree: SyntaxTree, node: cst.CSTNode) -> bool:
    """Return whether it is in ``step()`` of an optimizer's class that calls no other optimizer, nor computes gradients.

    Horovod calls that when it has averaged.
    """
    match [each for each in tree.parents(node) if isinstance(each, (cst.FunctionDef, cst.ClassDef))]:
        case [cst.FunctionDef(cst.Name("step")) as step, cst.ClassDef(bases=bases), *_]:
            names = [name for base in bases for name in tree.imported(base.value)]
            calls = (tree.text(call.func) for call in tree.all(cst.Call, inside=step.body))
            is_optimizer = any(_OF_OPTIMIZERS.match(name) for name in names)
            return is_optimizer and not any(_STEPS_OR_GRADIENTS.search(call) for call in calls)
    return False


def _assigned_anywhere(tree: SyntaxTree) -> Iterator[Problem]:
    values = {target: value for value, target in assignments(tree)}
    for node, base in _gradients(tree):
        whole = _whole_gradient(tree, node)
        if _is_changed(tree, node, whole, base, values.get(whole)):
            yield node, _ASSIGNED
    for call in tree.all(cst.Call):
        name = full_name(call.func).split(".")[-1]
        if name in ("setattr", "__setattr__") and len(call.args) > 2 and _is_string(call.args[-2].value, "grad"):
            if not is_constant(call.args[-1].value, None):
                yield call, _ASSIGNED
        elif re.match(r"_foreach_(add|sub|copy|lerp|addc)\w*_$", name) and "grad" in tree.text(call):
            yield call, _ASSIGNED


def _is_changed(
    tree: SyntaxTree, node: cst.BaseExpression, whole: cst.BaseExpression, base: str, value: cst.BaseExpression | None
) -> bool:
    """Return whether a gradient, or a part of it, gets values that may differ between the ranks."""
    parent = tree.parent(whole)
    if isinstance(parent, cst.AugAssign) and parent.target is whole:
        scales = isinstance(parent.operator, (cst.MultiplyAssign, cst.DivideAssign))
        return not (scales or _is_same_on_all_ranks(tree, parent.value, base))
    is_set = is_target(tree, whole) and not isinstance(parent, cst.Del)
    if isinstance(node, cst.Attribute) and is_set:
        return value is None or not _is_of_itself(tree, value, base)
    if isinstance(node, cst.Name) and isinstance(whole, cst.Subscript) and is_set:
        return value is None or not _is_same_on_all_ranks(tree, value, base)
    call = tree.parent(parent)
    if not isinstance(parent, cst.Attribute) or not isinstance(call, cst.Call) or call.func is not parent:
        return False
    method = parent.attr.value
    in_place = method.endswith("_") and not method.endswith("__") and method not in _SCALING
    return in_place and not _adds_same_on_all_ranks(tree, call, base)


def _gradients(tree: SyntaxTree) -> Iterator[tuple[cst.BaseExpression, str]]:
    """Gradients, and variables that hold one, each with the text of its parameter."""
    for node in tree.all(cst.Attribute):
        if node.attr.value in ("grad", "_grad"):
            yield node, tree.text(node.value)
    for value, target in assignments(tree):
        inner = value
        while isinstance(inner, cst.Call) and isinstance(inner.func, cst.Attribute):  # p.grad.view(-1)
            inner = inner.func.value
        while isinstance(inner, cst.Attribute) and inner.attr.value == "data":
            inner = inner.value
        if isinstance(inner, cst.Attribute) and inner.attr.value in ("grad", "_grad"):
            for use in references(tree).get(tree.variable(target) or "", ()):
                if isinstance(use, cst.Name) and use is not target:
                    yield use, tree.text(inner.value)


def _whole_gradient(tree: SyntaxTree, node: cst.BaseExpression) -> cst.BaseExpression:
    """``p.grad.data[0]`` for its ``p.grad``."""
    while True:
        above = tree.parent(node)
        data = isinstance(above, cst.Attribute) and above.attr.value == "data"
        if not (data or isinstance(above, cst.Subscript)) or getattr(above, "value", None) is not node:
            return node
        assert isinstance(above, (cst.Attribute, cst.Subscript))
        node = above


def _is_of_itself(tree: SyntaxTree, value: cst.BaseExpression, base: str) -> bool:
    """Return whether a gradient's new value is None, zeros, or the old value, scaled."""
    text = tree.text(value)
    if is_constant(value, None) or (_ZEROS.search(text) and "+" not in text):
        return True
    if not _has_gradient(text, base) or _RANDOM.search(text):
        return False
    for sum_ in tree.all(cst.BinaryOperation, inside=value):
        adds = not isinstance(sum_.operator, (cst.Multiply, cst.Divide, cst.Power, cst.FloorDivide))
        if adds and not (
            _is_same_on_all_ranks(tree, sum_.left, base) and _is_same_on_all_ranks(tree, sum_.right, base)
        ):
            return False
    for choice in tree.all(cst.IfExp, inside=value):
        if not all(_is_of_itself(tree, each, base) for each in (choice.body, choice.orelse)):
            return False
    return all(
        _adds_same_on_all_ranks(tree, call, base) for call in tree.all(cst.Call, inside=value) if _may_add(tree, call)
    )


def _may_add(tree: SyntaxTree, call: cst.Call) -> bool:
    """Return whether a call may add something to a gradient: one of torch's that adds, or one that is not torch's."""
    last = called_name(call)
    of_torch = isinstance(call.func, cst.Attribute) and (not tree.imported(call.func) or is_of_torch(tree, call))
    return bool(_ADDING.match(last)) or not of_torch


def _adds_same_on_all_ranks(tree: SyntaxTree, call: cst.Call, base: str) -> bool:
    """Return whether all other arguments of a call on the gradient are the same on all ranks."""
    values = [each.value for each in call.args if each.keyword is None or each.keyword.value not in ("alpha", "value")]
    if len(values) == 2 and all(isinstance(each, (cst.Name, cst.Attribute)) for each in values[:1]):
        values = values[-1:] if _is_same_on_all_ranks(tree, values[-1], base) else values  # add_(weight_decay, p.data)
    return not _RANDOM.search(called_name(call)) and all(_is_same_on_all_ranks(tree, value, base) for value in values)


def _is_same_on_all_ranks(tree: SyntaxTree, value: cst.BaseExpression, base: str) -> bool:
    """Return whether a term is visibly the same on all ranks: a number, the averaged gradient, or its parameter."""
    text = tree.text(value)
    if _RANDOM.search(text):
        return False
    if _has_gradient(text, base):
        return _is_of_itself(tree, value, base)
    names = [node for node in tree.all(cst.Name, inside=value) if not tree.is_attribute_name(node)]
    if not names:
        return True
    of_base = re.compile(rf"(?<![\w.]){re.escape(base)}(?!\w)")
    if not of_base.search(text):
        return False
    if any(of_base.search(tree.text(each.slice[0])) for each in tree.all(cst.Subscript, inside=value)):
        return False  # residual[p]
    if any(tree.text(each.value) == base and each.attr.value not in _DECAY for each in tree.all(cst.Attribute, value)):
        return False  # p.residual
    return all(called_name(call) in _DECAY for call in tree.all(cst.Call, inside=value))


def _has_gradient(text: str, base: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(base)}\._?grad\b", text) is not None


def _is_string(node: cst.BaseExpression, text: str) -> bool:
    return isinstance(node, cst.SimpleString) and node.evaluated_value == text


def _of_lbfgs(tree: SyntaxTree) -> Iterator[Problem]:
    """Yield where LBFGS is made, unless nothing here gives ``step()`` the closure that it needs."""
    steps = steps_of(tree)
    if steps and not any(call.args for call in steps):
        return
    for node in tree.all((cst.Name, cst.Attribute)):
        if in_import(tree, node) or isinstance(tree.parent(node), cst.Attribute):
            continue
        if tree.imported(node) & {"torch.optim.LBFGS", "torch.optim.lbfgs.LBFGS"}:
            yield node, _LBFGS


def is_of_torch(tree: SyntaxTree, call: cst.Call) -> bool:
    """Return whether a call is one of torch's functions or classes."""
    return any(name.startswith("torch.") for name in tree.imported(call.func))


def _argument(call: cst.Call, name: str, index: int) -> cst.BaseExpression | None:
    positional = [arg.value for arg in call.args if arg.keyword is None and not arg.star]
    return argument(call, name) or (positional[index] if index < len(positional) else None)


def _is_given(call: cst.Call, name: str, index: int) -> bool:
    """Return whether an argument may have another value than its default."""
    return not is_constant(_argument(call, name, index), None, False)


def _is_of_tensor(tree: SyntaxTree, call: cst.Call) -> bool:
    """Return whether it is ``loss.backward()``, and not ``torch.autograd.backward(loss)``."""
    return not tree.imported(call.func)


# ------------------------------------------------------------------------------------ what a backward pass starts from
def _is_detached(node: cst.CSTNode) -> bool:
    """Return whether a gradient ends here: ``loss.item()``, ``float(loss)``, ``loss.data``."""
    if isinstance(node, cst.Call):
        return called_name(node) in _DETACHING or full_name(node.func) in _CONVERSIONS
    return isinstance(node, cst.Attribute) and node.attr.value == "data"


# ------------------------------------------------------------------------------------ calls that gradients flow through
def may_require_gradient(tree: SyntaxTree, call: cst.Call, tensor: cst.BaseExpression) -> bool:
    """Return whether a collective call may record a gradient, unless the code shows that it does not."""
    return not (_is_in_no_grad(tree, call) or _is_constant(tree, tensor))


def may_carry_gradient(tree: SyntaxTree, call: cst.Call, tensor: cst.BaseExpression) -> bool:
    """Return whether a gradient may flow through a collective call, unless the code shows that none does."""
    return may_require_gradient(tree, call, tensor) and not _is_converted(tree, call)


def _is_in_no_grad(tree: SyntaxTree, node: cst.CSTNode) -> bool:
    function = tree.function(node)
    around = [each.decorator for each in function.decorators] if isinstance(function, cst.FunctionDef) else []
    for above in tree.parents(node, below=function):
        around += [item.item for item in above.items] if isinstance(above, cst.With) else []
    return any(_disables_grad(each) for each in around)


def _disables_grad(node: cst.BaseExpression) -> bool:
    """``torch.no_grad()`` and the like."""
    function, args = (node.func, node.args) if isinstance(node, cst.Call) else (node, ())
    values = [arg.value for arg in args[:1]]
    match full_name(function).split(".")[-1]:
        case "set_grad_enabled":
            return any(is_constant(value, False) for value in values)
        case "no_grad" | "inference_mode":
            return all(is_constant(value, True) for value in values)
    return False


def _is_converted(tree: SyntaxTree, call: cst.Call) -> bool:
    """Return whether a call's result is converted to numbers at once: ``.item()``, ``float(...)``."""
    node: cst.CSTNode = call
    while True:
        above = tree.parent(node)
        match above:
            case cst.Attribute(attr=cst.Name(name)) if (outer := tree.call_of(above)) is not None:
                if name in _TO_NUMBERS:
                    return True
                node = outer
            case cst.Attribute(attr=cst.Name("data")):
                return True
            case cst.Subscript(value) if value is node:
                node = above
            case cst.Arg() if isinstance(whole := tree.parent(above), cst.Call):
                return full_name(whole.func) in _CONVERSIONS | {"print", "str"}
            case cst.Assign([cst.AssignTarget(cst.Name(name))]):
                after = tree.siblings(tree.statement(above) or above)[1][:1]
                text = tree.text(after[0]) if after else ""
                return re.fullmatch(rf"{name} = (?:(?:float|int|bool)\({name}\)|{name}\.item\(\))", text) is not None
            case _:
                return isinstance(above, cst.Expr)


def _is_constant(tree: SyntaxTree, node: cst.BaseExpression, depth: int = 8) -> bool:
    """Return whether a value requires no gradient: numbers, tensors made of numbers, detached tensors."""
    parts: list[cst.BaseExpression]
    match node:
        case _ if depth == 0:
            return False
        case cst.BaseNumber() | cst.BaseString() | cst.Comparison() | cst.Name("True" | "False" | "None"):
            return True
        case cst.Call():
            return _is_constant_call(tree, node, depth)
        case cst.Attribute(attr=cst.Name("data" | "grad" | "shape")):
            return True
        case cst.Name() | cst.Attribute():
            return _holds_constants(tree, node, depth - 1)
        case cst.UnaryOperation(expression=inner) | cst.Subscript(inner):
            parts = [inner]
        case cst.BinaryOperation(left, _, right) | cst.IfExp(body=left, orelse=right):
            parts = [left, right]
        case cst.List() | cst.Tuple():
            parts = [element.value for element in node.elements]
        case _:
            return False
    return bool(parts) and all(_is_constant(tree, part, depth - 1) for part in parts)


def _holds_constants(tree: SyntaxTree, node: cst.BaseExpression, depth: int) -> bool:
    """Return whether all that a variable is assigned requires no gradient."""
    variable = tree.variable(node)
    if variable is None or is_parameter(tree, variable):
        return False
    values = assignments_of(tree, variable)
    changes = [each for each in tree.all(cst.AugAssign) if tree.variable(each.target) == variable]
    known = {target for _, target in values} | {each.target for each in changes}
    return (
        bool(values)
        and known.issuperset(targets_of(tree, variable))
        and all(_is_constant(tree, each.value, depth) for each in changes)
        and all(_is_constant_part(tree, *pair, depth) for pair in values)
    )


def _is_constant_part(tree: SyntaxTree, value: cst.BaseExpression, target: cst.BaseExpression, depth: int) -> bool:
    """Return whether what a target gets of a value requires no gradient; the value may be a tuple that is unpacked."""
    element = tree.parent(target)
    if not isinstance(element, cst.Element) or isinstance(tree.parent(value), cst.Element):
        return _is_constant(tree, value, depth)
    targets = tree.parent(element)
    assert isinstance(targets, (cst.Tuple, cst.List))
    return _returns_constants(tree, value, list(targets.elements).index(element), depth)


def _is_constant_call(tree: SyntaxTree, call: cst.Call, depth: int) -> bool:
    name, values = called_name(call), [each.value for each in call.args]
    if not is_constant(argument(call, "requires_grad"), None, False) or name == "requires_grad_":
        return False
    of_torch = is_of_torch(tree, call)
    if _is_detached(call) or (of_torch and name in _MAKING):
        return True
    if isinstance(call.func, cst.Attribute) and not tree.imported(call.func):
        values.insert(0, call.func.value)
    elif not of_torch:
        return False
    return not any(each.star for each in call.args) and all(_is_constant(tree, each, depth - 1) for each in values)


def _returns_constants(tree: SyntaxTree, call: cst.BaseExpression, index: int, depth: int) -> bool:
    """Return whether an element of the tuples that functions of this module return requires no gradient."""
    functions = callees(tree, call) if isinstance(call, cst.Call) else []
    returned = [each.value for function in functions for each in tree.all(cst.Return, function.body)]
    return bool(returned) and all(
        isinstance(value, cst.Tuple)
        and index < len(value.elements)
        and _is_constant(tree, value.elements[index].value, depth)
        for value in returned
    )
