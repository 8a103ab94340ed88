"""Rules for ``broadcast_parameters`` and ``broadcast_optimizer_state`` beside those that ``replicate`` replaces."""

from __future__ import annotations

from collections.abc import Callable

import libcst as cst

from unidist.migrate.context import Arguments, Context, is_constant
from unidist.migrate.flow import values_of
from unidist.migrate.syntax import argument, called_name, keyword

FIRST_STEP = (
    "on a new optimizer, Horovod's call takes a step with zero gradients (Adam's step count starts at 1, weight decay "
    "changes weights), which moves the losses; unidist's takes none"
)
OLD_NUMBERS = "for the old numbers `import unidist.hvd`, and here `unidist.hvd.broadcast_optimizer_state({}, {})`"


def change_broadcasts(context: Context) -> None:
    """Broadcasts of a model's or an optimizer's state, unless an optimizer of Horovod's stays in this module."""
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
        context.keep_comments(call)
        context.edits.replace(call, _rewritten(context, call, name, arguments))
        context.mark_handled(call.func)
        if name == "broadcast_optimizer_state" and not is_plain_sgd(context, state):
            root = context.text(arguments["root_rank"]) if "root_rank" in arguments else "0"
            context.remark(call, FIRST_STEP, OLD_NUMBERS.format(context.text(state), root))


def _rewritten(context: Context, call: cst.Call, name: str, arguments: Arguments) -> Callable[[cst.Call], cst.Call]:
    """A function that makes unidist's broadcast of the updated call, for ``Edits.replace``."""

    def change(updated: cst.Call) -> cst.Call:
        updated_arguments = {before.value: after.value for before, after in zip(call.args, updated.args)}
        state = updated_arguments[arguments["params" if name == "broadcast_model_state" else "optimizer"]]
        if isinstance(state, cst.Call) and isinstance(state.func, cst.Attribute) and name == "broadcast_model_state":
            state = state.func.value
        values = [cst.Arg(state)]
        if not is_constant(arguments.get("root_rank"), 0):
            values.append(keyword("src", updated_arguments[arguments["root_rank"]]))
        return cst.Call(context.unidist_name_for(call.func, name), values)

    return change


def is_plain_sgd(context: Context, optimizer: cst.BaseExpression) -> bool:
    """Whether an optimizer is visibly one on which a step with zero gradients has no effect."""
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
    """Whether an optimizer of Horovod's stays in this module."""
    return any(context.symbol(use) == "DistributedOptimizer" for use in context.remaining_uses())


def broadcast_model(context: Context, call: cst.Call) -> cst.BaseExpression | None:
    """The model whose state a ``broadcast_parameters`` sends from rank 0, or None."""
    state = (context.arguments(call) or {}).get("params")
    return owner(state, "state_dict", "named_parameters")


def owner(node: cst.BaseExpression | None, *methods: str) -> cst.BaseExpression | None:
    """``model`` of ``model.named_parameters()``."""
    match node:
        case cst.Call(cst.Attribute(cst.Name() | cst.Attribute() | cst.Subscript() as model, cst.Name(name))):
            return model if name in methods else None
    return None
