"""The rule for ``nn.DataParallel``: one process with several GPUs becomes a process for each.

DataParallel splits a batch and computes the loss of all of it. With a mean over the batch, the gradients are those of
``batch_size // world_size`` samples on each rank, averaged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import libcst as cst

from unidist.migrate.context import UNKNOWN_ARGUMENTS, is_constant
from unidist.migrate.flow import assignments_of, callees, callers, is_parameter, passed_to, targets_of, values_of
from unidist.migrate.rules.ddp.names import TorchContext
from unidist.migrate.rules.ddp.wrapping import is_asked_for, report_evaluation
from unidist.migrate.rules.loaders import LOADERS, training_loops
from unidist.migrate.syntax import Statement, argument, called_name, full_name, imports_of, iterated

#: Losses that are a mean over the samples, or over their elements, of which all have equally many.
_LOSSES = {
    "crossentropyloss", "cross_entropy", "mseloss", "mse_loss", "l1loss", "l1_loss", "smoothl1loss", "smooth_l1_loss",
    "huberloss", "huber_loss", "bceloss", "binary_cross_entropy", "bcewithlogitsloss",
    "binary_cross_entropy_with_logits", "nllloss", "nll_loss", "softmarginloss", "soft_margin_loss",
}  # fmt: skip
_NO_MEAN = {"reduction", "size_average", "reduce", "weight", "ignore_index"}
_WITHOUT_GROUP = (
    "nn.DataParallel stays: it is how the script runs without a process group",
    "remove that branch: unidist.init() makes a world of one process without a launcher",
)
_BY_HAND = "unidist.init(), wrap_model and shard_loader by hand, see docs/migrating.md"
_SHARE = (
    "each process computes this from its share of the batch",
    "unidist.allreduce_metric(value), or op='sum' for counts",
)
_EACH = ("each process does this now", "if unidist.is_main(): before it")
_KEYS = (
    "the keys begin with module., which they did with several GPUs only",
    "nothing, or unidist.unwrap(model).state_dict()",
)
_DECIDES = (
    "each process decides by its own value",
    "make the value the same on all ranks, by unidist.allreduce_metric",
)
_BATCHES = (
    "each process takes its part of the batch; shuffled, the order of the samples is another one than before, the same "
    "for any number of processes",
    "nothing, if the batch size is a multiple of the number of processes; else the batches are smaller",
)
_ONE_GPU = (
    "it chooses one GPU for all processes, and unidist.init() has chosen that of the local rank",
    "remove it, or torch.cuda.set_device(unidist.local_rank())",
)
#: Functions that change files, by their full names.
_FILES = re.compile(
    r"torch\.save|wandb\.init|(\w+\.)*SummaryWriter|shutil\.(copy\w*|move|rmtree)|os\.(rename|replace|remove|unlink|symlink)"
    r"|(np|numpy)\.save\w*"
)
_PLURAL = re.compile(r"^(torch\.cuda\.device_count\(\) *> *1|1 *< *torch\.cuda\.device_count\(\))$")


def change_data_parallel(context: TorchContext) -> None:
    """Change all of a script, or nothing: what cannot be followed is a reason to leave the file as it is."""
    tree = context.tree
    calls = list(context.calls("DataParallel"))
    if not calls:
        return
    others = (symbol not in ("DataParallel", "DistributedSampler") for symbol in context.names.symbols.values())
    if any(others) or any(bound == "unidist" for *_, bound in imports_of(tree)):
        for call in calls:
            context.remark(call, *_WITHOUT_GROUP)
        return
    changed = [node for call in calls for node in _wrap(context, call)]
    loops = training_loops(tree)
    loops = [loop for loop in loops if not any(tree.is_inside(other, loop.body) for other in loops)]
    if not loops:
        context.refuse(calls[0], "no loop of this file trains the model", _BY_HAND)
    for backward in tree.method_calls("backward"):
        _check_loss(context, backward)
    loaders = _shard_all(context, loops)
    called = {call.func for call in calls}
    for use in context.uses("DataParallel"):
        if use not in called and not is_asked_for(context, use):
            context.refuse(use, "DataParallel is used without being called", "call it where it is used")
    if context.refusals:
        return
    changed += [*loaders, *_devices(context)]
    _start(context, calls[0], changed)
    for use in list(context.uses("DataParallel")):
        context.edits.replace(use, context.unidist_name(use, "WrappedModel"))
        context.mark_handled(use)
    for loop in loops:
        _report_shares(context, loop)
    _guard_files(context)
    context.wrapped |= {variable for variable in _models(context) if variable is not None}
    report_evaluation(context)


def _shard_all(context: TorchContext, loops: list[cst.For]) -> list[cst.Call]:
    """Shard the loaders over which loops go."""
    loaders: list[cst.Call] = []
    for loop in loops:
        found = _loaders_of(context, loop)
        if not found:
            context.refuse(loop, "the DataLoader of this loop is not visible", _BY_HAND)
        loaders += [each for each in found if each not in loaders]
    for loader in loaders:
        _shard(context, loader)
    return loaders


def _wrap(context: TorchContext, call: cst.Call) -> Iterator[cst.CSTNode]:
    """Replace ``nn.DataParallel(model)``, also with ``.cuda()`` behind it, and yield what it is a part of."""
    tree = context.tree
    arguments = context.arguments(call)
    statement = tree.statement(call)
    if arguments is None or "module" not in arguments or not isinstance(statement, cst.SimpleStatementLine):
        context.refuse(call, *UNKNOWN_ARGUMENTS)
        return
    outer: cst.Call = call
    above = tree.parent(call)
    if isinstance(above, cst.Attribute) and above.attr.value in ("cuda", "to"):
        outer = cst.ensure_type(tree.parent(above), cst.Call)
    guard = tree.parent(tree.parent(statement))
    if isinstance(guard, cst.If):
        if guard.orelse is not None or not _PLURAL.match(context.text(guard.test)) or tree.block(guard) is None:
            why = f"whether the model is wrapped depends on `{context.text(guard.test)}`"
            context.refuse(call, why, "wrap it in any case, then migrate again")
            return
        context.edits.replace(guard, _without_condition)
        for state in tree.method_calls("state_dict"):
            by_case = any(isinstance(each, cst.IfExp) for each in tree.parents(state))
            if not by_case and tree.variable(cst.ensure_type(state.func, cst.Attribute).value) in _models(context):
                context.remark(state, *_KEYS)
    model = arguments["module"].deep_clone()
    moved = cst.Call(cst.Attribute(model, cst.Name("to")), [cst.Arg(cst.Call(context.unidist_name(call, "device")))])
    context.edits.replace(outer, cst.Call(context.unidist_name(call, "wrap_model"), [cst.Arg(moved)]))
    context.drop(outer)
    yield guard if isinstance(guard, cst.If) else statement


def _without_condition(updated: cst.If) -> cst.FlattenSentinel[cst.BaseStatement]:
    lines = list(cst.ensure_type(updated.body, cst.IndentedBlock).body)
    kept = [each for each in lines if not re.match(r"\s*print\(", cst.Module([each]).code)]  # type: ignore[list-item]
    first = kept[0]
    above = [*updated.leading_lines, *getattr(first, "leading_lines", ())]
    return cst.FlattenSentinel([first.with_changes(leading_lines=above), *kept[1:]])


# ------------------------------------------------------------------------------------ what the gradients are of
def _check_loss(context: TorchContext, backward: cst.Call) -> None:
    loss = cst.ensure_type(backward.func, cst.Attribute).value
    if isinstance(loss, cst.Call) and full_name(loss.func).endswith("scale") and loss.args:
        loss = loss.args[0].value
    if not _is_mean(context, loss):
        why = f"whether `{context.text(loss)}` is a mean over the samples of the batch cannot be determined"
        context.refuse(backward, why, _BY_HAND)


def _is_mean(context: TorchContext, node: cst.BaseExpression, depth: int = 6) -> bool:
    """Return whether a value is visibly a mean over the samples, or such values times constants."""
    rule = next((rule for kind, rule in _MEANS.items() if isinstance(node, kind)), None)
    return depth > 0 and rule is not None and rule(context, node, depth - 1)


def _is_mean_of_terms(context: TorchContext, node: cst.BinaryOperation, depth: int) -> bool:
    means = [_is_mean(context, each, depth) for each in (node.left, node.right)]
    numbers = [_is_number(context, each) for each in (node.left, node.right)]
    if isinstance(node.operator, (cst.Add, cst.Subtract)):
        return all(means)
    divided = means[0] and numbers[1]
    if isinstance(node.operator, cst.Multiply):
        return divided or (numbers[0] and means[1])
    return isinstance(node.operator, cst.Divide) and divided


def _is_mean_by_call(context: TorchContext, node: cst.Call, depth: int) -> bool:
    values = values_of(context.tree, node.func)
    if is_parameter(context.tree, variable := context.tree.variable(node.func)):
        values = [*values, *passed_to(context.tree, variable or "")]
        values = [each for value in values for each in _assigned(context, value)]
    if values:
        return all(isinstance(value, cst.Call) and _is_loss(context, value) for value in values)
    match node:
        case cst.Call(cst.Attribute(output, cst.Name("mean")), []) if _is_output(context, output):
            return True
        case cst.Call(cst.Call() as made):  # nn.MSELoss()(a, b)
            return _is_loss(context, made)
    return _is_loss(context, node)


def _is_mean_by_name(context: TorchContext, node: cst.Name, depth: int) -> bool:
    variable, values = context.tree.variable(node), values_of(context.tree, node)
    rest = [value for value in values if _is_of(context, value, variable)]
    same = [value for value in values if value not in rest]
    if any(context.text(value) == f"{node.value}.mean()" for value in rest):
        return len(rest) == 1 and all(_comes_from_model(context, value) for value in same)
    if not same or len(targets_of(context.tree, variable)) != len(values) + _scalings(context, variable):
        return False
    scaled = all(isinstance(value, cst.BinaryOperation) and _is_number(context, value.right) for value in rest)
    return scaled and all(_is_mean(context, value, depth) for value in same)


_MEANS: dict[type[cst.BaseExpression], Callable[[TorchContext, Any, int], bool]] = {
    cst.BinaryOperation: _is_mean_of_terms,
    cst.Call: _is_mean_by_call,
    cst.Name: _is_mean_by_name,
}


def _scalings(context: TorchContext, variable: str | None) -> int:
    """Return how often a variable is divided or multiplied by a number in place."""
    return sum(
        isinstance(each.operator, (cst.DivideAssign, cst.MultiplyAssign)) and _is_number(context, each.value)
        for each in context.tree.all(cst.AugAssign)
        if context.tree.variable(each.target) == variable
    )


def _assigned(context: TorchContext, value: cst.BaseExpression) -> list[cst.BaseExpression]:
    return values_of(context.tree, value) if context.tree.variable(value) else [value]


def _is_of(context: TorchContext, value: cst.BaseExpression, variable: str | None) -> bool:
    return any(context.tree.variable(each) == variable for each in context.tree.all(cst.Name, inside=value))


def _is_number(context: TorchContext, node: cst.BaseExpression) -> bool:
    """Return whether a value is a constant, or an option of the script."""
    return (
        isinstance(node, (cst.Integer, cst.Float))
        or context.text(node).startswith("args.")
        or context.text(node).isupper()
    )


def _is_output(context: TorchContext, node: cst.BaseExpression) -> bool:
    """Return whether a value is what a wrapped model returns: of DataParallel, the losses of all GPUs."""
    values = _assigned(context, node)
    return bool(values) and all(_comes_from_model(context, value) for value in values)


def _comes_from_model(context: TorchContext, value: cst.BaseExpression) -> bool:
    return isinstance(value, cst.Call) and context.tree.variable(value.func) in _models(context)


def _models(context: TorchContext) -> set[str | None]:
    tree = context.tree
    return {
        tree.variable(target.target)
        for call in tree.all(cst.Call)
        if context.symbol(call.func) == "DataParallel" and isinstance(assign := tree.parent(call), cst.Assign)
        for target in assign.targets
    }


def _is_loss(context: TorchContext, call: cst.Call) -> bool:
    while isinstance(call.func, cst.Attribute) and isinstance(call.func.value, cst.Call):  # nn.MSELoss().cuda()
        call = call.func.value
    name = full_name(call.func).split(".")[-1].lower()
    given = {arg.keyword.value for arg in call.args if arg.keyword is not None}
    of_torch = any(each.startswith("torch.") for each in context.tree.imported(call.func))
    starred = any(arg.star for arg in call.args)
    is_class = name.endswith("loss") and "_" not in name
    positional = [arg for arg in call.args if arg.keyword is None]
    few = not positional if is_class else len(positional) <= 2
    return of_torch and name in _LOSSES and not given & _NO_MEAN and not starred and few


# ------------------------------------------------------------------------------------ data
def _loaders_of(context: TorchContext, loop: cst.For) -> list[cst.Call]:
    """Return the ``DataLoader(...)`` calls over which a loop may iterate; none if they cannot be determined."""
    over = iterated(loop)
    match values_of(context.tree, over) if isinstance(over, cst.Name) else []:
        case [cst.Call(function, [cst.Arg(inner), *_])] if full_name(function).endswith("tqdm"):
            over = inner
    return _calls_of(context, over)


def _calls_of(
    context: TorchContext, node: cst.BaseExpression, index: int | None = None, depth: int = 5
) -> list[cst.Call]:
    """Return the ``DataLoader(...)`` calls of which a value may be the result.

    Args:
        index: which part of the value, if it is a tuple.
    """
    tree = context.tree
    if depth == 0:
        return []
    if isinstance(node, cst.Tuple) and index is not None and index < len(node.elements):
        return _calls_of(context, node.elements[index].value, None, depth - 1)
    if isinstance(node, cst.Call) and index is None and tree.imported(node.func) & LOADERS:
        return [node]
    if isinstance(node, cst.Call):
        called = callees(tree, node)
        results = [each for each in tree.all(cst.Return) if tree.function(each) in called]
        values = [(each.value, index) for each in results if each.value is not None]
    else:
        variable = tree.variable(node)
        pairs = assignments_of(tree, variable or "")
        if index is not None or len(targets_of(tree, variable)) != len(pairs):
            return []
        values = [(value, _index(context, value, target)) for value, target in pairs]
        values += [(value, None) for value in passed_to(tree, variable or "") if is_parameter(tree, variable)]
    found = [_calls_of(context, value, part, depth - 1) for value, part in values]
    return [call for calls in found for call in calls] if found and all(found) else []


def _index(context: TorchContext, value: cst.BaseExpression, target: cst.BaseExpression) -> int | None:
    """Return which part of a value a target gets."""
    element = context.tree.parent(target)
    whole = context.tree.parent(element)
    if not isinstance(element, cst.Element) or isinstance(context.tree.parent(value), cst.Element):
        return None
    return list(whole.elements).index(element) if isinstance(whole, (cst.Tuple, cst.List)) else None


def _shard(context: TorchContext, loader: cst.Call) -> None:
    given = {arg.keyword.value for arg in loader.args if arg.keyword is not None}
    positional = [arg for arg in loader.args if arg.keyword is None]
    size = argument(loader, "batch_size") or (positional[1].value if len(positional) > 1 else None)
    plain = not any(arg.star for arg in loader.args) and not given & {"sampler", "batch_sampler"}
    if size is None or is_constant(size, 1, None) or not plain or len(positional) > 3:
        context.refuse(loader, "how this loader makes its batches cannot be determined", _BY_HAND)
        return
    if any(
        "IterableDataset" in context.text(base.value) for node in context.tree.all(cst.ClassDef) for base in node.bases
    ):
        context.refuse(loader, "an IterableDataset must be divided among the processes", _BY_HAND)
        return
    function, world = context.unidist_name(loader, "shard_loader"), context.unidist_name(loader, "world_size")
    value = size.deep_clone()
    if isinstance(value, (cst.BinaryOperation, cst.IfExp, cst.BooleanOperation)) and not value.lpar:
        value = value.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    context.edits.replace(size, cst.BinaryOperation(value, cst.FloorDivide(), cst.Call(world)))
    context.edits.replace(loader, lambda updated: cst.Call(function, [cst.Arg(updated)]))
    context.remark(loader, *_BATCHES)


# ------------------------------------------------------------------------------------ processes
def _devices(context: TorchContext) -> Iterator[cst.CSTNode]:
    """``torch.device("cuda:0" if torch.cuda.is_available() else "cpu")`` is ``unidist.device()``."""
    names = re.compile(
        r"""^torch\.device\(["']cuda(:0)?["'](?: if torch\.cuda\.is_available\(\) else ["']cpu["'])?\)$"""
    )
    for call in context.tree.all(cst.Call):
        if names.match(context.text(call)):
            context.edits.replace(call, cst.Call(context.unidist_name(call, "device")))
            context.drop(call)
            yield call
        elif full_name(call.func) == "torch.cuda.set_device":
            context.remark(call, *_ONE_GPU)
        elif isinstance(call.func, cst.Attribute) and call.func.attr.value in ("to", "cuda") and len(call.args) == 1:
            first = call.args[0].value
            named = isinstance(first, cst.SimpleString) and first.evaluated_value in ("cuda:0", "cuda")
            if (named or is_constant(first, 0)) and not context.is_gone(call):
                device = cst.Call(context.unidist_name(call, "device"))
                context.edits.replace(call.func.attr, cst.Name("to"))
                context.edits.replace(first, device)
                yield call


def _start(context: TorchContext, wrapping: cst.Call, changed: list[cst.CSTNode]) -> None:
    """``unidist.init()`` before all that needs it: in ``if __name__ == "__main__"``, or where the script begins."""
    tree, module = context.tree, context.tree.module
    for each in module.body:
        if isinstance(each, (cst.FunctionDef, cst.ClassDef)):
            continue
        is_guard = isinstance(each, cst.If) and "__name__" in context.text(each.test)
        if any(tree.is_inside(node, each) for node in changed) and not is_guard:
            _insert_init(context, each)
            return
        if isinstance(each, cst.If) and is_guard and isinstance(each.body, cst.IndentedBlock):
            lines = each.body.body
            using = (line for line in lines if _uses_changed(context, line, changed))
            _insert_init(context, next(using, lines[0]))
            return
        if _uses_changed(context, each, changed):
            _insert_init(context, each)
            return
    why = "where the program begins is not visible"
    context.refuse(wrapping, why, _BY_HAND)


def _uses_changed(context: TorchContext, line: cst.CSTNode, changed: list[cst.CSTNode]) -> bool:
    """Return whether a statement contains what has changed, or calls a function that does."""
    tree = context.tree
    functions = {tree.function(node) for node in changed}
    calls = [call for function in functions for call in callers(tree, function)]
    return any(tree.is_inside(node, line) for node in (*changed, *calls))


def _insert_init(context: TorchContext, statement: Statement | cst.BaseStatement) -> None:
    context.edits.insert(
        statement, cst.SimpleStatementLine([cst.Expr(cst.Call(context.unidist_name(statement, "init")))])
    )


def _report_shares(context: TorchContext, loop: cst.For) -> None:
    """Values of one rank that the loop collects."""
    tree = context.tree
    for node in tree.all((cst.AugAssign, cst.Call), inside=loop.body):
        collects = isinstance(node, cst.AugAssign)
        if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
            collects = node.func.attr.value in ("append", "update", "add_scalar")
        tensors = re.search(r"\.item\(\)|\.size\(0\)|\.sum\(|\.data\b|\bloss\b", context.text(node))
        if collects and tensors:
            context.remark(node, *_SHARE)
    for call in tree.all(cst.Call):
        if called_name(call) == "ReduceLROnPlateau":
            context.remark(call, *_DECIDES)


def _guard_files(context: TorchContext) -> None:
    """``torch.save`` by rank 0 alone; remarks on other files."""
    tree = context.tree
    for call in tree.all(cst.Call):
        own = tree.is_statement(call)
        if full_name(call.func) == "torch.save" and own is not None and tree.block(own) is not None:
            test = cst.Call(context.unidist_name(call, "is_main"))
            context.edits.replace(own, partial(_guarded, test))
        elif _writes_file(context, call, full_name(call.func)):
            context.remark(call, *_EACH)


def _writes_file(context: TorchContext, call: cst.Call, name: str) -> bool:
    if _FILES.fullmatch(name):
        return True
    if name.split(".")[-1] in ("makedirs", "mkdir") and not (
        name.endswith("dirs") and not is_constant(argument(call, "exist_ok"), None, False)
    ):
        return True
    opened = name == "open" and len(call.args) > 1 and re.search("['\"][wa]", context.text(call.args[1].value))
    return bool(opened) or is_constant(argument(call, "download"), True)


def _guarded(test: cst.Call, updated: cst.SimpleStatementLine) -> cst.If:
    inner = updated.with_changes(leading_lines=[])
    return cst.If(test, cst.IndentedBlock([inner]), leading_lines=updated.leading_lines)
