"""``backward_passes_per_step`` becomes ``no_sync()`` where the loop over the passes can be seen."""

from __future__ import annotations

import libcst as cst

from unidist.migrate.code import Statement, full_name, is_pure
from unidist.migrate.flow import Flow, is_target
from unidist.migrate.site import Site, is_constant

_SLOWER = "gradients are now averaged in every backward pass: the result is the same, the network does more"
_REMEDY = "put all passes but the last into `with model.no_sync():`"


def accumulate(
    site: Site, passes: cst.BaseExpression | None, optimizer: Flow, model: cst.BaseExpression, wrap: Statement
) -> None:
    """Leave out the sums of all passes but the last; without this the result is the same."""
    if passes is None or is_constant(passes, 1):
        return
    conditional = any(
        isinstance(above, (cst.If, cst.Try)) and not site.text(above).startswith("if __name__ ==")
        for above in site.code.parents(wrap)
    )
    found = None if conditional else _inner_loop(site, optimizer) or _modulo(site, optimizer)
    if found is None:
        site.note(passes, _SLOWER, _REMEDY, f"backward_passes_per_step={site.text(passes)}")
        return
    statements, last = found
    site.needs_contextlib = True
    passing = f"{site.text(model)}.no_sync()"
    site.edits.wrap(statements[0], statements[-1], f"contextlib.nullcontext() if {last} else {passing}")


#: The statements of one pass, and the condition under which it is the last.
Found = tuple[list[cst.CSTNode], str]


def _steps(site: Site, optimizer: Flow) -> list[cst.Call]:
    """The calls of the optimizer's ``step()``."""
    return [
        call
        for call in site.code.method_calls("step")
        if isinstance(call.func, cst.Attribute) and call.func.value in optimizer.uses
    ]


def _inner_loop(site: Site, optimizer: Flow) -> Found | None:
    """``for i in range(...): loss.backward()`` and one ``step()`` behind it."""
    code = site.code
    backwards, steps = list(site.code.method_calls("backward")), _steps(site, optimizer)
    if len(backwards) != 1 or len(steps) != 1:
        return None
    loop, step = code.loop(backwards[0]), code.statement(steps[0])
    if (
        not isinstance(loop, cst.For)
        or step is None
        or code.is_inside(step, loop)
        or code.block(step) is not code.block(loop)
    ):
        return None
    counter, whole = loop.target, loop.iter
    if not isinstance(counter, cst.Name) or not isinstance(whole, cst.Call) or full_name(whole.func) != "range":
        return None
    if _skips(site, loop) or not isinstance(loop.body, cst.IndentedBlock) or _is_set(site, counter, loop.body):
        return None
    values = [arg.value for arg in whole.args]
    if any(arg.keyword or arg.star for arg in whole.args) or not all(map(_is_steady, values)):
        return None
    stop = values[0] if len(values) == 1 else values[1]
    stride = site.text(values[2]) if len(values) == 3 else "1"
    return list(loop.body.body), f"{counter.value} + {stride} >= {site.text(stop)}"


def _modulo(site: Site, optimizer: Flow) -> Found | None:
    """``for i, batch in enumerate(...): loss.backward(); if (i + 1) % n == 0: step()``."""
    code = site.code
    backwards, steps = list(site.code.method_calls("backward")), _steps(site, optimizer)
    if len(backwards) != 1 or len(steps) != 1:
        return None
    loop = code.loop(backwards[0])
    branch = next((above for above in code.parents(steps[0]) if isinstance(above, cst.If)), None)
    if (
        not isinstance(loop, cst.For)
        or branch is None
        or branch.orelse is not None
        or not isinstance(loop.body, cst.IndentedBlock)
    ):
        return None
    statement = code.statement(backwards[0])
    if statement is None or code.block(statement) is not loop.body or code.block(branch) is not loop.body:
        return None
    first = loop.target.elements[0].value if isinstance(loop.target, cst.Tuple) else loop.target
    test = branch.test
    names = [node.value for node in code.all(cst.Name, inside=test)]
    inside = {node.value for node in code.all(cst.Name, inside=loop.body) if is_target(code, node)}
    enumerated = isinstance(loop.iter, cst.Call) and full_name(loop.iter.func) in ("enumerate", "range")
    if not isinstance(first, cst.Name) or first.value not in names or not enumerated or _skips(site, loop):
        return None
    modulo = any(isinstance(node.operator, cst.Modulo) for node in code.all(cst.BinaryOperation, inside=test))
    if not modulo or any(code.all(cst.Call, inside=test)) or inside & set(names):
        return None
    before: list[cst.CSTNode] = []
    for each in loop.body.body:
        before.append(each)
        if code.is_inside(backwards[0], each):
            break
    return before, site.text(test)


def _is_steady(node: cst.BaseExpression) -> bool:
    """An expression that has the same value each time: names, numbers, ``len`` of a name."""
    if isinstance(node, cst.Call):
        return full_name(node.func) == "len" and all(is_pure(arg.value) for arg in node.args)
    return is_pure(node)


def _skips(site: Site, loop: cst.For) -> bool:
    """Whether a pass through the loop may leave out the step, and training go on. An exception ends it."""
    return any(not isinstance(jump, cst.Raise) for jump in site.code.jumps(loop.body))


def _is_set(site: Site, name: cst.Name, block: cst.CSTNode) -> bool:
    targets = (cst.AssignTarget, cst.AugAssign)
    return any(
        isinstance(node, targets) and isinstance(node.target, cst.Name) and node.target.value == name.value
        for node in site.code.nodes if site.code.is_inside(node, block)
    )  # fmt: skip
