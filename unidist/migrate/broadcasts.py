"""Rules for ``broadcast_parameters`` and ``broadcast_optimizer_state`` where no wrapping stands for them."""

from __future__ import annotations

from collections.abc import Callable

import libcst as cst

from unidist.migrate.code import full_name, keyword
from unidist.migrate.flow import assignments, code_references
from unidist.migrate.site import Arguments, Site, is_constant

_FIRST_STEP = (
    "Horovod's takes a step with zero gradients where there is no state yet (Adam's count begins at 1, weight decay changes weights); "
    "this one takes none"
)


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
        site.keep_comments(call)
        site.edits.replace(call, _rewritten(site, call, name, arguments))
        site.settle(call.func)
        if name == "broadcast_optimizer_state" and not _is_plain_sgd(site, sent):
            site.note(call, _FIRST_STEP, "nothing; the curves differ a little from the legacy ones")


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


def broadcast_model(site: Site, call: cst.Call) -> cst.BaseExpression | None:
    """The model whose state a ``broadcast_parameters`` sends from rank 0, or None."""
    arguments = site.arguments(call) or {}
    sent = arguments.get("params")
    return (owner(sent, "state_dict") or owner(sent, "named_parameters")) if sent is not None else None


def owner(node: cst.BaseExpression | None, method: str) -> cst.BaseExpression | None:
    """``model`` of ``model.named_parameters()``."""
    if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Attribute):
        return None
    return (
        node.func.value
        if node.func.attr.value == method and isinstance(node.func.value, (cst.Name, cst.Attribute))
        else None
    )
