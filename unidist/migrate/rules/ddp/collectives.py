"""Rules for collectives, which change their arguments in place in torch.distributed and return new values here."""

from __future__ import annotations

import re
from typing import Any

import libcst as cst

from unidist.migrate.context import Arguments, is_constant
from unidist.migrate.dtypes import is_floating
from unidist.migrate.flow import assignments, callees, is_target, references
from unidist.migrate.gradients import may_require_gradient
from unidist.migrate.rules.ddp.names import TorchContext, argument_named, place_of
from unidist.migrate.syntax import Statement, full_name, is_pure

_OPS = {"SUM": "sum", "AVG": "mean", "MIN": "min", "MAX": "max", "PRODUCT": "product"}
_CALLS = ("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_object", "broadcast_object_list")
_ASYNC = (
    "it is asynchronous, and unidist has no asynchronous calls",
    "remove async_op= and wait(), then migrate again",
)
_GROUP = ("it is a call within a process group of its own", "unidist.new_group(ranks), and group=")
_NOT_ALONE = ("it is a part of a larger statement", "call it in a statement of its own, then migrate again")
_UNKNOWN = ("its arguments cannot be determined", "write them out, without * and **, then migrate again")
_OP = ("its op= cannot be determined, or unidist has none like it", "write one of SUM, AVG, MIN, MAX, PRODUCT")
_TARGET = ("the tensor that it changes is not a variable", "assign it to a variable, then migrate again")
_SOURCE = ("its src= is computed by another such call", "assign that to a variable, then migrate again")
_LIST = (
    "the list that it fills is not visibly made right before",
    "tensors = list(unidist.all_gather(tensor[None]))",
)
#: Calls that make a tensor that nothing else holds.
_MAKING = re.compile(
    r"^(clone|tensor|as_tensor|zeros|ones|full|stack|cat|sum|mean|FloatTensor|Tensor|zeros_like|ones_like|item)$"
)
_CLONES = re.compile(r"^(.*?)((?:\.clone\(\)|\.detach\(\)|\.data)+)$", re.DOTALL)


def change_collectives(context: TorchContext) -> None:
    """``all_reduce``, ``reduce``, ``broadcast``, ``all_gather`` and those of objects, as statements."""
    for call in list(context.calls(*_CALLS)):
        symbol, arguments = context.names.symbols[call.func], context.arguments(call)
        statement = context.tree.is_statement(call)
        if arguments is None:
            context.keep(call.func, *_UNKNOWN)
        elif not is_constant(arguments.get("async_op"), None, False):
            context.keep(call.func, *_ASYNC)
        elif "src" in arguments and _has_uses(context, arguments["src"]):
            context.keep(call.func, *_SOURCE)
        elif not context.is_world(arguments.get("group")) or "group_src" in arguments or "group_dst" in arguments:
            context.keep(call.func, *_GROUP)
        elif (
            symbol in ("all_reduce", "broadcast")
            and isinstance(context.tree.parent(call), cst.Expr)
            and statement is None
        ):
            _on_shared_line(context, call, arguments)
        elif statement is None or context.tree.block(statement) is None:
            context.keep(call.func, *_NOT_ALONE)
        elif symbol in ("all_reduce", "reduce"):
            _reduce(context, call, statement, arguments)
        elif symbol == "broadcast":
            _replace_in_place(context, call, arguments.get("tensor"), "broadcast", _source(arguments))
        elif symbol == "all_gather":
            _gather(context, call, statement, arguments)
        else:
            _objects(context, call, statement, arguments)


def _on_shared_line(context: TorchContext, call: cst.Call, arguments: Arguments) -> None:
    """``for p in params: dist.broadcast(p, 0)``."""
    if context.symbol(call.func) == "broadcast":
        _replace_in_place(context, call, arguments.get("tensor"), "broadcast", _source(arguments))
        return
    op = _operation(context, arguments)
    if op is None:
        context.keep(call.func, *_OP)
        return
    _replace_in_place(context, call, arguments.get("tensor"), "all_reduce", _op_option(op))


def _op_option(op: str) -> list[tuple[str, cst.BaseExpression]]:
    return [] if op == "sum" else [("op", cst.SimpleString(f'"{op}"'))]


def _source(arguments: Arguments) -> list[tuple[str, cst.BaseExpression]]:
    return [] if is_constant(arguments.get("src"), 0, None) else [("src", arguments["src"])]


def _operation(context: TorchContext, arguments: Arguments) -> str | None:
    op = arguments.get("op")
    if op is None:
        return "sum"
    symbol = context.symbol(op) or ""
    return _OPS.get(symbol.split(".")[-1]) if symbol.split(".")[0].lower() in ("reduceop", "reduce_op") else None


# ------------------------------------------------------------------------------------ reductions
def _reduce(context: TorchContext, call: cst.Call, statement: Statement, arguments: Arguments) -> None:
    op, tensor = _operation(context, arguments), arguments.get("tensor")
    if op is None or tensor is None:
        context.keep(call.func, *_OP)
        return
    # In autograd's graph the division counts; what torch sums does not.
    counts = may_require_gradient(context.tree, call, tensor) and _reaches_backward(
        context, context.tree.variable(tensor)
    )
    following = _division(context, statement, tensor) if op == "sum" and not counts else None
    metric = _metric(context, statement, tensor) if not counts and (following is not None or op == "mean") else None
    if following is not None:
        context.edits.remove(following)
        context.drop(following)
        op = "mean"
    if metric is not None:
        value, text = metric
        new = cst.Call(context.unidist_name(call, "allreduce_metric"), [cst.Arg(cst.parse_expression(text))])
        context.edits.replace(value, new)
        context.drop(value)
        context.edits.remove(statement)
        context.drop(statement)
        return
    _replace_in_place(context, call, tensor, "all_reduce", _op_option(op))


def _division(context: TorchContext, statement: Statement, tensor: cst.BaseExpression) -> Statement | None:
    """The next statement, if it divides the sum by the number of processes: ``t /= world_size``.

    In place it is an error for integers, of which unidist takes no mean; otherwise the tensor must be visibly
    floating-point.
    """
    tree = context.tree
    following = _neighbour(context, statement, 1)
    if not isinstance(following, cst.SimpleStatementLine) or len(following.body) != 1:
        return None
    small, text = following.body[0], context.text(tensor)
    divisor: cst.BaseExpression | None = None
    if isinstance(small, cst.AugAssign) and isinstance(small.operator, cst.DivideAssign):
        divisor = small.value if context.text(small.target) == text else None
    elif isinstance(small, cst.Assign) and len(small.targets) == 1 and isinstance(small.value, cst.BinaryOperation):
        same = context.text(small.targets[0].target) == text == context.text(small.value.left)
        divides = isinstance(small.value.operator, cst.Divide)
        divisor = small.value.right if same and divides and is_floating(tree, tensor) else None
    elif isinstance(small, cst.Expr) and isinstance(small.value, cst.Call):
        inner = small.value
        method = inner.func if isinstance(inner.func, cst.Attribute) else None
        if method is not None and method.attr.value == "div_" and context.text(method.value) == text:
            divisor = inner.args[0].value if len(inner.args) == 1 else None
    if isinstance(divisor, cst.Call) and full_name(divisor.func) == "float" and len(divisor.args) == 1:
        divisor = divisor.args[0].value
    return following if place_of(context, divisor) == "world_size" else None


def _metric(
    context: TorchContext, statement: Statement, tensor: cst.BaseExpression
) -> tuple[cst.BaseExpression, str] | None:
    """The copy of which the statement right before makes the tensor, and what it copies: a metric is averaged."""
    tree = context.tree
    before = _neighbour(context, statement, -1)
    if not isinstance(tensor, cst.Name) or not isinstance(before, cst.SimpleStatementLine):
        return None
    for value, target in assignments(tree):
        if not tree.is_inside(target, before) or context.text(target) != tensor.value:
            continue
        found = _CLONES.match(context.text(value))
        if _has_uses(context, value) or found is None:
            continue
        if len(before.body) == 1 and ".clone()" in found[2] and "grad" not in found[1]:
            return value, found[1]
    return None


def _neighbour(context: TorchContext, statement: Statement, offset: int) -> cst.CSTNode | None:
    block = context.tree.block(statement)
    if block is None:
        return None
    index = next(index for index, each in enumerate(block.body) if each is statement) + offset
    return block.body[index] if 0 <= index < len(block.body) else None


def _reaches_backward(context: TorchContext, variable: str | None) -> bool:
    """Whether a value that depends on a variable may be what a backward pass starts from."""
    tree = context.tree
    reached = {variable}
    functions: set[cst.CSTNode] = set()

    def depends(node: cst.CSTNode) -> bool:
        if any(tree.variable(each) in reached for each in tree.all((cst.Name, cst.Attribute), inside=node)):
            return True
        return any(functions.intersection(callees(tree, each)) for each in tree.all(cst.Call, inside=node))

    while True:
        before = len(reached) + len(functions)
        for value, target in assignments(tree):
            if tree.variable(target) not in reached and depends(value):
                reached.add(tree.variable(target))
        for each in tree.all(cst.AugAssign):
            if depends(each.value):
                reached.add(tree.variable(each.target))
        for result in tree.all(cst.Return):
            if result.value is not None and tree.function(result) not in functions and depends(result.value):
                functions.add(tree.function(result))
        reached.discard(None)
        if len(reached) + len(functions) <= before:
            break
    return any(depends(call.func) for call in tree.method_calls("backward"))


# ------------------------------------------------------------------------------------ in place
def _replace_in_place(
    context: TorchContext,
    call: cst.Call,
    tensor: cst.BaseExpression | None,
    name: str,
    options: list[tuple[str, cst.BaseExpression]],
) -> None:
    """``dist.broadcast(x, 0)`` becomes ``x = unidist.broadcast(x)`` or ``x.copy_(unidist.broadcast(x))``.

    No gradient flows through torch's call: the result of unidist's is detached, unless none is recorded anyway.
    """
    tree = context.tree
    if tensor is None or not is_pure(tensor):
        context.keep(call.func, *_TARGET)
        return
    recorded = may_require_gradient(tree, call, tensor)
    detached: cst.BaseExpression = tensor.deep_clone()
    if recorded:
        detached = cst.Call(cst.Attribute(tensor.deep_clone(), cst.Name("detach")))
    args = [cst.Arg(detached), *(argument_named(each, value.deep_clone()) for each, value in options)]
    new = cst.Call(context.unidist_name(call, name), args)
    statement = tree.is_statement(call)
    context.keep_comments(call)
    if isinstance(statement, cst.SimpleStatementLine) and _is_fresh(context, statement, tensor) and not recorded:
        small = cst.Assign([cst.AssignTarget(cst.ensure_type(tensor, cst.Name).deep_clone())], new)
        context.edits.replace(statement.body[0], small)
    else:
        copy = cst.Attribute(detached.deep_clone(), cst.Name("copy_"))
        context.edits.replace(call, cst.Call(copy, [cst.Arg(new)]))
    context.mark_handled(call)


def _is_fresh(context: TorchContext, statement: Statement, tensor: cst.BaseExpression) -> bool:
    """Whether nothing but a variable of this block holds a tensor: it is made there, and only changed until now."""
    tree = context.tree
    variable, block = tree.variable(tensor), tree.block(statement)
    if not isinstance(tensor, cst.Name) or variable is None or block is None:
        return False
    made: Statement | None = None
    for value, target in assignments(tree):
        own = tree.statement(target)
        before = own is not None and tree.block(own) is block and tree.position(own) < tree.position(statement)
        if tree.variable(target) == variable and before and isinstance(own, cst.SimpleStatementLine):
            name = (
                value.func.attr.value if isinstance(value, cst.Call) and isinstance(value.func, cst.Attribute) else ""
            )
            made = own if _MAKING.match(name) or isinstance(value, cst.BinaryOperation) else None
    if made is None:
        return False
    between = (
        use
        for use in references(tree).get(variable, ())
        if tree.position(made) < tree.position(use) < tree.position(statement) and not tree.is_inside(use, made)
    )
    return all(is_target(tree, use) or isinstance(tree.parent(use), cst.Attribute) for use in between)


# ------------------------------------------------------------------------------------ gathering
def _gather(context: TorchContext, call: cst.Call, statement: Statement, arguments: Arguments) -> None:
    """``all_gather(parts, x)`` into a list that is made right before."""
    tree = context.tree
    tensor, parts = arguments.get("tensor"), arguments.get("tensor_list")
    made = None if parts is None else _made_before(context, statement, parts)
    if tensor is None or made is None or not isinstance(parts, cst.Name) or _has_uses(context, tensor):
        context.keep(call.func, *_LIST)
        return
    if _name_in(context, made, tensor):
        context.keep(call.func, *_LIST)
        return
    given: cst.BaseExpression = tensor.deep_clone()
    if may_require_gradient(tree, call, tensor):
        given = cst.Call(cst.Attribute(given, cst.Name("detach")))
    whole = _concatenation(context, statement, parts)
    if whole is not None:
        context.edits.replace(whole, cst.Call(context.unidist_name(call, "all_gather"), [cst.Arg(given)]))
        context.drop(whole)
        context.edits.remove(statement)
    else:
        index = cst.SubscriptElement(cst.Index(cst.Name("None")))
        rows = cst.Call(context.unidist_name(call, "all_gather"), [cst.Arg(cst.Subscript(given, [index]))])
        line = cst.ensure_type(statement, cst.SimpleStatementLine)
        value = cst.Call(cst.Name("list"), [cst.Arg(rows)])
        context.edits.replace(line.body[0], cst.Assign([cst.AssignTarget(cst.Name(parts.value))], value))
    context.drop(statement)
    context.edits.remove(made)
    context.drop(made)


def _has_uses(context: TorchContext, node: cst.CSTNode) -> bool:
    return any(context.tree.is_inside(use, node) for use in context.names.symbols)


def _name_in(context: TorchContext, statement: Statement, tensor: cst.BaseExpression) -> bool:
    """Whether a statement sets what a tensor is read from."""
    roots = {tree_name.value for tree_name in context.tree.all(cst.Name, inside=tensor)}
    return any(
        isinstance(target, cst.Name) and target.value in roots and context.tree.is_inside(target, statement)
        for _, target in assignments(context.tree)
    )


def _made_before(context: TorchContext, statement: Statement, parts: cst.BaseExpression) -> Statement | None:
    """The statement in the same block that makes a list of tensors or of None, with no use of it in between."""
    tree = context.tree
    variable = tree.variable(parts)
    own = [
        (value, made)
        for value, target in assignments(tree)
        if variable is not None
        and tree.variable(target) == variable
        and (made := tree.statement(target)) is not None
        and tree.block(made) is tree.block(statement)
        and tree.position(made) < tree.position(statement)
        and not isinstance(tree.parent(target), cst.Element)
    ]
    if not own:
        return None
    value, made = own[-1]
    text = context.text(value)
    is_list = isinstance(value, cst.ListComp) or (
        isinstance(value, cst.BinaryOperation) and isinstance(value.left, cst.List) and text.startswith("[None]")
    )
    used = any(
        tree.position(made) < tree.position(use) < tree.position(statement) and not tree.is_inside(use, made)
        for use in references(tree).get(variable or "", ())
    )
    element = text.startswith(("[torch.zeros", "[torch.ones", "[torch.empty", "[None"))
    return made if is_list and element and not used and _size_of(context, value) else None


def _size_of(context: TorchContext, value: cst.BaseExpression) -> bool:
    """Whether a list has an element for each process."""
    if isinstance(value, cst.BinaryOperation):
        return place_of(context, value.right) == "world_size"
    if isinstance(value, cst.ListComp) and isinstance(value.for_in.iter, cst.Call):
        args = value.for_in.iter.args
        is_range = full_name(value.for_in.iter.func) == "range" and len(args) == 1 and not value.for_in.ifs
        return is_range and place_of(context, args[0].value) == "world_size"
    return False


def _concatenation(context: TorchContext, statement: Statement, parts: cst.Name) -> cst.Call | None:
    """``torch.cat(parts)`` in the next statement, if nothing else uses the parts."""
    tree = context.tree
    following = _neighbour(context, statement, 1)
    variable = tree.variable(parts)
    uses = [use for use in references(tree).get(variable or "", ()) if not is_target(tree, use) and use is not parts]
    targets = [use for use in references(tree).get(variable or "", ()) if is_target(tree, use)]
    if following is None or len(uses) != 1 or len(targets) != 1 or not tree.is_inside(uses[0], following):
        return None
    call = tree.parent(tree.parent(uses[0]))
    if not isinstance(call, cst.Call) or full_name(call.func) != "torch.cat" or call.args[0].value is not uses[0]:
        return None
    rest = [arg.value for arg in call.args[1:]]
    if rest and not (len(rest) == 1 and is_constant(rest[0], 0)):
        return None
    return call if isinstance(following, cst.SimpleStatementLine) else None


def _objects(context: TorchContext, call: cst.Call, statement: Statement, arguments: Arguments) -> None:
    """``all_gather_object(parts, x)`` and ``broadcast_object_list(parts)``."""
    gathers = context.names.symbols[call.func] == "all_gather_object"
    parts, obj = arguments.get("object_list"), arguments.get("obj")
    if parts is None or not is_pure(parts) or (gathers and obj is None):
        context.keep(call.func, *_TARGET)
        return
    made = _made_before(context, statement, parts) if gathers else None
    name = "all_gather_object" if gathers else "broadcast_object"
    value = obj if gathers and obj is not None else parts
    if made is not None and _name_in(context, made, value):
        made = None
    source = [argument_named(*each) for each in ([] if gathers else _source(arguments))]
    target: Any = parts.deep_clone()
    if made is None:
        target = cst.Subscript(target, [cst.SubscriptElement(cst.Slice(None, None))])
    else:
        context.edits.remove(made)
        context.drop(made)
    line = cst.ensure_type(statement, cst.SimpleStatementLine)
    function = context.unidist_name(call, name)
    index = next(index for index, arg in enumerate(call.args) if arg.value is value)

    def change(updated: cst.Expr) -> cst.Assign:
        first = cst.Arg(cst.ensure_type(updated.value, cst.Call).args[index].value)
        return cst.Assign([cst.AssignTarget(target)], cst.Call(function, [first, *source]))

    context.edits.replace(line.body[0], change)
    context.drop(*(arg.value for arg in call.args if arg.value is not value))
    context.mark_handled(call.func)
