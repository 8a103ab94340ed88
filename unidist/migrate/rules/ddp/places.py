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
    """Return whether it is ``"nccl"``, or ``"nccl" if torch.cuda.is_available() else "gloo"``."""
    match node:
        case cst.SimpleString():
            return node.evaluated_value in _BY_CUDA
        case cst.IfExp(test, cst.SimpleString() as first, cst.SimpleString() as second):
            tested = isinstance(test, cst.Call) and context.symbol(test.func) == "is_nccl_available"
            names = [first.evaluated_value, second.evaluated_value]
            return names == ["nccl", "gloo"] and (tested or context.text(test) == "torch.cuda.is_available()")
    return context.symbol(node) == "Backend.NCCL"


def first_reading(context: TorchContext, start: Statement, values: list[cst.BaseExpression]) -> Statement:
    """Return the first of the statements right before the start that read the place or choose a GPU; else the start.

    Nothing that is between depends on the order of the two.

    Args:
        values: the arguments with which the start is called.
    """
    tree, first = context.tree, start
    assigned: set[str] = set()
    for each in reversed(tree.siblings(start)[0]):
        if not isinstance(each, cst.SimpleStatementLine) or len(each.body) != 1:
            break
        small = each.body[0]
        calls = list(tree.all(cst.Call, inside=each))
        if not isinstance(small, (cst.Assign, cst.AnnAssign, cst.Expr)) or any(
            full_name(call.func) not in _HARMLESS for call in calls
        ):
            break
        targets = {tree.text(each.target) for each in small.targets} if isinstance(small, cst.Assign) else set()
        if any("environ" in target for target in targets):
            break
        assigned |= targets
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
    """Change devices and places after the start to ``unidist.device()``, ``local_rank()``, ``rank()`` and so on."""
    tree = context.tree
    if context.sets_device and all(context.sets_device):
        for call in tree.all(cst.Call):
            if _is_set_device(context, call) and context.is_after_start(call) and (own := tree.is_statement(call)):
                context.cut(own)
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
    match [arg.value for arg in call.args]:
        case [cst.SimpleString("'cuda'" | '"cuda"'), index]:
            return place_of(context, index) == "local_rank"
        case [cst.IfExp(test, value, cst.SimpleString("'cpu'" | '"cpu"'))]:
            return context.text(test) == "torch.cuda.is_available()" and _is_device_name(context, value)
        case [value]:
            return _is_device_name(context, value)
    return False


def _is_device_name(context: TorchContext, value: cst.BaseExpression) -> bool:
    """``f"cuda:{local_rank}"``, ``"cuda:{}".format(local_rank)``, ``"cuda:%d" % local_rank``."""
    inner: cst.BaseExpression | None = None
    match value:
        case cst.FormattedString([cst.FormattedStringText("cuda:"), cst.FormattedStringExpression(inner)]):
            pass
        case cst.Call(cst.Attribute(cst.SimpleString("'cuda:{}'" | '"cuda:{}"'), cst.Name("format")), [cst.Arg(inner)]):
            pass
        case cst.BinaryOperation(cst.SimpleString() as text, cst.Modulo(), right):
            inner = right if text.evaluated_value in ("cuda:%d", "cuda:%s") else None
    return place_of(context, inner) == "local_rank"


def _moves_to_local_rank(context: TorchContext, call: cst.Call) -> bool:
    """``x.to(local_rank)``, ``x.cuda(local_rank, non_blocking=True)``."""
    match call:
        case cst.Call(cst.Attribute(attr=cst.Name("to" | "cuda")), [first] | [first, cst.Arg(keyword=cst.Name())]):
            named = first.keyword is not None and first.keyword.value != "device"
            if not (named or first.star or context.tree.imported(call.func)):
                return place_of(context, first.value) == "local_rank" or _is_device_name(context, first.value)
    return False


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
        uses = [use for use in references(tree)[variable] if use is not target]
        if uses and all(context.is_gone(use) for use in uses):
            context.cut(statement)
