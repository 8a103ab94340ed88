"""``horovod`` as another name of this package, for scripts that cannot be changed; only on request."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

#: Horovod's modules, and what stands for them; longer names first.
_PLACES = {
    "horovod.torch": "unidist.hvd",
    "horovod.common.process_sets": "unidist.hvd.process_sets",
    "horovod.common.basics": "unidist.hvd.basics",
    "horovod.common": "unidist.hvd.common",
}
#: The release whose calls these are.
VERSION = "0.28.1"


def install() -> None:
    """Let ``import horovod`` and its submodules find the drop-in in this process, whether or not Horovod is installed.

    Raises:
        ImportError: Horovod has been imported already.
    """
    loaded = sys.modules.get("horovod")
    if loaded is not None and not isinstance(loaded.__spec__ and loaded.__spec__.loader, _Aliases):
        raise ImportError("Horovod itself has been imported in this process: ask for the drop-in before that.")
    if not is_installed():
        sys.meta_path.insert(0, _Aliases())


def is_installed() -> bool:
    """Whether ``horovod`` means the drop-in in this process."""
    return any(isinstance(finder, _Aliases) for finder in sys.meta_path)


def drop_in_name(name: str) -> str | None:
    """The drop-in's name for one of Horovod's; None where it has none."""
    for prefix, place in _PLACES.items():
        if name == prefix:
            return place
        if name.startswith(f"{prefix}."):
            return place + name[len(prefix) :]
    return None


class _Aliases(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "horovod" and not fullname.startswith("horovod."):
            return None
        place = drop_in_name(fullname)
        if fullname != "horovod" and (place is None or importlib.util.find_spec(place) is None):
            raise ModuleNotFoundError(
                f"{fullname} is not part of unidist.hvd, which stands for horovod here: docs/hvd.md tells what is.",
                name=fullname,
            )
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        place = drop_in_name(spec.name)
        if place is None:
            return None
        module = importlib.import_module(place)
        # The machinery writes the alias's spec into the module that it gets: it gets a mirror of it.
        return _Mirror(spec.name, module)

    def exec_module(self, module: ModuleType) -> None:
        if isinstance(module, _Mirror):
            # From here on, whoever imports the alias gets the module itself.
            sys.modules[module.__name__] = module.mirrored
            return
        from unidist.hvd.run import run

        module.__dict__.update(run=run, __version__=VERSION, __path__=[])


class _Mirror(ModuleType):
    def __init__(self, name: str, mirrored: ModuleType) -> None:
        super().__init__(name)
        self.mirrored = mirrored
