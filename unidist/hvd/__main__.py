"""``python -m unidist.hvd [-m] script args``: run a script whose ``horovod`` is this package.

Under a launcher: ``torchrun --nproc-per-node 2 -m unidist.hvd train.py``.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from io import open_code
from types import CodeType, ModuleType
from typing import Any

from unidist import knobs
from unidist.hvd import alias

USAGE = "usage: python -m unidist.hvd [-m] SCRIPT [ARGUMENT ...]"


def main(argv: list[str]) -> None:
    """Run what the arguments name as ``__main__``."""
    as_module = argv[:1] == ["-m"]
    rest = argv[1:] if as_module else argv
    if not rest or rest[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if rest else sys.stderr)
        sys.exit(0 if rest else 2)
    alias.install()
    sys.argv[:] = rest
    if as_module:
        sys.path[0] = os.getcwd()
        spec, code = _find_module(rest[0])
        sys.argv[0] = spec.origin or rest[0]
        _run(code, f"-m {spec.name}", __file__=spec.origin, __package__=spec.parent, __loader__=spec.loader)
        return
    if not os.path.exists(rest[0]):
        sys.exit(f"{USAGE}\nthere is no file {rest[0]!r}")
    path = os.path.abspath(rest[0])
    sys.path[0] = os.path.dirname(path)
    with open_code(path) as file:
        code = compile(file.read(), path, "exec")
    _run(code, path, __file__=path, __package__=None)


def _find_module(name: str) -> tuple[ModuleSpec, CodeType]:
    """As ``python -m`` finds it: of a package its ``__main__``."""
    try:
        spec = find_spec(name)
    except ModuleNotFoundError as error:
        sys.exit(f"{USAGE}\nthere is no module {name!r}: {error}")
    if spec is not None and spec.submodule_search_locations is not None:
        return _find_module(f"{name}.__main__")
    code = spec and isinstance(spec.loader, InspectLoader) and spec.loader.get_code(spec.name)
    if spec is None or not isinstance(code, CodeType):
        sys.exit(f"{USAGE}\nthere is no module {name!r}")
    return spec, code


def _run(code: CodeType, script: str, **names: object) -> None:
    """Run it as ``__main__``, under a name that the processes it spawns import."""
    module = ModuleType("__main__")
    vars(module).update(names, __spec__=_MainSpec(names["__package__"]))
    sys.modules["__main__"] = module
    os.environ[knobs.HVD_SCRIPT] = script
    exec(code, module.__dict__)


class _MainSpec(ModuleSpec):
    """The stand-in's name, with the package of the script, from which its relative imports start."""

    def __init__(self, package: object) -> None:
        super().__init__("unidist.hvd.child", None)
        self._package = package

    @property
    def parent(self) -> Any:
        return self._package


if __name__ == "__main__":
    main(sys.argv[1:])
