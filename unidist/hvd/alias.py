"""``horovod`` as an alias of this package, for scripts that cannot be changed; only on request."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

from unidist.horovod_names import directory, drop_in_name
from unidist.hvd.names import VERSION, export_variables, is_installed
from unidist.hvd.optimizer import DistributedOptimizer
from unidist.hvd.run import run

#: Packages that are made here: they have ``run``, and the submodules above.
_PACKAGES = ("horovod", "horovod.runner", "horovod.runner.util")


def install() -> None:
    """Make ``import horovod`` and its submodules find the drop-in in this process, whether or not Horovod is installed.

    Under a launcher it sets ``HOROVOD_RANK``, ``HOROVOD_SIZE`` and the like too, as ``horovodrun`` does.

    Raises:
        ImportError: Horovod has been imported already.
    """
    if "horovod" in sys.modules and not _is_alias("horovod"):
        raise ImportError("Horovod itself has been imported in this process already: install the alias before that.")
    if not is_installed():
        sys.meta_path.insert(0, _Aliases())
    # Frameworks know a wrapped optimizer by "horovod" in its class's module, which is this function's.
    DistributedOptimizer.__module__ = "horovod.torch.optimizer"
    export_variables()


class _Aliases(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in ("horovod", "sparkdl"):
            return None
        if fullname == "sparkdl" and (real := _installed_sparkdl()):
            return real
        if fullname.startswith("sparkdl.") and not _is_alias("sparkdl"):
            return None
        if fullname == "horovod.runner.launch":  # a file of its own, for python -m
            source = importlib.util.find_spec("unidist.cli.run")
            return importlib.util.spec_from_file_location(fullname, source.origin if source else None)
        name = drop_in_name(fullname)
        if fullname not in _PACKAGES and (name is None or not _is_module(name)):
            raise ModuleNotFoundError(
                f"{fullname} is not part of unidist.hvd, which stands for horovod here: see docs/hvd.md.",
                name=fullname,
            )
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        name = drop_in_name(spec.name)
        if name is None:
            return None
        # The import system writes the alias's spec into the module that it gets, so it gets another one.
        return _Placeholder(spec.name, importlib.import_module(name))

    def exec_module(self, module: ModuleType) -> None:
        if isinstance(module, _Placeholder):
            # Later imports of the alias get the module itself.
            sys.modules[module.__name__] = module.module
            return
        module.__dict__.update(run=run, __version__=VERSION, __path__=[])


def _is_alias(name: str) -> bool:
    spec = sys.modules[name].__spec__
    return isinstance(spec and spec.loader, _Aliases)


def _installed_sparkdl() -> importlib.machinery.ModuleSpec | None:
    """Databricks' own, which has precedence; None: there is none."""
    path = [entry for entry in sys.path if entry != directory()]
    return importlib.machinery.PathFinder.find_spec("sparkdl", path)


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # it would be in a module that is no package
        return False


class _Placeholder(ModuleType):
    def __init__(self, name: str, module: ModuleType) -> None:
        super().__init__(name)
        self.module = module
