"""Horovod's modules by their names, and those of the drop-in."""

from __future__ import annotations

from pathlib import Path

#: Longer names first.
_MODULES = {
    "horovod.torch": "unidist.hvd",
    "horovod.common.process_sets": "unidist.hvd.process_sets",
    "horovod.common": "unidist.hvd.common",
    "horovod.runner.util.threads": "unidist.hvd.common.util",
    "horovod.ray": "unidist.ray",
    "horovod.spark": "unidist.spark",
    "sparkdl": "unidist.spark.sparkdl",
}


def directory() -> str:
    """The directory for PYTHONPATH by which all programs find the drop-in as ``horovod``: scripts, console scripts,
    and the processes that they start.
    """
    return str(Path(__file__).parent / "hvd" / "as_horovod")


def drop_in_name(name: str) -> str | None:
    """The drop-in's name for one of Horovod's; None where it has none."""
    for prefix, module in _MODULES.items():
        if name == prefix:
            return module
        if name.startswith(f"{prefix}."):
            return module + name[len(prefix) :]
    return None
