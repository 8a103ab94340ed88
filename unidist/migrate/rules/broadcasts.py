"""Rules for ``broadcast_parameters`` and ``broadcast_optimizer_state`` beside those that ``replicate`` replaces."""

from __future__ import annotations

import libcst as cst

from unidist.migrate.context import Context, is_constant
from unidist.migrate.flow import values_of
from unidist.migrate.syntax import argument, called_name

FIRST_STEP = (
    "on a new optimizer, Horovod's call takes a step with zero gradients (Adam's step count starts at 1, weight decay "
    "changes weights), which moves the losses; unidist's takes none"
)
OLD_NUMBERS = "for the old numbers `import unidist.hvd`, and here `unidist.hvd.broadcast_optimizer_state({}, {})`"


def change_broadcasts(context: Context) -> None:
    """Change broadcasts of a model's or an optimizer's state, unless an optimizer of Horovod's stays here."""
    if has_optimizer(context):
        return
    for call in list(context.calls("broadcast_parameters", "broadcast_optimizer_state")):
        arguments = context.arguments(call)
        if arguments is None or set(arguments) - {"params", "optimizer", "root_rank"}:
            continue
        if context.symbol(call.func) == "broadcast_parameters":
            state: cst.BaseExpression | None = broadcast_model(context, call)
            name = "broadcast_model_state"
        else:
            state, name = arguments["optimizer"], "broadcast_optimizer_state"
        if state is None or (name == "broadcast_model_state" and "optim" in context.text(state).lower()):
            continue
        if name == "broadcast_model_state":  # of model.state_dict()
            context.edits.replace(arguments["params"], lambda updated: updated.func.value)
        root = arguments.get("root_rank")
        source = [] if is_constant(root, 0) else [("src", arguments["root_rank"])]
        context.rebuild(call, name, [("", arguments["params" if "params" in arguments else "optimizer"]), *source])
        if name == "broadcast_optimizer_state" and not is_plain_sgd(context, state):
            of = context.text(arguments["root_rank"]) if "root_rank" in arguments else "0"
            context.remark(call, FIRST_STEP, OLD_NUMBERS.format(context.text(state), of))


def is_plain_sgd(context: Context, optimizer: cst.BaseExpression) -> bool:
    """Return whether an optimizer is visibly one on which a step with zero gradients has no effect."""
    made = values_of(context.tree, optimizer)
    made = [value for value in made if not (isinstance(value, cst.Call) and context.symbol(value.func))]
    return bool(made) and all(
        isinstance(value, cst.Call)
        and called_name(value) == "SGD"
        and not any(arg.star for arg in value.args)
        and argument(value, "weight_decay") is None
        for value in made
    )


def has_optimizer(context: Context) -> bool:
    """Return whether an optimizer of Horovod's stays in this module."""
    return any(context.symbol(use) == "DistributedOptimizer" for use in context.remaining_uses())


def broadcast_model(context: Context, call: cst.Call) -> cst.BaseExpression | None:
    """Return the model whose state a ``broadcast_parameters`` sends from rank 0, or None."""
    state = (context.arguments(call) or {}).get("params")
    return owner(state, "state_dict", "named_parameters")


def owner(node: cst.BaseExpression | None, *methods: str) -> cst.BaseExpression | None:
    """Return ``model`` of ``model.named_parameters()``."""
    match node:
        case cst.Call(cst.Attribute(cst.Name() | cst.Attribute() | cst.Subscript() as model, cst.Name(name))):
            return model if name in methods else None
    return None
