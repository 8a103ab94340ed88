"""Running a script or a module as ``__main__``, as ``python SCRIPT`` and ``python -m MODULE`` do."""

from __future__ import annotations

import os
import sys
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec
from io import open_code
from types import CodeType, ModuleType


def run(argv: list[str], usage: str) -> None:
    """Run what the arguments name, ``SCRIPT ARGUMENT ...`` or ``-m MODULE ARGUMENT ...``, in this process.

    Processes that multiprocessing spawns find it as they do under ``python``.

    Args:
        argv: the arguments.
        usage: the first line of errors.

    Raises:
        SystemExit: there is no such script or module, or the program raised it.
    """
    as_module = argv[:1] == ["-m"]
    rest = argv[1:] if as_module else argv
    if not rest:
        print(usage, file=sys.stderr)
        sys.exit(2)
    sys.argv[:] = rest
    if as_module:
        _set_first(os.getcwd())
        spec, code = _find_module(rest[0], usage)
        sys.argv[0] = spec.origin or rest[0]
        _execute(code, __file__=spec.origin, __package__=spec.parent, __loader__=spec.loader, __spec__=spec)
        return
    if not os.path.isfile(rest[0]):
        sys.exit(f"{usage}\nthere is no file {rest[0]!r}")
    path = os.path.abspath(rest[0])
    _set_first(os.path.dirname(os.path.realpath(path)))
    with open_code(path) as file:
        code = compile(file.read(), path, "exec")
    _execute(code, __file__=path, __loader__=SourceFileLoader("__main__", path))


def _set_first(directory: str) -> None:
    if not getattr(sys.flags, "safe_path", False):  # of Python 3.11: the path has no entry for the program
        sys.path[0] = directory


def _find_module(name: str, usage: str) -> tuple[ModuleSpec, CodeType]:
    """As ``python -m`` finds it: of a package its ``__main__``."""
    try:
        spec = find_spec(name)
    except (ModuleNotFoundError, ValueError) as error:
        sys.exit(f"{usage}\nthere is no module {name!r}: {error}")
    if spec is not None and spec.submodule_search_locations is not None:
        return _find_module(f"{name}.__main__", usage)
    code = spec and isinstance(spec.loader, InspectLoader) and spec.loader.get_code(spec.name)
    if spec is None or not isinstance(code, CodeType):
        sys.exit(f"{usage}\nthere is no module {name!r}")
    return spec, code


def _execute(code: CodeType, **names: object) -> None:
    module = ModuleType("__main__")
    vars(module).update(names)
    sys.modules["__main__"] = module
    exec(code, module.__dict__)
