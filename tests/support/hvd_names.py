"""The public names of Horovod and of the drop-in, side by side."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

#: What is not as in Horovod, and why.
LEFT_OUT = {
    "mpi_lib_v2": "Horovod's compiled extension",
    "elastic": "an error that says so, until it is there",
}


def compare() -> list[list[str]]:
    """Name, verdict (same, more, other), and a word on it."""
    import horovod.torch as theirs

    import unidist.hvd as ours

    rows = []
    for name in sorted(name for name in dir(theirs) if not name.startswith("_")):
        if name in LEFT_OUT:
            rows.append([name, "other", LEFT_OUT[name]])
        elif not hasattr(ours, name):
            rows.append([name, "MISSING", ""])
        else:
            rows.append([name, *_verdict(getattr(theirs, name), getattr(ours, name))])
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
