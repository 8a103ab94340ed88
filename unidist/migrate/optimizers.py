"""Rules for ``DistributedOptimizer`` and what belongs to it: both halves become unidist's, or neither."""

from __future__ import annotations

from dataclasses import dataclass, field

import libcst as cst

from unidist.migrate.broadcasts import broadcast_model, change_broadcasts, owner
from unidist.migrate.code import Statement, full_name
from unidist.migrate.flow import assignments, follow, results
from unidist.migrate.gradients import gradient_problems
from unidist.migrate.models import examine
from unidist.migrate.site import Arguments, Site, is_constant
from unidist.migrate.wrapping import COMPRESSION, METHODS, Optimizer, horovods_method, wrap_model

_AVERAGE = "keep it, or use the plain optimizer and unidist.all_reduce(p.grad, 'mean') for each gradient"
_KEPT = "it stays Horovod's optimizer, through the drop-in"


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
        wrap_model(site, optimizer)
    for node in compressions:
        site.edits.replace(node, cst.parse_expression(COMPRESSION[site.names.symbols[node]]))
        site.settle(node)
    change_broadcasts(site)


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
            "keep it: the drop-in has Adasum on every engine"
            if site.symbol(op) == "Adasum"
            else "if the average will do, take out op=, then migrate again",
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
        found = owner(named, "named_parameters")
        if found is None:
            raise Refusal(call, f"named_parameters={site.text(named)} is not that of one model")
        return found
    made = arguments["optimizer"]
    variable = site.code.variable(made)
    values = [value for value, target in assignments(site.code) if variable and site.code.variable(target) == variable]
    owners = []
    for value in values if variable else [made]:
        first = value.args[0].value if isinstance(value, cst.Call) and value is not call and value.args else None
        if (found := owner(first, "parameters")) is not None:
            owners.append(found)
    if len({site.text(owner) for owner in owners}) != 1:
        raise Refusal(
            call,
            "the model that it trains cannot be told",
            "pass named_parameters=model.named_parameters(), then migrate again",
        )
    return owners[0]


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
    if optimizers:
        called, passed = (
            [use for each in optimizers for use in getattr(each.use, kind)] for kind in ("called", "passed")
        )
        for node, why in gradient_problems(site.code, called, passed, [each.wrap for each in optimizers]):
            raise Refusal(node, why, _AVERAGE)
    known = {use for each in optimizers for use in each.flow.uses}
    for node in site.code.all(cst.Attribute):
        method = node.attr.value in ("skip_synchronize", "synchronize") and optimizers and node.value not in known
        if method and not site.code.imported(node) and site.symbol(node) is None and "cuda" not in site.text(node):
            raise Refusal(node, f"`{site.text(node)}` is of an optimizer that cannot be followed")
    for text in site.code.all(cst.SimpleString):
        if optimizers and text.evaluated_value in METHODS:
            raise Refusal(text, "the optimizer is asked whether it has a method of Horovod's")
    for each in optimizers:
        for use in each.flow.uses:
            _check_method(site, use)


def _check_method(site: Site, use: cst.BaseExpression) -> None:
    code = site.code
    method = horovods_method(site, use)
    if method is None:
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
        if any(site.code.is_inside(use, node.test) for use in site.uses()):
            raise Refusal(call, "the compression depends on a call of Horovod's", "ask it before, then migrate again")
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
