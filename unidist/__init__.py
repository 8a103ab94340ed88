"""One training script, any launcher, any backend."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unidist.backends.base import Group, WrappedModel
    from unidist.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
    from unidist.collectives import (
        all_gather,
        all_gather_object,
        all_reduce,
        all_reduce_,
        all_to_all,
        barrier,
        broadcast,
        broadcast_object,
        new_group,
        reduce_scatter,
    )
    from unidist.console import RankFilter, progress
    from unidist.console import print as print
    from unidist.context import (
        backend_name,
        device,
        init,
        is_initialized,
        is_main,
        local_rank,
        local_size,
        node_rank,
        num_nodes,
        rank,
        shutdown,
        timeline,
        world_size,
    )
    from unidist.data import ShardLoader, shard_loader
    from unidist.errors import (
        BackendError,
        CheckpointError,
        CollectiveError,
        LaunchError,
        MismatchError,
        NotInitializedError,
        UnidistError,
        WorldSizeError,
    )
    from unidist.metric_reduction import allreduce_metric
    from unidist.model import (
        assert_in_sync,
        broadcast_model_state,
        broadcast_optimizer_state,
        global_mean,
        no_sync,
        replicate,
        unwrap,
        wrap_model,
    )
    from unidist.multiprocessing import spawn
    from unidist.preparation import prepare
    from unidist.running_metrics import Accuracy, Mean, Sum, wrap_metric
    from unidist.seed import set_seed
    from unidist.uneven import join

__version__ = "0.1.0"

#: Where each public name is. A module is imported when one of its names is first asked for: the command line answers
#: without importing torch.
_MODULES = {
    "backends.base": ("Group", "WrappedModel"),
    "checkpoint": ("latest_checkpoint", "load_checkpoint", "save_checkpoint"),
    "collectives": (
        "all_gather",
        "all_gather_object",
        "all_reduce",
        "all_reduce_",
        "all_to_all",
        "barrier",
        "broadcast",
        "broadcast_object",
        "new_group",
        "reduce_scatter",
    ),
    "console": ("RankFilter", "print", "progress"),
    "context": (
        "backend_name",
        "device",
        "init",
        "is_initialized",
        "is_main",
        "local_rank",
        "local_size",
        "node_rank",
        "num_nodes",
        "rank",
        "shutdown",
        "timeline",
        "world_size",
    ),
    "data": ("ShardLoader", "shard_loader"),
    "errors": (
        "BackendError",
        "CheckpointError",
        "CollectiveError",
        "LaunchError",
        "MismatchError",
        "NotInitializedError",
        "UnidistError",
        "WorldSizeError",
    ),
    "uneven": ("join",),
    "multiprocessing": ("spawn",),
    "preparation": ("prepare",),
    "running_metrics": ("Accuracy", "Mean", "Sum", "wrap_metric"),
    "metric_reduction": ("allreduce_metric",),
    "model": (
        "assert_in_sync",
        "broadcast_model_state",
        "broadcast_optimizer_state",
        "global_mean",
        "no_sync",
        "replicate",
        "unwrap",
        "wrap_model",
    ),
    "seed": ("set_seed",),
}

# Without print: `from unidist import *` must not replace Python's.
__all__ = [
    "Accuracy",
    "BackendError",
    "CheckpointError",
    "CollectiveError",
    "Group",
    "LaunchError",
    "Mean",
    "MismatchError",
    "NotInitializedError",
    "RankFilter",
    "ShardLoader",
    "Sum",
    "UnidistError",
    "WorldSizeError",
    "WrappedModel",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_reduce_",
    "all_to_all",
    "allreduce_metric",
    "assert_in_sync",
    "backend_name",
    "barrier",
    "broadcast",
    "broadcast_model_state",
    "broadcast_object",
    "broadcast_optimizer_state",
    "device",
    "global_mean",
    "init",
    "is_initialized",
    "is_main",
    "join",
    "latest_checkpoint",
    "load_checkpoint",
    "local_rank",
    "local_size",
    "new_group",
    "no_sync",
    "node_rank",
    "num_nodes",
    "prepare",
    "progress",
    "rank",
    "reduce_scatter",
    "replicate",
    "save_checkpoint",
    "set_seed",
    "shard_loader",
    "shutdown",
    "spawn",
    "timeline",
    "unwrap",
    "world_size",
    "wrap_metric",
    "wrap_model",
]


def _warn_of_another_unidist() -> None:
    import sys
    from pathlib import Path
    from warnings import warn

    # Modin's engine has the same import name, and these files.
    others = [path for path in sys.path if Path(path, "unidist", "core", "base").is_dir()]
    if others:
        warn(
            f"another distribution with the import name unidist is installed in {others[0]}: one of the two replaces "
            "files of the other, or hides it. Keep one: pip uninstall unidist, then install unidist-torch again.",
            stacklevel=3,
        )


_warn_of_another_unidist()


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"unidist.{module}"), name)
            return value
    if name in _MODULES or name in ("backends", "batch_norm", "elastic", "knobs", "topology", "tree"):
        return import_module(f"unidist.{name}")
    raise AttributeError(f"module 'unidist' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "print"})
