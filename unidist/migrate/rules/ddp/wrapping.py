"""Rules for models: ``DistributedDataParallel``, apex's, and the conversion of BatchNorm layers."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from unidist.migrate.context import UNKNOWN_ARGUMENTS, Arguments, is_constant
from unidist.migrate.flow import assignments, follow, targets_of, uses_of
from unidist.migrate.rules.ddp.names import APEX_DDP, DDP, TorchContext
from unidist.migrate.syntax import SyntaxTree, called_name, full_name

#: Arguments that wrap_model has too, and their defaults.
_DEFAULTS: dict[str, object] = {
    "find_unused_parameters": False,
    "broadcast_buffers": True,
    "forward_sync_buffers": True,
    "bucket_cap_mb": 25,
    "static_graph": False,
}
#: Arguments that do not change what is computed.
_WITHOUT_EFFECT = {"gradient_as_bucket_view", "check_reduction", "device_ids", "output_device", "dim"}
#: Values of others that change nothing.
_HARMLESS = {"init_sync": True, "gradient_average": True}
#: Of apex: they change how the average is rounded, or when it is made.
_OF_APEX = {
    "message_size", "delay_allreduce", "retain_allreduce_buffers", "allreduce_always_fp32", "num_allreduce_streams",
    "gradient_predivide_factor", "gradient_average_split_factor", "prof", "shared_param",
}  # fmt: skip
_CONVERTERS = ("convert_sync_batchnorm", "apex.parallel.convert_syncbn_model")
_GROUP = ("process_group= trains on some of the ranks", "unidist.new_group and wrap_model(group=...)")
_SEVERAL = ("device_ids= names several GPUs for one process", "one process per GPU, then migrate again")
_REMOVE = "remove the argument, then migrate again"
_TORCH_SYNC = (
    "nn.SyncBatchNorm stays, as it is not visibly converted right before the model is wrapped: it works on GPUs of "
    "torch.distributed's backends only",
    "wrap_model(sync_bn=True), which works on all backends",
)
_HOOK = ("unidist registers communication hooks itself", 'wrap_model(model, compression="fp16"), then migrate again')
_KEPT = (
    "wrap_model's gradients are views of DDP's buckets (gradient_as_bucket_view=True): the next backward pass "
    "overwrites those that are kept",
    "keep .grad.clone()",
)
_ZERO_JOIN = ("unidist.join takes models and optimizers", "with unidist.join(model, optimizer):, see docs/semantics.md")


def change_models(context: TorchContext) -> None:
    """Make each ``DistributedDataParallel(model, ...)`` ``unidist.wrap_model(model, ...)``."""
    tree = context.tree
    for call in list(context.calls(DDP, APEX_DDP)):
        arguments = context.arguments(call)
        if arguments is None or "module" not in arguments:
            context.keep(call.func, *UNKNOWN_ARGUMENTS)
            continue
        is_apex = context.symbol(call.func) == APEX_DDP
        problem = _problem(context, arguments, is_apex)
        if problem is not None:
            context.keep(call.func, *problem)
            continue
        values = [("", arguments["module"]), *_sync_bn(context, call, arguments["module"])]
        values += [("broadcast_buffers", cst.Name("False"))] if is_apex else []
        values += [
            (name.replace("forward_sync", "broadcast"), arguments[name])
            for name, default in _DEFAULTS.items()
            if name in arguments and not is_constant(arguments[name], None, default)
        ]
        context.rebuild(call, "wrap_model", values)
        for value, target in assignments(tree):
            if value is call and (variable := tree.variable(target)) is not None:
                context.wrapped.add(variable)
    for use in list(context.uses(DDP, APEX_DDP)):
        if is_asked_for(context, use) or isinstance(tree.parent(use), cst.Annotation):
            context.edits.replace(use, context.unidist_name(use, "WrappedModel"))
            context.mark_handled(use)
    for call in list(context.calls("convert_sync_batchnorm")):
        context.remark(call, *_TORCH_SYNC)
        context.mark_handled(call.func)
    for call in tree.method_calls("register_comm_hook"):
        context.refuse(call, *_HOOK)
    _change_joins(context)
    report_evaluation(context)
    _report_kept_gradients(context)


def _problem(context: TorchContext, arguments: Arguments, is_apex: bool) -> tuple[str, str] | None:
    allowed = {"module", "process_group", *(_OF_APEX if is_apex else {*_DEFAULTS, *_WITHOUT_EFFECT})}
    if not context.is_world(arguments.get("process_group")):
        return _GROUP
    devices = arguments.get("device_ids")
    if isinstance(devices, (cst.List, cst.Tuple)) and len(devices.elements) > 1:
        return _SEVERAL
    for name, value in arguments.items():
        if name not in allowed and not is_constant(value, _HARMLESS.get(name)):
            return f"wrap_model has no {name}=", _REMOVE
    return None


def is_asked_for(context: TorchContext, use: cst.BaseExpression) -> bool:
    """Return whether a class is asked for: ``isinstance(model, DistributedDataParallel)``, ``model: DataParallel``."""
    above = context.tree.parent(use)
    if isinstance(above, cst.Annotation):
        return True
    while isinstance(above, (cst.Element, cst.Tuple, cst.BinaryOperation)):
        above = context.tree.parent(above)
    call = context.tree.parent(above)
    return isinstance(above, cst.Arg) and isinstance(call, cst.Call) and full_name(call.func) == "isinstance"


# ------------------------------------------------------------------------------------ BatchNorm
def _sync_bn(
    context: TorchContext, wrapping: cst.Call, model: cst.BaseExpression
) -> list[tuple[str, cst.BaseExpression]]:
    """``sync_bn=``, if the statements before the wrapping convert the model; these go."""
    tree = context.tree
    inner = _converted(context, model)
    if inner is not None:  # DDP(convert(model))
        context.edits.replace(model, lambda updated: updated.args[0].value)
        context.mark_handled(cst.ensure_type(model, cst.Call).func)
        return [("sync_bn", cst.Name("True"))]
    for each in _before(context, wrapping):
        test: cst.BaseExpression = cst.Name("True")
        lines: list[cst.CSTNode] = [each]
        if isinstance(each, cst.If):
            if each.orelse is not None or not isinstance(each.test, (cst.Name, cst.Attribute)):
                return []
            test, lines = each.test, list(each.body.body)
        elif not isinstance(each, cst.SimpleStatementLine):
            return []
        for value, target in assignments(tree):
            inner = _converted(context, value)
            own = tree.statement(target)
            same = context.text(target) == context.text(model)
            if inner is None or own is None or not same or not any(own is line for line in lines):
                continue
            if context.text(inner) != context.text(model):
                if isinstance(each, cst.If):
                    return []
                context.edits.replace(value, lambda updated: updated.args[0].value)
                context.mark_handled(cst.ensure_type(value, cst.Call).func)
            else:
                others = [line for line in lines if line is not own and not _is_import(line)]
                gone = each if isinstance(each, cst.If) and not others else own
                context.cut(gone)
            return [("sync_bn", test.deep_clone())]
    return []


def _before(context: TorchContext, wrapping: cst.Call) -> Iterator[cst.CSTNode]:
    """Yield the statements before the wrapping of a model, nearest first, also before the ``if`` that it is in."""
    tree = context.tree
    statement: cst.CSTNode | None = tree.statement(wrapping)
    while statement is not None and (block := tree.block(statement)) is not None:
        yield from reversed(tree.siblings(statement)[0])
        above = tree.parent(block)
        statement = above if isinstance(above, cst.If) else None


def _is_import(line: cst.CSTNode) -> bool:
    return isinstance(line, cst.SimpleStatementLine) and isinstance(line.body[0], (cst.Import, cst.ImportFrom))


def _converted(context: TorchContext, value: cst.BaseExpression) -> cst.BaseExpression | None:
    """``model`` of ``convert_sync_batchnorm(model)``."""
    match value:
        case cst.Call(function, [cst.Arg(model, keyword=None, star="")]) if context.symbol(function) in _CONVERTERS:
            return model
    return None


# ------------------------------------------------------------------------------------ uses of wrapped models
def _change_joins(context: TorchContext) -> None:
    """``with model.join():`` of a wrapped model."""
    tree = context.tree
    for call in list(tree.method_calls("join")):
        function = cst.ensure_type(call.func, cst.Attribute)
        if tree.variable(function.value) not in context.wrapped:
            continue
        if call.args:
            context.refuse(call, *_ZERO_JOIN)
        elif isinstance(tree.parent(call), cst.WithItem):
            args = [cst.Arg(function.value.deep_clone())]
            context.edits.replace(call, cst.Call(context.unidist_name(call, "join"), args))


def report_evaluation(context: TorchContext) -> None:
    """Say that DDP copies rank 0's statistics of BatchNorm also before a forward pass of the evaluation."""
    tree = context.tree
    if not context.wrapped or not any(name in tree.module.code for name in ("BatchNorm", "torchvision.models")):
        return
    for call in tree.method_calls("eval"):
        function = cst.ensure_type(call.func, cst.Attribute)
        if tree.variable(function.value) in follow(tree, context.wrapped).variables:  # also as a parameter
            context.remark(
                call,
                "DDP gives all ranks rank 0's BatchNorm statistics before a forward pass of the evaluation, too; "
                "unidist in training only, so that other ranks may evaluate with their own",
                "nothing, if rank 0 alone evaluates or sync_bn=True; else unidist.broadcast_model_state(model) before",
            )
            return


def _report_kept_gradients(context: TorchContext) -> None:
    """Gradients that an object, a list or a variable still has in the next backward pass."""
    tree = context.tree
    if not context.wrapped or "gradient_as_bucket_view=True" in tree.module.code:
        return
    for node in tree.all(cst.Attribute):
        if node.attr.value == "grad" and _is_kept(tree, _whole(tree, node)):
            context.remark(node, *_KEPT)


def _whole(tree: SyntaxTree, node: cst.CSTNode) -> cst.CSTNode:
    """Return the list, tuple or dictionary that is made with a value; else the value."""
    match tree.parent(node):
        case cst.Element() | cst.DictElement() | cst.List() | cst.Tuple() | cst.Dict() as above:
            return _whole(tree, above)
        case cst.ListComp(elt=value) | cst.GeneratorExp(elt=value) | cst.DictComp(value=value) as above if (
            value is node
        ):
            return _whole(tree, above)
        case cst.Attribute(attr=cst.Name("data")) as above:
            return _whole(tree, above)
        case cst.Arg() as above if called_name(cst.ensure_type(tree.parent(above), cst.Call)) in ("list", "tuple"):
            return _whole(tree, tree.parent(above))
    return node


def _is_kept(tree: SyntaxTree, node: cst.CSTNode) -> bool:
    above = tree.parent(node)
    if isinstance(above, cst.Arg):
        return called_name(cst.ensure_type(tree.parent(above), cst.Call)) == "append"
    return any(
        isinstance(target, cst.Subscript) or _is_used_in_later_pass(tree, target)
        for value, target in assignments(tree)
        if value is node
    )


def _is_used_in_later_pass(tree: SyntaxTree, target: cst.BaseExpression) -> bool:
    """Return whether a variable is read after a later backward pass of the same function, and not set in between."""
    variable, function = tree.variable(target), tree.function(target)
    if isinstance(target, cst.Attribute):
        return target.attr.value != "grad" and bool(uses_of(tree, variable))
    start = tree.position(target)
    passes = (call for call in tree.method_calls("backward") if tree.function(call) is function)
    later = min((at for at in map(tree.position, passes) if at > start), default=None)
    again = min((at for at in map(tree.position, targets_of(tree, variable)) if at > start), default=None)
    uses = map(tree.position, uses_of(tree, variable))
    return later is not None and any(later < use and (again is None or use < again) for use in uses)
