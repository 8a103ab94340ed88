"""Rules for single calls: where a process stands, and the collectives."""

from __future__ import annotations

import re

import libcst as cst

from unidist.migrate.code import is_pure, keyword
from unidist.migrate.dtypes import is_floating
from unidist.migrate.flow import assignments, callees, is_parameter
from unidist.migrate.gradients import may_carry_gradient, may_require_gradient
from unidist.migrate.loaders import has_even_loops, is_even
from unidist.migrate.site import Arguments, Site, is_constant

#: Calls without arguments, and unidist's names for them.
PLACE = {
    "init": "init",
    "shutdown": "shutdown",
    "is_initialized": "is_initialized",
    "rank": "rank",
    "size": "world_size",
    "local_rank": "local_rank",
    "local_size": "local_size",
    "cross_rank": "node_rank",
    "cross_size": "num_nodes",
    "barrier": "barrier",
}
#: Collectives whose arguments carry over: the name, and which argument is what.
COLLECTIVES = {
    "allgather": ("all_gather", "tensor"),
    "allgather_object": ("all_gather_object", "obj"),
    "alltoall": ("all_to_all", "tensor"),
    "broadcast": ("broadcast", "tensor"),
    "broadcast_object": ("broadcast_object", "obj"),
}
#: Arguments that change nothing of the result.
_IDLE = {"name", "ignore_name_scope"}
OPS = {"Average": "mean", "Sum": "sum", "Min": "min", "Max": "max", "Product": "product"}
Options = list[tuple[str, cst.BaseExpression]]
#: What Horovod does with whole numbers.
TRUNCATED = "Horovod cuts the average of whole numbers off towards 0; allreduce_metric gives the exact mean as float32"


def change_places(site: Site) -> None:
    """``hvd.rank()`` and the like; ``hvd.rank() == 0`` is ``unidist.is_main()``."""
    for use in list(site.uses(*PLACE)):
        call = site.code.parent(use)
        called = isinstance(call, cst.Call) and call.func is use
        if called and isinstance(call, cst.Call) and call.args:
            continue
        if called and site.symbol(use) == "rank" and _is_compared_with_zero(site, call):
            site.edits.replace(site.code.parent(call), cst.Call(site.native(use, "is_main")))
        else:
            site.edits.replace(use, site.native(use, PLACE[site.names.symbols[use]]))
        site.settle(use)


def _is_compared_with_zero(site: Site, call: cst.CSTNode) -> bool:
    comparison = site.code.parent(call)
    return (
        isinstance(comparison, cst.Comparison)
        and comparison.left is call
        and len(comparison.comparisons) == 1
        and isinstance(comparison.comparisons[0].operator, cst.Equal)
        and is_constant(comparison.comparisons[0].comparator, 0)
        and not comparison.lpar
    )


def change_collectives(site: Site) -> None:
    """Gathers and broadcasts whose results are new."""
    for call in list(site.calls(*COLLECTIVES)):
        arguments = site.arguments(call)
        name, first = COLLECTIVES[site.names.symbols[call.func]]
        if arguments is None or first not in arguments or set(arguments) - {first, "root_rank", *_IDLE}:
            continue
        if has_other_gradient(site, call, arguments):
            continue
        values: list[cst.Arg] = [cst.Arg(arguments[first])]
        if "root_rank" in arguments and not is_constant(arguments["root_rank"], 0):
            values.append(keyword("src", arguments["root_rank"]))
        _put(site, call, name, [arguments[first], arguments.get("root_rank")], values)
    for call in list(site.calls("broadcast_")):
        arguments = site.arguments(call)
        if arguments is None or set(arguments) - {"tensor", "root_rank", *_IDLE} or not _is_settable(site, arguments):
            continue
        source: Options = [] if is_constant(arguments["root_rank"], 0) else [("src", arguments["root_rank"])]
        _put_in_place(site, call, arguments["tensor"], "broadcast", source)


def has_other_gradient(site: Site, call: cst.Call, arguments: Arguments) -> bool:
    """Whether unidist's call would give another gradient than Horovod's, or none, and one may go through it."""
    symbol, tensor = site.symbol(call.func), arguments.get("tensor")
    if tensor is None:
        return False
    if symbol in ("allgather", "broadcast"):
        return may_carry_gradient(site.code, call, tensor)
    extremes = symbol == "allreduce" and operation(site, arguments) in ("min", "max", "product")
    return extremes and may_require_gradient(site.code, call, tensor)


def change_allreduce(site: Site) -> None:
    """``allreduce`` of figures and of tensors; its default stays the average."""
    for call in list(site.calls("allreduce", "allreduce_")):
        arguments = site.arguments(call)
        if arguments is None or set(arguments) - {"tensor", "average", "op", "compression", *_IDLE}:
            continue
        op = operation(site, arguments)
        if op is None or site.symbol(arguments.get("compression")) not in (None, "Compression.none"):
            continue
        if "compression" in arguments and site.symbol(arguments["compression"]) is None:
            continue
        tensor = arguments["tensor"]
        if has_other_gradient(site, call, arguments):
            continue
        figure = op == "mean" and _is_figure(site, call, tensor)
        floating = is_floating(site.code, tensor)
        if (op == "mean" and (floating is False or (not floating and not figure))) or (
            not figure and _may_be_bool(site, tensor)
        ):
            continue
        in_place = site.symbol(call.func) == "allreduce_"
        if in_place and not _is_settable(site, arguments):
            continue
        name = "allreduce_metric" if figure else "all_reduce"
        default = "mean" if figure else "sum"
        options: Options = [] if op == default else [("op", cst.SimpleString(f'"{op}"'))]
        if in_place:
            _put_in_place(site, call, tensor, name, options)
        else:
            _put(site, call, name, [tensor], [cst.Arg(tensor), *(keyword(*option) for option in options)])
            if figure and op == "mean" and not floating:
                site.note(call, TRUNCATED, "nothing, unless this figure is a whole number and was meant to be cut off")


def operation(site: Site, arguments: Arguments) -> str | None:
    """The reduction that a call asks for, by unidist's name; None where it has none or cannot be told."""
    average, op = arguments.get("average"), arguments.get("op")
    if op is not None and not is_constant(op, None):
        return OPS.get(site.symbol(op) or "")
    if average is None or is_constant(average, None, True) or _is_name(site, average):
        return "mean"  # hvd.allreduce(x, "name"): any true value asks for the average
    return "sum" if is_constant(average, False) else None


def _is_name(site: Site, node: cst.BaseExpression, depth: int = 3) -> bool:
    """Whether a string stands here: by its form, by what its variable is assigned, or because that is called ``name``."""
    if isinstance(node, (cst.SimpleString, cst.FormattedString, cst.ConcatenatedString)):
        return True
    if isinstance(node, cst.BinaryOperation):
        return _is_name(site, node.left, depth) or _is_name(site, node.right, depth)
    if isinstance(node, cst.Call):
        return site.text(node.func) == "str" or site.text(node.func).endswith(".format")
    if re.search(r"(^|[._])name$", site.text(node)):
        return True
    variable = site.code.variable(node)
    values = [value for value, target in assignments(site.code) if variable and site.code.variable(target) == variable]
    known = bool(values) and not is_parameter(site.code, variable) and depth > 0
    return known and all(_is_name(site, value, depth - 1) for value in values)


def _is_figure(site: Site, call: cst.Call, tensor: cst.BaseExpression) -> bool:
    """Whether a call combines a figure for people: no gradient goes through it, and training does not go on with it."""
    text = site.text(tensor)
    above = [node.name.value for node in site.code.parents(call) if isinstance(node, (cst.FunctionDef, cst.ClassDef))]
    if "grad" in text or any("grad" in name.lower() for name in above):
        return False
    parent = site.code.parent(call)
    item = isinstance(parent, cst.Attribute) and parent.attr.value in ("item", "tolist")
    return item or ".detach()" in text or ".item()" in text or is_floating(site.code, tensor, made=True) is not None


def _may_be_bool(site: Site, tensor: cst.BaseExpression) -> bool:
    return isinstance(tensor, cst.Comparison) or ".bool()" in site.text(tensor)


def _is_settable(site: Site, arguments: Arguments) -> bool:
    """Whether ``x.copy_(...)`` does to a tensor what an operation in place does."""
    tensor = arguments["tensor"]
    if not is_pure(tensor):
        return False
    if isinstance(tensor, cst.Attribute) and tensor.attr.value in ("grad", "data"):
        return True
    made = is_floating(site.code, tensor, made=True)
    return made is not None


def _put(site: Site, call: cst.Call, name: str, kept: list[cst.BaseExpression | None], values: list[cst.Arg]) -> None:
    """A call of unidist in a call's place; the arguments' own changes are made too."""
    site.keep_comments(call, *(each for each in kept if each is not None))
    site.edits.replace(
        call, lambda updated: _rebuilt(site, call, updated, cst.Call(site.native(call.func, name), values))
    )
    site.settle(call.func)
    for argument in call.args:
        if all(argument.value is not each for each in kept):
            site.settle(argument)


def _put_in_place(site: Site, call: cst.Call, tensor: cst.BaseExpression, name: str, options: Options) -> None:
    site.keep_comments(call)
    values = [cst.Arg(tensor.deep_clone()), *(keyword(*option) for option in options)]
    copy = cst.Attribute(tensor.deep_clone(), cst.Name("copy_"))
    site.edits.replace(call, cst.Call(copy, [cst.Arg(cst.Call(site.native(call.func, name), values))]))
    site.settle(call)


def _rebuilt(site: Site, original: cst.Call, updated: cst.Call, new: cst.Call) -> cst.Call:
    """The new call, with each original argument in it replaced by what became of that."""
    became = {before.value: after.value for before, after in zip(original.args, updated.args)}
    args = [
        arg.with_changes(value=became.get(arg.value, arg.value), comma=cst.MaybeSentinel.DEFAULT) for arg in new.args
    ]
    return new.with_changes(args=args, lpar=updated.lpar, rpar=updated.rpar)


def keep_joined(site: Site) -> None:
    """All that a rank in ``hvd.join()`` serves stays the drop-in's together with it."""
    joins = [use for use in site.uses("join") if not _joins_together(site, use)]
    for use in site.uses() if joins else ():
        if _is_collective(site.names.symbols[use]):
            site.kept[use] = _JOIN if use in joins else _WITH_JOIN


def _is_collective(symbol: str) -> bool:
    return symbol not in PLACE or symbol == "barrier"


def _joins_together(site: Site, use: cst.BaseExpression) -> bool:
    call = site.code.parent(use)
    return isinstance(call, cst.Call) and call.func is use and is_barrier(site, call)


def change_barriers(site: Site) -> None:
    """``hvd.join()`` where all ranks come to it together."""
    for call in list(site.calls("join")):
        site.edits.replace(call.func, site.native(call.func, "barrier"))
        site.settle(call.func)


#: Calls after which all ranks are at the same place.
_MEETING = {"init", "barrier", "join", "broadcast_parameters", "broadcast_optimizer_state", "broadcast_object", "broadcast", "allreduce", "allgather", "allgather_object"}  # fmt: skip
_JOIN = (
    "join() lets ranks run out of batches at different steps, and the others' calls must be the drop-in's then, in other files too",
    "unidist.barrier() if all ranks come here together; else train inside `with unidist.join(model):`, see docs/semantics.md",
)
_WITH_JOIN = ("a rank in join() takes part in the drop-in's calls alone", "see what is said of join()")
_STDLIB = ("os", "sys", "time", "logging", "print", "torch", "json", "shutil", "pathlib", "Path", "len", "str", "int")


def is_barrier(site: Site, call: cst.Call) -> bool:
    """Whether a ``join()`` is one at which all ranks arrive with nothing under way."""
    statement = site.code.is_statement(call)
    if statement is None or call.args:
        return False
    return (has_even_loops(site) and not _has_uneven_calls(site)) or _follows_a_meeting(site, statement)


def _has_uneven_calls(site: Site) -> bool:
    """Whether a loop over what may differ between the ranks makes collective calls."""
    code = site.code
    uses = [use for use in site.names.symbols if _is_collective(site.names.symbols[use]) and site.symbol(use) != "join"]
    called = {function for use in uses if isinstance(function := code.function(use), cst.FunctionDef)}
    calls = [call for call in code.all(cst.Call) if not called.isdisjoint(callees(code, call))]
    for loop in (*code.all(cst.For), *code.all(cst.While)):
        inside = any(code.is_inside(each, loop.body) for each in (*uses, *calls))
        if inside and not (isinstance(loop, cst.For) and is_even(site, loop)):
            return True
    return False


def _follows_a_meeting(site: Site, statement: cst.CSTNode) -> bool:
    """Whether only harmless statements stand between a collective call and this one."""
    block = site.code.block(statement)
    if block is None:
        return False
    place = next(index for index, each in enumerate(block.body) if each is statement)
    for each in reversed(block.body[:place]):
        if any(isinstance(node, (cst.For, cst.While)) for node in site.code.nodes if site.code.is_inside(node, each)):
            return False
        calls = list(site.code.all(cst.Call, inside=each))
        top = isinstance(each, cst.SimpleStatementLine)
        if top and any(site.symbol(node.func) in _MEETING for node in calls):
            return True
        for node in calls:
            first = site.text(node.func).split(".")[0].split("(")[0]
            if first not in _STDLIB and site.symbol(node.func) not in PLACE:
                return False
    return False
