"""One training script, any launcher, any backend."""

import re
from importlib import import_module
from typing import TYPE_CHECKING, Any

from unidist import horovod_names, moved

# The public names, here and nowhere else. A module is imported when one of its names is first asked for: the command
# line answers without importing torch.
if TYPE_CHECKING:
    from unidist import elastic as elastic
    from unidist import hvd as hvd
    from unidist.backends.base import Group as Group
    from unidist.checkpoint.checkpoint import latest_checkpoint as latest_checkpoint
    from unidist.checkpoint.checkpoint import load_checkpoint as load_checkpoint
    from unidist.checkpoint.checkpoint import save_checkpoint as save_checkpoint
    from unidist.collectives.metric_reduction import allreduce_metric as allreduce_metric
    from unidist.collectives.operations import all_gather as all_gather
    from unidist.collectives.operations import all_gather_object as all_gather_object
    from unidist.collectives.operations import all_reduce as all_reduce
    from unidist.collectives.operations import all_reduce_ as all_reduce_
    from unidist.collectives.operations import all_to_all as all_to_all
    from unidist.collectives.operations import barrier as barrier
    from unidist.collectives.operations import broadcast as broadcast
    from unidist.collectives.operations import broadcast_ as broadcast_
    from unidist.collectives.operations import broadcast_object as broadcast_object
    from unidist.collectives.operations import first_rank as first_rank
    from unidist.collectives.operations import new_group as new_group
    from unidist.collectives.operations import reduce_scatter as reduce_scatter
    from unidist.collectives.running_metrics import Accuracy as Accuracy
    from unidist.collectives.running_metrics import Mean as Mean
    from unidist.collectives.running_metrics import Sum as Sum
    from unidist.collectives.running_metrics import wrap_metric as wrap_metric
    from unidist.console import RankFilter as RankFilter
    from unidist.console import print as print
    from unidist.console import progress as progress
    from unidist.context import backend_name as backend_name
    from unidist.context import device as device
    from unidist.context import init as init
    from unidist.context import is_initialized as is_initialized
    from unidist.context import is_main as is_main
    from unidist.context import local_rank as local_rank
    from unidist.context import local_size as local_size
    from unidist.context import node_rank as node_rank
    from unidist.context import num_nodes as num_nodes
    from unidist.context import rank as rank
    from unidist.context import shutdown as shutdown
    from unidist.context import timeline as timeline
    from unidist.context import world_size as world_size
    from unidist.data import ShardLoader as ShardLoader
    from unidist.data import shard_loader as shard_loader
    from unidist.errors import BackendError as BackendError
    from unidist.errors import CheckpointError as CheckpointError
    from unidist.errors import CollectiveError as CollectiveError
    from unidist.errors import LaunchError as LaunchError
    from unidist.errors import MismatchError as MismatchError
    from unidist.errors import NotInitializedError as NotInitializedError
    from unidist.errors import UnidistError as UnidistError
    from unidist.errors import WorldSizeError as WorldSizeError
    from unidist.gradients.wrapper import WrappedModel as WrappedModel
    from unidist.run.spawn import spawn as spawn
    from unidist.seed import set_seed as set_seed
    from unidist.training.join import join as join
    from unidist.training.model import assert_in_sync as assert_in_sync
    from unidist.training.model import broadcast_model_state as broadcast_model_state
    from unidist.training.model import broadcast_optimizer_state as broadcast_optimizer_state
    from unidist.training.model import global_mean as global_mean
    from unidist.training.model import no_sync as no_sync
    from unidist.training.model import replicate as replicate
    from unidist.training.model import unwrap as unwrap
    from unidist.training.model import wrap_model as wrap_model
    from unidist.training.prepare import prepare as prepare

__version__ = "0.1.0"

#: The module of each public name, by the imports above.
_MODULES: dict[str, str] = {
    name: module
    for module, name in re.findall(
        r"^    from (unidist\.[\w.]+) import \w+ as (\w+)$",
        __loader__.get_source(__name__),  # type: ignore[name-defined]
        re.MULTILINE,
    )
}
#: Without print: ``from unidist import *`` must not replace Python's.
__all__ = sorted({*_MODULES} - {"print"})


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
moved.find()


if not TYPE_CHECKING:  # for which an unknown name is an error

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            value = globals()[name] = getattr(import_module(_MODULES[name]), name)
            return value
        try:
            return import_module(f"unidist.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"unidist.{name}":
                raise
        raise AttributeError(f"module 'unidist' has no attribute {name!r}{horovod_names.hint(name)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "print"})
