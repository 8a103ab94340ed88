"""Whether a model may be wrapped: what the module does with it, before and after."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import libcst as cst

from unidist.migrate.code import Statement, full_name
from unidist.migrate.flow import (
    LOOKING,
    Flow,
    assignments,
    callees,
    code_references,
    destinations,
    follow,
    is_parameter,
    is_target,
    parameter_of,
)
from unidist.migrate.site import Site

#: Attributes that mean the same on a wrapped model.
SAME = {"parameters", "buffers", "train", "eval", "training", "zero_grad", "requires_grad_", "modules", "apply"}
#: Attributes that are the inner model's: ``unidist.unwrap(model).state_dict()``.
INNER = {
    "state_dict", "load_state_dict", "named_parameters", "named_buffers", "named_modules", "children", "named_children",
    "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook", "get_parameter", "get_submodule",
}  # fmt: skip
#: Parts of a chain behind which there is data and no forward pass.
_DATA = {"weight", "bias", "grad", "data", "dtype", "device", "shape", "__class__", "__dict__", "__name__"}
_MOVES = {"to", "cuda", "cpu", "half", "float", "double", "bfloat16"}
#: Questions that the inner model answers.
_ASKING = {"isinstance", "type", "len", "hasattr"}
#: Functions that want the inner model: they keep it, or write all of it.
_KEEPING = {"torch.save", "copy.deepcopy", "copy.copy", "pickle.dump"}

Problem = tuple[cst.CSTNode, str]


@dataclass
class Use:
    """A model's uses, when it is wrapped at one statement."""

    #: Why it cannot be wrapped, and where.
    problem: Problem | None = None
    #: Its forward passes.
    called: list[cst.BaseExpression] = field(default_factory=list)
    #: Uses by which it is an argument of a call.
    passed: list[cst.BaseExpression] = field(default_factory=list)
    #: Uses that shall become ``unidist.unwrap(...)``.
    unwrapped: list[cst.BaseExpression] = field(default_factory=list)


def examine(site: Site, model: cst.BaseExpression, wrap: Statement) -> Use:
    """Whether ``model = wrap_model(model)`` may stand in the place of a statement."""
    found = Use()
    code = site.code
    variable = code.variable(model)
    if variable is None or code.loop(wrap) is not None or not _is_settable(site, variable, wrap):
        found.problem = (model, "the model that is trained cannot be told from the code")
        return found
    flow = follow(code, [variable], lambda node: _is_before(site, node, wrap) or code.is_inside(node, wrap))
    found.called = [use for use in flow.uses if isinstance(call := code.parent(use), cst.Call) and call.func is use]
    if not found.called:
        found.problem = (model, "no forward pass of the model is seen in this file after it has been wrapped")
        return found
    found.passed = [use for use in flow.uses if isinstance(code.parent(use), cst.Arg)]
    problems = [*_raw_aliases(site, variable, wrap), *_assigned_again(site, flow, variable, wrap)]
    for use in flow.uses:
        verdict = _verdict(site, use, use in flow.escapes)
        if isinstance(verdict, str):
            problems.append((use, verdict))
        elif verdict is not None:
            found.unwrapped.append(verdict)
    problems += [*_unused_layers(site), *_frozen_later(site, flow, wrap)]
    found.problem = next(iter(problems), None)
    return found


def _is_before(site: Site, node: cst.CSTNode, wrap: Statement) -> bool:
    """Whether a use is over when the model is wrapped."""
    return site.code.function(node) is site.code.function(wrap) and site.code.place(node) < site.code.place(wrap)


def _verdict(site: Site, use: cst.BaseExpression, escapes: bool) -> cst.BaseExpression | str | None:
    """What is to be unwrapped, or why that does not go, or None where the use may stay."""
    code = site.code
    parent = code.parent(use)
    if isinstance(parent, cst.Attribute):
        chain = list(_chain(site, use))
        if chain[0] in SAME:
            return None
        if chain[0] in _MOVES:
            return "the model is moved or converted after it has been wrapped"
        if is_target(code, _whole(site, use)):
            return "the model is changed after it has been wrapped"
        if chain[0] in INNER or chain[-1] in INNER | SAME or set(chain) & _DATA:
            return use
        return f"`.{chain[0]}` of the model is used: a call past the wrapper's own would train without averaging"
    if (
        isinstance(parent, cst.Arg)
        and isinstance(call := code.parent(parent), cst.Call)
        and full_name(call.func) in _ASKING
    ):
        return use
    if isinstance(parent, cst.Arg) and escapes:
        call = code.parent(parent)
        name = full_name(call.func) if isinstance(call, cst.Call) else ""
        if name.startswith("unidist.") or site.symbol(getattr(call, "func", None)):
            return None
        if code.imported(getattr(call, "func", use)) & _KEEPING:
            return use
        return f"the model goes to {name or 'a call'}, which this file does not define"
    return "the model goes where it cannot be followed" if escapes else None


def _chain(site: Site, use: cst.CSTNode) -> Iterator[str]:
    """The attributes that are taken of a use, one after another: ``fc``, ``weight``."""
    node = site.code.parent(use)
    while isinstance(node, (cst.Attribute, cst.Subscript)):
        if isinstance(node, cst.Attribute):
            yield node.attr.value
        above = site.code.parent(node)
        if not isinstance(above, (cst.Attribute, cst.Subscript)) or above.value is not node:
            return
        node = above


def _raw_aliases(site: Site, variable: str, wrap: Statement) -> Iterator[Problem]:
    """Ways in which the model is reached, unwrapped, after it has been wrapped."""
    code = site.code
    aliases: set[str] = set()
    for use in code_references(code).get(variable, ()):
        if not is_target(code, use) and _is_before(site, use, wrap) and not code.is_inside(use, wrap):
            kept = _kept(site, use, variable)
            if isinstance(kept, str):
                yield use, kept
            else:
                aliases |= kept
    for value, target in assignments(code):
        if code.variable(target) == variable and (source := code.variable(_moved(value))):
            aliases.add(source)
        if code.variable(target) == variable and isinstance(value, cst.Call):
            parts = {code.variable(part) for part in code.all(cst.Name, inside=value)}
            aliases |= {name for name in parts - {variable} if name and _is_made_of_torch(site, name)}
    for name in {variable, *aliases}:
        if is_parameter(code, name):
            yield from _callers(site, name)
    for alias in sorted(aliases - {variable}):
        for use in follow(code, [alias], lambda node: _is_before(site, node, wrap) or code.is_inside(node, wrap)).uses:
            if not _is_harmless(site, use):
                yield use, f"`{site.text(use)}` is another way to the model, or to a part of it, that stays unwrapped"


def _is_made_of_torch(site: Site, variable: str) -> bool:
    """Whether a variable is assigned a module of torch's or of this file's."""
    code = site.code
    classes = {
        each.name.value
        for each in code.all(cst.ClassDef)
        if any("Module" in site.text(base.value) for base in each.bases)
    }
    return any(
        code.variable(target) == variable
        and isinstance(value, cst.Call)
        and (
            full_name(value.func) in classes or any(name.startswith("torch.nn.") for name in code.imported(value.func))
        )
        for value, target in assignments(code)
    )


def _kept(site: Site, use: cst.BaseExpression, variable: str) -> set[str] | str:
    """The variables that keep the model, or a part of it, after a use; or why that cannot be told."""
    code = site.code
    parent = code.parent(use)
    if isinstance(parent, cst.Attribute):
        return set() if _is_harmless(site, use) else _targets_of_part(site, use)
    if isinstance(parent, cst.Arg) and isinstance(call := code.parent(parent), cst.Call):
        name = full_name(call.func)
        if site.symbol(call.func) is not None or name in LOOKING or code.imported(call.func) & _KEEPING:
            return set()
        called = callees(code, call)
        if called and (parameters := destinations(code, use)) is not None:
            return _kept_by_functions(site, parameters)
        effect = code.is_statement(call) or any(
            value is call and code.variable(to) == variable for value, to in assignments(code)
        )
        function = isinstance(call.func, cst.Name) or bool(code.imported(call.func))
        return (
            set()
            if effect and function and not called
            else f"the model goes to {name or 'a call'} before it is wrapped"
        )
    found = destinations(code, use)
    if found is None or isinstance(parent, cst.Param):
        return "the model goes where it cannot be followed before it is wrapped"
    return {name for name in found if name != variable}


def _kept_by_functions(site: Site, parameters: list[str]) -> set[str] | str:
    """What functions of this file keep of a parameter."""
    code = site.code
    found: set[str] = set()
    for parameter in parameters:
        inside = follow(code, [parameter])
        found |= {name for name in inside.variables if not name.startswith(_scope(parameter))}
        for use in inside.uses:
            own = code.functions.get(parameter.rpartition(".<locals>.")[0])
            local = any(code.variable(use) == name for name in inside.variables if name.startswith(_scope(parameter)))
            if local and code.function(use) is not own:
                return "a function that is made before the model is wrapped keeps it"
            if use in inside.escapes and not (
                isinstance(code.parent(use), cst.Arg) and code.is_statement(code.parent(code.parent(use)))
            ):
                return "the model goes where it cannot be followed before it is wrapped"
    return found


def _is_harmless(site: Site, use: cst.BaseExpression) -> bool:
    """Whether a use neither trains the model nor keeps it."""
    code = site.code
    parent = code.parent(use)
    if isinstance(parent, cst.Arg):
        call = code.parent(parent)
        return isinstance(call, cst.Call) and (
            site.symbol(call.func) is not None or bool(code.imported(call.func) & _KEEPING)
        )
    if not isinstance(parent, cst.Attribute):
        return not isinstance(parent, cst.Call)
    chain = list(_chain(site, use))
    if chain[0] in SAME | INNER | _MOVES or chain[-1] in SAME | INNER or set(chain) & _DATA:
        return True
    whole = _whole(site, use)
    call = code.parent(whole)
    return is_target(code, whole) or (
        isinstance(call, cst.Call) and call.func is whole and code.is_statement(call) is not None
    )


def _whole(site: Site, use: cst.BaseExpression) -> cst.BaseExpression:
    """``model.fc.weight`` of its ``model``."""
    node = use
    while isinstance(above := site.code.parent(node), (cst.Attribute, cst.Subscript)) and above.value is node:
        node = above
    return node


def _targets_of_part(site: Site, use: cst.BaseExpression) -> set[str] | str:
    """``encoder`` of ``encoder = model.encoder``."""
    found = destinations(site.code, _whole(site, use))
    return set(found) if found else f"`{site.text(_whole(site, use))}` is taken of the model before it is wrapped"


def _moved(value: cst.BaseExpression) -> cst.BaseExpression:
    """``model`` of ``model.to(device)``."""
    while isinstance(value, cst.Call) and isinstance(value.func, cst.Attribute) and value.func.attr.value in _MOVES:
        value = value.func.value
    return value


def _scope(variable: str) -> str:
    return variable.rpartition(".<locals>.")[0] + ".<locals>."


def _is_settable(site: Site, variable: str, wrap: Statement) -> bool:
    """Whether ``name = ...`` at this place sets the variable, and not another one of the same name."""
    function = site.code.function(wrap)
    if variable.startswith("."):
        return True
    if isinstance(function, cst.Module):
        return ".<locals>." not in variable
    if not isinstance(function, cst.FunctionDef):
        return False
    name = variable.rpartition(".")[2]
    for each in site.code.all(cst.Global, inside=function.body):
        if any(item.name.value == name for item in each.names):
            return True
    own = next((qualified for qualified, node in site.code.functions.items() if node is function), "")
    return variable == f"{own}.<locals>.{name}"


def _callers(site: Site, variable: str) -> Iterator[Problem]:
    """What the callers of a function that wraps its parameter do with their model."""
    code = site.code
    function = variable.rsplit(".<locals>.", 1)[0]
    node = code.functions.get(function)
    if node is None:
        return
    for call in code.all(cst.Call):
        if node not in callees(code, call):
            continue
        for argument in call.args:
            if parameter_of(code, node, call, argument) != variable:
                continue
            theirs = code.variable(argument.value)
            if theirs is None:
                continue
            for use in follow(code, [theirs], lambda each, call=call: _is_over(site, each, call)).uses:  # type: ignore[misc]
                parent = code.parent(use)
                outside = not code.is_inside(use, node)
                if outside and (
                    isinstance(parent, cst.Call) or (isinstance(parent, cst.Arg) and not code.is_inside(use, call))
                ):
                    yield use, "the model is wrapped in a function, and its caller goes on with the unwrapped one"


def _is_over(site: Site, node: cst.CSTNode, call: cst.Call) -> bool:
    same = site.code.function(node) is site.code.function(call)
    return same and site.code.place(node) <= site.code.place(call)


def _assigned_again(site: Site, flow: Flow, variable: str, wrap: Statement) -> Iterator[Problem]:
    """Places where the variable gets another model after the wrapping."""
    for value, target in flow.assigned:
        if (
            site.code.variable(target) != variable
            or _is_before(site, target, wrap)
            or site.code.is_inside(target, wrap)
        ):
            continue
        if not (isinstance(value, cst.Name) and value.value == "None") and not _is_made_before(site, target, wrap):
            yield target, "the model is assigned again in another place than that where it is wrapped"
    loops = [each for each in site.code.all(cst.For) if is_target(site.code, each.target)]
    for loop in loops:
        for name in site.code.all(cst.Name, inside=loop.target):
            if site.code.variable(name) == variable:
                yield name, "the model is a loop's variable"


def _is_made_before(site: Site, target: cst.BaseExpression, wrap: Statement) -> bool:
    """Whether an attribute is set by ``__init__``, and wrapped by another method of the class."""
    code = site.code
    setter, wrapper = code.function(target), code.function(wrap)
    functions = isinstance(setter, cst.FunctionDef) and isinstance(wrapper, cst.FunctionDef) and setter is not wrapper
    own = isinstance(target, cst.Attribute) and full_name(target.value) == "self"
    same = functions and code.parent(setter) is code.parent(wrapper)
    return own and same and isinstance(setter, cst.FunctionDef) and setter.name.value == "__init__"


def _frozen_later(site: Site, flow: Flow, wrap: Statement) -> Iterator[Problem]:
    """Parameters that are frozen or unfrozen after the wrapping, unless all of a model's are."""
    code = site.code
    for node in code.all(cst.Attribute):
        changes = node.attr.value == "requires_grad_" or (node.attr.value == "requires_grad" and is_target(code, node))
        if isinstance(node.value, cst.BinaryOperation):
            continue  # a sum or a product is no parameter
        if changes and not _is_all_before(site, node, wrap) and not _is_of_whole_model(site, node, flow):
            yield node, "some parameters are frozen or unfrozen after the model has been wrapped, which DDP refuses"


def _is_all_before(site: Site, node: cst.CSTNode, wrap: Statement) -> bool:
    """Whether a place is executed before the wrapping only."""
    function = site.code.function(node)
    if function is site.code.function(wrap):
        return site.code.place(node) < site.code.place(wrap)
    calls = [call for call in site.code.all(cst.Call) if function in callees(site.code, call)]
    return bool(calls) and all(_is_before(site, call, wrap) for call in calls)


def _is_of_whole_model(site: Site, node: cst.Attribute, flow: Flow) -> bool:
    code = site.code
    if node.attr.value == "requires_grad_":
        return isinstance(node.value, cst.Name) or node.value in flow.uses
    loop, statement = code.loop(node), code.statement(node)
    if not isinstance(loop, cst.For) or statement is None or code.block(statement) is not loop.body:
        return False
    called = loop.iter.func if isinstance(loop.iter, cst.Call) else None
    return (
        isinstance(called, cst.Attribute) and called.attr.value == "parameters" and isinstance(called.value, cst.Name)
    )


def _unused_layers(site: Site) -> Iterator[Problem]:
    """Layers that may take no part in a pass: Horovod counts their gradients as zeros, DDP refuses them."""
    code = site.code
    reads = [node for node in code.all(cst.Attribute) if not is_target(code, node)]
    for kind in code.all(cst.ClassDef):
        if not any(site.text(base.value).split(".")[-1] == "Module" for base in kind.bases):
            continue
        for value, target in assignments(code):
            layer = (
                isinstance(target, cst.Attribute) and full_name(target.value) == "self" and code.is_inside(target, kind)
            )
            if not layer or not isinstance(value, cst.Call) or not isinstance(target, cst.Attribute):
                continue
            name = target.attr.value
            if not any(each.startswith("torch.nn.") for each in code.imported(value.func)):
                continue
            uses = [node for node in reads if node.attr.value == name]
            if not uses:
                yield target, f"the layer `{name}` takes no part in the forward pass: its gradient is zero in Horovod"
            elif all(_is_by_chance(site, node, kind) for node in uses):
                yield (
                    uses[0],
                    f"the layer `{name}` takes part in some forward passes only: its gradient is zero in the others in Horovod",
                )


def _is_attribute(site: Site, name: cst.Name) -> bool:
    parent = site.code.parent(name)
    return isinstance(parent, cst.Attribute) and parent.attr is name


def _is_by_chance(site: Site, node: cst.CSTNode, kind: cst.ClassDef) -> bool:
    """Whether a condition that is not the module's own decides if this is executed."""
    child = node
    for above in site.code.parents(node):
        if above is kind:
            return False
        if isinstance(above, (cst.If, cst.IfExp)) and child is not above.test:
            roots = {each.value for each in site.code.all(cst.Name, inside=above.test) if not _is_attribute(site, each)}
            if roots - {"self", "None", "True", "False", "hasattr", "isinstance"}:
                return True
        child = above
    return False
