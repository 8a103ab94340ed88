"""Rules for collectives, which change their arguments in place in torch.distributed and return new values here."""

from __future__ import annotations

import re
from typing import Any

import libcst as cst

from unidist.migrate.context import Arguments, is_constant
from unidist.migrate.dtypes import is_floating
from unidist.migrate.flow import assignments, assignments_of, callees, is_target, references, targets_of, uses_of
from unidist.migrate.gradients import may_require_gradient
from unidist.migrate.rules.ddp.names import ASYNC, GROUP, UNKNOWN, TorchContext, place_of
from unidist.migrate.syntax import Statement, full_name, is_pure, keyword, method

_OPS = {"SUM": "sum", "AVG": "mean", "MIN": "min", "MAX": "max", "PRODUCT": "product"}
_CALLS = ("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_object", "broadcast_object_list")
_NOT_ALONE = ("it is a part of a larger statement", "call it in a statement of its own, then migrate again")
_OP = ("its op= cannot be determined, or unidist has none like it", "write one of SUM, AVG, MIN, MAX, PRODUCT")
_TARGET = ("the tensor that it changes is not a variable", "assign it to a variable, then migrate again")
_SOURCE = ("its src= is computed by another such call", "assign that to a variable, then migrate again")
_LIST = (
    "the list that it fills is not visibly made right before",
    "tensors = list(unidist.all_gather(tensor[None]))",
)
#: Arguments of a call, each with its keyword; empty if it has none.
Values = list[tuple[str, cst.BaseExpression]]
#: Calls that make a tensor that nothing else holds.
_MAKING = re.compile(
    r"^(clone|tensor|as_tensor|zeros|ones|full|stack|cat|sum|mean|FloatTensor|Tensor|zeros_like|ones_like|item)$"
)
_CLONES = re.compile(r"^(.*?)((?:\.clone\(\)|\.detach\(\)|\.data)+)$", re.DOTALL)


def change_collectives(context: TorchContext) -> None:
    """``all_reduce``, ``reduce``, ``broadcast``, ``all_gather`` and those of objects, as statements."""
    for call in list(context.calls(*_CALLS)):
        problem = _change(context, call, context.names.symbols[call.func])
        if problem is not None:
            context.keep(call.func, *problem)


def _change(context: TorchContext, call: cst.Call, symbol: str) -> tuple[str, str] | None:
    """Change one call; why it stays if it does."""
    arguments, statement = context.arguments(call), context.tree.is_statement(call)
    if arguments is None:
        return UNKNOWN
    if not is_constant(arguments.get("async_op"), None, False):
        return ASYNC
    if "src" in arguments and _has_uses(context, arguments["src"]):
        return _SOURCE
    if not context.is_world(arguments.get("group")) or "group_src" in arguments or "group_dst" in arguments:
        return GROUP
    alone = statement is not None and (context.tree.block(statement) is not None)
    on_shared_line = statement is None and isinstance(context.tree.parent(call), cst.Expr)
    if symbol == "broadcast" and (alone or on_shared_line):  # for p in params: dist.broadcast(p, 0)
        return _replace_in_place(context, call, arguments.get("tensor"), "broadcast", _source(arguments))
    if symbol == "all_reduce" and on_shared_line:
        op = _operation(context, arguments)
        return _OP if op is None else _replace_in_place(context, call, arguments.get("tensor"), "all_reduce", _of(op))
    if statement is None or not alone:
        return _NOT_ALONE
    change = {"all_reduce": _reduce, "reduce": _reduce, "all_gather": _gather}.get(symbol, _objects)
    return change(context, call, statement, arguments)


def _of(op: str) -> Values:
    return [] if op == "sum" else [("op", cst.SimpleString(f'"{op}"'))]


def _source(arguments: Arguments) -> Values:
    return [] if is_constant(arguments.get("src"), 0, None) else [("src", arguments["src"])]


def _operation(context: TorchContext, arguments: Arguments) -> str | None:
    op = arguments.get("op")
    kind, _, name = (context.symbol(op) or "").rpartition(".")
    return "sum" if op is None else _OPS.get(name) if kind.lower() in ("reduceop", "reduce_op") else None


# ------------------------------------------------------------------------------------ reductions
def _reduce(
    context: TorchContext, call: cst.Call, statement: Statement, arguments: Arguments
) -> tuple[str, str] | None:
    op, tensor = _operation(context, arguments), arguments.get("tensor")
    if op is None or tensor is None:
        return _OP
    # In autograd's graph the division counts; what torch sums does not.
    counts = may_require_gradient(context.tree, call, tensor) and _reaches_backward(
        context, context.tree.variable(tensor)
    )
    following = _division(context, statement, tensor) if op == "sum" and not counts else None
    metric = _metric(context, statement, tensor) if not counts and (following is not None or op == "mean") else None
    if following is not None:
        context.cut(following)
        op = "mean"
    if metric is None:
        return _replace_in_place(context, call, tensor, "all_reduce", _of(op))
    value, text = metric
    new = cst.Call(context.unidist_name(call, "allreduce_metric"), [cst.Arg(cst.parse_expression(text))])
    context.edits.replace(value, new)
    context.drop(value)
    context.cut(statement)
    return None


def _division(context: TorchContext, statement: Statement, tensor: cst.BaseExpression) -> Statement | None:
    """The next statement, if it divides the sum by the number of processes: ``t /= world_size``.

    In place it is an error for integers, of which unidist takes no mean; otherwise the tensor must be visibly
    floating-point.
    """
    tree, divided = context.tree, list[cst.BaseExpression]()
    match next(iter(tree.siblings(statement)[1]), None):
        case cst.SimpleStatementLine([cst.AugAssign(target, cst.DivideAssign(), divisor)]) as following:
            divided = [target]
        case cst.SimpleStatementLine(
            [cst.Assign([cst.AssignTarget(target)], cst.BinaryOperation(left, cst.Divide(), divisor))]
        ) as following if is_floating(tree, tensor):
            divided = [target, left]
        case cst.SimpleStatementLine(
            [cst.Expr(cst.Call(cst.Attribute(target, cst.Name("div_")), [cst.Arg(divisor)]))]
        ) as following:
            divided = [target]
        case _:
            return None
    if isinstance(divisor, cst.Call) and full_name(divisor.func) == "float" and len(divisor.args) == 1:
        divisor = divisor.args[0].value
    same = all(context.text(each) == context.text(tensor) for each in divided)
    return following if same and place_of(context, divisor) == "world_size" else None


def _metric(
    context: TorchContext, statement: Statement, tensor: cst.BaseExpression
) -> tuple[cst.BaseExpression, str] | None:
    """The copy of which the statement right before makes the tensor, and what it copies: a metric is averaged."""
    match context.tree.siblings(statement)[0][-1:]:
        case [cst.SimpleStatementLine([cst.Assign(targets, value)])] if isinstance(tensor, cst.Name):
            found = _CLONES.match(context.text(value))
            if found is None or _has_uses(context, value) or ".clone()" not in found[2] or "grad" in found[1]:
                return None
            if tensor.value in [context.text(each.target) for each in targets]:
                return value, found[1]
    return None


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
    context: TorchContext, call: cst.Call, tensor: cst.BaseExpression | None, name: str, options: Values
) -> tuple[str, str] | None:
    """``dist.broadcast(x, 0)`` becomes ``x = unidist.broadcast(x)`` or ``x.copy_(unidist.broadcast(x))``.

    No gradient flows through torch's call: the result of unidist's is detached, unless none is recorded anyway.
    """
    tree = context.tree
    if tensor is None or not is_pure(tensor):
        return _TARGET
    recorded = may_require_gradient(tree, call, tensor)
    detached = method(tensor.deep_clone(), "detach") if recorded else tensor.deep_clone()
    args = [cst.Arg(detached), *(keyword(each, value.deep_clone()) for each, value in options)]
    new = cst.Call(context.unidist_name(call, name), args)
    statement = tree.is_statement(call)
    context.keep_comments(call)
    if isinstance(statement, cst.SimpleStatementLine) and _is_fresh(context, statement, tensor) and not recorded:
        small = cst.Assign([cst.AssignTarget(cst.ensure_type(tensor, cst.Name).deep_clone())], new)
        context.edits.replace(statement.body[0], small)
    else:
        context.edits.replace(call, method(detached.deep_clone(), "copy_", new))
    context.mark_handled(call)
    return None


def _is_fresh(context: TorchContext, statement: Statement, tensor: cst.BaseExpression) -> bool:
    """Whether nothing but a variable of this block holds a tensor: it is made there, and only changed until now."""
    tree = context.tree
    made = _last_assignment(context, statement, tensor)
    if made is None or not isinstance(tensor, cst.Name) or not isinstance(made[1], cst.SimpleStatementLine):
        return False
    value, own = made
    name = value.func.attr.value if isinstance(value, cst.Call) and isinstance(value.func, cst.Attribute) else ""
    if not (_MAKING.match(name) or isinstance(value, cst.BinaryOperation)):
        return False
    between = _uses_between(context, own, statement, tensor)
    return all(is_target(tree, use) or isinstance(tree.parent(use), cst.Attribute) for use in between)


def _last_assignment(
    context: TorchContext, statement: Statement, name: cst.BaseExpression
) -> tuple[cst.BaseExpression, Statement] | None:
    """What a variable was assigned last before a statement in the same block, and the statement of that."""
    tree = context.tree
    found = [
        (value, own)
        for value, target in assignments_of(tree, tree.variable(name) or "")
        if (own := tree.statement(target)) is not None
        and tree.block(own) is tree.block(statement)
        and tree.position(own) < tree.position(statement)
        and not isinstance(tree.parent(target), cst.Element)
    ]
    return found[-1] if found and tree.block(statement) is not None else None


def _uses_between(
    context: TorchContext, made: Statement, statement: Statement, name: cst.BaseExpression
) -> list[cst.BaseExpression]:
    tree = context.tree
    return [
        use
        for use in references(tree).get(tree.variable(name) or "", ())
        if tree.position(made) < tree.position(use) < tree.position(statement) and not tree.is_inside(use, made)
    ]


# ------------------------------------------------------------------------------------ gathering
def _gather(
    context: TorchContext, call: cst.Call, statement: Statement, arguments: Arguments
) -> tuple[str, str] | None:
    """``all_gather(parts, x)`` into a list that is made right before."""
    tensor, parts = arguments.get("tensor"), arguments.get("tensor_list")
    made = None if parts is None else _made_before(context, statement, parts)
    if tensor is None or made is None or not isinstance(parts, cst.Name) or _has_uses(context, tensor):
        return _LIST
    if _name_in(context, made, tensor):
        return _LIST
    given: cst.BaseExpression = tensor.deep_clone()
    if may_require_gradient(context.tree, call, tensor):
        given = method(given, "detach")
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
    context.cut(made)
    return None


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
    found = _last_assignment(context, statement, parts)
    if found is None or _uses_between(context, found[1], statement, parts):
        return None
    size: cst.BaseExpression | None = None
    match found[0]:
        case cst.BinaryOperation(cst.List() as one, right=right) if context.text(one) == "[None]":
            size = right
        case cst.ListComp(_, cst.CompFor(iter=cst.Call(cst.Name("range"), [cst.Arg(right)]), ifs=[])):
            made = context.text(found[0]).startswith(("[torch.zeros", "[torch.ones", "[torch.empty", "[None"))
            size = right if made else None
    return found[1] if place_of(context, size) == "world_size" else None


def _concatenation(context: TorchContext, statement: Statement, parts: cst.Name) -> cst.Call | None:
    """``torch.cat(parts)`` in the next statement, if nothing else uses the parts."""
    tree, variable = context.tree, context.tree.variable(parts)
    uses = [use for use in uses_of(tree, variable) if use is not parts]
    following = next(iter(tree.siblings(statement)[1]), None)
    if not isinstance(following, cst.SimpleStatementLine) or len(uses) != 1 or len(targets_of(tree, variable)) != 1:
        return None
    match tree.parent(tree.parent(uses[0])):
        case cst.Call(function, [first, *rest]) as call if full_name(function) == "torch.cat":
            whole = not rest or (len(rest) == 1 and is_constant(rest[0].value, 0))
            return call if whole and first.value is uses[0] and tree.is_inside(call, following) else None
    return None


def _objects(
    context: TorchContext, call: cst.Call, statement: Statement, arguments: Arguments
) -> tuple[str, str] | None:
    """``all_gather_object(parts, x)`` and ``broadcast_object_list(parts)``."""
    gathers = context.names.symbols[call.func] == "all_gather_object"
    parts, obj = arguments.get("object_list"), arguments.get("obj")
    if parts is None or not is_pure(parts) or (gathers and obj is None):
        return _TARGET
    made = _made_before(context, statement, parts) if gathers else None
    name = "all_gather_object" if gathers else "broadcast_object"
    value = obj if gathers and obj is not None else parts
    source = [keyword(*each) for each in ([] if gathers else _source(arguments))]
    target: Any = parts.deep_clone()
    if made is None or _name_in(context, made, value):
        target = cst.Subscript(target, [cst.SubscriptElement(cst.Slice(None, None))])
    else:
        context.cut(made)
    function = context.unidist_name(call, name)
    index = next(index for index, arg in enumerate(call.args) if arg.value is value)

    def change(updated: cst.Expr) -> cst.Assign:
        first = cst.Arg(cst.ensure_type(updated.value, cst.Call).args[index].value)
        return cst.Assign([cst.AssignTarget(target)], cst.Call(function, [first, *source]))

    context.edits.replace(cst.ensure_type(statement, cst.SimpleStatementLine).body[0], change)
    context.drop(*(arg.value for arg in call.args if arg.value is not value))
    context.mark_handled(call.func)
    return None
