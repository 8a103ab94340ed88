"""The public names of Horovod and of the drop-in, side by side."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

#: What is not as in Horovod, and why.
LEFT_OUT = {
    "mpi_lib_v2": "Horovod's compiled extension",
    "elastic.State.on_hosts_updated": "Horovod's driver calls it",
}


def compare() -> list[list[str]]:
    """Name, verdict (same, more, other), and a word on it."""
    import horovod.torch as theirs

    import unidist.hvd as ours

    rows = _compare_names("", theirs, ours)
    return rows + _compare_names("elastic.", theirs.elastic, ours.elastic)


def compare_methods() -> list[list[str]]:
    """The same for the methods of elastic training's classes."""
    import horovod.common.elastic as theirs
    import horovod.torch.elastic as theirs_for_torch

    import unidist.hvd.common.elastic as ours
    import unidist.hvd.elastic as ours_for_torch

    pairs: list[tuple[str, Any, Any]] = [(name, theirs, ours) for name in ("State", "ObjectState")]
    pairs += [(name, theirs_for_torch, ours_for_torch) for name in ("TorchState", "ElasticSampler")]
    return [
        row
        for name, one, other in pairs
        for row in _compare_names(f"elastic.{name}.", getattr(one, name), getattr(other, name))
    ]


def _compare_names(prefix: str, theirs: Any, ours: Any) -> list[list[str]]:
    rows = []
    for name in sorted(name for name in dir(theirs) if not name.startswith("_")):
        known = LEFT_OUT.get(prefix + name) or (LEFT_OUT.get(f"elastic.State.{name}") if prefix.count(".") > 1 else "")
        if known:
            rows.append([prefix + name, "other", known])
        elif not hasattr(ours, name):
            rows.append([prefix + name, "MISSING", ""])
        else:
            rows.append([prefix + name, *_verdict(getattr(theirs, name), getattr(ours, name))])
    return rows


def _verdict(theirs: Any, ours: Any) -> list[str]:
    if isinstance(theirs, ModuleType):
        return ["same", "module"] if isinstance(ours, ModuleType) else ["WRONG", "no module"]
    if isinstance(theirs, int):
        return ["same", f"{ours}"] if theirs == ours else ["WRONG", f"{ours}"]
    if not callable(theirs):
        return ["same", type(ours).__name__] if type(ours).__name__ == type(theirs).__name__ else ["WRONG", ""]
    if inspect.isclass(theirs) and not inspect.isclass(ours):
        return ["WRONG", "no class"]
    if inspect.isclass(theirs) and issubclass(theirs, Exception):
        same = issubclass(ours, Exception) and theirs.__mro__[1].__name__ == ours.__mro__[1].__name__
        return ["same", "exception"] if same else ["WRONG", "base"]
    a, b = inspect.signature(theirs), inspect.signature(ours)
    mine, given = dict(b.parameters), dict(a.parameters)
    if any(p.kind is p.VAR_POSITIONAL for p in given.values()):  # Horovod passes everything on
        return ["same", f"({', '.join(mine)})"]
    if list(given) != list(mine):
        return ["WRONG", f"{list(mine)} instead of {list(given)}"]
    for name, parameter in given.items():
        if _plain(parameter.default) != _plain(mine[name].default):
            return ["WRONG", f"default of {name}"]
    return ["same", f"({', '.join(mine)})"]


def _plain(default: Any) -> Any:
    return (
        default
        if isinstance(default, (int, float, str, bool, type(None)))
        else getattr(default, "__name__", type(default).__name__)
    )
