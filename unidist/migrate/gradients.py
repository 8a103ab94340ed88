"""Where gradients come from, and through which calls they flow.

A wrapped model averages gradients in backward passes of its outputs, and nowhere else. In the backward passes of
``allgather`` and ``broadcast``, Horovod averages gradients and unidist sums them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import libcst as cst

from unidist.migrate.context import is_constant
from unidist.migrate.flow import assignments, assignments_of, callees, is_parameter, is_target, parameter_of, references
from unidist.migrate.syntax import Problem, Statement, SyntaxTree, argument, full_name

_ASSIGNED = "a gradient is assigned by hand, and unidist does not average it"
_COMPUTED = "gradients are computed without backward(), and wrap_model does not average them"
_NOT_OUTPUT = "whether this backward pass starts from the model's output, as wrap_model requires, cannot be determined"
_SECOND = "backward(create_graph=True) keeps a graph of gradients, which averaging in place would break"
_INPUTS = "backward(inputs=...) skips gradients for which DistributedDataParallel waits"
_LBFGS = "LBFGS calls the closure as often as each rank's own loss requires, so ranks would wait for each other"
_FUNCTIONAL = (
    "torch.func",
    "torch.autograd.functional",
    "torch.autograd.forward_ad",
    "torch.nn.utils.stateless",
    "functorch",
)
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
    "linspace", "eye", "Tensor", "FloatTensor", "DoubleTensor", "HalfTensor", "LongTensor", "IntTensor", "zeros_like",
    "ones_like", "rand_like", "randn_like", "empty_like",
}  # fmt: skip
_ZEROS = re.compile(r"zeros_like\(|new_zeros\(|torch\.zeros\(|\.zero_\(\)$")


def gradient_problems(
    tree: SyntaxTree,
    called: Iterable[cst.BaseExpression],
    passed: Iterable[cst.BaseExpression],
    wraps: Iterable[Statement],
) -> Iterator[Problem]:
    """Gradients of wrapped models that their backward passes would not average.

    Args:
        tree: the module.
        called: the forward passes of the models.
        passed: uses of the models as arguments of calls.
        wraps: the statements that wrap them; a backward pass before all of these involves no wrapped model.
    """
    wraps = list(wraps)
    yield from _assigned_by_hand(tree)
    yield from _computed_otherwise(tree)
    yield from _of_lbfgs(tree)
    origin = _Origins(tree, set(called), set(passed))
    for call in tree.method_calls("backward"):
        if all(
            tree.function(call) is tree.function(wrap) and tree.position(call) < tree.position(wrap) for wrap in wraps
        ):
            continue
        if _is_given(call, "create_graph", 2 if _is_of_tensor(tree, call) else 3):
            yield call, _SECOND
        if _is_given(call, "inputs", 3 if _is_of_tensor(tree, call) else 5):
            yield call, _INPUTS
        if not origin.is_output(call):
            yield call, _NOT_OUTPUT


def gradient_problems_in_place(tree: SyntaxTree) -> Iterator[Problem]:
    """Gradients that ``replicate`` would not average as Horovod does: both watch what ``backward()`` accumulates."""
    yield from _assigned_by_hand(tree)
    yield from _of_lbfgs(tree)
    for call in tree.method_calls("backward"):
        if _is_given(call, "create_graph", 2 if _is_of_tensor(tree, call) else 3):
            yield call, _SECOND


# ------------------------------------------------------------------------------------ gradients that are assigned
def _assigned_by_hand(tree: SyntaxTree) -> Iterator[Problem]:
    values = {target: value for value, target in assignments(tree)}
    for node, base in _gradients(tree):
        whole = _whole_gradient(tree, node)
        parent = tree.parent(whole)
        if isinstance(parent, cst.AugAssign) and parent.target is whole:
            scales = isinstance(parent.operator, (cst.MultiplyAssign, cst.DivideAssign))
            if not (scales or _is_same_on_all_ranks(tree, parent.value, base)):
                yield node, _ASSIGNED
        elif isinstance(node, cst.Attribute) and is_target(tree, whole) and not isinstance(parent, cst.Del):
            if whole not in values or not _is_of_itself(tree, values[whole], base):
                yield node, _ASSIGNED
        elif isinstance(node, cst.Name) and isinstance(whole, cst.Subscript) and is_target(tree, whole):
            if whole not in values or not _is_same_on_all_ranks(tree, values[whole], base):
                yield node, _ASSIGNED
        elif isinstance(parent, cst.Attribute) and isinstance(call := tree.parent(parent), cst.Call):
            method = parent.attr.value
            changes = call.func is parent and method.endswith("_") and not method.endswith("__")
            if changes and method not in _SCALING and not _adds_same_on_all_ranks(tree, call, base):
                yield node, _ASSIGNED
    for call in tree.all(cst.Call):
        name = full_name(call.func).split(".")[-1]
        if name in ("setattr", "__setattr__") and len(call.args) > 2 and _is_string(call.args[-2].value, "grad"):
            if not is_constant(call.args[-1].value, None):
                yield call, _ASSIGNED
        elif re.match(r"_foreach_(add|sub|copy|lerp|addc)\w*_$", name) and "grad" in tree.text(call):
            yield call, _ASSIGNED


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
    """Whether a gradient's new value is None, zeros, or the old value, scaled."""
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
    """Whether a call may add something to a gradient: one of torch's that adds, or one that is not torch's."""
    last = _called_name(call)
    of_torch = isinstance(call.func, cst.Attribute) and (
        not tree.imported(call.func) or any(name.startswith("torch.") for name in tree.imported(call.func))
    )
    return bool(_ADDING.match(last)) or not of_torch


def _adds_same_on_all_ranks(tree: SyntaxTree, call: cst.Call, base: str) -> bool:
    """Whether all other arguments of a call on the gradient are the same on all ranks."""
    values = [each.value for each in call.args if each.keyword is None or each.keyword.value not in ("alpha", "value")]
    if len(values) == 2 and all(isinstance(each, (cst.Name, cst.Attribute)) for each in values[:1]):
        values = values[-1:] if _is_same_on_all_ranks(tree, values[-1], base) else values  # add_(weight_decay, p.data)
    return not _RANDOM.search(_called_name(call)) and all(_is_same_on_all_ranks(tree, value, base) for value in values)


def _is_same_on_all_ranks(tree: SyntaxTree, value: cst.BaseExpression, base: str) -> bool:
    """Whether a term is visibly the same on all ranks: a number, the averaged gradient, or its parameter."""
    text = tree.text(value)
    if _RANDOM.search(text):
        return False
    if _has_gradient(text, base):
        return _is_of_itself(tree, value, base)
    names = [node for node in tree.all(cst.Name, inside=value) if not tree.is_attribute_name(node)]
    if not names:
        return True
    if not re.search(rf"(?<![\w.]){re.escape(base)}(?!\w)", text):
        return False
    return all(_called_name(call) in _DECAY for call in tree.all(cst.Call, inside=value))


def _has_gradient(text: str, base: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(base)}\._?grad\b", text) is not None


def _is_string(node: cst.BaseExpression, text: str) -> bool:
    return isinstance(node, cst.SimpleString) and node.evaluated_value == text


# ------------------------------------------------------------------------------------ gradients without backward()
def _computed_otherwise(tree: SyntaxTree) -> Iterator[Problem]:
    """Gradients that are not computed by ``backward()``."""
    for node in tree.all((cst.Name, cst.Attribute)):
        if isinstance(tree.parent(node), cst.Attribute):
            continue
        names = tree.imported(node)
        above = tree.parent(node)
        if not names or isinstance(above, (cst.ImportAlias, cst.ImportFrom, cst.AsName)):
            continue
        if any(name == start or name.startswith(f"{start}.") for name in names for start in _FUNCTIONAL):
            yield node, _COMPUTED
        if "torch.autograd.grad" in names:
            inputs = _argument(above, "inputs", 1) if isinstance(above, cst.Call) and above.func is node else None
            if inputs is None or not _is_data(tree, inputs):
                yield node, _COMPUTED


def _of_lbfgs(tree: SyntaxTree) -> Iterator[Problem]:
    for node in tree.nodes:
        if isinstance(node, (cst.Name, cst.Attribute)) and not isinstance(tree.parent(node), cst.Attribute):
            above = tree.parent(node)
            imported = not isinstance(above, (cst.ImportAlias, cst.ImportFrom, cst.AsName))
            if imported and tree.imported(node) & {"torch.optim.LBFGS", "torch.optim.lbfgs.LBFGS"}:
                yield node, _LBFGS


def _argument(call: cst.Call, name: str, index: int) -> cst.BaseExpression | None:
    positional = [arg.value for arg in call.args if arg.keyword is None and not arg.star]
    return argument(call, name) or (positional[index] if index < len(positional) else None)


def _is_given(call: cst.Call, name: str, index: int) -> bool:
    """Whether an argument may have another value than its default."""
    return not is_constant(_argument(call, name, index), None, False)


def _is_of_tensor(tree: SyntaxTree, call: cst.Call) -> bool:
    """Whether it is ``loss.backward()``, and not ``torch.autograd.backward(loss)``."""
    return not tree.imported(call.func)


def _is_data(tree: SyntaxTree, inputs: cst.BaseExpression) -> bool:
    """Whether derivatives are taken with respect to leaves that the script makes, as a batch, and not to parameters."""
    if isinstance(inputs, (cst.List, cst.Tuple)):
        return all(_is_data(tree, element.value) for element in inputs.elements)
    variable = tree.variable(inputs)
    if variable is None or not isinstance(inputs, cst.Name):
        return False
    uses = references(tree).get(variable, [])
    requires_grad = any(
        isinstance(above := tree.parent(use), cst.Attribute)
        and above.value is use
        and (above.attr.value == "requires_grad_" or (above.attr.value == "requires_grad" and is_target(tree, above)))
        for use in uses
    )
    values = [value for value, _ in assignments_of(tree, variable)]
    made = bool(values) and all(_is_leaf(value) for value in values)
    looped = any(
        tree.variable(name) == variable and "param" in tree.text(loop.iter)
        for loop in tree.all(cst.For)
        for name in tree.all(cst.Name, inside=loop.target)
    )
    of_parameters = any(re.search(r"param|weight|\bbias\b", tree.text(value)) for value in values)
    return (requires_grad or made) and not looped and not of_parameters


def _is_leaf(value: cst.BaseExpression) -> bool:
    """``x.detach().requires_grad_()``, ``torch.rand(3, requires_grad=True)``."""
    if not isinstance(value, cst.Call):
        return False
    method = value.func.attr.value if isinstance(value.func, cst.Attribute) else ""
    return method == "requires_grad_" or is_constant(argument(value, "requires_grad"), True)


# ------------------------------------------------------------------------------------ what a backward pass starts from
def _is_detached(node: cst.CSTNode) -> bool:
    """Whether a gradient ends here: ``loss.item()``, ``float(loss)``, ``loss.data``."""
    if isinstance(node, cst.Call):
        return _called_name(node) in _DETACHING or full_name(node.func) in _CONVERSIONS
    return isinstance(node, cst.Attribute) and node.attr.value == "data"


def _called_name(call: cst.Call) -> str:
    """The name of a function or method, without what precedes the last dot."""
    return call.func.attr.value if isinstance(call.func, cst.Attribute) else full_name(call.func)


class _Origins:
    """What values are computed from, as far as the module shows it."""

    def __init__(self, tree: SyntaxTree, called: set[cst.BaseExpression], passed: set[cst.BaseExpression]) -> None:
        self._tree = tree
        self._called, self._passed = called, passed
        #: For each variable, where it is set or changed, and by what.
        self._sources: dict[str, list[tuple[cst.CSTNode, cst.CSTNode]]] = {}
        for value, target in assignments(tree):
            self._add(target, value)
        for node in tree.all((cst.AugAssign, cst.For, cst.CompFor, cst.WithItem, cst.Call)):
            if isinstance(node, cst.AugAssign):
                self._add(node.target, node.value)
            elif isinstance(node, (cst.For, cst.CompFor)):
                self._add(node.target, node.iter)
            elif isinstance(node, cst.WithItem) and node.asname is not None:
                self._add(node.asname.name, node.item)
            elif isinstance(node, cst.Call):
                self._call(node)

    def _add(self, target: cst.BaseExpression, source: cst.CSTNode) -> None:
        for each in (target, *self._tree.all(cst.Name, inside=target), *self._tree.all(cst.Attribute, inside=target)):
            if isinstance(each, (cst.Name, cst.Attribute)) and (variable := self._tree.variable(each)) is not None:
                self._sources.setdefault(variable, []).append((each, source))

    def _call(self, call: cst.Call) -> None:
        """Arguments become a part of a method's object (``losses.append(loss)``), and of parameters."""
        if isinstance(call.func, cst.Attribute) and not self._tree.imported(call.func):
            for argument_ in call.args:
                self._add(call.func.value, argument_)
        for function in callees(self._tree, call):
            for argument_ in call.args:
                parameter = parameter_of(self._tree, function, call, argument_)
                if parameter is not None:
                    self._sources.setdefault(parameter, []).append((function, argument_))

    def is_output(self, call: cst.Call) -> bool:
        """Whether a backward pass starts from something that a forward pass of a model has computed."""
        waiting: list[cst.CSTNode] = [call.func, *call.args]
        seen: set[cst.CSTNode] = set()
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            index, end = self._tree.span(node)
            while index < end:
                part = self._tree.nodes[index]
                if _is_detached(part):
                    index = self._tree.span(part)[1]
                    continue
                if part in self._called or self._is_passed(part):
                    return True
                waiting += self._origins_of(part)
                index += 1
        return False

    def _is_passed(self, node: cst.CSTNode) -> bool:
        """Whether the model is passed to an object that may call it."""
        if node not in self._passed:
            return False
        call = self._tree.parent(self._tree.parent(node))
        return isinstance(call, cst.Call) and any(each.name.value == "__init__" for each in callees(self._tree, call))

    def _sources_at(self, use: cst.CSTNode, variable: str) -> Iterator[cst.CSTNode]:
        """What a variable may come from at a use, without what an earlier assignment in the same block overwrote."""
        tree = self._tree
        sources = self._sources.get(variable, [])
        statement = tree.statement(use)
        block = tree.block(statement) if statement is not None else None
        before = [
            target
            for target, _ in sources
            if statement is not None
            and isinstance(tree.parent(target), cst.AssignTarget)
            and (own := tree.statement(target)) is not None
            and tree.block(own) is block
            and tree.position(own) < tree.position(statement)
        ]
        last = max(before, key=tree.position, default=None)
        for target, source in sources:
            if last is None or tree.position(last) <= tree.position(target) < tree.position(use):
                yield source

    def _origins_of(self, part: cst.CSTNode) -> Iterator[cst.CSTNode]:
        tree = self._tree
        functions: list[cst.FunctionDef] = callees(tree, part) if isinstance(part, cst.Call) else []
        if isinstance(part, (cst.Name, cst.Attribute)) and (variable := tree.variable(part)) is not None:
            yield from self._sources_at(part, variable)
            if variable in tree.functions and not is_parameter(tree, variable):
                functions = [tree.functions[variable]]
        for function in functions:
            results: list[cst.Return | cst.Yield]
            results = [*tree.all(cst.Return, inside=function.body), *tree.all(cst.Yield, inside=function.body)]
            yield from (result.value for result in results if result.value is not None)


# ------------------------------------------------------------------------------------ calls that gradients flow through
def may_require_gradient(tree: SyntaxTree, call: cst.Call, tensor: cst.BaseExpression) -> bool:
    """Whether a collective call may record a gradient, unless the code shows that it does not."""
    return not (_is_in_no_grad(tree, call) or _is_constant(tree, tensor))


def may_carry_gradient(tree: SyntaxTree, call: cst.Call, tensor: cst.BaseExpression) -> bool:
    """Whether a gradient may flow through a collective call, unless the code shows that none does."""
    return may_require_gradient(tree, call, tensor) and not _is_converted(tree, call)


def _is_in_no_grad(tree: SyntaxTree, node: cst.CSTNode) -> bool:
    function = tree.function(node)
    if isinstance(function, cst.FunctionDef) and any(
        _disables_grad(tree, each.decorator) for each in function.decorators
    ):
        return True
    for above in tree.parents(node):
        if above is function:
            return False
        if isinstance(above, cst.With) and any(_disables_grad(tree, item.item) for item in above.items):
            return True
    return False


def _disables_grad(tree: SyntaxTree, node: cst.BaseExpression) -> bool:
    """``torch.no_grad()`` and the like."""
    call = node if isinstance(node, cst.Call) else None
    last = full_name(call.func if call is not None else node).split(".")[-1]
    if last == "set_grad_enabled":
        return call is not None and bool(call.args) and is_constant(call.args[0].value, False)
    return last in ("no_grad", "inference_mode") and (
        call is None or not call.args or is_constant(call.args[0].value, True)
    )


def _is_converted(tree: SyntaxTree, call: cst.Call) -> bool:
    """Whether a call's result is converted to numbers at once: ``.item()``, ``float(...)``."""
    node: cst.CSTNode = call
    while True:
        above = tree.parent(node)
        if (
            isinstance(above, cst.Attribute)
            and isinstance(outer := tree.parent(above), cst.Call)
            and outer.func is above
        ):
            if above.attr.value in _TO_NUMBERS:
                return True
            node = outer
        elif isinstance(above, cst.Subscript) and above.value is node:
            node = above
        elif isinstance(above, cst.Arg) and isinstance(outer := tree.parent(above), cst.Call):
            return full_name(outer.func) in _CONVERSIONS | {"print", "str"}
        else:
            return isinstance(above, cst.Expr)


def _is_constant(tree: SyntaxTree, node: cst.BaseExpression, depth: int = 8) -> bool:
    """Whether a value requires no gradient: numbers, tensors made of numbers, detached tensors."""
    if depth == 0:
        return False

    def inner(*parts: cst.BaseExpression) -> bool:
        return all(_is_constant(tree, part, depth - 1) for part in parts)

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
        return _is_constant_call(tree, node, depth)
    if isinstance(node, cst.Attribute) and node.attr.value in ("data", "grad", "shape"):
        return True
    if isinstance(node, cst.Name) and node.value in ("True", "False", "None"):
        return True
    variable = tree.variable(node)
    if variable is None or is_parameter(tree, variable):
        return False
    values = assignments_of(tree, variable)
    unpacked = any(
        isinstance(tree.parent(target), cst.Element) and not isinstance(tree.parent(value), cst.Element)
        for value, target in values
    )
    changed = [each.value for each in tree.all(cst.AugAssign) if tree.variable(each.target) == variable]
    bound = {use for use in references(tree).get(variable, ()) if is_target(tree, use)}
    known = {target for _, target in values} | {each.target for each in tree.all(cst.AugAssign)}
    return bool(values) and not unpacked and bound <= known and inner(*(value for value, _ in values), *changed)


def _is_constant_call(tree: SyntaxTree, call: cst.Call, depth: int) -> bool:
    name, values = _called_name(call), [each.value for each in call.args]
    if not is_constant(argument(call, "requires_grad"), None, False) or name == "requires_grad_":
        return False
    of_torch = any(each.startswith("torch.") for each in tree.imported(call.func))
    if _is_detached(call) or (of_torch and name in _MAKING):
        return True
    if isinstance(call.func, cst.Attribute) and not tree.imported(call.func):
        values.insert(0, call.func.value)
    elif not of_torch:
        return False
    return not any(each.star for each in call.args) and all(_is_constant(tree, each, depth - 1) for each in values)
