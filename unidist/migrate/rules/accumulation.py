"""``backward_passes_per_step`` becomes ``no_sync()`` if the loop over the passes has a known form."""

from __future__ import annotations

import libcst as cst

from unidist.migrate.context import Context, is_constant
from unidist.migrate.flow import Flow, is_target
from unidist.migrate.syntax import Statement, full_name, is_pure

_SLOWER = "every backward pass now averages the gradients: the result is the same, with more communication"
_REMEDY = "run all passes but the last in `with {}:`"


def change_accumulation(
    context: Context, passes: cst.BaseExpression | None, optimizer: Flow, model: cst.BaseExpression, before: Statement
) -> None:
    """Average the gradients in the last pass only; without this the result is the same, with more communication."""
    if passes is None or is_constant(passes, 1):
        return
    conditional = any(
        isinstance(above, (cst.If, cst.Try)) and not context.text(above).startswith("if __name__ ==")
        for above in context.tree.parents(before)
    )
    found = None if conditional else _inner_loop(context, optimizer) or _modulo(context, optimizer)
    if found is not None and not context.is_bound_at(model, found[0][0]):
        found = None
    if found is None:
        what, remedy = (
            f"backward_passes_per_step={context.text(passes)}",
            _REMEDY.format(_no_sync(context, passes, model)),
        )
        context.remark(passes, _SLOWER, remedy, what)
        return
    statements, last = found
    context.needs_contextlib = True
    no_sync = _no_sync(context, statements[0], model)
    context.edits.wrap(statements[0], statements[-1], f"contextlib.nullcontext() if {last} else {no_sync}")


def _no_sync(context: Context, node: cst.CSTNode, model: cst.BaseExpression) -> str:
    """The code of the context manager that averages nothing, for use at a node."""
    return f"{full_name(context.unidist_name(node, 'no_sync'))}({context.text(model)})"


#: The statements of one pass, and the condition under which it is the last.
Pass = tuple[list[cst.CSTNode], str]


def _steps(context: Context, optimizer: Flow) -> list[cst.Call]:
    """The calls of the optimizer's ``step()``."""
    return [
        call
        for call in context.tree.method_calls("step")
        if isinstance(call.func, cst.Attribute) and call.func.value in optimizer.uses
    ]


def _inner_loop(context: Context, optimizer: Flow) -> Pass | None:
    """``for i in range(...): loss.backward()``, followed by one ``step()``."""
    tree = context.tree
    backwards, steps = list(context.tree.method_calls("backward")), _steps(context, optimizer)
    if len(backwards) != 1 or len(steps) != 1:
        return None
    loop, step = tree.loop(backwards[0]), tree.statement(steps[0])
    backward = tree.statement(backwards[0])
    if (
        not isinstance(loop, cst.For)
        or step is None
        or backward is None
        or tree.block(backward) is not loop.body
        or tree.is_inside(step, loop)
        or tree.block(step) is not tree.block(loop)
    ):
        return None
    counter, whole = loop.target, loop.iter
    if not isinstance(counter, cst.Name) or not isinstance(whole, cst.Call) or full_name(whole.func) != "range":
        return None
    if (
        _may_skip_step(context, loop)
        or not isinstance(loop.body, cst.IndentedBlock)
        or _is_assigned(context, counter, loop.body)
    ):
        return None
    values = [arg.value for arg in whole.args]
    if any(arg.keyword or arg.star for arg in whole.args) or not all(map(_is_invariant, values)):
        return None
    stop = values[0] if len(values) == 1 else values[1]
    stride = context.text(values[2]) if len(values) == 3 else "1"
    return list(loop.body.body), f"{counter.value} + {stride} >= {context.text(stop)}"


def _modulo(context: Context, optimizer: Flow) -> Pass | None:
    """``for i, batch in enumerate(...): loss.backward(); if (i + 1) % n == 0: step()``."""
    tree = context.tree
    backwards, steps = list(context.tree.method_calls("backward")), _steps(context, optimizer)
    if len(backwards) != 1 or len(steps) != 1:
        return None
    loop = tree.loop(backwards[0])
    branch = next((above for above in tree.parents(steps[0]) if isinstance(above, cst.If)), None)
    if (
        not isinstance(loop, cst.For)
        or branch is None
        or branch.orelse is not None
        or not isinstance(loop.body, cst.IndentedBlock)
    ):
        return None
    statement = tree.statement(backwards[0])
    if statement is None or tree.block(statement) is not loop.body or tree.block(branch) is not loop.body:
        return None
    first = loop.target.elements[0].value if isinstance(loop.target, cst.Tuple) else loop.target
    test = branch.test
    names = [node.value for node in tree.all(cst.Name, inside=test)]
    inside = {node.value for node in tree.all(cst.Name, inside=loop.body) if is_target(tree, node)}
    enumerated = isinstance(loop.iter, cst.Call) and full_name(loop.iter.func) in ("enumerate", "range")
    if not isinstance(first, cst.Name) or first.value not in names or not enumerated or _may_skip_step(context, loop):
        return None
    modulo = any(isinstance(node.operator, cst.Modulo) for node in tree.all(cst.BinaryOperation, inside=test))
    if not modulo or any(tree.all(cst.Call, inside=test)) or inside & set(names):
        return None
    before: list[cst.CSTNode] = []
    for each in loop.body.body:
        before.append(each)
        if tree.is_inside(backwards[0], each):
            break
    return before, context.text(test)


def _is_invariant(node: cst.BaseExpression) -> bool:
    """Whether an expression has the same value in each iteration: names, numbers, ``len`` of a name."""
    if isinstance(node, cst.Call):
        return full_name(node.func) == "len" and all(is_pure(arg.value) for arg in node.args)
    return is_pure(node)


def _may_skip_step(context: Context, loop: cst.For) -> bool:
    """Whether an iteration may skip the step and training go on; an exception ends the training."""
    return any(not isinstance(jump, cst.Raise) for jump in context.tree.jumps(loop.body))


def _is_assigned(context: Context, name: cst.Name, block: cst.CSTNode) -> bool:
    targets = (cst.AssignTarget, cst.AugAssign)
    return any(
        isinstance(node, targets) and isinstance(node.target, cst.Name) and node.target.value == name.value
        for node in context.tree.nodes
        if context.tree.is_inside(node, block)
    )
