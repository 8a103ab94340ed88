"""Replaces a ``DistributedOptimizer`` by ``replicate`` and a plain optimizer, as the optimizer rule decided."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from unidist.migrate.context import Arguments, Context, is_constant
from unidist.migrate.flow import Flow, is_on_the_way
from unidist.migrate.rules.accumulation import change_accumulation
from unidist.migrate.syntax import Statement, called_name, dotted, is_pure, keyword

_ADASUM_BRANCH = (
    "unidist has no Adasum: the script raises an error where it is asked for",
    "remove the option; or migrate with --to hvd, since the drop-in has Adasum on every backend",
)
_ROUNDING = "removed: it changes only how the average is rounded"
_NO_ADASUM = "unidist has no Adasum: use the DistributedOptimizer of its drop-in for Horovod"
COMPRESSION = {"Compression.none": "None", "Compression.fp16": '"fp16"'}
#: Methods that only Horovod's optimizers have.
METHODS = {"synchronize", "skip_synchronize", "set_backward_passes_per_step"}
#: Functions that clip gradients, and what a GradScaler has for it.
_CLIPPING = {"clip_grad_norm_", "clip_grad_norm", "clip_grad_value_", "clip_grad_value", "unscale_"}
_CLIPPED = "without synchronize(), Horovod may clip before it has averaged; now it is the averages that are clipped"
_CLOSURE = "Horovod averages before it calls the closure; now each backward pass in the closure averages"
_PASSED_ON = "the optimizer is passed to a function of another file, and is now a plain one"


@dataclass
class OptimizerPlan:
    """How one ``DistributedOptimizer(...)`` is replaced."""

    call: cst.Call
    statement: Statement
    #: What it is assigned to; None if it goes elsewhere.
    target: cst.BaseExpression | None
    arguments: Arguments
    model: cst.BaseExpression
    #: The model is replicated before this statement: the optimizer's, or the broadcast's if that is later.
    before: Statement
    broadcast: Statement | None
    compression: cst.BaseExpression | None
    #: The condition under which the script would use Adasum.
    adasum: cst.BaseExpression | None
    flow: Flow


def replace_optimizer(context: Context, each: OptimizerPlan, places: list[tuple[Statement, str | None]]) -> None:
    """Replace one.

    Args:
        places: the statements before which its model is replicated, and the name that it has there if it is another.
    """
    edits = context.edits
    change_accumulation(context, each.arguments.get("backward_passes_per_step"), each.flow, each.model, each.before)
    predivide = each.arguments.get("gradient_predivide_factor")
    if predivide is not None and not is_constant(predivide, 1):
        context.remark(each.call, _ROUNDING, "nothing", f"gradient_predivide_factor={context.text(predivide)}")
    inner = each.arguments["optimizer"]
    if each.adasum is not None:
        test = context.text(each.adasum)
        context.remark(each.call, *_ADASUM_BRANCH)
        edits.insert(each.statement, f'if {test}:\n    raise ValueError("{_NO_ADASUM}")\n')
    if _is_assigned_to(context, each, inner):
        edits.remove(each.statement)
    else:
        edits.keep_comments(each.statement, each.call, but=[inner])
        index = next(index for index, argument in enumerate(each.call.args) if argument.value is inner)
        edits.replace(each.call, lambda updated: updated.args[index].value)
    if each.broadcast is not None:
        edits.remove(each.broadcast)
        context.mark_handled(each.broadcast)
    for statement, name in places:
        model = each.model.deep_clone() if name is None else dotted(name)
        edits.insert(statement, cst.SimpleStatementLine([cst.Expr(_replicate(context, each, model))]))
    for node in (
        each.call.func,
        *(value for name, value in each.arguments.items() if name not in ("optimizer", "compression")),
    ):
        context.mark_handled(node)
    if context.symbol(each.arguments.get("compression")) == "Compression.none":
        context.mark_handled(each.arguments["compression"])
    for use in each.flow.uses:
        _change_method(context, use)
        _remark_on_use(context, each, use)
    _remark_on_others(context, each)


def _is_assigned_to(context: Context, each: OptimizerPlan, inner: cst.BaseExpression) -> bool:
    """Return whether the plain optimizer, too, is what the optimizer is assigned to."""
    match each.statement:
        case cst.SimpleStatementLine([cst.Assign([target], value)]) if value is each.call and is_pure(inner):
            return context.text(target.target) == context.text(inner)
    return False


def _remark_on_others(context: Context, each: OptimizerPlan) -> None:
    """Remark on clipping before Horovod has averaged, and on state that is loaded before wrapping."""
    tree, inner = context.tree, each.arguments["optimizer"]
    synchronized = [use for use in each.flow.uses if tree.called_method(use) == "synchronize"]
    for call in tree.all(cst.Call):
        if called_name(call) in _CLIPPING and not any(is_on_the_way(tree, use, call) for use in synchronized):
            context.remark(call, _CLIPPED, "nothing; the curves may differ from the legacy ones")
    for loaded in tree.all(cst.Attribute):
        before = loaded.attr.value == "load_state_dict" and context.text(loaded.value) == context.text(inner)
        same = tree.function(loaded) is tree.function(each.call) and tree.position(loaded) < tree.position(each.call)
        if before and same and is_pure(inner):
            why = "Horovod drops optimizer state that is loaded before wrapping (momentum restarts); now it is kept"
            context.remark(loaded, why, "nothing, if the state was meant to be loaded")


def _replicate(context: Context, each: OptimizerPlan, model: cst.BaseExpression) -> cst.Call:
    options = [cst.Arg(model)]
    if each.compression is not None:
        value: cst.BaseExpression = each.compression.deep_clone()
        if context.symbol(each.compression) in COMPRESSION:
            value = cst.parse_expression(COMPRESSION[context.names.symbols[each.compression]])
        elif isinstance(each.compression, cst.IfExp):
            text = context.text(each.compression)
            for node, symbol in context.names.symbols.items():
                if symbol in COMPRESSION and context.tree.is_inside(node, each.compression):
                    text = text.replace(context.text(node), COMPRESSION[symbol])
            value = cst.parse_expression(text)
        options.append(keyword("compression", value))
    return cst.Call(context.unidist_name_for(each.call.func, "replicate"), options)


def _remark_on_use(context: Context, each: OptimizerPlan, use: cst.BaseExpression) -> None:
    """Remark on steps with a closure, and on functions of other files that get the optimizer."""
    tree = context.tree
    call = tree.parent(tree.parent(use))
    if not isinstance(call, cst.Call):
        return
    if tree.called_method(use) == "step" and call.args:
        context.remark(call, _CLOSURE, "nothing, if the closure calls backward()")
    elif use in each.flow.escapes and isinstance(call.func, cst.Name) and "sched" not in call.func.value.lower():
        known = any(name.startswith(("torch.", "unidist.")) for name in tree.imported(call.func))
        if not known and context.symbol(call.func) is None:
            context.remark(call, _PASSED_ON, "make sure that it calls neither synchronize() nor skip_synchronize()")


def horovod_method(context: Context, use: cst.BaseExpression) -> cst.Attribute | None:
    """Return ``optimizer.synchronize`` for its ``optimizer``; None for the methods that every optimizer has."""
    method = context.tree.method_of(use)
    return method if method is not None and method.attr.value in METHODS else None


def _change_method(context: Context, use: cst.BaseExpression) -> None:
    tree = context.tree
    method = horovod_method(context, use)
    if method is None:
        return
    call = tree.parent(method)
    match tree.parent(call):
        case cst.Expr() as above:
            statement = _guard_of(context, above) or tree.is_statement(call)
            if statement is not None:
                context.edits.remove(statement)
            else:  # it shares its line
                context.edits.replace(above, cst.Pass())
        case cst.WithItem() as item:
            block = cst.ensure_type(tree.parent(item), cst.With)
            index = list(block.items).index(item)
            context.edits.replace(block, lambda updated: _without_item(updated, index))


def _guard_of(context: Context, small: cst.Expr) -> cst.If | None:
    """``if self.averaged:`` around a statement alone; its condition has no effect, and it has no comments."""
    guard = next((each for each in context.tree.parents(small) if isinstance(each, cst.If)), None)
    match guard:
        case cst.If(
            cst.Name() | cst.Attribute() | cst.UnaryOperation(cst.Not(), cst.Name() | cst.Attribute()),
            cst.BaseSuite(body=[one]),
            orelse=None,
        ) if one is small or (isinstance(one, cst.SimpleStatementLine) and list(one.body) == [small]):
            plain = context.tree.block(guard) is not None and not any(context.tree.all(cst.Comment, inside=guard))
            return guard if plain else None
    return None


def _without_item(updated: cst.With, index: int) -> cst.BaseCompoundStatement | cst.FlattenSentinel[cst.BaseStatement]:
    items = [item for at, item in enumerate(updated.items) if at != index]
    if items:
        items[-1] = items[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        return updated.with_changes(items=items)
    body = updated.body
    comments = list(updated.leading_lines)
    if isinstance(body, cst.IndentedBlock):
        lines: list[cst.BaseStatement] = list(body.body)
        comments += [cst.EmptyLine(comment=body.header.comment)] if body.header.comment is not None else []
        comments += [line for line in body.footer if line.comment is not None]
    else:
        assert isinstance(body, cst.SimpleStatementSuite)
        lines = [cst.SimpleStatementLine(body.body, trailing_whitespace=body.trailing_whitespace)]
    first = lines[0]
    return cst.FlattenSentinel(
        [first.with_changes(leading_lines=[*comments, *getattr(first, "leading_lines", ())]), *lines[1:]]
    )
