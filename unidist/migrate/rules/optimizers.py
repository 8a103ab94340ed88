"""The rule for ``DistributedOptimizer``: it becomes ``replicate`` and a plain optimizer, or stays."""

from __future__ import annotations

from itertools import takewhile

import libcst as cst

from unidist.migrate.context import UNKNOWN_ARGUMENTS, Arguments, Context, Refusal, is_constant
from unidist.migrate.flow import (
    INSPECTING,
    assignments,
    follow,
    is_on_the_way,
    is_parameter,
    passed_to,
    references,
    result_variables,
    targets_of,
    uses_of,
    values_of,
)
from unidist.migrate.gradients import gradient_problems, is_of_torch, steps_of
from unidist.migrate.rules.broadcasts import broadcast_model, change_broadcasts, owner
from unidist.migrate.rules.elastic import elastic_models, elastic_uses
from unidist.migrate.rules.freezing import frozen_later
from unidist.migrate.rules.replicating import COMPRESSION, METHODS, OptimizerPlan, horovod_method, replace_optimizer
from unidist.migrate.syntax import Statement, full_name, is_pure

#: Methods that change a list.
_CHANGING = {"append", "extend", "insert", "remove", "pop", "clear"}
_HIDDEN_ARGUMENTS = (
    "the arguments of DistributedOptimizer cannot be determined",
    UNKNOWN_ARGUMENTS[1],
)
CHANGED_HOROVOD = "Horovod's DistributedOptimizer does not take these arguments, perhaps a changed Horovod's does"
_OTHER_ARGUMENTS = (
    CHANGED_HOROVOD,
    "remove those that Horovod does not have, then migrate again; or keep the changed Horovod, and do not migrate",
)
_TAKEN_FOR_OWN = (
    "this is taken for an optimizer of this file, whose gradients are averaged when backward() returns",
    "nothing, if it is one",
)
_AVERAGE = "keep it, or use a plain optimizer and unidist.all_reduce(p.grad, 'mean') for each gradient"


def change_optimizers(context: Context) -> None:
    """Change all optimizers of a module, or none of them: calls of both kinds cannot share a model.

    Horovod and ``replicate`` watch the same parameters in the same way, whoever calls the model, so that what the rest
    of the program does with it does not matter.
    """
    try:
        optimizers = [_plan(context, call) for call in context.calls("DistributedOptimizer")]
        unknown = _unknown_uses(context, optimizers)
        for each in optimizers:
            each.flow.uses += unknown
        elastic = elastic_models(context, [each.model for each in optimizers])
        for each in optimizers if elastic else ():
            _check_compression(context, each, elastic[context.text(each.model)])
        _check_together(context, optimizers)
        compressions = _compressions(context, optimizers)
    except Refusal as refusal:
        line = context.tree.line(context.tree.statement(refusal.node) or refusal.node)
        uses = list(context.uses("DistributedOptimizer"))
        for use in uses or elastic_uses(context)[:1]:
            here = context.tree.line(context.tree.statement(use) or use) == line
            where = "" if here else f" (line {line}: `{context.first_line(refusal.node)}`)"
            what = "this optimizer stays" if uses else "elastic training stays"
            context.kept[use] = f"{what} on the drop-in: {refusal.why}{where}", refusal.remedy
        elastic_rest = [use for use in elastic_uses(context) if use not in context.kept]
        context.kept.update(dict.fromkeys(elastic_rest, ("", "")))
        context.covered.update([*context.uses("broadcast_parameters", "broadcast_optimizer_state"), *elastic_rest])
        return
    for use in unknown:
        context.remark(use, *_TAKEN_FOR_OWN)
    for index, optimizer in enumerate(optimizers):
        is_first = not any(_is_same_model(context, other, optimizer) for other in optimizers[:index])
        places: list[tuple[Statement, str | None]] = [(optimizer.before, None)]
        if elastic:
            places = [*elastic[context.text(optimizer.model)]]
        replace_optimizer(context, optimizer, places if is_first else [])
    for node in compressions:
        context.edits.replace(node, cst.parse_expression(COMPRESSION[context.names.symbols[node]]))
        context.mark_handled(node)
    change_broadcasts(context)


def _check_compression(context: Context, each: OptimizerPlan, places: list[tuple[Statement, str]]) -> None:
    """
    Raises:
        Refusal: the compression is another thing, or nothing, in the function that trains elastically.
    """
    compression = each.compression
    if compression is None or context.symbol(compression) in COMPRESSION:
        return
    if not all(context.is_bound_at(compression, statement) for statement, _ in places):
        why = f"compression={context.text(compression)} is not known where the elastic training begins"
        raise Refusal(each.call, why, "assign it at the top of the module, then migrate again")


def _is_same_model(context: Context, left: OptimizerPlan, right: OptimizerPlan) -> bool:
    """Return whether two optimizers, one after another, visibly train one model."""
    tree = context.tree
    text = context.text(left.model)
    if context.text(right.model) != text or tree.block(left.before) is not tree.block(right.before):
        return False
    return not any(
        context.text(target) == text
        and tree.position(left.before) < tree.position(target) < tree.position(right.before)
        for _, target in assignments(tree)
    )


# ------------------------------------------------------------------------------------ one optimizer
def _plan(context: Context, call: cst.Call) -> OptimizerPlan:
    """
    Raises:
        Refusal: Horovod's optimizer does something that ``replicate`` does not, or the model cannot be determined.
    """
    tree = context.tree
    arguments = context.arguments(call)
    if arguments is None:
        hidden = any(arg.star for arg in call.args)
        raise Refusal(call, *(_HIDDEN_ARGUMENTS if hidden else _OTHER_ARGUMENTS))
    statement = tree.statement(call)
    if statement is None:
        raise Refusal(
            call,
            "DistributedOptimizer(...) shares its line with another statement, or with its condition",
            "write it on a line of its own, then migrate again",
        )
    if not isinstance(statement, cst.SimpleStatementLine) or not _is_always_evaluated(context, call):
        raise Refusal(
            call,
            "whether DistributedOptimizer(...) is called depends on a part of its statement",
            "call it in a statement of its own, in a for loop or under an if, then migrate again",
        )
    target, variables = _assigned_to(context, call)
    adasum, compression = _check_arguments(context, call, arguments)
    model = _trained_model(context, call, arguments)
    if not is_pure(model) or not context.is_bound_at(model, statement):
        raise Refusal(call, f"`{context.text(model)}` may be another model at the line of DistributedOptimizer")
    broadcast = _broadcast_statement(context, call, model, statement)
    before = max(statement, broadcast or statement, key=tree.position)
    variable = tree.variable(model)
    for problem in frozen_later(context, follow(tree, [variable] if variable else []), before):
        raise Refusal(*problem)
    flow = follow(tree, variables)
    return OptimizerPlan(call, statement, target, arguments, model, before, broadcast, compression, adasum, flow)


def _is_always_evaluated(context: Context, call: cst.Call) -> bool:
    """Return whether a call is evaluated whenever its statement is executed."""
    child: cst.CSTNode = call
    for above in context.tree.parents(call):
        match above:
            case cst.SimpleStatementLine():
                return True
            case cst.Lambda() | cst.BaseComp() | cst.Assert():
                return False
            case cst.IfExp(test=first) | cst.BooleanOperation(left=first) if child is not first:
                return False
        child = above
    return False


def _assigned_to(context: Context, call: cst.Call) -> tuple[cst.BaseExpression | None, list[str]]:
    """Return what the optimizer is assigned to, and the variables that hold it; nothing if they are not known."""
    tree = context.tree
    assigned = [target for value, target in assignments(tree) if value is call]
    parent = tree.parent(call)
    if len(assigned) == 1 and (variable := tree.variable(assigned[0])) is not None:
        return (None if isinstance(tree.parent(assigned[0]), cst.Element) else assigned[0]), [variable]
    return None, (result_variables(tree, parent, None) or [] if isinstance(parent, cst.Return) else [])


def _check_arguments(
    context: Context, call: cst.Call, arguments: Arguments
) -> tuple[cst.BaseExpression | None, cst.BaseExpression | None]:
    """Return the condition under which the script would use Adasum, and the compression.

    Raises:
        Refusal: an argument has no equivalent.
    """
    op = arguments.get("op")
    adasum = _adasum_condition(context, op)
    if op is not None and context.symbol(op) != "Average" and adasum is None:
        raise Refusal(
            call,
            f"op={context.text(op)}, and unidist always averages gradients",
            "keep it: the drop-in has Adasum on every backend"
            if context.symbol(op) == "Adasum"
            else f"remove op=, and write `({_loss(context)} * unidist.world_size()).backward()`, whose average is the "
            "sum; then migrate again",
        )
    if "process_set" in arguments:
        group, named = context.text(arguments["process_set"]), arguments.get("named_parameters")
        model = None if named is None else _owner_of_parameters(context, named)
        line = f"`unidist.replicate({context.text(model) if model is not None else 'model'}, group={group})`"
        why = "process_set= trains on some of the ranks"
        raise Refusal(call, why, f"{line}, where that is made by `unidist.new_group(ranks)`")
    if not is_constant(arguments.get("sparse_as_dense"), None, False):
        raise Refusal(
            call,
            "sparse_as_dense=, and unidist keeps sparse gradients sparse",
            "remove the argument, then migrate again",
        )
    compression = arguments.get("compression")
    return adasum, (None if compression is None or context.symbol(compression) == "Compression.none" else compression)


def _loss(context: Context) -> str:
    """Return what the first backward pass starts from."""
    losses = (cst.ensure_type(call.func, cst.Attribute).value for call in context.tree.method_calls("backward"))
    return next(map(context.text, losses), "loss")


def _adasum_condition(context: Context, op: cst.BaseExpression | None) -> cst.BaseExpression | None:
    """``args.use_adasum`` of ``hvd.Adasum if args.use_adasum else hvd.Average``; None for another operation."""
    if not isinstance(op, cst.IfExp) or not is_pure(op.test):
        return None
    return op.test if [context.symbol(op.body), context.symbol(op.orelse)] == ["Adasum", "Average"] else None


def _trained_model(context: Context, call: cst.Call, arguments: Arguments) -> cst.BaseExpression:
    """Return the model whose parameters are trained.

    Raises:
        Refusal: it cannot be determined, or it is more than one.
    """
    named = arguments.get("named_parameters")
    for node in context.tree.all(cst.Attribute):
        if node.attr.value == "add_param_group" and not (named is not None and _is_before(context, node, call)):
            raise Refusal(call, "add_param_group() may add parameters of another model")
    if named is not None and not is_constant(named, None):
        found = _owner_of_parameters(context, named)
        if found is None:
            raise Refusal(call, f"named_parameters={context.text(named)} is not visibly model.named_parameters()")
        return found
    inner = arguments["optimizer"]
    made = values_of(context.tree, inner) if context.tree.variable(inner) else [inner]
    owners = [
        owner(value.args[0].value, "parameters") if isinstance(value, cst.Call) and value.args else None
        for value in made
        if value is not call and not is_constant(value, None)
    ]
    texts = {context.text(each) if each is not None else None for each in owners}
    if len(texts) != 1 or owners[0] is None:
        raise Refusal(
            call,
            "which model this one trains cannot be determined",
            "pass named_parameters=model.named_parameters(), then migrate again",
        )
    return owners[0]


def _is_before(context: Context, node: cst.CSTNode, call: cst.Call) -> bool:
    """Return whether a node is before a call in its function: Horovod checks there that all parameters are named."""
    tree = context.tree
    return tree.function(node) is tree.function(call) and tree.position(node) < tree.position(call)


def _owner_of_parameters(context: Context, named: cst.BaseExpression) -> cst.BaseExpression | None:
    """``model`` of an expression for some of ``model.named_parameters()``."""
    for _ in range(4):
        values = values_of(context.tree, named)
        if len(values) == 1 and not _is_changed(context, named):
            named = values[0]
        match named:
            case cst.Call(cst.Name("list" | "tuple" | "iter" | "sorted"), [first, *_]):
                named = first.value
            case cst.Call(cst.Name("filter"), [*_, last]):
                named = last.value
            case cst.ListComp(_, cst.CompFor(iter=inner, inner_for_in=None)):
                named = inner
            case cst.GeneratorExp(_, cst.CompFor(iter=inner, inner_for_in=None)):
                named = inner
            case _:
                break
    return owner(named, "named_parameters")


def _is_changed(context: Context, variable: cst.BaseExpression) -> bool:
    """Return whether a list is changed in place: ``named += ...``, ``named.extend(...)``."""
    tree = context.tree
    return any(
        isinstance(tree.parent(use), cst.AugAssign) or tree.called_method(use) in _CHANGING
        for use in references(tree).get(tree.variable(variable) or "", ())
    )


def _broadcast_statement(
    context: Context, optimizer: cst.Call, model: cst.BaseExpression, statement: Statement
) -> Statement | None:
    """Return the statement of the same block that broadcasts the model from rank 0, if nothing between uses the model.

    Raises:
        Refusal: another rank than 0 has the weights.
    """
    for call in context.calls("broadcast_parameters"):
        found, own = broadcast_model(context, call), context.tree.is_statement(call)
        if found is None or context.text(found) != context.text(model):
            continue
        arguments = context.arguments(call) or {}
        if not is_constant(context.value_of(arguments.get("root_rank")), 0):
            raise Refusal(
                optimizer,
                f"`{context.first_line(call)}` sends the weights of another rank than 0, whose weights replicate sends",
                "let rank 0 load the weights, then migrate again",
            )
        if (
            own is not None
            and set(arguments) <= {"params", "root_rank"}
            and _is_unused_between(context, model, statement, own)
        ):
            return own
    return None


def _is_unused_between(context: Context, model: cst.BaseExpression, left: Statement, right: Statement) -> bool:
    """Return whether the statements of a block between two others neither use a model nor call functions that may."""
    tree = context.tree
    if tree.block(left) is None or tree.block(right) is not tree.block(left):
        return False
    first, last = sorted((left, right), key=tree.position)
    variable = tree.variable(context.root_of(model))
    for each in takewhile(lambda each: each is not last, tree.siblings(first)[1]):
        if not isinstance(each, cst.SimpleStatementLine):
            return False
        harmless = _harmless_calls(context, each)
        nodes = (
            *tree.all(cst.Call, each),
            *(name for name in tree.all(cst.Name, each) if tree.variable(name) == variable),
        )
        if not all(any(tree.is_inside(node, call) for call in harmless) for node in nodes):
            return False
    return True


def _harmless_calls(context: Context, statement: cst.CSTNode) -> list[cst.Call]:
    """Calls that neither change nor copy weights: Horovod's own, and those that make optimizers or print."""
    calls = context.tree.all(cst.Call, inside=statement)
    return [
        call
        for call in calls
        if context.symbol(call.func) is not None
        or full_name(call.func) in INSPECTING
        or any(name.startswith("torch.optim") for name in context.tree.imported(call.func))
    ]


# ------------------------------------------------------------------------------------ all of a module
def _check_together(context: Context, optimizers: list[OptimizerPlan]) -> None:
    """
    Raises:
        Refusal: something else in the module needs Horovod's optimizer.
    """
    texts = [context.text(each.model) for each in optimizers]
    for each, model in zip(optimizers, texts):
        same = [other for other, its_model in zip(optimizers, texts) if its_model == model]
        if len(same) > 1 and any(other.compression is not None for other in same):
            raise Refusal(each.call, "two optimizers train one model, and one of them compresses gradients")
        whole = next((other for other in texts if model.startswith((f"{other}.", f"{other}["))), None)
        if whole is not None:
            raise Refusal(
                each.call,
                f"another optimizer has named_parameters of `{whole}`, of which `{model}` is a part",
                "name the parts that each trains, as in named_parameters=model.part.named_parameters(), then migrate "
                "again",
            )
    for use in context.uses("DistributedOptimizer"):
        if not isinstance(context.tree.parent(use), cst.Call):
            raise Refusal(use, "DistributedOptimizer is used without being called")
    if not optimizers:
        return
    known = {use for each in optimizers for use in each.flow.uses}
    averages_before = _averages_before_steps(context, known)
    for node, why in gradient_problems(context.tree, _deciding(context, optimizers)) if not averages_before else ():
        raise Refusal(node, why, _AVERAGE)
    _check_methods(context, optimizers, known)
    methods = {context.tree.called_method(use): use for use in known}
    if "skip_synchronize" in methods and "synchronize" not in methods:
        raise Refusal(methods["skip_synchronize"], "it makes steps with gradients that are not averaged", _AVERAGE)
    for each in optimizers:
        if context.elsewhere.optimizer_method and _is_reachable(context, each):
            raise Refusal(
                each.call,
                f"other files may use it, and {context.elsewhere.optimizer_method} calls a method that only Horovod's "
                "optimizers have",
                "remove that call (unidist's gradients are averaged when backward() returns), then migrate again",
            )
    if context.elsewhere.gradient and not averages_before:
        why = f"{context.elsewhere.gradient}, a file of the same program, assigns gradients by hand"
        raise Refusal(optimizers[0].call, why, _AVERAGE)


def _deciding(context: Context, optimizers: list[OptimizerPlan]) -> set[str]:
    """Return the variables that decide whether there is an optimizer of Horovod's: where they differ, ranks wait."""
    tree = context.tree
    tests = [above.test for each in optimizers for above in tree.parents(each.statement) if isinstance(above, cst.If)]
    found = {tree.variable(node) for test in tests for node in tree.all((cst.Name, cst.Attribute), inside=test)}
    return {each for each in found if each is not None and len(targets_of(tree, each)) < 2}


def _unknown_uses(context: Context, optimizers: list[OptimizerPlan]) -> list[cst.BaseExpression]:
    """Return the uses of optimizers of Horovod's that come from where they cannot be followed, as out of a dictionary.

    They have ``skip_synchronize()``, or stand in the same function as a use of the same text that has it.
    """
    tree = context.tree
    if not optimizers or any(each.name.value in METHODS for each in tree.all(cst.FunctionDef)):
        return []  # the methods are those of a class of the script's own
    followed = {use for each in optimizers for use in each.flow.uses}
    methods = [
        node
        for node in tree.all(cst.Attribute)
        if node.attr.value in ("skip_synchronize", "synchronize") and node.value not in followed
    ]
    skipping = {_place(context, node.value) for node in methods if node.attr.value == "skip_synchronize"}
    return [node.value for node in methods if _place(context, node.value) in skipping and _is_held(context, node.value)]


def _is_held(context: Context, use: cst.BaseExpression) -> bool:
    """Return whether it comes out of what holds optimizers, as far as can be seen, and is made by no call here."""
    tree = context.tree
    if tree.imported(use):
        return False
    loops = [loop for loop in tree.all(cst.For) if isinstance(loop.iter, (cst.Tuple, cst.List))]
    targets = [name for loop in loops for name in tree.all(cst.Name, inside=loop.target)]
    listed = tree.variable(use) in {tree.variable(name) for name in targets}
    return not listed and not any(isinstance(value, cst.Call) for value in values_of(tree, use))


def _place(context: Context, node: cst.BaseExpression) -> tuple[cst.CSTNode, str]:
    return context.tree.function(node), context.text(node)


def _check_methods(context: Context, optimizers: list[OptimizerPlan], known: set[cst.BaseExpression]) -> None:
    """
    Raises:
        Refusal: a method of Horovod's optimizers is used in a way that cannot be removed.
    """
    for node in context.tree.all(cst.Attribute):
        if node.attr.value not in METHODS:
            continue
        if node.value in known:
            if context.elsewhere.optimizer and _may_come_from_elsewhere(context, optimizers, node.value):
                why = f"{context.elsewhere.optimizer} makes an optimizer, too, which this may be"
                raise Refusal(node, why, "write a function of its own for each file's optimizer, then migrate again")
            continue
        if isinstance(node.value, cst.Name) and context.tree.is_unbound(node.value):
            continue
        if not (context.tree.imported(node) or context.symbol(node) is not None or "cuda" in context.text(node)):
            raise Refusal(node, f"which optimizer `{context.text(node)}` belongs to cannot be determined")
    for text, value in context.tree.strings():
        if value in METHODS:
            raise Refusal(text, f"{text.value} names a method of Horovod's optimizer")
    for use in known:
        _check_method(context, use)


def _may_come_from_elsewhere(context: Context, optimizers: list[OptimizerPlan], use: cst.BaseExpression) -> bool:
    """Return whether a use of an optimizer may be of one that another file has made: anything but a variable to which
    this file's calls are assigned. An attribute may be set by a class that is derived from this file's.
    """
    tree, made = context.tree, {each.call for each in optimizers}
    values = values_of(tree, use)
    return (
        isinstance(use, cst.Attribute)
        or not values
        or is_parameter(tree, tree.variable(use))
        or not all(value in made or (isinstance(value, cst.Call) and is_of_torch(tree, value)) for value in values)
    )


def _averages_before_steps(context: Context, uses: set[cst.BaseExpression]) -> bool:
    """Return whether each step of a module is in ``skip_synchronize()``, after ``synchronize()`` in the same function.

    Horovod averages nothing there either, so that gradients may have been changed in between, as K-FAC does.
    """
    tree, steps = context.tree, steps_of(context.tree)
    synchronized = [use for use in uses if tree.called_method(use) == "synchronize"]
    return bool(steps) and all(
        any(is_on_the_way(tree, use, step) for use in synchronized) and _is_in_skip(context, step) for step in steps
    )


def _is_in_skip(context: Context, node: cst.CSTNode) -> bool:
    """Return whether a node is in ``with optimizer.skip_synchronize():``, or in the other branch of an ``if``."""
    child = node
    for above in context.tree.parents(node):
        if isinstance(above, cst.With) and any("skip_synchronize" in context.text(item.item) for item in above.items):
            return True
        if isinstance(above, cst.If) and child is above.orelse and "skip_synchronize" in context.text(above.body):
            return True
        child = above
    return False


def _is_reachable(context: Context, each: OptimizerPlan) -> bool:
    """Return whether other files may use an optimizer: an attribute, or one that is passed on."""
    if each.target is None or any(variable.startswith(".") for variable in each.flow.variables):
        return True
    calls = (context.tree.parent(context.tree.parent(use)) for use in each.flow.escapes)
    return not all(isinstance(call, cst.Call) and is_of_torch(context.tree, call) for call in calls)


def _check_method(context: Context, use: cst.BaseExpression) -> None:
    tree, method = context.tree, horovod_method(context, use)
    if method is None:
        return
    call = tree.call_of(method)
    above = None if call is None else tree.parent(call)
    is_with = isinstance(above, cst.WithItem) and method.attr.value == "skip_synchronize"
    if not (isinstance(above, cst.Expr) or is_with):
        raise Refusal(method, f"`{context.text(method)}` is a part of a larger statement")


def _compressions(context: Context, optimizers: list[OptimizerPlan]) -> list[cst.BaseExpression]:
    """Return the uses of ``hvd.Compression`` that become ``replicate``'s strings.

    Raises:
        Refusal: one is not a constant of Horovod's, or another call takes it too.
    """
    if not optimizers:
        return []
    found: list[cst.BaseExpression] = []
    taken = [each.compression for each in optimizers]
    for each in optimizers:
        if each.compression is None:
            continue
        constants = _constants(context, each.call, each.compression, [other.call for other in optimizers])
        if not _is_never_compressed(context, each.compression, constants, taken):
            found += constants
            continue
        each.compression = None
        for constant in constants:
            context.remove(context.tree.statement(constant) or each.statement)
    others = [
        use for use in context.uses() if context.names.symbols[use].startswith("Compression") and use not in found
    ]
    outside = [use for use in others if not any(context.tree.is_inside(use, each.call) for each in optimizers)]
    if found and outside:
        raise Refusal(outside[0], "this compression is passed to something else than the optimizer")
    return found


def _given(context: Context, variable: str | None) -> list[cst.BaseExpression]:
    """Return what a parameter is given by its default and by this file's calls; nothing if other files may call it."""
    found = passed_to(context.tree, variable or "")
    for parameter in context.tree.all(cst.Param):
        if context.tree.variable(parameter.name) != variable:
            continue
        function = context.tree.parent(context.tree.parent(parameter))
        if not isinstance(function, cst.FunctionDef) or function.name.value in context.exported:
            return []
        found = [*found, *([parameter.default] if parameter.default is not None else [])]
    return found


def _is_never_compressed(
    context: Context,
    compression: cst.BaseExpression,
    constants: list[cst.BaseExpression],
    taken: list[cst.BaseExpression | None],
) -> bool:
    """Return whether it is a variable to which statements assign ``Compression.none`` and nothing else, and that is
    read only where it is what optimizers take.
    """
    read = uses_of(context.tree, context.tree.variable(compression))
    if any(use not in taken for use in read):
        return False
    none = all(context.names.symbols[each] == "Compression.none" for each in constants)
    return (
        none
        and isinstance(compression, cst.Name)
        and all(
            isinstance(context.tree.parent(each), cst.Assign) and context.tree.statement(each) for each in constants
        )
    )


def _constants(
    context: Context, call: cst.Call, node: cst.BaseExpression, calls: list[cst.Call]
) -> list[cst.BaseExpression]:
    """Return the constants of Horovod's that may be the compression of a call; nothing but some calls uses them.

    Raises:
        Refusal: it may be something else.
    """
    if context.symbol(node) in COMPRESSION:
        return [node]
    if isinstance(node, cst.IfExp):
        if any(context.tree.is_inside(use, node.test) for use in context.uses()):
            raise Refusal(
                call,
                "the compression depends on a call of Horovod's",
                "assign that call's result to a variable before, then migrate again",
            )
        return [constant for part in (node.body, node.orelse) for constant in _constants(context, call, part, calls)]
    variable = context.tree.variable(node)
    values = values_of(context.tree, node)
    values += _given(context, variable) if is_parameter(context.tree, variable) else []
    if isinstance(node, cst.Name) and values and variable and not any(value is call for value in values):
        uses = follow(context.tree, [variable]).uses
        first = min(map(context.tree.position, calls))
        if any(context.tree.position(target) > first for target in targets_of(context.tree, variable)):
            raise Refusal(
                call,
                f"`{context.text(node)}` is assigned again after the first DistributedOptimizer that takes it",
                "use another name for the second compression, then migrate again",
            )
        if all(any(context.tree.is_inside(use, each) for each in calls) for use in uses):
            return [constant for value in values for constant in _constants(context, call, value, calls)]
    if is_parameter(context.tree, variable):
        chosen = f"hvd.Compression.fp16 if {context.text(node)} else hvd.Compression.none"
        raise Refusal(
            call,
            f"what is passed as compression={context.text(node)} cannot be seen in this file",
            f"let the callers pass a bool in its place, and write `compression={chosen}`; then migrate again",
        )
    raise Refusal(
        call,
        f"compression={context.text(node)} is not one of Horovod's",
        "use replicate(compression='fp16') or 'bf16'",
    )
