"""The rule for data: a ``DistributedSampler`` and its ``DataLoader`` become ``shard_loader``."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from unidist.migrate.context import Arguments, Context, is_constant
from unidist.migrate.flow import assignments, callees, follow, is_target, references
from unidist.migrate.syntax import Statement, argument, bound_name, full_name, keyword

_SAMPLER = "torch.utils.data.distributed.DistributedSampler"
_SAMPLERS = {_SAMPLER, "torch.utils.data.DistributedSampler", "torch.utils.data.distributed.DistributedSampler"}
_LOADERS = {"torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader"}
_POSITIONS = ("dataset", "num_replicas", "rank", "shuffle", "seed", "drop_last")
#: Methods whose results have the same length on all ranks.
_SAME_LENGTH_METHODS = {
    "parameters", "named_parameters", "buffers", "named_buffers", "modules", "state_dict", "items", "keys", "values",
}  # fmt: skip

_NOT_EVERY_EPOCH = (
    "whether set_epoch() precedes every iteration over the loader cannot be determined; "
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


def is_imported(context: Context, call: cst.Call, names: set[str]) -> bool:
    """Whether a call is one of some imported functions."""
    return bool(context.tree.imported(call.func) & names)


def sampled_loaders(context: Context) -> dict[str, cst.Call]:
    """The DataLoaders with a DistributedSampler, by the variables that hold them."""
    samplers = {
        context.tree.variable(target)
        for value, target in assignments(context.tree)
        if isinstance(value, cst.Call) and is_imported(context, value, _SAMPLERS)
    }
    found = {}
    for value, target in assignments(context.tree):
        if isinstance(value, cst.Call) and is_imported(context, value, _LOADERS):
            sampler = argument(value, "sampler")
            inline = isinstance(sampler, cst.Call) and is_imported(context, sampler, _SAMPLERS)
            variable = context.tree.variable(target)
            if variable and sampler is not None and (inline or context.tree.variable(sampler) in samplers - {None}):
                found[variable] = value
    return found


def has_even_loops(context: Context) -> bool:
    """Whether all training loops draw from a ``DistributedSampler``, so that all ranks have equally many batches."""
    tree, loaders = context.tree, _even_loaders(context)
    loops = [loop for loop in tree.all(cst.For) if _has_backward(context, loop)]
    even = [loop for loop in loops if tree.variable(_iterable_of(loop)) in loaders]

    def covered(loop: cst.For) -> bool:
        return any(tree.is_inside(each, loop) or tree.is_inside(loop, each) for each in even)

    return bool(even) and all(map(covered, loops)) and not any(_is_uneven(context, loop) for loop in even)


def _even_loaders(context: Context) -> set[str]:
    """The variables that hold a ``DataLoader`` with a ``DistributedSampler``, and no other."""
    tree, sampled = context.tree, sampled_loaders(context)
    all_loaders = {
        tree.variable(target)
        for value, target in assignments(tree)
        if isinstance(value, cst.Call) and is_imported(context, value, _LOADERS)
    }
    others = follow(tree, {name for name in all_loaders if name} - set(sampled)).variables
    return follow(tree, sampled).variables - others


def is_even(context: Context, loop: cst.For) -> bool:
    """Whether a loop visibly has equally many iterations on all ranks.

    As over such a loader, a ``range``, the parameters of a model or the items of a dict.
    """
    if any(isinstance(jump, (cst.Break, cst.Return)) for jump in context.tree.jumps(loop.body)):
        return False
    over = _iterable_of(loop)
    if isinstance(over, cst.Call):
        last = context.text(over.func).split(".")[-1]
        return last in _SAME_LENGTH_METHODS or (
            last == "range"
            and "len(" not in context.text(over)
            and not any(context.tree.is_inside(use, over) for use in context.names.symbols)
        )
    return isinstance(over, (cst.List, cst.Tuple)) or context.tree.variable(over) in _even_loaders(context)


def _is_uneven(context: Context, loop: cst.For) -> bool:
    """Whether some iterations may run no backward pass."""
    if any(context.tree.jumps(loop.body)):
        return True
    for call in context.tree.method_calls("backward", inside=loop.body):
        for above in context.tree.parents(call):
            if above is loop:
                break
            if isinstance(above, (cst.If, cst.Try, cst.While)):
                return True
    return False


def _has_backward(context: Context, loop: cst.For) -> bool:
    return next(context.tree.method_calls("backward", inside=loop.body), None) is not None


def _iterable_of(loop: cst.For) -> cst.BaseExpression:
    """What a loop iterates over, without ``enumerate`` and progress bars."""
    found = loop.iter
    while isinstance(found, cst.Call) and found.args and full_name(found.func).split(".")[-1] in ("enumerate", "tqdm"):
        found = found.args[0].value
    return found


# ------------------------------------------------------------------------------------ the rule
def change_loaders(context: Context) -> None:
    """Each sampler that serves one loader and nothing else; others stay, with unidist's rank and world size."""
    gone: list[Statement] = []
    if any(symbol.startswith("elastic") for symbol in context.names.symbols.values()):
        return  # a sampler that is made before the world changes keeps its share
    for pair in list(_samplers_with_loaders(context)):
        uses = _uses_of_sampler(context, pair)
        epochs = [use for use in uses or () if _called_method(context, use) == "set_epoch"]
        shuffle = not is_constant(pair.arguments.get("shuffle"), False)
        if (
            uses is None
            or not _is_equivalent(context, pair)
            or _uses_loader_sampler(context, pair)
            or not context.can_import(pair.loader)
        ):
            continue
        statements = [each for use in epochs if (each := context.tree.statement(use)) is not None]
        if (
            shuffle
            and epochs
            and not all(_follows_set_epoch(context, use, statements) for use in _iterations(context, pair))
        ):
            context.remark(pair.sampler, _NOT_EVERY_EPOCH, _CALL_SET_EPOCH)
            continue
        if shuffle and not epochs:
            if _trains(context, pair):
                context.remark(pair.sampler, _SAME_ORDER, _CALL_SET_EPOCH)
            continue
        _change(context, pair, uses, shuffle)
        gone.append(pair.sampler_statement)
    if gone:
        _drop_import(context, gone)


def _drop_import(context: Context, statements: list[Statement]) -> None:
    """Remove the sampler's import if all its uses are removed."""
    tree = context.tree
    for node in tree.all(cst.ImportFrom):
        statement = tree.statement(node)
        if isinstance(node.names, cst.ImportStar) or node.module is None or statement is None:
            continue
        for alias in node.names:
            if f"{full_name(node.module)}.{full_name(alias.name)}" not in _SAMPLERS:
                continue
            bound = bound_name(alias)
            uses = [each for each in tree.all(cst.Name) if each.value == bound and not tree.is_inside(each, node)]
            if not all(any(tree.is_inside(use, gone) for gone in statements) for use in uses):
                continue
            kept = [each for each in node.names if each is not alias]
            if kept:
                kept[-1] = kept[-1].with_changes(
                    comma=cst.MaybeSentinel.DEFAULT if node.rpar is None else kept[-1].comma
                )
                context.edits.replace(node, node.with_changes(names=kept))
            else:
                context.edits.remove(statement)


def _samplers_with_loaders(context: Context) -> list[SampledLoader]:
    tree = context.tree
    found = []
    loaders = [
        (value, target)
        for value, target in assignments(tree)
        if isinstance(value, cst.Call) and is_imported(context, value, _LOADERS)
    ]
    for value, target in assignments(tree):
        variable, statement = tree.variable(target), tree.statement(target)
        if (
            not isinstance(value, cst.Call)
            or not is_imported(context, value, _SAMPLERS)
            or not variable
            or statement is None
        ):
            continue
        arguments = _sampler_arguments(value)
        mine = [
            (call, to) for call, to in loaders if tree.variable(argument(call, "sampler") or cst.Name("_")) == variable
        ]
        others = [each for each in assignments(tree) if tree.variable(each[1]) == variable]
        if arguments is None or len(mine) != 1 or len(others) != 1 or isinstance(tree.parent(target), cst.Element):
            continue
        loader, name = mine[0]
        loader_variable = tree.variable(name)
        if loader_variable is None or [tree.variable(each[1]) for each in loaders].count(loader_variable) != 1:
            continue
        found.append(SampledLoader(variable, value, statement, loader, loader_variable, name, arguments))
    return found


def _sampler_arguments(call: cst.Call) -> Arguments | None:
    if any(arg.star for arg in call.args):
        return None
    found = {}
    for index, arg in enumerate(call.args):
        found[arg.keyword.value if arg.keyword is not None else _POSITIONS[index]] = arg.value
    return found


def _is_equivalent(context: Context, pair: SampledLoader) -> bool:
    """Whether shard_loader gives the same samples in the same order."""
    arguments, tree = pair.arguments, context.tree
    whole = context.is_whole_world(arguments.get("num_replicas"), arguments.get("rank"))
    if not whole or set(arguments) - set(_POSITIONS):
        return False
    if not is_constant(arguments.get("shuffle", cst.Name("True")), True, False):
        return False
    given = {arg.keyword.value for arg in pair.loader.args if arg.keyword is not None}
    for arg in pair.loader.args:
        more = _keys(context, arg.value) if arg.star == "**" else set()
        if arg.star == "*" or more is None or more & {"sampler", "shuffle", "drop_last"}:
            return False
        given |= more
    if given & {"batch_sampler", "generator"} or argument(pair.loader, "sampler") is None:
        return False
    if not is_constant(argument(pair.loader, "shuffle"), False, None):
        return False
    # DataLoader(drop_last=True) over padded shares keeps a batch that shard_loader(drop_last=True) may not have.
    if not is_constant(argument(pair.loader, "drop_last"), False, None) or not is_constant(
        arguments.get("drop_last"), False, None
    ):
        return False
    positional = [arg.value for arg in pair.loader.args if arg.keyword is None and not arg.star]
    if len(positional) > 2:
        return False
    dataset = positional[0] if positional else argument(pair.loader, "dataset")
    same = dataset is not None and context.text(dataset) == context.text(arguments.get("dataset", dataset))
    return same and tree.block(pair.sampler_statement) is tree.block(
        tree.statement(pair.loader) or pair.sampler_statement
    )


def _keys(context: Context, node: cst.BaseExpression) -> set[str] | None:
    """The keys of a dict display or of a variable that holds one; None if they cannot be determined."""
    if isinstance(node, cst.IfExp):
        parts = [_keys(context, node.body), _keys(context, node.orelse)]
        return None if None in parts else {key for part in parts for key in part or ()}
    if isinstance(node, cst.Dict):
        keys = [element.key for element in node.elements if isinstance(element, cst.DictElement)]
        if len(keys) < len(node.elements) or not all(isinstance(key, cst.SimpleString) for key in keys):
            return None
        return {str(key.evaluated_value) for key in keys if isinstance(key, cst.SimpleString)}
    variable = context.tree.variable(node)
    if variable is None:
        return None
    found: set[str] = set()
    for value, target in assignments(context.tree):
        into = target.value if isinstance(target, cst.Subscript) else target
        if context.tree.variable(into) != variable:
            continue
        if isinstance(target, cst.Subscript):
            first = target.slice[0].slice
            key = first.value if isinstance(first, cst.Index) else None
            more = {str(key.evaluated_value)} if isinstance(key, cst.SimpleString) else None
        else:
            more = _keys(context, value)
        if more is None:
            return None
        found |= more
    return found


def _called_method(context: Context, use: cst.BaseExpression) -> str | None:
    parent = context.tree.parent(use)
    called = isinstance(parent, cst.Attribute) and isinstance(context.tree.parent(parent), cst.Call)
    return parent.attr.value if called and isinstance(parent, cst.Attribute) else None


def _uses_of_sampler(context: Context, pair: SampledLoader) -> list[cst.BaseExpression] | None:
    """The calls of ``set_epoch()`` and ``len()`` on the sampler; None if it has other uses."""
    found = []
    for use in references(context.tree).get(pair.variable, ()):
        if is_target(context.tree, use) or use is argument(pair.loader, "sampler"):
            continue
        call = context.tree.parent(context.tree.parent(use))
        if (_called_method(context, use) == "set_epoch" and context.tree.is_statement(call)) or _is_length(
            context, use
        ):
            found.append(use)
        else:
            return None
    return found


def _trains(context: Context, pair: SampledLoader) -> bool:
    loops = [
        loop for loop in context.tree.all(cst.For) if context.tree.variable(_iterable_of(loop)) == pair.loader_variable
    ]
    return any(_has_backward(context, loop) for loop in loops)


def _change(context: Context, pair: SampledLoader, uses: list[cst.BaseExpression], shuffle: bool) -> None:
    tree = context.tree
    seed = pair.arguments.get("seed")
    wrapper_args = [] if seed is None or is_constant(seed, 0) else [keyword("seed", seed.deep_clone())]
    function = context.unidist_name(pair.loader, "shard_loader")

    def rebuilt(updated: cst.Call) -> cst.Call:
        args = [arg for arg in updated.args if arg.keyword is None or arg.keyword.value not in ("sampler", "shuffle")]
        indices = [
            i for i, arg in enumerate(updated.args) if arg.keyword is not None and arg.keyword.value == "sampler"
        ]
        if shuffle:
            args.insert(
                min(indices[0], len(args)),
                updated.args[indices[0]].with_changes(keyword=cst.Name("shuffle"), value=cst.Name("True")),
            )
        if args:
            args[-1] = args[-1].with_changes(comma=updated.args[-1].comma)
        return cst.Call(function, [cst.Arg(updated.with_changes(args=args)), *wrapper_args])

    context.edits.replace(pair.loader, rebuilt)
    context.remove(pair.sampler_statement)
    for each in uses:
        call = tree.parent(tree.parent(each))
        statement = tree.statement(call)
        name = pair.loader_name
        if _called_method(context, each) != "set_epoch":
            context.edits.replace(each, cst.Attribute(name.deep_clone(), cst.Name("sampler")))
        elif isinstance(call, cst.Call) and statement is not None and _is_default_epoch(context, pair, call, statement):
            context.remove(statement)
        else:
            context.edits.replace(each, name.deep_clone())


def _is_default_epoch(context: Context, pair: SampledLoader, call: cst.Call, statement: Statement) -> bool:
    """Whether ``set_epoch`` is redundant: epochs 0, 1, 2, ..., each one iteration, which the loader counts itself."""
    tree = context.tree
    loop = tree.loop(statement)
    if not isinstance(loop, cst.For) or tree.loop(loop) is not None or tree.block(statement) is not loop.body:
        return False
    counter = isinstance(loop.iter, cst.Call) and full_name(loop.iter.func) == "range" and len(loop.iter.args) == 1
    if not counter or len(call.args) != 1 or context.text(loop.target) != context.text(call.args[0].value):
        return False
    function = tree.function(loop)
    if isinstance(function, cst.FunctionDef):
        calls = [each for each in tree.all(cst.Call) if function in callees(tree, each)]
        if len(calls) > 1 or tree.is_method(function) or any(tree.loop(each) for each in calls):
            return False
    uses = _iterations(context, pair)
    inner = [each for each in tree.all(cst.For, inside=loop.body) if any(use is _iterable_of(each) for use in uses)]
    if len(uses) != 1 or len(inner) != 1 or tree.block(inner[0]) is not loop.body:
        return False
    return not any(jump for each in (inner[0].body, loop.body) for jump in context.tree.jumps(each))


def _uses_loader_sampler(context: Context, pair: SampledLoader) -> bool:
    """Whether an attribute of ``loader.sampler`` is used, which a ``ShardLoader``'s sampler may not have."""
    for use in references(context.tree).get(pair.loader_variable, ()):
        sampler = context.tree.parent(use)
        asked = isinstance(context.tree.parent(sampler), cst.Attribute)
        if isinstance(sampler, cst.Attribute) and sampler.attr.value == "sampler" and asked:
            return True
    return False


def _iterations(context: Context, pair: SampledLoader) -> list[cst.BaseExpression]:
    """The uses that iterate over the loader, or pass it to something that may."""
    tree = context.tree
    return [
        use
        for use in references(tree).get(pair.loader_variable, ())
        if not is_target(tree, use) and not isinstance(tree.parent(use), cst.Attribute) and not _is_length(context, use)
    ]


def _follows_set_epoch(context: Context, use: cst.CSTNode, epochs: list[Statement], depth: int = 3) -> bool:
    """Whether a ``set_epoch`` precedes each execution of a use."""
    tree = context.tree
    child, loops = use, 0
    for above in tree.parents(use):
        if isinstance(above, (cst.FunctionDef, cst.Lambda)):
            if depth == 0 or not isinstance(above, cst.FunctionDef) or loops:
                return False
            calls = [call for call in tree.all(cst.Call) if above in callees(tree, call)]
            return bool(calls) and all(_follows_set_epoch(context, call, epochs, depth - 1) for call in calls)
        if isinstance(above, (cst.Module, cst.IndentedBlock)):
            index = next(index for index, each in enumerate(above.body) if each is child)
            if any(each is epoch for each in above.body[:index] for epoch in epochs):
                return loops == 0
        if isinstance(above, (cst.For, cst.While)) and child is above.body:
            loops += 1
        child = above
    return False


def _is_length(context: Context, use: cst.CSTNode) -> bool:
    call = context.tree.parent(context.tree.parent(use))
    return isinstance(call, cst.Call) and full_name(call.func) == "len"
