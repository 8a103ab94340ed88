"""``hvd.elastic`` becomes ``unidist.elastic``, with ``replicate`` at the beginning of the function that trains."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from unidist.migrate.context import Context, Refusal
from unidist.migrate.rules.broadcasts import FIRST_STEP, OLD_NUMBERS, is_plain_sgd
from unidist.migrate.syntax import Statement

#: What both have, with the same arguments.
_NAMES = {"run", "TorchState", "ElasticSampler"}
_REMEDY = "write `unidist.replicate(state.model)` as the first line of the function under unidist.elastic.run, by hand"


def elastic_uses(context: Context) -> list[cst.BaseExpression]:
    """Return the uses of Horovod's elastic module."""
    return [use for use, symbol in context.names.symbols.items() if symbol.split(".")[0] == "elastic"]


def elastic_models(context: Context, models: list[cst.BaseExpression]) -> dict[str, list[tuple[Statement, str]]]:
    """Return, for the text of each model, the statements before which it is replicated, and its name there.

    A function under ``run`` is called again in each new world, with the state that all ranks share then.

    Raises:
        Refusal: this cannot be determined, or the file uses other parts of the elastic module.
    """
    uses = elastic_uses(context)
    if not uses:
        return {}
    for use in uses:
        if context.names.symbols[use].split(".")[-1] not in _NAMES:
            raise Refusal(use, f"unidist.elastic has no {context.names.symbols[use].split('.')[-1]}", _REMEDY)
    if not models:
        raise Refusal(uses[0], "the file trains elastically, and no optimizer is made in it", _REMEDY)
    functions = [_function(context, use) for use in _of(context, uses, "run")]
    states = [
        call for use in _of(context, uses, "TorchState") if isinstance(call := context.tree.parent(use), cst.Call)
    ]
    if not functions or len(states) != 1:
        raise Refusal(uses[0], "not one TorchState and a function under elastic.run are visible", _REMEDY)
    attributes = _attributes(context, states[0])
    found: dict[str, list[tuple[Statement, str]]] = {}
    for model in models:
        text = context.text(model)
        if text not in attributes:
            raise Refusal(states[0], f"the state does not visibly hold `{text}`", _REMEDY)
        found[text] = [(first, f"{state}.{attributes[text]}") for first, state in functions]
    return found


def change_elastic(context: Context) -> None:
    """Change the names, after the optimizers have been changed."""
    for use in elastic_uses(context):
        if use not in context.kept:
            call = context.tree.parent(use)
            if isinstance(call, cst.Call) and context.names.symbols[use].endswith("TorchState"):
                _remark_on_first_step(context, call)
            name = context.names.symbols[use].split(".")[-1]
            context.edits.replace(use, context.unidist_name_for(use, f"elastic.{name}"))
            context.mark_handled(use)


def _remark_on_first_step(context: Context, state: cst.Call) -> None:
    """Say where Horovod's state takes a first step, which broadcasts an optimizer, and the line that keeps it."""
    for text, name in _attributes(context, state).items():
        argument = next(arg.value for arg in state.args if context.text(arg.value) == text)
        if name == "optimizer" and not is_plain_sgd(context, argument):
            remedy = OLD_NUMBERS.format("state.optimizer", "0").replace("here", "after `replicate`")
            context.remark(state, FIRST_STEP, remedy)


def _of(context: Context, uses: list[cst.BaseExpression], name: str) -> Iterator[cst.BaseExpression]:
    return (use for use in uses if context.names.symbols[use].split(".")[-1] == name)


def _function(context: Context, use: cst.BaseExpression) -> tuple[Statement, str]:
    """Return the first statement of the function that ``run`` decorates, and the name of the state there.

    Raises:
        Refusal: it decorates none, or a method.
    """
    decorator = context.tree.parent(use)
    function = context.tree.parent(decorator)
    if not isinstance(decorator, cst.Decorator) or not isinstance(function, cst.FunctionDef):
        raise Refusal(use, "elastic.run is not used as a decorator", _REMEDY)
    match function:
        case cst.FunctionDef(body=cst.IndentedBlock(body), params=cst.Parameters([cst.Param(name), *_])) if (
            not context.tree.is_method(function)
        ):
            has_docstring = function.get_docstring() is not None and len(body) > 1
            first = body[has_docstring]
            assert isinstance(first, (cst.SimpleStatementLine, cst.BaseCompoundStatement))
            return first, name.value
    raise Refusal(use, "elastic.run decorates a method, or a function without a state", _REMEDY)


def _attributes(context: Context, state: cst.Call) -> dict[str, str]:
    """Return what a TorchState is given, by text, and the attributes that hold it."""
    positional = [arg for arg in state.args if arg.keyword is None]
    found = {context.text(arg.value): name for name, arg in zip(("model", "optimizer"), positional)}
    named = {context.text(arg.value): arg.keyword.value for arg in state.args if arg.keyword is not None}
    return {**found, **named}
