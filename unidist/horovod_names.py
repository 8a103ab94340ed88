"""Horovod's modules by their names, and those of the drop-in."""

from __future__ import annotations

import os
import sys
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
#: Calls without arguments, and unidist's names for them.
PLAIN_CALLS = {
    "init": "init",
    "shutdown": "shutdown",
    "is_initialized": "is_initialized",
    "rank": "rank",
    "size": "world_size",
    "local_rank": "local_rank",
    "local_size": "local_size",
    "cross_rank": "node_rank",
    "cross_size": "num_nodes",
    "barrier": "barrier",
}
#: What unidist has in place of other names.
_OTHERS = {
    "allreduce": 'all_reduce(x, op="mean")',
    "allreduce_": 'all_reduce_(x, op="mean")',
    "allgather": "all_gather(x)",
    "alltoall": "all_to_all(x)",
    "reducescatter": 'reduce_scatter(x, op="mean")',
    "allgather_object": "all_gather_object(x)",
    "broadcast_parameters": "broadcast_model_state(model)",
    "DistributedOptimizer": "replicate(model) beside a plain optimizer",
    "Compression": 'replicate(model, compression="fp16")',
    "SyncBatchNorm": "wrap_model(model, sync_bn=True)",
    "ProcessSet": "new_group(ranks)",
    "start_timeline": "timeline(path)",
}


def is_collective(symbol: str) -> bool:
    """Return whether all ranks must call one of ``horovod.torch``'s names, as far as that can be said of a name."""
    return symbol not in PLAIN_CALLS or symbol == "barrier"


def hint(name: str) -> str:
    """Return the hint for a name that Horovod has and unidist has not."""
    instead = _OTHERS.get(name) or PLAIN_CALLS.get(name, "") + "()"
    known = f"; Horovod's hvd.{name} is unidist.{instead}: docs/hvd-to-unidist.md, or `import unidist.hvd as hvd`"
    return known if instead != "()" else ""


def directory() -> str:
    """Return the directory for PYTHONPATH by which all programs find the drop-in as ``horovod``: scripts, console
    scripts, and the processes that they start.
    """
    return str(Path(__file__).parent / "hvd" / "as_horovod")


def export_directory() -> None:
    """Let the processes that this one starts find it: by their environment, those of multiprocessing by sys.path."""
    path = directory()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")]))
    sys.path[:] = [entry for entry in sys.path if entry != path]
    sys.path.insert(1, path)  # before Horovod


def drop_in_name(name: str) -> str | None:
    """Return the drop-in's name for one of Horovod's; None where it has none."""
    for prefix, module in _MODULES.items():
        if name == prefix:
            return module
        if name.startswith(f"{prefix}."):
            return module + name[len(prefix) :]
    return None
