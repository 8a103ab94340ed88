"""Where gradients come from, and through which calls they go.

A wrapped model averages them in backward passes of what it returns, and nowhere else. Horovod averages them in the backward passes of
``allgather`` and ``broadcast``, where unidist adds them up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import libcst as cst

from unidist.migrate.code import Code, Statement, argument, full_name
from unidist.migrate.flow import assignments, callees, code_references, is_parameter, is_target, parameter_of
from unidist.migrate.site import is_constant

Problem = tuple[cst.CSTNode, str]

_BY_HAND = "a gradient is set by hand, which wrap_model does not average"
_MADE = "it computes gradients without backward(), which wrap_model does not average"
_NOT_OUTPUT = "that this backward pass begins at the model's output cannot be determined: wrap_model averages no other"
_SECOND = "backward(create_graph=True) fails in DistributedDataParallel"
_INPUTS = "backward(inputs=...) leaves gradients out, for which DistributedDataParallel waits"
_LBFGS = "LBFGS decides by each rank's own loss how often it calls the closure, so ranks would wait for each other"
_FUNCTIONAL = (
    "torch.func",
    "torch.autograd.functional",
    "torch.autograd.forward_ad",
    "torch.nn.utils.stateless",
    "functorch",
)
#: Changes in place that scale a gradient or cut it off, each rank alike.
_SCALING = {
    "mul_", "div_", "true_divide_", "zero_", "clamp_", "clip_", "clamp_min_", "clamp_max_", "nan_to_num_", "neg_", "sign_", "renorm_",
    "masked_fill_", "detach_", "requires_grad_", "squeeze_", "unsqueeze_",
}  # fmt: skip
#: Calls in whose result another tensor may stand in the gradient's place, or on top of it.
_ADDING = re.compile(
    r"^(add\w*|sub\w*|rsub|lerp|where|copysign|maximum|minimum|index_\w+|scatter\w*|cat|stack|einsum)_?$"
)
#: What a parameter may pass through on its way into its gradient: weight decay.
_DECAY = {"data", "detach", "clone", "sign", "mul", "abs", "float", "to"}
_RANDOM = re.compile(r"rand|normal|uniform|bernoulli|noise|dropout|multinomial")
#: Methods whose results take part in no gradient, those of them that give numbers, and functions that make such tensors.
_READING = {"item", "tolist", "numpy", "detach"}
_DETACHING = _READING | {
    "argmax", "argmin", "argsort", "long", "int", "bool", "byte", "size", "numel", "dim", "nonzero", "eq", "ne", "gt", "lt", "ge", "le", "isnan",
}  # fmt: skip
_MAKING = {
    "tensor", "from_numpy", "arange", "zeros", "ones", "full", "empty", "rand", "randn", "randint", "randperm", "linspace", "eye", "Tensor",
    "FloatTensor", "DoubleTensor", "HalfTensor", "LongTensor", "IntTensor", "zeros_like", "ones_like", "rand_like", "randn_like", "empty_like",
}  # fmt: skip
_ZEROS = re.compile(r"zeros_like\(|new_zeros\(|torch\.zeros\(|\.zero_\(\)$")


def gradient_problems(
    code: Code, called: Iterable[cst.BaseExpression], passed: Iterable[cst.BaseExpression], wraps: Iterable[Statement]
) -> Iterator[Problem]:
    """Gradients of wrapped models that no backward pass of theirs would average.

    Args:
        called: the forward passes of the models.
        passed: uses by which the models are arguments of calls.
        wraps: where they are wrapped; backward passes before all of these concern no wrapped model.
    """
    wraps = list(wraps)
    yield from _set_by_hand(code)
    yield from _made_otherwise(code)
    origin = _Origin(code, set(called), set(passed))
    for call in code.method_calls("backward"):
        if all(code.function(call) is code.function(wrap) and code.place(call) < code.place(wrap) for wrap in wraps):
            continue
        if _given(call, "create_graph", 2 if _is_of_tensor(code, call) else 3):
            yield call, _SECOND
        if _given(call, "inputs", 3 if _is_of_tensor(code, call) else 5):
            yield call, _INPUTS
        if not origin.is_output(call):
            yield call, _NOT_OUTPUT


# ------------------------------------------------------------------------------------ gradients that are set
def _set_by_hand(code: Code) -> Iterator[Problem]:
    values = {target: value for value, target in assignments(code)}
    for node, base in _gradients(code):
        whole = _whole(code, node)
        parent = code.parent(whole)
        if isinstance(parent, cst.AugAssign) and parent.target is whole:
            scales = isinstance(parent.operator, (cst.MultiplyAssign, cst.DivideAssign))
            if not (scales or _is_common(code, parent.value, base)):
                yield node, _BY_HAND
        elif isinstance(node, cst.Attribute) and is_target(code, whole) and not isinstance(parent, cst.Del):
            if whole not in values or not _is_of_itself(code, values[whole], base):
                yield node, _BY_HAND
        elif isinstance(node, cst.Name) and isinstance(whole, cst.Subscript) and is_target(code, whole):
            if whole not in values or not _is_common(code, values[whole], base):
                yield node, _BY_HAND
        elif isinstance(parent, cst.Attribute) and isinstance(call := code.parent(parent), cst.Call):
            method = parent.attr.value
            changes = call.func is parent and method.endswith("_") and not method.endswith("__")
            if changes and method not in _SCALING and not _adds_common(code, call, base):
                yield node, _BY_HAND
    for call in code.all(cst.Call):
        name = full_name(call.func).split(".")[-1]
        if name in ("setattr", "__setattr__") and len(call.args) > 2 and _is_string(call.args[-2].value, "grad"):
            if not is_constant(call.args[-1].value, None):
                yield call, _BY_HAND
        elif re.match(r"_foreach_(add|sub|copy|lerp|addc)\w*_$", name) and "grad" in code.text(call):
            yield call, _BY_HAND


def _gradients(code: Code) -> Iterator[tuple[cst.BaseExpression, str]]:
    """Gradients, and variables that hold one, each with the text of its parameter."""
    for node in code.all(cst.Attribute):
        if node.attr.value in ("grad", "_grad"):
            yield node, code.text(node.value)
    for value, target in assignments(code):
        inner = value
        while isinstance(inner, cst.Call) and isinstance(inner.func, cst.Attribute):  # p.grad.view(-1)
            inner = inner.func.value
        while isinstance(inner, cst.Attribute) and inner.attr.value == "data":
            inner = inner.value
        if isinstance(inner, cst.Attribute) and inner.attr.value in ("grad", "_grad"):
            for use in code_references(code).get(code.variable(target) or "", ()):
                if isinstance(use, cst.Name) and use is not target:
                    yield use, code.text(inner.value)


def _whole(code: Code, node: cst.BaseExpression) -> cst.BaseExpression:
    """``p.grad.data[0]`` of its ``p.grad``."""
    while True:
        above = code.parent(node)
        data = isinstance(above, cst.Attribute) and above.attr.value == "data"
        if not (data or isinstance(above, cst.Subscript)) or getattr(above, "value", None) is not node:
            return node
        assert isinstance(above, (cst.Attribute, cst.Subscript))
        node = above


def _is_of_itself(code: Code, value: cst.BaseExpression, base: str) -> bool:
    """Whether a gradient's new value is nothing, zeros, or what it was, scaled."""
    text = code.text(value)
    if is_constant(value, None) or (_ZEROS.search(text) and "+" not in text):
        return True
    if not _has_gradient(text, base) or _RANDOM.search(text):
        return False
    for sum_ in code.all(cst.BinaryOperation, inside=value):
        adds = not isinstance(sum_.operator, (cst.Multiply, cst.Divide, cst.Power, cst.FloorDivide))
        if adds and not (_is_common(code, sum_.left, base) and _is_common(code, sum_.right, base)):
            return False
    for choice in code.all(cst.IfExp, inside=value):
        if not all(_is_of_itself(code, each, base) for each in (choice.body, choice.orelse)):
            return False
    return all(_adds_common(code, call, base) for call in code.all(cst.Call, inside=value) if _may_add(code, call))


def _may_add(code: Code, call: cst.Call) -> bool:
    """Whether a call may put something else on top of a gradient: one of torch's that adds, or one that is not torch's."""
    last = call.func.attr.value if isinstance(call.func, cst.Attribute) else full_name(call.func)
    of_torch = isinstance(call.func, cst.Attribute) and (
        not code.imported(call.func) or any(name.startswith("torch.") for name in code.imported(call.func))
    )
    return bool(_ADDING.match(last)) or not of_torch


def _adds_common(code: Code, call: cst.Call, base: str) -> bool:
    """Whether all that a call takes beside the gradient is the same on all ranks."""
    random = call.func.attr.value if isinstance(call.func, cst.Attribute) else full_name(call.func)
    values = [each.value for each in call.args if each.keyword is None or each.keyword.value not in ("alpha", "value")]
    if len(values) == 2 and all(isinstance(each, (cst.Name, cst.Attribute)) for each in values[:1]):
        values = values[-1:] if _is_common(code, values[-1], base) else values  # add_(weight_decay, p.data)
    return not _RANDOM.search(random) and all(_is_common(code, value, base) for value in values)


def _is_common(code: Code, value: cst.BaseExpression, base: str) -> bool:
    """Whether an addend is seen to be the same on all ranks: a number, the averaged gradient, or its parameter."""
    text = code.text(value)
    if _RANDOM.search(text):
        return False
    if _has_gradient(text, base):
        return _is_of_itself(code, value, base)
    names = [node for node in code.all(cst.Name, inside=value) if not _is_attribute(code, node)]
    if not names:
        return True
    if not re.search(rf"(?<![\w.]){re.escape(base)}(?!\w)", text):
        return False
    called = (
        call.func.attr.value if isinstance(call.func, cst.Attribute) else full_name(call.func)
        for call in code.all(cst.Call, inside=value)
    )  # fmt: skip
    return all(name in _DECAY for name in called)


def _has_gradient(text: str, base: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(base)}\._?grad\b", text) is not None


def _is_attribute(code: Code, name: cst.Name) -> bool:
    parent = code.parent(name)
    return isinstance(parent, cst.Attribute) and parent.attr is name


def _is_string(node: cst.BaseExpression, text: str) -> bool:
    return isinstance(node, cst.SimpleString) and node.evaluated_value == text


# ------------------------------------------------------------------------------------ gradients that are made
def _made_otherwise(code: Code) -> Iterator[Problem]:
    """Gradients from elsewhere than ``backward()``."""
    for node in code.nodes:
        if not isinstance(node, (cst.Name, cst.Attribute)) or isinstance(code.parent(node), cst.Attribute):
            continue
        names = code.imported(node)
        above = code.parent(node)
        if not names or isinstance(above, (cst.ImportAlias, cst.ImportFrom, cst.AsName)):
            continue
        if any(name == start or name.startswith(f"{start}.") for name in names for start in _FUNCTIONAL):
            yield node, _MADE
        if "torch.autograd.grad" in names:
            inputs = _argument(above, "inputs", 1) if isinstance(above, cst.Call) and above.func is node else None
            if inputs is None or not _is_data(code, inputs):
                yield node, _MADE
        if names & {"torch.optim.LBFGS", "torch.optim.lbfgs.LBFGS"}:
            yield node, _LBFGS


def _argument(call: cst.Call, name: str, place: int) -> cst.BaseExpression | None:
    positional = [arg.value for arg in call.args if arg.keyword is None and not arg.star]
    return argument(call, name) or (positional[place] if place < len(positional) else None)


def _given(call: cst.Call, name: str, place: int) -> bool:
    """Whether an argument may be something else than its default."""
    return not is_constant(_argument(call, name, place), None, False)


def _is_of_tensor(code: Code, call: cst.Call) -> bool:
    """Whether it is ``loss.backward()``, and not ``torch.autograd.backward(loss)``."""
    return not code.imported(call.func)


def _is_data(code: Code, inputs: cst.BaseExpression) -> bool:
    """Whether derivatives are taken by what the code makes a leaf of by itself, as a batch, and not by parameters."""
    if isinstance(inputs, (cst.List, cst.Tuple)):
        return all(_is_data(code, element.value) for element in inputs.elements)
    variable = code.variable(inputs)
    if variable is None or not isinstance(inputs, cst.Name):
        return False
    uses = code_references(code).get(variable, [])
    asked = any(
        isinstance(above := code.parent(use), cst.Attribute)
        and above.value is use
        and (above.attr.value == "requires_grad_" or (above.attr.value == "requires_grad" and is_target(code, above)))
        for use in uses
    )
    values = [value for value, target in assignments(code) if code.variable(target) == variable]
    made = bool(values) and all(_is_leaf(value) for value in values)
    looped = any(
        code.variable(name) == variable and "param" in code.text(loop.iter)
        for loop in code.all(cst.For) for name in code.all(cst.Name, inside=loop.target)
    )  # fmt: skip
    of_parameters = any(re.search(r"param|weight|\bbias\b", code.text(value)) for value in values)
    return (asked or made) and not looped and not of_parameters


def _is_leaf(value: cst.BaseExpression) -> bool:
    """``x.detach().requires_grad_()``, ``torch.rand(3, requires_grad=True)``."""
    if not isinstance(value, cst.Call):
        return False
    method = value.func.attr.value if isinstance(value.func, cst.Attribute) else ""
    return method == "requires_grad_" or is_constant(argument(value, "requires_grad"), True)


# ------------------------------------------------------------------------------------ what a backward pass begins at
def _is_detached(node: cst.CSTNode) -> bool:
    """Whether a gradient ends here: ``loss.item()``, ``float(loss)``, ``loss.data``."""
    if isinstance(node, cst.Call):
        method = node.func.attr.value if isinstance(node.func, cst.Attribute) else ""
        return method in _DETACHING or full_name(node.func) in ("float", "int", "bool", "len")
    return isinstance(node, cst.Attribute) and node.attr.value == "data"


class _Origin:
    """What a value is made of, as far as the module shows it."""

    def __init__(self, code: Code, called: set[cst.BaseExpression], passed: set[cst.BaseExpression]) -> None:
        self._code = code
        self._called, self._passed = called, passed
        #: What variables are made of: where each is set or changed, and by what.
        self._sources: dict[str, list[tuple[cst.CSTNode, cst.CSTNode]]] = {}
        for value, target in assignments(code):
            self._add(target, value)
        for node in code.nodes:
            if isinstance(node, cst.AugAssign):
                self._add(node.target, node.value)
            elif isinstance(node, (cst.For, cst.CompFor)):
                self._add(node.target, node.iter)
            elif isinstance(node, cst.WithItem) and node.asname is not None:
                self._add(node.asname.name, node.item)
            elif isinstance(node, cst.Call):
                self._call(node)

    def _add(self, target: cst.BaseExpression, source: cst.CSTNode) -> None:
        for each in (target, *self._code.all(cst.Name, inside=target), *self._code.all(cst.Attribute, inside=target)):
            if isinstance(each, (cst.Name, cst.Attribute)) and (variable := self._code.variable(each)) is not None:
                self._sources.setdefault(variable, []).append((each, source))

    def _call(self, call: cst.Call) -> None:
        """Arguments become a part of what a method belongs to (``losses.append(loss)``), and of parameters."""
        if isinstance(call.func, cst.Attribute) and not self._code.imported(call.func):
            for argument_ in call.args:
                self._add(call.func.value, argument_)
        for function in callees(self._code, call):
            for argument_ in call.args:
                parameter = parameter_of(self._code, function, call, argument_)
                if parameter is not None:
                    self._sources.setdefault(parameter, []).append((function, argument_))

    def is_output(self, call: cst.Call) -> bool:
        """Whether what a backward pass begins at is made of a forward pass of a model."""
        waiting: list[cst.CSTNode] = [call.func, *call.args]
        seen: set[cst.CSTNode] = set()
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            place, end = self._code.span(node)
            while place < end:
                part = self._code.nodes[place]
                if _is_detached(part):
                    place = self._code.span(part)[1]
                    continue
                if part in self._called or self._is_passed(part):
                    return True
                waiting += self._made_of(part)
                place += 1
        return False

    def _is_passed(self, node: cst.CSTNode) -> bool:
        """Whether the model is handed to an object that may call it."""
        if node not in self._passed:
            return False
        call = self._code.parent(self._code.parent(node))
        return isinstance(call, cst.Call) and any(each.name.value == "__init__" for each in callees(self._code, call))

    def _reaching(self, use: cst.CSTNode, variable: str) -> Iterator[cst.CSTNode]:
        """What a variable may be made of here: nothing that an assignment before it in the same block replaces."""
        code = self._code
        sources = self._sources.get(variable, [])
        statement = code.statement(use)
        block = code.block(statement) if statement is not None else None
        before = [
            target for target, _ in sources
            if statement is not None and isinstance(code.parent(target), cst.AssignTarget)
            and (own := code.statement(target)) is not None and code.block(own) is block and code.place(own) < code.place(statement)
        ]  # fmt: skip
        last = max(before, key=code.place, default=None)
        for target, source in sources:
            if last is None or code.place(last) <= code.place(target) < code.place(use):
                yield source

    def _made_of(self, part: cst.CSTNode) -> Iterator[cst.CSTNode]:
        code = self._code
        functions: list[cst.FunctionDef] = callees(code, part) if isinstance(part, cst.Call) else []
        if isinstance(part, (cst.Name, cst.Attribute)) and (variable := code.variable(part)) is not None:
            yield from self._reaching(part, variable)
            if variable in code.functions and not is_parameter(code, variable):
                functions = [code.functions[variable]]
        for function in functions:
            results: list[cst.Return | cst.Yield]
            results = [*code.all(cst.Return, inside=function.body), *code.all(cst.Yield, inside=function.body)]
            yield from (result.value for result in results if result.value is not None)


# ------------------------------------------------------------------------------------ calls that gradients go through
def may_require_gradient(code: Code, call: cst.Call, tensor: cst.BaseExpression) -> bool:
    """Whether a collective call may record a gradient, unless the code shows that it does not."""
    return not (_is_in_no_grad(code, call) or _is_constant(code, tensor))


def may_carry_gradient(code: Code, call: cst.Call, tensor: cst.BaseExpression) -> bool:
    """Whether a gradient may go through a collective call, unless the code shows that none does."""
    return may_require_gradient(code, call, tensor) and not _is_read(code, call)


def _is_in_no_grad(code: Code, node: cst.CSTNode) -> bool:
    function = code.function(node)
    if isinstance(function, cst.FunctionDef) and any(_stops(code, each.decorator) for each in function.decorators):
        return True
    for above in code.parents(node):
        if above is function:
            return False
        if isinstance(above, cst.With) and any(_stops(code, item.item) for item in above.items):
            return True
    return False


def _stops(code: Code, node: cst.BaseExpression) -> bool:
    """``torch.no_grad()`` and the like."""
    call = node if isinstance(node, cst.Call) else None
    last = full_name(call.func if call is not None else node).split(".")[-1]
    if last == "set_grad_enabled":
        return call is not None and bool(call.args) and is_constant(call.args[0].value, False)
    return last in ("no_grad", "inference_mode") and (
        call is None or not call.args or is_constant(call.args[0].value, True)
    )


def _is_read(code: Code, call: cst.Call) -> bool:
    """Whether a call's result becomes numbers at once: ``.item()``, ``float(...)``."""
    node: cst.CSTNode = call
    while True:
        above = code.parent(node)
        if (
            isinstance(above, cst.Attribute)
            and isinstance(outer := code.parent(above), cst.Call)
            and outer.func is above
        ):
            if above.attr.value in _READING:
                return True
            node = outer
        elif isinstance(above, cst.Subscript) and above.value is node:
            node = above
        elif isinstance(above, cst.Arg) and isinstance(outer := code.parent(above), cst.Call):
            return full_name(outer.func) in ("float", "int", "bool", "len", "print", "str")
        else:
            return isinstance(above, cst.Expr)


def _is_constant(code: Code, node: cst.BaseExpression, depth: int = 8) -> bool:
    """Whether a value takes part in no gradient: numbers, what is made of them, what is detached."""
    if depth == 0:
        return False

    def inner(*parts: cst.BaseExpression) -> bool:
        return all(_is_constant(code, part, depth - 1) for part in parts)

    if isinstance(node, (cst.BaseNumber, cst.BaseString, cst.Comparison)):
        return True
    if isinstance(node, cst.UnaryOperation):
        return inner(node.expression)
    if isinstance(node, cst.BinaryOperation):
        return inner(node.left, node.right)
    if isinstance(node, cst.IfExp):
        return inner(node.body, node.orelse)
    if isinstance(node, (cst.List, cst.Tuple)):
        return inner(*(element.value for element in node.elements))
    if isinstance(node, cst.Subscript):
        return inner(node.value)
    if isinstance(node, cst.Call):
        return _is_constant_call(code, node, depth)
    if isinstance(node, cst.Attribute) and node.attr.value in ("data", "grad", "shape"):
        return True
    if isinstance(node, cst.Name) and node.value in ("True", "False", "None"):
        return True
    variable = code.variable(node)
    if variable is None or is_parameter(code, variable):
        return False
    values = [(value, target) for value, target in assignments(code) if code.variable(target) == variable]
    unpacked = any(
        isinstance(code.parent(target), cst.Element) and not isinstance(code.parent(value), cst.Element)
        for value, target in values
    )
    changed = [each.value for each in code.all(cst.AugAssign) if code.variable(each.target) == variable]
    bound = {use for use in code_references(code).get(variable, ()) if is_target(code, use)}
    known = {target for _, target in values} | {each.target for each in code.all(cst.AugAssign)}
    return bool(values) and not unpacked and bound <= known and inner(*(value for value, _ in values), *changed)


def _is_constant_call(code: Code, call: cst.Call, depth: int) -> bool:
    last = call.func.attr.value if isinstance(call.func, cst.Attribute) else full_name(call.func)
    values = [each.value for each in call.args]
    if not is_constant(argument(call, "requires_grad"), None, False) or last == "requires_grad_":
        return False
    of_torch = any(name.startswith("torch.") for name in code.imported(call.func))
    if last in _DETACHING or (of_torch and last in _MAKING) or last in ("int", "float", "len", "bool"):
        return True
    if isinstance(call.func, cst.Attribute) and not code.imported(call.func):
        values.insert(0, call.func.value)
    elif not of_torch:
        return False
    return not any(each.star for each in call.args) and all(_is_constant(code, each, depth - 1) for each in values)
