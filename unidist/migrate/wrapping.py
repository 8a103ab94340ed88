"""How a ``DistributedOptimizer`` is replaced by a wrapped model, once it is known that it can be."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from unidist.migrate.accumulation import accumulate
from unidist.migrate.code import Statement, full_name, keyword
from unidist.migrate.flow import Flow
from unidist.migrate.models import Use
from unidist.migrate.site import Arguments, Site

COMPRESSION = {"Compression.none": "None", "Compression.fp16": '"fp16"'}
#: Methods that only Horovod's optimizers have.
METHODS = {"synchronize", "skip_synchronize", "set_backward_passes_per_step"}
_CLIPPED = "without synchronize() Horovod's gradients may still be on their way here; now they are the averages"
_CLOSURE = "Horovod averages before the closure; now each backward pass in it is averaged"
_HANDED_ON = "the optimizer goes to a function that is not in this file, and is a plain one now"
_PART = (
    "a part of the model's output is taken: parameters that only the rest depends on get no gradient, which DDP refuses"
)


@dataclass
class Optimizer:
    """One ``DistributedOptimizer(...)`` and how it is replaced."""

    call: cst.Call
    statement: Statement
    #: What it is assigned to; None where a function returns it.
    target: cst.BaseExpression | None
    arguments: Arguments
    model: cst.BaseExpression
    #: Where the model is wrapped, in the place of this statement.
    wrap: Statement
    broadcast: Statement | None
    compression: cst.BaseExpression | None
    use: Use
    flow: Flow


def wrap_model(site: Site, each: Optimizer) -> None:
    code, edits = site.code, site.edits
    accumulate(site, each.arguments.get("backward_passes_per_step"), each.flow, each.model, each.wrap)
    inner = each.arguments["optimizer"]
    target = each.model.deep_clone()
    assert isinstance(target, (cst.Name, cst.Attribute))
    wrapped = cst.Assign([cst.AssignTarget(target)], _wrap_call(site, each))
    if each.target is not None and site.text(inner) == site.text(each.target):
        edits.remove(each.statement)
    else:
        became = _Became(site, inner)
        edits.keep_comments(each.statement, each.call, but=[inner])
        edits.replace(each.call, lambda updated: became.of(each.call, updated))
    if each.broadcast is not None:
        edits.remove(each.broadcast)
        site.settle(each.broadcast)
    line = cst.SimpleStatementLine([wrapped])
    edits.insert(each.wrap, line)
    for node in (
        each.call.func,
        *(value for name, value in each.arguments.items() if name not in ("optimizer", "compression")),
    ):
        site.settle(node)
    if site.symbol(each.arguments.get("compression")) == "Compression.none":
        site.settle(each.arguments["compression"])
    for use in each.use.unwrapped:
        edits.replace(use, _unwrapped(site, use))
    for use in each.use.called:
        if isinstance(code.parent(code.parent(use)), cst.Subscript):
            site.note(use, _PART, "pass find_unused_parameters=True to wrap_model if so")
    for use in each.flow.uses:
        _change_method(site, use)
        _note_use(site, each, use)
    if not any(_method(site, use) == "synchronize" for use in each.flow.uses):
        for call in code.all(cst.Call):
            if full_name(call.func).split(".")[-1] in ("clip_grad_norm_", "clip_grad_value_", "unscale_"):
                site.note(call, _CLIPPED, "nothing; the curves may differ from the legacy ones")
    for loaded in code.all(cst.Attribute):
        before = loaded.attr.value == "load_state_dict" and site.text(loaded.value) == site.text(inner)
        same = code.function(loaded) is code.function(each.call) and code.place(loaded) < code.place(each.call)
        if before and same and isinstance(inner, cst.Name):
            why = "Horovod's optimizer forgets state that was loaded before wrapping (momentum starts anew); now it is kept"
            site.note(loaded, why, "nothing, if the state was meant to be loaded")


def _unwrapped(site: Site, use: cst.BaseExpression) -> cst.BaseExpression:
    """The inner model; where Horovod may not have been imported, in words that need no import of unidist."""
    model = use.deep_clone()
    if site.is_reached(use):
        return cst.Call(site.own(use, "unwrap"), [cst.Arg(model)])
    text = site.text(use)
    return cst.parse_expression(f'({text}.module if hasattr({text}, "no_sync") else {text})')


def _wrap_call(site: Site, each: Optimizer) -> cst.Call:
    options = [cst.Arg(each.model.deep_clone())]
    if each.compression is not None:
        value: cst.BaseExpression = each.compression.deep_clone()
        if site.symbol(each.compression) in COMPRESSION:
            value = cst.parse_expression(COMPRESSION[site.names.symbols[each.compression]])
        elif isinstance(each.compression, cst.IfExp):
            text = site.text(each.compression)
            for node, symbol in site.names.symbols.items():
                if symbol in COMPRESSION and site.code.is_inside(node, each.compression):
                    text = text.replace(site.text(node), COMPRESSION[symbol])
            value = cst.parse_expression(text)
        options.append(keyword("compression", value))
    # Horovod leaves BatchNorm's statistics to each rank.
    options.append(keyword("broadcast_buffers", cst.Name("False")))
    return cst.Call(site.native(each.call.func, "wrap_model"), options)


class _Became:
    """An argument's node after the changes inside it."""

    def __init__(self, site: Site, node: cst.BaseExpression) -> None:
        self._node = node

    def of(self, call: cst.Call, updated: cst.Call) -> cst.BaseExpression:
        pairs = zip(call.args, updated.args)
        return next(after.value for before, after in pairs if before.value is self._node)


def _note_use(site: Site, each: Optimizer, use: cst.BaseExpression) -> None:
    """Steps with a closure, and functions of other files that get the optimizer."""
    code = site.code
    call = code.parent(code.parent(use))
    if not isinstance(call, cst.Call):
        return
    if _method(site, use) == "step" and call.args:
        site.note(call, _CLOSURE, "nothing, if the closure calls backward()")
    elif use in each.flow.escapes and isinstance(call.func, cst.Name) and "sched" not in call.func.value.lower():
        known = any(name.startswith(("torch.", "unidist.")) for name in code.imported(call.func))
        if not known and site.symbol(call.func) is None:
            site.note(call, _HANDED_ON, "see to it that it calls neither synchronize() nor skip_synchronize()")


def _method(site: Site, use: cst.BaseExpression) -> str | None:
    method = site.code.parent(use)
    return method.attr.value if isinstance(method, cst.Attribute) else None


def horovods_method(site: Site, use: cst.BaseExpression) -> cst.Attribute | None:
    """``optimizer.synchronize`` of its ``optimizer``; None for what every optimizer has."""
    method = site.code.parent(use)
    return method if isinstance(method, cst.Attribute) and method.attr.value in METHODS else None


def _change_method(site: Site, use: cst.BaseExpression) -> None:
    code = site.code
    method = horovods_method(site, use)
    if method is None:
        return
    call = code.parent(method)
    above = code.parent(call)
    if isinstance(above, cst.Expr):
        statement = code.is_statement(call)
        if statement is not None:
            site.edits.remove(statement)
        else:  # it shares its line
            site.edits.replace(above, cst.Pass())
    elif isinstance(above, cst.WithItem) and isinstance(block := code.parent(above), cst.With):
        place = list(block.items).index(above)
        site.edits.replace(block, lambda updated: _without_item(updated, place))


def _without_item(updated: cst.With, place: int) -> cst.BaseCompoundStatement | cst.FlattenSentinel[cst.BaseStatement]:
    items = [item for index, item in enumerate(updated.items) if index != place]
    if items:
        items[-1] = items[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        return updated.with_changes(items=items)
    body = updated.body
    said = list(updated.leading_lines)
    if isinstance(body, cst.IndentedBlock):
        lines: list[cst.BaseStatement] = list(body.body)
        said += [cst.EmptyLine(comment=body.header.comment)] if body.header.comment is not None else []
        said += [line for line in body.footer if line.comment is not None]
    else:
        assert isinstance(body, cst.SimpleStatementSuite)
        lines = [cst.SimpleStatementLine(body.body, trailing_whitespace=body.trailing_whitespace)]
    first = lines[0]
    return cst.FlattenSentinel(
        [first.with_changes(leading_lines=[*said, *getattr(first, "leading_lines", ())]), *lines[1:]]
    )
