"""What is a process's rank, and what that is used for: environment variables, arguments, devices."""

from __future__ import annotations

import re

import libcst as cst

from unidist.migrate.flow import assignments, is_target, references
from unidist.migrate.rules.ddp.names import TorchContext, environment_place, place_of
from unidist.migrate.syntax import Statement, full_name

_BY_CUDA = ("nccl", "cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo", "cuda:nccl")
_CHOSEN = (
    "unidist.init(), which comes after it, chooses the GPU of the local rank, on nccl",
    "nothing, if this is the local rank; else call it after init(), or pass device= to init()",
)
#: Calls that do nothing but read, or choose a GPU.
_HARMLESS = {
    "int", "str", "float", "bool", "len", "torch.device", "torch.cuda.set_device", "torch.cuda.is_available",
    "torch.cuda.device_count", "os.getenv", "os.environ.get", "environ.get", "getenv", "print",
}  # fmt: skip


def is_by_cuda(context: TorchContext, node: cst.BaseExpression | None) -> bool:
    """``"nccl"``, or ``"nccl" if torch.cuda.is_available() else "gloo"``."""
    if isinstance(node, cst.SimpleString):
        return node.evaluated_value in _BY_CUDA
    if context.symbol(node) == "Backend.NCCL":
        return True
    if not isinstance(node, cst.IfExp):
        return False
    names = [each.evaluated_value for each in (node.body, node.orelse) if isinstance(each, cst.SimpleString)]
    tested = isinstance(node.test, cst.Call) and context.symbol(node.test.func) == "is_nccl_available"
    return names == ["nccl", "gloo"] and (tested or context.text(node.test) == "torch.cuda.is_available()")


def first_reading(context: TorchContext, start: Statement, values: list[cst.BaseExpression]) -> Statement:
    """The first of the statements right before the start that read the place or choose a GPU; else the start itself.

    Nothing that is between depends on the order of the two.

    Args:
        values: the arguments with which the start is called.
    """
    tree = context.tree
    block, first = tree.block(start), start
    if block is None:
        return start
    index = next(index for index, each in enumerate(block.body) if each is start)
    assigned: set[str] = set()
    for each in reversed(block.body[:index]):
        if not isinstance(each, cst.SimpleStatementLine) or len(each.body) != 1:
            break
        small = each.body[0]
        calls = list(tree.all(cst.Call, inside=each))
        if not isinstance(small, (cst.Assign, cst.AnnAssign, cst.Expr)) or any(
            full_name(call.func) not in _HARMLESS for call in calls
        ):
            break
        if isinstance(small, cst.Assign) and any("environ" in tree.text(target) for target in small.targets):
            break
        if isinstance(small, cst.Assign):
            assigned |= {tree.text(target.target) for target in small.targets}
        if any(environment_place(call) or _is_set_device(context, call) for call in calls):
            first = each
    given = {name for value in values for name in re.findall(r"[\w.]+", tree.text(value))}
    return start if given & assigned else first


def _is_set_device(context: TorchContext, call: cst.Call) -> bool:
    return (
        full_name(call.func) == "torch.cuda.set_device"
        and len(call.args) == 1
        and place_of(context, call.args[0].value) == "local_rank"
    )


def change_places(context: TorchContext) -> None:
    """Devices and places after the start: ``unidist.device()``, ``local_rank()``, ``rank()``, ``world_size()``."""
    tree = context.tree
    if context.sets_device and all(context.sets_device):
        for call in tree.all(cst.Call):
            if _is_set_device(context, call) and context.is_after_start(call) and (own := tree.is_statement(call)):
                context.edits.remove(own)
                context.drop(own)
            elif _is_device(context, call) and context.is_after_start(call) and not context.is_gone(call):
                context.edits.replace(call, cst.Call(context.unidist_name(call, "device")))
                context.drop(call)
            elif _moves_to_local_rank(context, call) and context.is_after_start(call) and not context.is_gone(call):
                _move(context, call)
    for node in tree.all((cst.Call, cst.Attribute)):
        if context.is_gone(node) or not context.is_after_start(node):
            continue
        found = environment_place(node) if context.by_launcher else None
        if isinstance(node, cst.Attribute) and node.attr.value == "local_rank" and not is_target(tree, node):
            found = place_of(context, node)
        if found is not None:
            context.edits.replace(node, cst.Call(context.unidist_name(node, found)))
            context.drop(node)
    if context.chooses_device:
        _report_devices(context)
    _remove_unused(context)


def _report_devices(context: TorchContext) -> None:
    """GPUs that the script chooses before ``unidist.init()`` chooses that of the local rank."""
    tree = context.tree
    for call in tree.all(cst.Call):
        if full_name(call.func) != "torch.cuda.set_device" or context.is_gone(call) or context.is_after_start(call):
            continue
        chosen = call.args[0].value if call.args else None
        named = chosen is not None and full_name(chosen).lower().endswith("local_rank")
        if not named and place_of(context, chosen) != "local_rank":
            context.remark(call, *_CHOSEN)


def _is_device(context: TorchContext, call: cst.Call) -> bool:
    """``torch.device("cuda", local_rank)``, ``torch.device(f"cuda:{local_rank}")``."""
    if full_name(call.func) != "torch.device" or any(arg.star for arg in call.args):
        return False
    values = [arg.value for arg in call.args]
    if len(values) == 2 and isinstance(values[0], cst.SimpleString) and values[0].evaluated_value == "cuda":
        return place_of(context, values[1]) == "local_rank"
    if len(values) != 1:
        return False
    value = values[0]
    if isinstance(value, cst.IfExp):
        other = isinstance(value.orelse, cst.SimpleString) and value.orelse.evaluated_value == "cpu"
        if not other or context.text(value.test) != "torch.cuda.is_available()":
            return False
        value = value.body
    return _is_device_name(context, value)


def _is_device_name(context: TorchContext, value: cst.BaseExpression) -> bool:
    """``f"cuda:{local_rank}"``, ``"cuda:{}".format(local_rank)``, ``"cuda:%d" % local_rank``."""
    inner: cst.BaseExpression | None = None
    if isinstance(value, cst.FormattedString) and len(value.parts) == 2:
        first, second = value.parts
        if isinstance(first, cst.FormattedStringText) and first.value == "cuda:":
            inner = second.expression if isinstance(second, cst.FormattedStringExpression) else None
    elif isinstance(value, cst.Call) and context.text(value.func) in ('"cuda:{}".format', "'cuda:{}'.format"):
        inner = value.args[0].value if len(value.args) == 1 else None
    elif isinstance(value, cst.BinaryOperation) and isinstance(value.operator, cst.Modulo):
        inner = value.right if context.text(value.left).strip("\"'") in ("cuda:%d", "cuda:%s") else None
    return place_of(context, inner) == "local_rank"


def _moves_to_local_rank(context: TorchContext, call: cst.Call) -> bool:
    """``x.to(local_rank)``, ``x.cuda(local_rank, non_blocking=True)``."""
    method = call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
    if method not in ("to", "cuda") or not call.args or context.tree.imported(call.func):
        return False
    first = call.args[0]
    named = first.keyword is not None and first.keyword.value != "device"
    if named or first.star or len(call.args) > 2 or (len(call.args) == 2 and call.args[1].keyword is None):
        return False
    return place_of(context, first.value) == "local_rank" or _is_device_name(context, first.value)


def _move(context: TorchContext, call: cst.Call) -> None:
    device = cst.Call(context.unidist_name(call, "device"))

    def change(updated: cst.Call) -> cst.Call:
        function = cst.ensure_type(updated.func, cst.Attribute).with_changes(attr=cst.Name("to"))
        return updated.with_changes(func=function, args=[updated.args[0].with_changes(value=device), *updated.args[1:]])

    context.edits.replace(call, change)
    context.drop(call.args[0])


def _remove_unused(context: TorchContext) -> None:
    """Remove assignments of ranks, the backend and the address to variables that nothing uses any more."""
    tree = context.tree
    for value, target in assignments(tree):
        statement, variable = tree.statement(target), tree.variable(target)
        if not isinstance(statement, cst.SimpleStatementLine) or tree.parent(value) is not statement.body[0]:
            continue
        known = place_of(context, value) or is_by_cuda(context, value) or isinstance(value, cst.SimpleString)
        if not known or not isinstance(target, cst.Name) or variable is None or target.value in context.exported:
            continue
        uses = [use for use in references(tree).get(variable, ()) if use is not target]
        if uses and all(context.is_gone(use) for use in uses):
            context.edits.remove(statement)
            context.drop(statement)
