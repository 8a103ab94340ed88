"""Rules for ``DistributedOptimizer`` and what belongs to it: both halves become unidist's, or neither."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import libcst as cst

from unidist.migrate.accumulation import accumulate
from unidist.migrate.calls import is_barrier
from unidist.migrate.code import Statement, full_name, keyword
from unidist.migrate.flow import Flow, assignments, code_references, follow, results
from unidist.migrate.models import Use, examine
from unidist.migrate.site import Arguments, Site, is_constant

COMPRESSION = {"Compression.none": "None", "Compression.fp16": '"fp16"'}
#: Methods that only Horovod's optimizers have.
_METHODS = {"synchronize", "skip_synchronize", "set_backward_passes_per_step"}
#: Arguments that change how gradients travel, and nothing of what they are.
_TRAVEL = {"num_groups", "groups"}
_FIRST_STEP = (
    "Horovod's takes a step with zero gradients where there is no state yet (Adam's count begins at 1, weight decay changes weights); "
    "this one takes none"
)
_CLIPPED = "without synchronize() Horovod's gradients may still be on their way here; now they are the averages"
_CLOSURE = "Horovod averages before the closure; now each backward pass in it is averaged"
_HANDED_ON = "the optimizer goes to a function that is not in this file, and is a plain one now"
_PART = (
    "a part of the model's output is taken: parameters that only the rest depends on get no gradient, which DDP refuses"
)
_KEPT = "it stays Horovod's optimizer, through the drop-in"


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


@dataclass
class Refusal(Exception):
    """Why the optimizers of a file stay Horovod's."""

    node: cst.CSTNode
    why: str
    remedy: str = field(default="write unidist.wrap_model and a plain optimizer by hand, see docs/migrating.md")


def change_optimizers(site: Site) -> None:
    """All of a file, or none of them."""
    try:
        optimizers = [_plan(site, call) for call in site.calls("DistributedOptimizer")]
        _check_together(site, optimizers)
        compressions = _compressions(site, optimizers)
    except Refusal as refusal:
        site.note(refusal.node, f"{refusal.why}; {_KEPT}", refusal.remedy)
        return
    for optimizer in optimizers:
        _change(site, optimizer)
    for node in compressions:
        site.edits.replace(node, cst.parse_expression(COMPRESSION[site.names.symbols[node]]))
        site.settle(node)
    change_broadcasts(site)


def _is_plain_sgd(site: Site, optimizer: cst.BaseExpression) -> bool:
    """Whether an optimizer is visibly one for which a step with zero gradients changes nothing."""
    variable = site.code.variable(optimizer)
    made = [value for value, target in assignments(site.code) if variable and site.code.variable(target) == variable]
    made = [value for value in made if not (isinstance(value, cst.Call) and site.symbol(value.func))]
    return bool(made) and all(
        isinstance(value, cst.Call)
        and full_name(value.func).split(".")[-1] == "SGD"
        and not any(arg.star or (arg.keyword is not None and arg.keyword.value == "weight_decay") for arg in value.args)
        for value in made
    )


def has_optimizer(site: Site) -> bool:
    """Whether an optimizer of Horovod's stays in this file."""
    return any(site.symbol(use) == "DistributedOptimizer" for use in site.left())


# ------------------------------------------------------------------------------------ one optimizer
def _plan(site: Site, call: cst.Call) -> Optimizer:
    code = site.code
    arguments = site.arguments(call)
    statement = code.statement(call)
    if arguments is None:
        raise Refusal(call, "its arguments cannot be told")
    target, variables = _result(site, call)
    if not isinstance(statement, cst.SimpleStatementLine) or (
        target is not None and isinstance(code.parent(target), cst.Element)
    ):
        raise Refusal(
            call, "it shares its statement with something else", "give it a statement of its own, then migrate again"
        )
    compression = _check_arguments(site, call, arguments)
    model = _model(site, call, arguments)
    broadcast = _broadcast_of(site, model, statement)
    wrap = max(statement, broadcast or statement, key=code.place)
    use = examine(site, model, wrap)
    if use.problem is not None:
        raise Refusal(use.problem[0], use.problem[1])
    flow = follow(code, variables)
    return Optimizer(call, statement, target, arguments, model, wrap, broadcast, compression, use, flow)


def _result(site: Site, call: cst.Call) -> tuple[cst.BaseExpression | None, list[str]]:
    """What the optimizer is assigned to, and the variables that hold it.

    Raises:
        Refusal: it goes elsewhere.
    """
    code = site.code
    assigned = [target for value, target in assignments(code) if value is call]
    parent = code.parent(call)
    if len(assigned) == 1 and (variable := code.variable(assigned[0])) is not None:
        return assigned[0], [variable]
    if isinstance(parent, cst.Return) and (variables := results(code, parent, None)):
        return None, variables
    raise Refusal(call, "its result is not assigned to a variable", "assign it to a variable, then migrate again")


def _check_arguments(site: Site, call: cst.Call, arguments: Arguments) -> cst.BaseExpression | None:
    """The compression.

    Raises:
        Refusal: an argument has no counterpart.
    """
    op = arguments.get("op")
    if op is not None and site.symbol(op) != "Average":
        raise Refusal(
            call,
            f"op={site.text(op)}: wrap_model averages gradients and does nothing else",
            "if the average will do, take out op=, then migrate again",
        )
    if "process_set" in arguments:
        raise Refusal(
            call, "process_set=: a part of the ranks trains", "use unidist.new_group and wrap_model(group=...)"
        )
    if not is_constant(arguments.get("sparse_as_dense"), None, False):
        raise Refusal(
            call,
            "sparse_as_dense=: wrap_model averages sparse gradients as they are",
            "take it out, then migrate again",
        )
    predivide = arguments.get("gradient_predivide_factor")
    if predivide is not None and not is_constant(predivide, 1):
        why = "gradient_predivide_factor has no counterpart: the average is the same but for rounding"
        site.note(call, why, "nothing", f"gradient_predivide_factor={site.text(predivide)}")
    compression = arguments.get("compression")
    return None if compression is None or site.symbol(compression) == "Compression.none" else compression


def _model(site: Site, call: cst.Call, arguments: Arguments) -> cst.BaseExpression:
    """The model whose parameters are trained.

    Raises:
        Refusal: it cannot be told, or it is more than one.
    """
    if any(node.attr.value == "add_param_group" for node in site.code.all(cst.Attribute)):
        raise Refusal(call, "add_param_group() may bring parameters of another model")
    named = arguments.get("named_parameters")
    if isinstance(named, cst.Call) and full_name(named.func) in ("list", "tuple", "iter") and len(named.args) == 1:
        named = named.args[0].value
    if named is not None and not is_constant(named, None):
        found = _owner(named, "named_parameters")
        if found is None:
            raise Refusal(call, f"named_parameters={site.text(named)} is not that of one model")
        return found
    made = arguments["optimizer"]
    variable = site.code.variable(made)
    values = [value for value, target in assignments(site.code) if variable and site.code.variable(target) == variable]
    owners = []
    for value in values if variable else [made]:
        first = value.args[0].value if isinstance(value, cst.Call) and value is not call and value.args else None
        if (found := _owner(first, "parameters")) is not None:
            owners.append(found)
    if len({site.text(owner) for owner in owners}) != 1:
        raise Refusal(
            call,
            "the model that it trains cannot be told",
            "pass named_parameters=model.named_parameters(), then migrate again",
        )
    return owners[0]


def _owner(node: cst.BaseExpression | None, method: str) -> cst.BaseExpression | None:
    """``model`` of ``model.named_parameters()``."""
    if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Attribute):
        return None
    return (
        node.func.value
        if node.func.attr.value == method and isinstance(node.func.value, (cst.Name, cst.Attribute))
        else None
    )


def broadcast_model(site: Site, call: cst.Call) -> cst.BaseExpression | None:
    """The model whose state a ``broadcast_parameters`` sends from rank 0, or None."""
    arguments = site.arguments(call) or {}
    sent = arguments.get("params")
    return (_owner(sent, "state_dict") or _owner(sent, "named_parameters")) if sent is not None else None


def _broadcast_of(site: Site, model: cst.BaseExpression, statement: Statement) -> Statement | None:
    """The statement of the same block that sends the model from rank 0."""
    for call in site.calls("broadcast_parameters"):
        found, own = broadcast_model(site, call), site.code.is_statement(call)
        if found is None or own is None or site.text(found) != site.text(model):
            continue
        arguments = site.arguments(call) or {}
        root = arguments.get("root_rank")
        if (
            set(arguments) <= {"params", "root_rank"}
            and site.code.block(own) is site.code.block(statement)
            and is_constant(root, 0)
        ):
            return own
    return None


# ------------------------------------------------------------------------------------ all of a file
def _check_together(site: Site, optimizers: list[Optimizer]) -> None:
    """
    Raises:
        Refusal: something else in the file needs Horovod's optimizer.
    """
    models = [site.code.variable(each.model) for each in optimizers]
    for each, model in zip(optimizers, models):
        if models.count(model) > 1:
            raise Refusal(each.call, "two optimizers train one model")
    for use in site.uses("DistributedOptimizer"):
        if not isinstance(site.code.parent(use), cst.Call):
            raise Refusal(use, "the class is used otherwise than by calling it")
    for argument in site.code.all(cst.Arg):
        graph = argument.keyword is not None and argument.keyword.value == "create_graph"
        if optimizers and graph and is_constant(argument.value, True):
            raise Refusal(argument, "backward(create_graph=True) fails in DistributedDataParallel")
    if optimizers:
        for call in site.calls("join"):
            if not is_barrier(site, call):
                why = "join() lets ranks run out of batches at different steps"
                raise Refusal(
                    call,
                    why,
                    "train inside `with unidist.join(model):`, see docs/semantics.md, or shard the data evenly",
                )
    known = {use for each in optimizers for use in each.flow.uses}
    for node in site.code.all(cst.Attribute):
        method = node.attr.value in ("skip_synchronize", "synchronize") and optimizers and node.value not in known
        if method and not site.code.imported(node) and site.symbol(node) is None and "cuda" not in site.text(node):
            raise Refusal(node, f"`{site.text(node)}` is of an optimizer that cannot be followed")
    for text in site.code.all(cst.SimpleString):
        if optimizers and text.evaluated_value in _METHODS:
            raise Refusal(text, "the optimizer is asked whether it has a method of Horovod's")
    for each in optimizers:
        for use in each.flow.uses:
            _check_method(site, use)


def _check_method(site: Site, use: cst.BaseExpression) -> None:
    code = site.code
    method = code.parent(use)
    if not isinstance(method, cst.Attribute) or method.attr.value not in _METHODS:
        return
    call = code.parent(method)
    item = code.parent(call)
    is_with = isinstance(item, cst.WithItem) and method.attr.value == "skip_synchronize"
    if not (isinstance(call, cst.Call) and call.func is method and (isinstance(item, cst.Expr) or is_with)):
        raise Refusal(method, f"`{site.text(method)}` is used otherwise than as a statement")


def _compressions(site: Site, optimizers: list[Optimizer]) -> list[cst.BaseExpression]:
    """The uses of ``hvd.Compression`` that become ``wrap_model``'s words.

    Raises:
        Refusal: one is no constant of Horovod's, or goes elsewhere too.
    """
    if not optimizers:
        return []
    found: list[cst.BaseExpression] = []
    for each in optimizers:
        if each.compression is not None:
            found += _constants(site, each.call, each.compression)
    others = [use for use in site.uses() if site.names.symbols[use].startswith("Compression") and use not in found]
    outside = [use for use in others if not any(site.code.is_inside(use, each.call) for each in optimizers)]
    if found and outside:
        raise Refusal(outside[0], "this compression goes elsewhere than to the optimizer")
    return found


def _constants(site: Site, call: cst.Call, node: cst.BaseExpression) -> list[cst.BaseExpression]:
    if site.symbol(node) in COMPRESSION:
        return [node]
    if isinstance(node, cst.IfExp):
        return [*_constants(site, call, node.body), *_constants(site, call, node.orelse)]
    variable = site.code.variable(node)
    values = [value for value, target in assignments(site.code) if variable and site.code.variable(target) == variable]
    if isinstance(node, cst.Name) and values and variable and not any(value is call for value in values):
        uses = follow(site.code, [variable]).uses
        if all(site.code.is_inside(use, call) for use in uses):
            return [constant for value in values for constant in _constants(site, call, value)]
    raise Refusal(
        call, f"compression={site.text(node)} is none of Horovod's own", "use wrap_model(compression='fp16') or 'bf16'"
    )


# ------------------------------------------------------------------------------------ the change
def _change(site: Site, each: Optimizer) -> None:
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
        edits.replace(use, lambda updated: cst.Call(site.own("unwrap"), [cst.Arg(updated)]))
        site.own("unwrap")
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


def _wrap_call(site: Site, each: Optimizer) -> cst.Call:
    options = [cst.Arg(each.model.deep_clone())]
    if each.compression is not None:
        value: cst.BaseExpression = each.compression.deep_clone()
        if site.symbol(each.compression) in COMPRESSION:
            value = cst.parse_expression(COMPRESSION[site.names.symbols[each.compression]])
        elif isinstance(each.compression, cst.IfExp):
            text = site.text(each.compression)
            for node in _constants(site, each.call, each.compression):
                text = text.replace(site.text(node), COMPRESSION[site.names.symbols[node]])
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


def _change_method(site: Site, use: cst.BaseExpression) -> None:
    code = site.code
    method = code.parent(use)
    if not isinstance(method, cst.Attribute) or method.attr.value not in _METHODS:
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


def _is_module(site: Site, node: cst.BaseExpression) -> bool:
    """Whether something is visibly a module of torch's, and not another thing with a state_dict."""
    variable = site.code.variable(node)
    for use in code_references(site.code).get(variable or "", ()):
        parent = site.code.parent(use)
        if isinstance(parent, cst.Attribute) and parent.attr.value in (
            "parameters",
            "named_parameters",
            "train",
            "eval",
        ):
            return True
        if isinstance(parent, cst.Call) and parent.func is use:
            return True
    return False


def _rewritten(site: Site, call: cst.Call, name: str, arguments: Arguments) -> Callable[[cst.Call], cst.Call]:
    """The broadcast of a model or an optimizer by unidist's name, with what has become of the arguments."""

    def change(updated: cst.Call) -> cst.Call:
        became = {before.value: after.value for before, after in zip(call.args, updated.args)}
        sent = became[arguments["params" if name == "broadcast_model_state" else "optimizer"]]
        if isinstance(sent, cst.Call) and isinstance(sent.func, cst.Attribute) and name == "broadcast_model_state":
            sent = sent.func.value
        values = [cst.Arg(sent)]
        if not is_constant(arguments.get("root_rank"), 0):
            values.append(keyword("src", became[arguments["root_rank"]]))
        return cst.Call(site.native(call.func, name), values)

    return change


def change_broadcasts(site: Site) -> None:
    """The state of models and optimizers from another rank, where no wrapping stands for it."""
    if has_optimizer(site):
        return
    for call in list(site.calls("broadcast_parameters", "broadcast_optimizer_state")):
        arguments = site.arguments(call)
        if arguments is None or set(arguments) - {"params", "optimizer", "root_rank"}:
            continue
        if site.symbol(call.func) == "broadcast_parameters":
            sent: cst.BaseExpression | None = broadcast_model(site, call)
            name = "broadcast_model_state"
        else:
            sent, name = arguments["optimizer"], "broadcast_optimizer_state"
        if sent is None or (name == "broadcast_model_state" and not _is_module(site, sent)):
            continue
        site.edits.replace(call, _rewritten(site, call, name, arguments))
        site.settle(call.func)
        if name == "broadcast_optimizer_state" and not _is_plain_sgd(site, sent):
            site.note(call, _FIRST_STEP, "nothing; the curves differ a little from the legacy ones")
