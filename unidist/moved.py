"""The modules' earlier names, which are found still, with a warning."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from warnings import warn

#: Where the modules of each directory were.
_BEFORE: dict[str, dict[str, tuple[str, ...]]] = {
    "launch": {"unidist": ("topology", "membership", "scripts")},
    "diagnosis": {"unidist": ("operations", "spans"), "unidist.backends": ("watch",)},
    "gradients": {
        "unidist.backends": ("buckets", "backward_pass", "data_parallel", "replica", "reducer", "wrapper"),
    },
    "collectives": {"unidist": ("agreement", "metric_reduction", "running_metrics")},
    "training": {"unidist": ("model", "batch_norm")},
    "network": {"unidist": ("open_files",), "unidist.backends": ("addresses", "processes")},
    "checkpoint": {"unidist.backends": ("shards",)},
}
_NEW_NAMES = {
    "unidist.knobs": "unidist.settings",
    "unidist.tracing": "unidist.diagnosis.timeline",
    "unidist.multiprocessing": "unidist.run.spawn",
    "unidist.uneven": "unidist.training.join",
    "unidist.preparation": "unidist.training.prepare",
    "unidist.checkpoint_files": "unidist.checkpoint.files",
    **{
        f"{package}.{name}": f"unidist.{directory}.{name}"
        for directory, packages in _BEFORE.items()
        for package, names in packages.items()
        for name in names
    },
}


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in _NEW_NAMES else None

    def exec_module(self, module: ModuleType) -> None:
        old, new = module.__name__, _NEW_NAMES[module.__name__]
        warn(f"the module {old} is {new} now: change the import.", DeprecationWarning, stacklevel=2)
        sys.modules[old] = import_module(new)


def find() -> None:
    """Let imports find the modules by their earlier names, too."""
    sys.meta_path.append(_Finder())
