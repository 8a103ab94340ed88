"""``python -m unidist.hvd [-m] script args``: run a script whose ``horovod`` is this package.

Under a launcher: ``torchrun --nproc-per-node 2 -m unidist.hvd train.py``.
"""

from __future__ import annotations

import os
import runpy
import sys
from importlib.machinery import ModuleSpec
from io import open_code
from types import ModuleType

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
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    if not os.path.exists(rest[0]):
        sys.exit(f"{USAGE}\nthere is no file {rest[0]!r}")
    sys.path[0] = os.path.dirname(os.path.abspath(rest[0]))
    _run(os.path.abspath(rest[0]))


def _run(path: str) -> None:
    """Run a file as ``__main__``, under a name that the processes it spawns import."""
    module = ModuleType("__main__")
    module.__file__ = path
    module.__spec__ = ModuleSpec("unidist.hvd.child", None)
    sys.modules["__main__"] = module
    os.environ[knobs.HVD_SCRIPT] = path
    with open_code(path) as file:
        code = compile(file.read(), path, "exec")
    exec(code, module.__dict__)


if __name__ == "__main__":
    main(sys.argv[1:])
