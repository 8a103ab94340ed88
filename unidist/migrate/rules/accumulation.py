"""``backward_passes_per_step`` becomes ``no_sync()`` if the loop over the passes has a known form."""

from __future__ import annotations

import libcst as cst

from unidist.migrate.context import Context, is_constant
from unidist.migrate.flow import Flow, is_target
from unidist.migrate.syntax import Statement, full_name, is_pure

_SLOWER = (
    "every backward pass now averages the gradients: the same result, with more communication, if all ranks make "
    "equally many"
)
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
    found = None if conditional else _last_pass(context, optimizer)
    if found is not None and not context.is_bound_at(model, found[0][0]):
        found = None
    if found is None:
        what, remedy = (
            f"backward_passes_per_step={context.text(passes)}",
            _REMEDY.format(f"unidist.no_sync({context.text(model)})"),
        )
        context.remark(passes, _SLOWER, remedy, what)
        return
    statements, last = found
    context.needs_contextlib = True
    no_sync = f"{full_name(context.unidist_name(statements[0], 'no_sync'))}({context.text(model)})"
    context.edits.wrap(statements[0], statements[-1], f"contextlib.nullcontext() if {last} else {no_sync}")


#: The statements of one pass, and the condition under which it is the last.
Pass = tuple[list[cst.CSTNode], str]


def _last_pass(context: Context, optimizer: Flow) -> Pass | None:
    """Return the passes of the only loop with a backward pass and a step of the optimizer."""
    tree = context.tree
    backwards = list(tree.method_calls("backward"))
    steps = [
        call for call in tree.method_calls("step") if cst.ensure_type(call.func, cst.Attribute).value in optimizer.uses
    ]
    if len(backwards) != 1 or len(steps) != 1:
        return None
    loop, backward = tree.loop(backwards[0]), tree.statement(backwards[0])
    if not isinstance(loop, cst.For) or backward is None or tree.block(backward) is not loop.body:
        return None
    # An exception ends the training; other jumps may skip the step.
    if any(tree.all((cst.Break, cst.Continue, cst.Return), loop.body)):
        return None
    return _inner_loop(context, loop, steps[0]) or _modulo(context, loop, backward, steps[0])


def _inner_loop(context: Context, loop: cst.For, call: cst.Call) -> Pass | None:
    """``for i in range(...): loss.backward()``, followed by one ``step()``."""
    tree, step = context.tree, context.tree.statement(call)
    if step is None or tree.is_inside(step, loop) or tree.block(step) is not tree.block(loop):
        return None
    match loop:
        case cst.For(cst.Name(counter), cst.Call(cst.Name("range"), args), cst.IndentedBlock(body)):
            values = [arg.value for arg in args]
            if any(arg.keyword or arg.star for arg in args) or not all(map(_is_invariant, values)):
                return None
            if counter in _assigned_in(context, loop.body):
                return None
            stop = values[0] if len(values) == 1 else values[1]
            stride = context.text(values[2]) if len(values) == 3 else "1"
            return list(body), f"{counter} + {stride} >= {context.text(stop)}"
    return None


def _modulo(context: Context, loop: cst.For, backward: cst.CSTNode, step: cst.Call) -> Pass | None:
    """``for i, batch in enumerate(...): loss.backward(); if (i + 1) % n == 0: step()``."""
    tree = context.tree
    branch = next((above for above in tree.parents(step) if isinstance(above, cst.If)), None)
    if branch is None or branch.orelse is not None or tree.block(branch) is not loop.body:
        return None
    first = loop.target.elements[0].value if isinstance(loop.target, cst.Tuple) else loop.target
    names = {node.value for node in tree.all(cst.Name, inside=branch.test)}
    enumerated = isinstance(loop.iter, cst.Call) and full_name(loop.iter.func) in ("enumerate", "range")
    if not isinstance(first, cst.Name) or first.value not in names or not enumerated:
        return None
    modulo = any(isinstance(each.operator, cst.Modulo) for each in tree.all(cst.BinaryOperation, inside=branch.test))
    if not modulo or any(tree.all(cst.Call, inside=branch.test)) or names & _assigned_in(context, loop.body):
        return None
    return [*tree.siblings(backward)[0], backward], context.text(branch.test)


def _is_invariant(node: cst.BaseExpression) -> bool:
    """Return whether an expression has the same value in each iteration: names, numbers, ``len`` of a name."""
    if isinstance(node, cst.Call):
        return full_name(node.func) == "len" and all(is_pure(arg.value) for arg in node.args)
    return is_pure(node)


def _assigned_in(context: Context, block: cst.CSTNode) -> set[str]:
    """Return the names that a block sets."""
    return {node.value for node in context.tree.all(cst.Name, inside=block) if is_target(context.tree, node)}
