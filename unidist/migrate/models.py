"""Whether a model may be wrapped: what the module does with it, before and after."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import libcst as cst

from unidist.migrate.code import Statement, full_name
from unidist.migrate.flow import Flow, assignments, callees, destinations, follow, is_target, parameter_of
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
#: Functions that want the inner model: they keep it, or write all of it.
_KEEPING = {"torch.save", "copy.deepcopy", "copy.copy", "pickle.dump"}

Problem = tuple[cst.CSTNode, str]


@dataclass
class Use:
    """A model's uses, when it is wrapped at one statement."""

    #: Why it cannot be wrapped, and where.
    problem: Problem | None = None
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
    problems = [*_raw_aliases(site, variable, wrap), *_assigned_again(site, flow, variable, wrap)]
    for use in flow.uses:
        verdict = _verdict(site, use, use in flow.escapes)
        if isinstance(verdict, str):
            problems.append((use, verdict))
        elif verdict is not None:
            found.unwrapped.append(verdict)
    problems += _unused_layers(site)
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
        if chain[0] in INNER or chain[-1] in INNER | SAME or set(chain) & _DATA:
            return use
        return f"`.{chain[0]}` of the model is used: a call past the wrapper's own would train without averaging"
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
    """Other names of the model that are made before it is wrapped, and go on with it afterwards."""
    code = site.code
    before = follow(code, [variable], lambda node: not _is_before(site, node, wrap))
    others = {
        name for name in before.variables - {variable} if ".<locals>." not in name or name.startswith(_scope(variable))
    }
    for use in before.uses:
        parent = code.parent(use)
        if _keeps_nothing(site, use, variable):
            continue
        if use in before.escapes:
            yield use, "the model goes where it cannot be followed before it is wrapped"
        elif isinstance(parent, cst.Arg):
            for parameter in destinations(code, use) or ():
                inside = follow(code, [parameter])
                others |= {name for name in inside.variables if not name.startswith(_scope(parameter))}
                for escaped in inside.escapes:
                    if not _keeps_nothing(site, escaped, parameter):
                        yield escaped, "the model goes where it cannot be followed before it is wrapped"
    for value, target in assignments(code):
        if code.variable(target) == variable and (source := code.variable(_moved(value))):
            others.add(source)
    for name in {variable, *others}:
        if _is_parameter(site, name):
            yield from _callers(site, name)
    for other in sorted(others - {variable}):
        for use in follow(code, [other], lambda node: _is_before(site, node, wrap) or code.is_inside(node, wrap)).uses:
            parent = code.parent(use)
            called = isinstance(parent, cst.Call) and parent.func is use
            passed = isinstance(parent, cst.Arg) and site.symbol(getattr(code.parent(parent), "func", None)) is None
            if called or passed:
                yield (
                    use,
                    f"`{site.text(use)}` is another name of the model that stays unwrapped, and is used after wrapping",
                )


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


def _keeps_nothing(site: Site, use: cst.BaseExpression, variable: str) -> bool:
    """A call for its effect, such as ``init_weights(model)``, or one whose result is the model again."""
    code = site.code
    argument = code.parent(use)
    call = code.parent(argument)
    if not isinstance(argument, cst.Arg) or not isinstance(call, cst.Call):
        return False
    if site.symbol(call.func) is not None or code.is_statement(call):
        return True
    if code.imported(call.func) & _KEEPING:
        return True
    return any(value is call and code.variable(target) == variable for value, target in assignments(code))


def _is_parameter(site: Site, variable: str) -> bool:
    return any(site.code.variable(each.name) == variable for each in site.code.all(cst.Param))


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


def _unused_layers(site: Site) -> Iterator[Problem]:
    """Layers that a module makes and never calls: Horovod counts their gradients as zeros, DDP refuses them."""
    code = site.code
    for kind in code.all(cst.ClassDef):
        if not any(site.text(base.value).split(".")[-1] == "Module" for base in kind.bases):
            continue
        read = [
            node.attr.value for node in code.all(cst.Attribute)
            if not is_target(code, node) and isinstance(node.attr, cst.Name)
        ]  # fmt: skip
        for value, target in assignments(code):
            layer = (
                isinstance(target, cst.Attribute) and full_name(target.value) == "self" and code.is_inside(target, kind)
            )
            if not layer or not isinstance(value, cst.Call) or not isinstance(target, cst.Attribute):
                continue
            made = any(name.startswith("torch.nn.") for name in code.imported(value.func))
            if made and target.attr.value not in read:
                yield (
                    target,
                    f"the layer `{target.attr.value}` takes no part in the forward pass: its gradient is zero in Horovod",
                )
