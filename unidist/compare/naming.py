"""The names of an optimizer's parameters in its model."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

#: Prefixes that DDP and torch.compile add to the names of the module that they wrap.
WRAPPERS = ("module", "_orig_mod")


def parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return an optimizer's parameters, in the order of its groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def names(optimizer: Optimizer) -> list[str]:
    """Return a unique name for each parameter, without prefixes of wrappers; group and index if no module has it."""
    found: dict[int, str] = {}
    for root in _roots():
        for name, param in root.named_parameters(remove_duplicate=False):
            plain = ".".join(part for part in name.split(".") if part not in WRAPPERS)
            known = found.get(id(param), plain)
            found[id(param)] = min(known, plain, key=lambda name: (len(name), name))
    places = [(g, n, p) for g, group in enumerate(optimizer.param_groups) for n, p in enumerate(group["params"])]
    return list(_distinct([found.get(id(param), f"group {group}, number {n}") for group, n, param in places]))


def _roots() -> list[nn.Module]:
    """Return the modules that are no child of another."""
    # type() and not isinstance(), which reads __class__ and so would load lazy objects. Without _modules, __init__ has
    # not run.
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module) and "_modules" in vars(thing)]
    inner = {id(child) for module in modules for child in module.children()}
    return [module for module in modules if id(module) not in inner]


def _distinct(found: Sequence[str]) -> Iterator[str]:
    seen: Counter[str] = Counter()
    for name in found:
        seen[name] += 1
        yield name if seen[name] == 1 else f"{name} #{seen[name]}"
