"""The rule for data: a ``DistributedSampler`` and its ``DataLoader`` become ``shard_loader``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import libcst as cst

from unidist.migrate.context import Arguments, Context, is_constant
from unidist.migrate.flow import assignments, assignments_of, callers, follow, references, uses_of, values_of
from unidist.migrate.syntax import (
    Statement,
    SyntaxTree,
    argument,
    called_name,
    full_name,
    imports_of,
    iterated,
    keyword,
    names_in,
    of_tree,
    without_trailing_comma,
)

_SAMPLERS = {"torch.utils.data.DistributedSampler", "torch.utils.data.distributed.DistributedSampler"}
LOADERS = {"torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader"}
_POSITIONS = ("dataset", "num_replicas", "rank", "shuffle", "seed", "drop_last")
#: Methods whose results have the same length on all ranks.
_SAME_LENGTH_METHODS = {
    "parameters", "named_parameters", "buffers", "named_buffers", "modules", "state_dict", "items", "keys", "values",
}  # fmt: skip

_NOT_EVERY_EPOCH = (
    "whether every iteration over the loader has a set_epoch() of its own before it cannot be determined; "
    "shard_loader counts each iteration as an epoch"
)
_CALL_SET_EPOCH = (
    "call set_epoch(epoch) before each epoch, then migrate again, or use unidist.shard_loader(DataLoader(...))"
)
_SAME_ORDER = "set_epoch() is never called, so every epoch has the same order; with shard_loader each has another"


@dataclass
class SampledLoader:
    """A sampler and the loader that draws from it."""

    variable: str
    sampler: cst.Call
    sampler_statement: Statement
    loader: cst.Call
    loader_variable: str
    loader_name: cst.BaseExpression
    arguments: Arguments


def _made(context: Context, names: set[str]) -> list[tuple[cst.Call, cst.BaseExpression]]:
    """Return the calls of some imported classes whose results are assigned, each with its target."""
    return [
        (value, target)
        for value, target in assignments(context.tree)
        if isinstance(value, cst.Call) and context.tree.imported(value.func) & names
    ]


def sampled_loaders(context: Context) -> dict[str, cst.Call]:
    """Return the DataLoaders with a DistributedSampler, by the variables that hold them."""
    tree = context.tree
    samplers = {tree.variable(target) for _, target in _made(context, _SAMPLERS)} - {None}
    found = {}
    for call, target in _made(context, LOADERS):
        sampler, variable = argument(call, "sampler"), tree.variable(target)
        inline = isinstance(sampler, cst.Call) and tree.imported(sampler.func) & _SAMPLERS
        if variable and sampler is not None and (inline or tree.variable(sampler) in samplers):
            found[variable] = call
    return found


def has_even_loops(context: Context) -> bool:
    """Return whether all training loops draw from a ``DistributedSampler``: all ranks have equally many batches."""
    tree, loaders = context.tree, _even_loaders(context)
    loops = training_loops(tree)
    even = [loop for loop in loops if tree.variable(iterated(loop)) in loaders]

    def covered(loop: cst.For) -> bool:
        return any(tree.is_inside(each, loop) or tree.is_inside(loop, each) for each in even)

    return bool(even) and all(map(covered, loops)) and not any(_is_uneven(context, loop) for loop in even)


def _even_loaders(context: Context) -> set[str]:
    """Return the variables that hold a ``DataLoader`` with a ``DistributedSampler``, and no other."""
    tree, sampled = context.tree, sampled_loaders(context)
    made = {variable for _, target in _made(context, LOADERS) if (variable := tree.variable(target))}
    return follow(tree, sampled).variables - follow(tree, made - set(sampled)).variables


def is_even(context: Context, loop: cst.For) -> bool:
    """Return whether a loop visibly has equally many iterations on all ranks.

    As over such a loader, a ``range``, the parameters of a model or the items of a dict.
    """
    tree, over = context.tree, iterated(loop)
    if any(tree.all((cst.Break, cst.Return), loop.body)):
        return False
    if isinstance(over, cst.Call):
        name, text = called_name(over), context.text(over)
        own = any(tree.is_inside(use, over) for use in context.names.symbols)
        return name in _SAME_LENGTH_METHODS or (name == "range" and "len(" not in text and not own)
    return isinstance(over, (cst.List, cst.Tuple)) or tree.variable(over) in _even_loaders(context)


def _is_uneven(context: Context, loop: cst.For) -> bool:
    """Return whether some iterations may run no backward pass."""
    calls = context.tree.method_calls("backward", inside=loop.body)
    around = [above for call in calls for above in context.tree.parents(call, below=loop)]
    return any(context.tree.jumps(loop.body)) or any(isinstance(each, (cst.If, cst.Try, cst.While)) for each in around)


@of_tree
def training_loops(tree: SyntaxTree) -> list[cst.For]:
    """Return the loops with a backward pass."""
    return [loop for loop in tree.all(cst.For) if any(tree.method_calls("backward", loop.body))]


# ------------------------------------------------------------------------------------ the rule
def change_loaders(context: Context) -> None:
    """Change each sampler that serves one loader and nothing else; others stay, with unidist's rank and world size."""
    if any(symbol.startswith("elastic") for symbol in context.names.symbols.values()):
        return  # a sampler that is made before the world changes keeps its share
    gone = [pair.sampler_statement for pair in list(_samplers_with_loaders(context)) if _change_pair(context, pair)]
    if gone:
        _drop_import(context, gone)


def _change_pair(context: Context, pair: SampledLoader) -> bool:
    """Change a sampler and its loader, if that gives the same samples."""
    tree, uses = context.tree, _uses_of_sampler(context, pair)
    if (
        uses is None
        or not _is_equivalent(context, pair)
        or _uses_loader_sampler(context, pair)
        or not context.can_import(pair.loader)
    ):
        return False
    shuffle = not is_constant(pair.arguments.get("shuffle"), False)
    epochs = [tree.statement(use) for use in uses if tree.called_method(use) == "set_epoch"]
    before = [_epochs_before(context, use, epochs) for use in _iterations(context, pair)]
    each_once = len({id(epoch) for found in before for epoch in found}) == sum(map(len, before))
    if shuffle and epochs and not (all(before) and each_once):
        context.remark(pair.sampler, _NOT_EVERY_EPOCH, _CALL_SET_EPOCH)
        return False
    if shuffle and not epochs:
        if pair.loader_variable in {tree.variable(iterated(loop)) for loop in training_loops(tree)}:
            context.remark(pair.sampler, _SAME_ORDER, _CALL_SET_EPOCH)
        return False
    _change(context, pair, uses, shuffle)
    return True


def _drop_import(context: Context, statements: list[Statement]) -> None:
    """Remove the sampler's import if all its uses are removed."""
    tree = context.tree
    for node, alias, name, bound in imports_of(tree):
        statement = tree.statement(node)
        if name not in _SAMPLERS or not isinstance(node, cst.ImportFrom) or statement is None:
            continue
        uses = [each for each in tree.all(cst.Name) if each.value == bound and not tree.is_inside(each, node)]
        if not all(any(tree.is_inside(use, gone) for gone in statements) for use in uses):
            continue
        kept = [each for each in names_in(node) if each is not alias]
        if kept:
            context.edits.replace(node, node.with_changes(names=kept if node.rpar else without_trailing_comma(kept)))
        else:
            context.edits.remove(statement)


def _samplers_with_loaders(context: Context) -> Iterator[SampledLoader]:
    tree, loaders = context.tree, _made(context, LOADERS)
    for sampler, target in _made(context, _SAMPLERS):
        variable, statement = tree.variable(target), tree.statement(target)
        arguments = _sampler_arguments(sampler)
        if not variable or statement is None or arguments is None or len(assignments_of(tree, variable)) != 1:
            continue
        mine = [
            (call, to) for call, to in loaders if tree.variable(argument(call, "sampler") or cst.Name("_")) == variable
        ]
        if len(mine) != 1 or isinstance(tree.parent(target), cst.Element):
            continue
        loader, name = mine[0]
        own = tree.variable(name)
        if own is not None and [tree.variable(each[1]) for each in loaders].count(own) == 1:
            yield SampledLoader(variable, sampler, statement, loader, own, name, arguments)


def _sampler_arguments(call: cst.Call) -> Arguments | None:
    if any(arg.star for arg in call.args):
        return None
    return {arg.keyword.value if arg.keyword else _POSITIONS[index]: arg.value for index, arg in enumerate(call.args)}


def _is_equivalent(context: Context, pair: SampledLoader) -> bool:
    """Return whether shard_loader gives the same samples in the same order."""
    arguments, loader, tree = pair.arguments, pair.loader, context.tree
    if not context.is_whole_world(arguments.get("num_replicas"), arguments.get("rank")):
        return False
    if set(arguments) - set(_POSITIONS) or not is_constant(arguments.get("shuffle", cst.Name("True")), True, False):
        return False
    given = {arg.keyword.value for arg in loader.args if arg.keyword is not None}
    for arg in loader.args:
        more = _keys(context, arg.value) if arg.star == "**" else set()
        if arg.star == "*" or more is None or more & {"sampler", "shuffle", "drop_last"}:
            return False
        given |= more
    if given & {"batch_sampler", "generator"} or argument(loader, "sampler") is None:
        return False
    # DataLoader(drop_last=True) over padded shares keeps a batch that shard_loader(drop_last=True) may not have.
    options = (argument(loader, "shuffle"), argument(loader, "drop_last"), arguments.get("drop_last"))
    if not all(is_constant(each, False, None) for each in options):
        return False
    positional = [arg.value for arg in loader.args if arg.keyword is None and not arg.star]
    dataset = positional[0] if positional else argument(loader, "dataset")
    same = dataset is not None and context.text(dataset) == context.text(arguments.get("dataset", dataset))
    block = tree.block(tree.statement(loader) or pair.sampler_statement)
    return same and len(positional) <= 2 and tree.block(pair.sampler_statement) is block


def _keys(context: Context, node: cst.BaseExpression) -> set[str] | None:
    """Return the keys of a dict display or of a variable that holds one; None if they cannot be determined."""
    if isinstance(node, cst.IfExp):
        parts = [_keys(context, node.body), _keys(context, node.orelse)]
    elif isinstance(node, cst.Dict):
        parts = [_key(each.key) if isinstance(each, cst.DictElement) else None for each in node.elements]
    elif (variable := context.tree.variable(node)) is None:
        return None
    else:
        parts = [_keys(context, value) for value in values_of(context.tree, node)]
        for _, target in assignments(context.tree):
            if isinstance(target, cst.Subscript) and context.tree.variable(target.value) == variable:
                index = target.slice[0].slice
                parts.append(_key(index.value) if isinstance(index, cst.Index) else None)
    return None if None in parts else {key for part in parts for key in part or ()}


def _key(node: cst.BaseExpression) -> set[str] | None:
    return {str(node.evaluated_value)} if isinstance(node, cst.SimpleString) else None


def _uses_of_sampler(context: Context, pair: SampledLoader) -> list[cst.BaseExpression] | None:
    """Return the calls of ``set_epoch()`` and ``len()`` on the sampler; None if it has other uses."""
    tree = context.tree
    found = [use for use in uses_of(tree, pair.variable) if use is not argument(pair.loader, "sampler")]

    def is_known(use: cst.BaseExpression) -> bool:
        call = tree.parent(tree.parent(use))
        return bool(tree.called_method(use) == "set_epoch" and tree.is_statement(call)) or _is_length(context, use)

    return found if all(map(is_known, found)) else None


def _change(context: Context, pair: SampledLoader, uses: list[cst.BaseExpression], shuffle: bool) -> None:
    tree, seed = context.tree, pair.arguments.get("seed")
    options = [] if seed is None or is_constant(seed, 0) else [keyword("seed", seed.deep_clone())]
    function = context.unidist_name(pair.loader, "shard_loader")

    def rebuilt(updated: cst.Call) -> cst.Call:
        args = []
        for arg in updated.args:
            name = arg.keyword.value if arg.keyword is not None else ""
            if name == "sampler" and shuffle:
                args.append(arg.with_changes(keyword=cst.Name("shuffle"), value=cst.Name("True")))
            elif name not in ("sampler", "shuffle"):
                args.append(arg)
        args[-1:] = [arg.with_changes(comma=updated.args[-1].comma) for arg in args[-1:]]
        return cst.Call(function, [cst.Arg(updated.with_changes(args=args)), *options])

    context.edits.replace(pair.loader, rebuilt)
    context.remove(pair.sampler_statement)
    for each in uses:
        name = pair.loader_name.deep_clone()
        call = tree.parent(tree.parent(each))
        statement = tree.statement(call)
        if tree.called_method(each) != "set_epoch":
            context.edits.replace(each, cst.Attribute(name, cst.Name("sampler")))
        elif isinstance(call, cst.Call) and statement is not None and _is_default_epoch(context, pair, call, statement):
            context.remove(statement)
        else:
            context.edits.replace(each, name)


def _is_default_epoch(context: Context, pair: SampledLoader, call: cst.Call, statement: Statement) -> bool:
    """Return whether ``set_epoch`` is redundant: epochs 0, 1, 2, ..., each one iteration, as the loader counts them."""
    tree = context.tree
    loop = tree.loop(statement)
    if not isinstance(loop, cst.For) or tree.loop(loop) is not None or tree.block(statement) is not loop.body:
        return False
    counter = isinstance(loop.iter, cst.Call) and full_name(loop.iter.func) == "range" and len(loop.iter.args) == 1
    if not counter or len(call.args) != 1 or context.text(loop.target) != context.text(call.args[0].value):
        return False
    function = tree.function(loop)
    if isinstance(function, cst.FunctionDef):
        calls = callers(tree, function)
        if len(calls) > 1 or tree.is_method(function) or any(tree.loop(each) for each in calls):
            return False
    uses = _iterations(context, pair)
    inner = [each for each in tree.all(cst.For, inside=loop.body) if any(use is iterated(each) for use in uses)]
    if len(uses) != 1 or len(inner) != 1 or tree.block(inner[0]) is not loop.body:
        return False
    return not any(tree.jumps(loop.body))


def _uses_loader_sampler(context: Context, pair: SampledLoader) -> bool:
    """Return whether an attribute of ``loader.sampler`` is used, which a ``ShardLoader``'s sampler may not have."""
    tree = context.tree
    attributes = [tree.method_of(use) for use in references(tree).get(pair.loader_variable, ())]
    return any(each is not None and each.attr.value == "sampler" and tree.method_of(each) for each in attributes)


def _iterations(context: Context, pair: SampledLoader) -> list[cst.BaseExpression]:
    """Return the uses that iterate over the loader, or pass it to something that may."""
    tree = context.tree
    uses = uses_of(tree, pair.loader_variable)
    return [use for use in uses if not isinstance(tree.parent(use), cst.Attribute) and not _is_length(context, use)]


def _epochs_before(
    context: Context, use: cst.CSTNode, epochs: Sequence[cst.CSTNode | None], depth: int = 3
) -> list[cst.CSTNode]:
    """Return the calls of ``set_epoch`` that precede the executions of a use; none if one has none before it."""
    tree = context.tree
    child, loops = use, 0
    for above in tree.parents(use):
        if isinstance(above, (cst.FunctionDef, cst.Lambda)):
            calls = callers(tree, above)
            if depth == 0 or loops:
                return []
            found = [_epochs_before(context, call, epochs, depth - 1) for call in calls]
            return [epoch for each in found for epoch in each] if all(found) else []
        if isinstance(above, (cst.Module, cst.IndentedBlock)):
            preceding = [each for each in tree.siblings(child)[0] if any(each is epoch for epoch in epochs)]
            if preceding:
                return [] if loops else preceding[-1:]
        if _repeats(above, child):
            loops += 1
        child = above
    return []


def _repeats(above: cst.CSTNode, child: cst.CSTNode) -> bool:
    """Return whether a loop or a comprehension executes a part of it more than once."""
    if isinstance(above, (cst.For, cst.While)):
        return child is above.body or (isinstance(above, cst.While) and child is above.test)
    if isinstance(above, cst.CompFor):
        return child is not above.iter
    return isinstance(above, cst.BaseComp) and child is not above.for_in


def _is_length(context: Context, use: cst.CSTNode) -> bool:
    call = context.tree.parent(context.tree.parent(use))
    return isinstance(call, cst.Call) and full_name(call.func) == "len"
