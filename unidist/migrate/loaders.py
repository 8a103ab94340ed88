"""Rules for data: a ``DistributedSampler`` and its ``DataLoader`` become ``shard_loader``."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from unidist.migrate.code import Statement, argument, full_name, keyword
from unidist.migrate.flow import assignments, callees, code_references, follow, is_target
from unidist.migrate.site import Arguments, Site, is_constant

_SAMPLER = "torch.utils.data.distributed.DistributedSampler"
_NAMES = {_SAMPLER, "torch.utils.data.DistributedSampler", "torch.utils.data.distributed.DistributedSampler"}
_LOADERS = {"torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader"}
_POSITIONS = ("dataset", "num_replicas", "rank", "shuffle", "seed", "drop_last")
#: Methods whose results are as long on all ranks.
_PARTS = {
    "parameters",
    "named_parameters",
    "buffers",
    "named_buffers",
    "modules",
    "state_dict",
    "items",
    "keys",
    "values",
}
#: What tells of legacy training whose order never changes.
_UNSEEN = "that set_epoch() is called before each time the loader is gone through cannot be seen; shard_loader counts each as an epoch"
_BY_HAND = "call set_epoch(epoch) before each epoch, then migrate again, or use unidist.shard_loader(DataLoader(...))"
_SAME_ORDER = "set_epoch() is never called, so every epoch has the same order, which shard_loader does not do"


@dataclass
class Pair:
    """A sampler and the loader that draws from it."""

    variable: str
    sampler: cst.Call
    sampler_statement: Statement
    loader: cst.Call
    loader_variable: str
    loader_name: cst.BaseExpression
    arguments: Arguments


def is_imported(site: Site, call: cst.Call, names: set[str]) -> bool:
    """Whether a call is one of some imported functions."""
    return bool(site.code.imported(call.func) & names)


def sampled_loaders(site: Site) -> dict[str, cst.Call]:
    """The DataLoaders with a DistributedSampler, by the variables that hold them."""
    samplers = {
        site.code.variable(target)
        for value, target in assignments(site.code)
        if isinstance(value, cst.Call) and is_imported(site, value, _NAMES)
    }
    found = {}
    for value, target in assignments(site.code):
        if isinstance(value, cst.Call) and is_imported(site, value, _LOADERS):
            sampler = argument(value, "sampler")
            inline = isinstance(sampler, cst.Call) and is_imported(site, sampler, _NAMES)
            variable = site.code.variable(target)
            if variable and sampler is not None and (inline or site.code.variable(sampler) in samplers - {None}):
                found[variable] = value
    return found


def has_even_loops(site: Site) -> bool:
    """Whether all loops that train take their batches from a DistributedSampler, which makes all ranks' shares equally long."""
    code, loaders = site.code, _even_loaders(site)
    loops = [loop for loop in code.all(cst.For) if _has_backward(site, loop)]
    even = [loop for loop in loops if code.variable(_iterated(loop)) in loaders]

    def covered(loop: cst.For) -> bool:
        return any(code.is_inside(each, loop) or code.is_inside(loop, each) for each in even)

    return bool(even) and all(map(covered, loops)) and not any(_is_uneven(site, loop) for loop in even)


def _even_loaders(site: Site) -> set[str]:
    """The variables that hold a DataLoader with a DistributedSampler, and no other."""
    code, sampled = site.code, sampled_loaders(site)
    all_loaders = {
        code.variable(target)
        for value, target in assignments(code)
        if isinstance(value, cst.Call) and is_imported(site, value, _LOADERS)
    }
    others = follow(code, {name for name in all_loaders if name} - set(sampled)).variables
    return follow(code, sampled).variables - others


def is_even(site: Site, loop: cst.For) -> bool:
    """Whether a loop is seen to go round equally often on all ranks: over such a loader, a number, a model's or a dict's parts."""
    if any(isinstance(jump, (cst.Break, cst.Return)) for jump in site.code.jumps(loop.body)):
        return False
    over = _iterated(loop)
    if isinstance(over, cst.Call):
        last = site.text(over.func).split(".")[-1]
        return last in _PARTS or (
            last == "range"
            and "len(" not in site.text(over)
            and not any(site.code.is_inside(use, over) for use in site.names.symbols)
        )
    return isinstance(over, (cst.List, cst.Tuple)) or site.code.variable(over) in _even_loaders(site)


def _is_uneven(site: Site, loop: cst.For) -> bool:
    """Whether some batches may have no backward pass."""
    if any(site.code.jumps(loop.body)):
        return True
    for call in site.code.method_calls("backward", inside=loop.body):
        for above in site.code.parents(call):
            if above is loop:
                break
            if isinstance(above, (cst.If, cst.Try, cst.While)):
                return True
    return False


def _has_backward(site: Site, loop: cst.For) -> bool:
    return next(site.code.method_calls("backward", inside=loop.body), None) is not None


def _iterated(loop: cst.For) -> cst.BaseExpression:
    """What a loop goes over, without ``enumerate`` and progress bars."""
    found = loop.iter
    while isinstance(found, cst.Call) and found.args and full_name(found.func).split(".")[-1] in ("enumerate", "tqdm"):
        found = found.args[0].value
    return found


# ------------------------------------------------------------------------------------ the rule
def change_loaders(site: Site) -> None:
    """Each sampler with one loader and nothing else to do; the others keep working as they are, by rank and world size."""
    gone: list[Statement] = []
    for pair in list(_pairs(site)):
        uses = _uses_of_sampler(site, pair)
        epochs = [use for use in uses or () if _method(site, use) == "set_epoch"]
        shuffle = not is_constant(pair.arguments.get("shuffle"), False)
        if uses is None or not _fits(site, pair) or _asks_sampler(site, pair) or not site.may_import(pair.loader):
            continue
        statements = [each for use in epochs if (each := site.code.statement(use)) is not None]
        if shuffle and epochs and not all(_is_governed(site, use, statements) for use in _iterations(site, pair)):
            site.note(pair.sampler, _UNSEEN, _BY_HAND)
            continue
        if shuffle and not epochs:
            if _trains(site, pair):
                site.note(pair.sampler, _SAME_ORDER, _BY_HAND)
            continue
        _change(site, pair, uses, shuffle)
        gone.append(pair.sampler_statement)
    if gone:
        _drop_import(site, gone)


def _drop_import(site: Site, statements: list[Statement]) -> None:
    """Take the sampler's import away if nothing is left of its uses."""
    code = site.code
    for node in code.all(cst.ImportFrom):
        statement = code.statement(node)
        if isinstance(node.names, cst.ImportStar) or node.module is None or statement is None:
            continue
        for alias in node.names:
            if f"{full_name(node.module)}.{full_name(alias.name)}" not in _NAMES:
                continue
            bound = full_name(alias.asname.name) if alias.asname else full_name(alias.name)
            uses = [each for each in code.all(cst.Name) if each.value == bound and not code.is_inside(each, node)]
            if not all(any(code.is_inside(use, gone) for gone in statements) for use in uses):
                continue
            kept = [each for each in node.names if each is not alias]
            if kept:
                kept[-1] = kept[-1].with_changes(
                    comma=cst.MaybeSentinel.DEFAULT if node.rpar is None else kept[-1].comma
                )
                site.edits.replace(node, node.with_changes(names=kept))
            else:
                site.edits.remove(statement)


def _pairs(site: Site) -> list[Pair]:
    code = site.code
    found = []
    loaders = [
        (value, target) for value, target in assignments(code)
        if isinstance(value, cst.Call) and is_imported(site, value, _LOADERS)
    ]  # fmt: skip
    for value, target in assignments(code):
        variable, statement = code.variable(target), code.statement(target)
        if not isinstance(value, cst.Call) or not is_imported(site, value, _NAMES) or not variable or statement is None:
            continue
        arguments = _sampler_arguments(value)
        mine = [
            (call, to) for call, to in loaders if code.variable(argument(call, "sampler") or cst.Name("_")) == variable
        ]
        others = [each for each in assignments(code) if code.variable(each[1]) == variable]
        if arguments is None or len(mine) != 1 or len(others) != 1 or isinstance(code.parent(target), cst.Element):
            continue
        loader, name = mine[0]
        loader_variable = code.variable(name)
        if loader_variable is None or [code.variable(each[1]) for each in loaders].count(loader_variable) != 1:
            continue
        found.append(Pair(variable, value, statement, loader, loader_variable, name, arguments))
    return found


def _sampler_arguments(call: cst.Call) -> Arguments | None:
    if any(arg.star for arg in call.args):
        return None
    found = {}
    for place, arg in enumerate(call.args):
        found[arg.keyword.value if arg.keyword is not None else _POSITIONS[place]] = arg.value
    return found


def _fits(site: Site, pair: Pair) -> bool:
    """Whether shard_loader gives the same samples in the same order."""
    arguments, code = pair.arguments, site.code
    size, rank = _meaning(site, arguments.get("num_replicas")), _meaning(site, arguments.get("rank"))
    if (size, rank) != ("size", "rank") or set(arguments) - set(_POSITIONS):
        return False
    if not is_constant(arguments.get("shuffle", cst.Name("True")), True, False):
        return False
    given = {arg.keyword.value for arg in pair.loader.args if arg.keyword is not None}
    for arg in pair.loader.args:
        more = _keys(site, arg.value) if arg.star == "**" else set()
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
    same = dataset is not None and site.text(dataset) == site.text(arguments.get("dataset", dataset))
    return same and code.block(pair.sampler_statement) is code.block(
        code.statement(pair.loader) or pair.sampler_statement
    )


def _keys(site: Site, node: cst.BaseExpression) -> set[str] | None:
    """The keys of a dict that is written out; None where some cannot be told."""
    if isinstance(node, cst.IfExp):
        parts = [_keys(site, node.body), _keys(site, node.orelse)]
        return None if None in parts else {key for part in parts for key in part or ()}
    if isinstance(node, cst.Dict):
        keys = [element.key for element in node.elements if isinstance(element, cst.DictElement)]
        if len(keys) < len(node.elements) or not all(isinstance(key, cst.SimpleString) for key in keys):
            return None
        return {str(key.evaluated_value) for key in keys if isinstance(key, cst.SimpleString)}
    variable = site.code.variable(node)
    if variable is None:
        return None
    found: set[str] = set()
    for value, target in assignments(site.code):
        into = target.value if isinstance(target, cst.Subscript) else target
        if site.code.variable(into) != variable:
            continue
        if isinstance(target, cst.Subscript):
            first = target.slice[0].slice
            key = first.value if isinstance(first, cst.Index) else None
            more = {str(key.evaluated_value)} if isinstance(key, cst.SimpleString) else None
        else:
            more = _keys(site, value)
        if more is None:
            return None
        found |= more
    return found


def _meaning(site: Site, node: cst.BaseExpression | None) -> str | None:
    """``size`` or ``rank``, for a call or for a variable that has been assigned nothing else."""
    if isinstance(node, cst.Call):
        return site.symbol(node.func)
    variable = site.code.variable(node) if node is not None else None
    if variable is None:
        return None
    values = [value for value, target in assignments(site.code) if site.code.variable(target) == variable]
    return _meaning(site, values[0]) if len(values) == 1 and isinstance(values[0], cst.Call) else None


def _method(site: Site, use: cst.BaseExpression) -> str | None:
    parent = site.code.parent(use)
    called = isinstance(parent, cst.Attribute) and isinstance(site.code.parent(parent), cst.Call)
    return parent.attr.value if called and isinstance(parent, cst.Attribute) else None


def _uses_of_sampler(site: Site, pair: Pair) -> list[cst.BaseExpression] | None:
    """What else is done with the sampler: ``set_epoch()`` and ``len()``; None where there is more."""
    found = []
    for use in code_references(site.code).get(pair.variable, ()):
        if is_target(site.code, use) or use is argument(pair.loader, "sampler"):
            continue
        call = site.code.parent(site.code.parent(use))
        if (_method(site, use) == "set_epoch" and site.code.is_statement(call)) or _is_length(site, use):
            found.append(use)
        else:
            return None
    return found


def _trains(site: Site, pair: Pair) -> bool:
    loops = [loop for loop in site.code.all(cst.For) if site.code.variable(_iterated(loop)) == pair.loader_variable]
    return any(_has_backward(site, loop) for loop in loops)


def _change(site: Site, pair: Pair, uses: list[cst.BaseExpression], shuffle: bool) -> None:
    code = site.code
    seed = pair.arguments.get("seed")
    wrapper_args = [] if seed is None or is_constant(seed, 0) else [keyword("seed", seed.deep_clone())]
    function = site.own(pair.loader, "shard_loader")

    def rebuilt(updated: cst.Call) -> cst.Call:
        args = [arg for arg in updated.args if arg.keyword is None or arg.keyword.value not in ("sampler", "shuffle")]
        places = [i for i, arg in enumerate(updated.args) if arg.keyword is not None and arg.keyword.value == "sampler"]
        if shuffle:
            args.insert(
                min(places[0], len(args)),
                updated.args[places[0]].with_changes(keyword=cst.Name("shuffle"), value=cst.Name("True")),
            )
        if args:
            args[-1] = args[-1].with_changes(comma=updated.args[-1].comma)
        return cst.Call(function, [cst.Arg(updated.with_changes(args=args)), *wrapper_args])

    site.edits.replace(pair.loader, rebuilt)
    site.remove(pair.sampler_statement)
    for each in uses:
        call = code.parent(code.parent(each))
        statement = code.statement(call)
        name = pair.loader_name
        if _method(site, each) != "set_epoch":
            site.edits.replace(each, cst.Attribute(name.deep_clone(), cst.Name("sampler")))
        elif isinstance(call, cst.Call) and statement is not None and _counts_from_zero(site, pair, call, statement):
            site.remove(statement)
        else:
            site.edits.replace(each, name.deep_clone())


def _counts_from_zero(site: Site, pair: Pair, call: cst.Call, statement: Statement) -> bool:
    """Whether ``set_epoch`` says what the loader does by itself: epochs 0, 1, 2 ..., each of one whole iteration."""
    code = site.code
    loop = code.loop(statement)
    if not isinstance(loop, cst.For) or code.loop(loop) is not None or code.block(statement) is not loop.body:
        return False
    counter = isinstance(loop.iter, cst.Call) and full_name(loop.iter.func) == "range" and len(loop.iter.args) == 1
    if not counter or len(call.args) != 1 or site.text(loop.target) != site.text(call.args[0].value):
        return False
    function = code.function(loop)
    if isinstance(function, cst.FunctionDef):
        calls = [each for each in code.all(cst.Call) if function in callees(code, each)]
        if len(calls) > 1 or code.is_method(function) or any(code.loop(each) for each in calls):
            return False
    uses = _iterations(site, pair)
    inner = [each for each in code.all(cst.For, inside=loop.body) if any(use is _iterated(each) for use in uses)]
    if len(uses) != 1 or len(inner) != 1 or code.block(inner[0]) is not loop.body:
        return False
    return not any(jump for each in (inner[0].body, loop.body) for jump in site.code.jumps(each))


def _asks_sampler(site: Site, pair: Pair) -> bool:
    """Whether something is read of the loader's sampler that a share's sampler does not have."""
    for use in code_references(site.code).get(pair.loader_variable, ()):
        sampler = site.code.parent(use)
        asked = isinstance(site.code.parent(sampler), cst.Attribute)
        if isinstance(sampler, cst.Attribute) and sampler.attr.value == "sampler" and asked:
            return True
    return False


def _iterations(site: Site, pair: Pair) -> list[cst.BaseExpression]:
    """The places where the loader is gone through, or handed to something that may."""
    code = site.code
    return [
        use for use in code_references(code).get(pair.loader_variable, ())
        if not is_target(code, use) and not isinstance(code.parent(use), cst.Attribute) and not _is_length(site, use)
    ]  # fmt: skip


def _is_governed(site: Site, use: cst.CSTNode, epochs: list[Statement], depth: int = 3) -> bool:
    """Whether ``set_epoch`` comes before each time that a place is executed."""
    code = site.code
    child, loops = use, 0
    for above in code.parents(use):
        if isinstance(above, (cst.FunctionDef, cst.Lambda)):
            if depth == 0 or not isinstance(above, cst.FunctionDef) or loops:
                return False
            calls = [call for call in code.all(cst.Call) if above in callees(code, call)]
            return bool(calls) and all(_is_governed(site, call, epochs, depth - 1) for call in calls)
        if isinstance(above, (cst.Module, cst.IndentedBlock)):
            place = next(index for index, each in enumerate(above.body) if each is child)
            if any(each is epoch for each in above.body[:place] for epoch in epochs):
                return loops == 0
        if isinstance(above, (cst.For, cst.While)) and child is above.body:
            loops += 1
        child = above
    return False


def _is_length(site: Site, use: cst.CSTNode) -> bool:
    call = site.code.parent(site.code.parent(use))
    return isinstance(call, cst.Call) and full_name(call.func) == "len"
