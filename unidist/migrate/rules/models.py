"""Whether a model can be wrapped: what the module does with it, before and after."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import libcst as cst

from unidist.migrate.context import Context
from unidist.migrate.flow import (
    INSPECTING,
    Flow,
    assignments,
    callees,
    destinations,
    follow,
    is_parameter,
    is_target,
    parameter_of,
    references,
)
from unidist.migrate.syntax import Problem, Statement, full_name

#: Attributes with the same meaning on a wrapped model.
SAME = {"parameters", "buffers", "train", "eval", "training", "zero_grad", "requires_grad_", "modules", "apply"}
#: Attributes that only the inner model has: ``unidist.unwrap(model).state_dict()``.
INNER = {
    "state_dict", "load_state_dict", "named_parameters", "named_buffers", "named_modules", "children",
    "named_children", "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
    "get_parameter", "get_submodule",
}  # fmt: skip
#: Attributes that lead to data, and to no forward pass.
_DATA = {"weight", "bias", "grad", "data", "dtype", "device", "shape", "__class__", "__dict__", "__name__"}
_MOVES = {"to", "cuda", "cpu", "half", "float", "double", "bfloat16"}
#: Functions that need the inner model's answer.
_ASKING = {"isinstance", "type", "len", "hasattr"}
#: Functions that need the inner model itself: they copy it, or write all of it.
_KEEPING = {"torch.save", "copy.deepcopy", "copy.copy", "pickle.dump"}


@dataclass
class ModelUse:
    """The uses of a model that is wrapped at a given statement."""

    #: Where and why it cannot be wrapped.
    problem: Problem | None = None
    #: Its forward passes.
    called: list[cst.BaseExpression] = field(default_factory=list)
    #: Uses as an argument of a call.
    passed: list[cst.BaseExpression] = field(default_factory=list)
    #: Uses that become ``unidist.unwrap(...)``.
    unwrapped: list[cst.BaseExpression] = field(default_factory=list)


def examine_model(context: Context, model: cst.BaseExpression, wrap: Statement) -> ModelUse:
    """Whether ``model = wrap_model(model)`` can replace the statement ``wrap``."""
    found = ModelUse()
    tree = context.tree
    variable = tree.variable(model)
    if variable is None or tree.loop(wrap) is not None or not _is_settable(context, variable, wrap):
        found.problem = (model, "the variable of the model that is trained cannot be determined")
        return found
    flow = follow(tree, [variable], lambda node: _is_before(context, node, wrap) or tree.is_inside(node, wrap))
    found.called = [use for use in flow.uses if isinstance(call := tree.parent(use), cst.Call) and call.func is use]
    if not found.called:
        found.problem = (model, "this file calls no forward pass of the model after the line that would wrap it")
        return found
    found.passed = [use for use in flow.uses if isinstance(tree.parent(use), cst.Arg)]
    problems = [*_raw_aliases(context, variable, wrap), *_assigned_again(context, flow, variable, wrap)]
    for use in flow.uses:
        verdict = _verdict(context, use, use in flow.escapes)
        if isinstance(verdict, str):
            problems.append((use, verdict))
        elif verdict is not None:
            found.unwrapped.append(verdict)
    problems += [*_unused_layers(context), *frozen_later(context, flow, wrap)]
    found.problem = next(iter(problems), None)
    return found


def _is_before(context: Context, node: cst.CSTNode, wrap: Statement) -> bool:
    """Whether a use comes before the model is wrapped."""
    return context.tree.function(node) is context.tree.function(wrap) and context.tree.position(
        node
    ) < context.tree.position(wrap)


def _verdict(context: Context, use: cst.BaseExpression, escapes: bool) -> cst.BaseExpression | str | None:
    """What to unwrap, or why the model cannot be wrapped, or None if the use can stay."""
    tree = context.tree
    parent = tree.parent(use)
    if isinstance(parent, cst.Attribute):
        chain = list(_chain(context, use))
        if chain[0] in SAME:
            return None
        if chain[0] in _MOVES:
            return "the model is moved or converted where it would be wrapped already"
        if is_target(tree, _attribute_chain(context, use)):
            return "the model is modified where it would be wrapped already"
        if chain[0] in INNER or chain[-1] in INNER | SAME or set(chain) & _DATA:
            return use
        return f"`.{chain[0]}` of the model is used, and calls that bypass the wrapper train without averaging"
    if (
        isinstance(parent, cst.Arg)
        and isinstance(call := tree.parent(parent), cst.Call)
        and full_name(call.func) in _ASKING
    ):
        return use
    if isinstance(parent, cst.Arg) and escapes:
        call = tree.parent(parent)
        name = full_name(call.func) if isinstance(call, cst.Call) else ""
        if name.startswith("unidist.") or context.symbol(getattr(call, "func", None)):
            return None
        if tree.imported(getattr(call, "func", use)) & _KEEPING:
            return use
        return f"the model is passed to {name or 'a call'}, which this file does not define"
    return "the model is passed on and cannot be followed" if escapes else None


def _chain(context: Context, use: cst.CSTNode) -> Iterator[str]:
    """The attributes accessed on a use, in order: ``fc``, ``weight`` of ``model.fc.weight``."""
    node = context.tree.parent(use)
    while isinstance(node, (cst.Attribute, cst.Subscript)):
        if isinstance(node, cst.Attribute):
            yield node.attr.value
        above = context.tree.parent(node)
        if not isinstance(above, (cst.Attribute, cst.Subscript)) or above.value is not node:
            return
        node = above


def _raw_aliases(context: Context, variable: str, wrap: Statement) -> Iterator[Problem]:
    """Other references to the unwrapped model that are used after the wrapping."""
    tree = context.tree
    aliases: set[str] = set()
    for use in references(tree).get(variable, ()):
        if not is_target(tree, use) and _is_before(context, use, wrap) and not tree.is_inside(use, wrap):
            kept = _references_after(context, use, variable)
            if isinstance(kept, str):
                yield use, kept
            else:
                aliases |= kept
    for value, target in assignments(tree):
        if tree.variable(target) == variable and (source := tree.variable(_moved(value))):
            aliases.add(source)
        if tree.variable(target) == variable and isinstance(value, cst.Call):
            parts = {tree.variable(part) for part in tree.all(cst.Name, inside=value)}
            aliases |= {name for name in parts - {variable} if name and _is_made_of_torch(context, name)}
    for name in {variable, *aliases}:
        if is_parameter(tree, name):
            yield from _callers(context, name)
    for alias in sorted(aliases - {variable}):
        for use in follow(
            tree, [alias], lambda node: _is_before(context, node, wrap) or tree.is_inside(node, wrap)
        ).uses:
            if not _is_harmless(context, use):
                yield use, f"`{context.text(use)}` refers to the model or to a part of it, and would stay unwrapped"


def _is_made_of_torch(context: Context, variable: str) -> bool:
    """Whether a variable is assigned an ``nn.Module`` of torch or of this file."""
    tree = context.tree
    classes = {
        each.name.value
        for each in tree.all(cst.ClassDef)
        if any("Module" in context.text(base.value) for base in each.bases)
    }
    return any(
        tree.variable(target) == variable
        and isinstance(value, cst.Call)
        and (
            full_name(value.func) in classes or any(name.startswith("torch.nn.") for name in tree.imported(value.func))
        )
        for value, target in assignments(tree)
    )


def _references_after(context: Context, use: cst.BaseExpression, variable: str) -> set[str] | str:
    """The variables that refer to the model, or to a part of it, after a use; or why they cannot be determined."""
    tree = context.tree
    parent = tree.parent(use)
    if isinstance(parent, cst.Attribute):
        return set() if _is_harmless(context, use) else _targets_of_part(context, use)
    if isinstance(parent, cst.Arg) and isinstance(call := tree.parent(parent), cst.Call):
        name = full_name(call.func)
        if context.symbol(call.func) is not None or name in INSPECTING or tree.imported(call.func) & _KEEPING:
            return set()
        called = callees(tree, call)
        if called and (parameters := destinations(tree, use)) is not None:
            return _references_after_functions(context, parameters)
        effect = tree.is_statement(call) or any(
            value is call and tree.variable(to) == variable for value, to in assignments(tree)
        )
        function = isinstance(call.func, cst.Name) or bool(tree.imported(call.func))
        return (
            set()
            if effect and function and not called
            else f"the model is passed to {name or 'a call'} before it is wrapped"
        )
    found = destinations(tree, use)
    if found is None or isinstance(parent, cst.Param):
        return "the model is passed on before it is wrapped, and cannot be followed"
    return {name for name in found if name != variable}


def _references_after_functions(context: Context, parameters: list[str]) -> set[str] | str:
    """The variables outside of some functions that refer to their parameters afterwards; or why that is unknown."""
    tree = context.tree
    found: set[str] = set()
    for parameter in parameters:
        inside = follow(tree, [parameter])
        found |= {name for name in inside.variables if not name.startswith(_scope(parameter))}
        for use in inside.uses:
            own = tree.functions.get(parameter.rpartition(".<locals>.")[0])
            local = any(tree.variable(use) == name for name in inside.variables if name.startswith(_scope(parameter)))
            if local and tree.function(use) is not own:
                return "a closure that is made before the model is wrapped captures it"
            if use in inside.escapes and not (
                isinstance(tree.parent(use), cst.Arg) and tree.is_statement(tree.parent(tree.parent(use)))
            ):
                return "the model is passed on before it is wrapped, and cannot be followed"
    return found


def _is_harmless(context: Context, use: cst.BaseExpression) -> bool:
    """Whether a use neither trains the model nor keeps a reference to it."""
    tree = context.tree
    parent = tree.parent(use)
    if isinstance(parent, cst.Arg):
        call = tree.parent(parent)
        return isinstance(call, cst.Call) and (
            context.symbol(call.func) is not None or bool(tree.imported(call.func) & _KEEPING)
        )
    if not isinstance(parent, cst.Attribute):
        return not isinstance(parent, cst.Call)
    chain = list(_chain(context, use))
    if chain[0] in SAME | INNER | _MOVES or chain[-1] in SAME | INNER or set(chain) & _DATA:
        return True
    whole = _attribute_chain(context, use)
    call = tree.parent(whole)
    return is_target(tree, whole) or (
        isinstance(call, cst.Call) and call.func is whole and tree.is_statement(call) is not None
    )


def _attribute_chain(context: Context, use: cst.BaseExpression) -> cst.BaseExpression:
    """``model.fc.weight`` for its ``model``."""
    node = use
    while isinstance(above := context.tree.parent(node), (cst.Attribute, cst.Subscript)) and above.value is node:
        node = above
    return node


def _targets_of_part(context: Context, use: cst.BaseExpression) -> set[str] | str:
    """``encoder`` for ``encoder = model.encoder``."""
    whole = _attribute_chain(context, use)
    found = destinations(context.tree, whole)
    return (
        set(found) if found else f"`{context.text(whole)}` is used before the model is wrapped, and cannot be followed"
    )


def _moved(value: cst.BaseExpression) -> cst.BaseExpression:
    """``model`` for ``model.to(device)``."""
    while isinstance(value, cst.Call) and isinstance(value.func, cst.Attribute) and value.func.attr.value in _MOVES:
        value = value.func.value
    return value


def _scope(variable: str) -> str:
    return variable.rpartition(".<locals>.")[0] + ".<locals>."


def _is_settable(context: Context, variable: str, wrap: Statement) -> bool:
    """Whether ``name = ...`` at the statement ``wrap`` sets the variable, and not a local one of the same name."""
    function = context.tree.function(wrap)
    if variable.startswith("."):
        return True
    if isinstance(function, cst.Module):
        return ".<locals>." not in variable
    if not isinstance(function, cst.FunctionDef):
        return False
    name = variable.rpartition(".")[2]
    for each in context.tree.all(cst.Global, inside=function.body):
        if any(item.name.value == name for item in each.names):
            return True
    own = next((qualified for qualified, node in context.tree.functions.items() if node is function), "")
    return variable == f"{own}.<locals>.{name}"


def _callers(context: Context, variable: str) -> Iterator[Problem]:
    """What the callers of a function that wraps its parameter do with their model."""
    tree = context.tree
    function = variable.rsplit(".<locals>.", 1)[0]
    node = tree.functions.get(function)
    if node is None:
        return
    for call in tree.all(cst.Call):
        if node not in callees(tree, call):
            continue
        for argument in call.args:
            if parameter_of(tree, node, call, argument) != variable:
                continue
            theirs = tree.variable(argument.value)
            if theirs is None:
                continue
            for use in follow(tree, [theirs], lambda each, call=call: _is_over(context, each, call)).uses:  # type: ignore[misc]
                parent = tree.parent(use)
                outside = not tree.is_inside(use, node)
                if outside and (
                    isinstance(parent, cst.Call) or (isinstance(parent, cst.Arg) and not tree.is_inside(use, call))
                ):
                    yield use, "a function would wrap the model, and its caller goes on with the unwrapped one"


def _is_over(context: Context, node: cst.CSTNode, call: cst.Call) -> bool:
    same = context.tree.function(node) is context.tree.function(call)
    return same and context.tree.position(node) <= context.tree.position(call)


def _assigned_again(context: Context, flow: Flow, variable: str, wrap: Statement) -> Iterator[Problem]:
    """Assignments of another model to the variable after the wrapping."""
    for value, target in flow.assigned:
        if (
            context.tree.variable(target) != variable
            or _is_before(context, target, wrap)
            or context.tree.is_inside(target, wrap)
        ):
            continue
        if not (isinstance(value, cst.Name) and value.value == "None") and not _is_made_before(context, target, wrap):
            yield target, "the model is also assigned elsewhere than where it would be wrapped"
    loops = [each for each in context.tree.all(cst.For) if is_target(context.tree, each.target)]
    for loop in loops:
        for name in context.tree.all(cst.Name, inside=loop.target):
            if context.tree.variable(name) == variable:
                yield name, "the model is a loop variable"


def _is_made_before(context: Context, target: cst.BaseExpression, wrap: Statement) -> bool:
    """Whether ``__init__`` sets the attribute, and another method of the class wraps it."""
    tree = context.tree
    setter, wrapper = tree.function(target), tree.function(wrap)
    functions = isinstance(setter, cst.FunctionDef) and isinstance(wrapper, cst.FunctionDef) and setter is not wrapper
    own = isinstance(target, cst.Attribute) and full_name(target.value) == "self"
    same = functions and tree.parent(setter) is tree.parent(wrapper)
    return own and same and isinstance(setter, cst.FunctionDef) and setter.name.value == "__init__"


def frozen_later(context: Context, flow: Flow, wrap: Statement) -> Iterator[Problem]:
    """Changes of ``requires_grad`` after the wrapping, unless they are made to all parameters of a model."""
    tree = context.tree
    for node in tree.all(cst.Attribute):
        changes = node.attr.value == "requires_grad_" or (node.attr.value == "requires_grad" and is_target(tree, node))
        if isinstance(node.value, cst.BinaryOperation):
            continue  # a sum or a product is not a parameter
        if changes and not _is_all_before(context, node, wrap) and not _is_of_whole_model(context, node, flow):
            yield node, "some parameters are frozen or unfrozen after DistributedOptimizer, which unidist refuses"


def _is_all_before(context: Context, node: cst.CSTNode, wrap: Statement) -> bool:
    """Whether a node is executed before the wrapping only."""
    function = context.tree.function(node)
    if function is context.tree.function(wrap):
        return context.tree.position(node) < context.tree.position(wrap)
    calls = [call for call in context.tree.all(cst.Call) if function in callees(context.tree, call)]
    return bool(calls) and all(_is_before(context, call, wrap) for call in calls)


def _is_of_whole_model(context: Context, node: cst.Attribute, flow: Flow) -> bool:
    tree = context.tree
    if node.attr.value == "requires_grad_":
        return isinstance(node.value, cst.Name) or node.value in flow.uses
    loop, statement = tree.loop(node), tree.statement(node)
    if not isinstance(loop, cst.For) or statement is None or tree.block(statement) is not loop.body:
        return False
    called = loop.iter.func if isinstance(loop.iter, cst.Call) else None
    return (
        isinstance(called, cst.Attribute) and called.attr.value == "parameters" and isinstance(called.value, cst.Name)
    )


def _unused_layers(context: Context) -> Iterator[Problem]:
    """Layers that a forward pass may not use: Horovod takes their gradients for zeros, DDP raises an error."""
    tree = context.tree
    reads = [node for node in tree.all(cst.Attribute) if not is_target(tree, node)]
    for kind in tree.all(cst.ClassDef):
        if not any(context.text(base.value).split(".")[-1] == "Module" for base in kind.bases):
            continue
        for value, target in assignments(tree):
            layer = (
                isinstance(target, cst.Attribute) and full_name(target.value) == "self" and tree.is_inside(target, kind)
            )
            if not layer or not isinstance(value, cst.Call) or not isinstance(target, cst.Attribute):
                continue
            name = target.attr.value
            if not any(each.startswith("torch.nn.") for each in tree.imported(value.func)):
                continue
            uses = [node for node in reads if node.attr.value == name]
            if not uses:
                yield (
                    target,
                    f"no forward pass uses the layer `{name}` (Horovod takes its gradient for zeros, DDP fails)",
                )
            elif all(_is_data_dependent(context, node, kind) for node in uses):
                why = f"not all forward passes use the layer `{name}` (Horovod takes its gradient for zeros, DDP fails)"
                yield uses[0], why


def _is_data_dependent(context: Context, node: cst.CSTNode, kind: cst.ClassDef) -> bool:
    """Whether a condition on something else than the module's own attributes decides if a node is executed."""
    child = node
    for above in context.tree.parents(node):
        if above is kind:
            return False
        if isinstance(above, (cst.If, cst.IfExp)) and child is not above.test:
            roots = {
                each.value
                for each in context.tree.all(cst.Name, inside=above.test)
                if not context.tree.is_attribute_name(each)
            }
            if roots - {"self", "None", "True", "False", "hasattr", "isinstance"}:
                return True
        child = above
    return False
