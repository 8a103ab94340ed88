"""The drop-in for ``horovod.torch``: Horovod's calls on ``torch.distributed``, with no Horovod installed.

    import unidist.hvd as hvd

``python -m unidist.hvd train.py`` runs a script whose imports still say ``horovod``.
"""

from unidist.hvd import compression, elastic, functions, mpi_ops, optimizer, sync_batch_norm
from unidist.hvd.common.util import check_extension
from unidist.hvd.functions import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
from unidist.hvd.mpi_ops import *  # noqa: F403 - what it has is in its __all__
from unidist.hvd.optimizer import DistributedOptimizer
from unidist.hvd.run import run as run  # not in __all__: no name of horovod.torch's, which "import *" would bring
from unidist.hvd.sync_batch_norm import SyncBatchNorm

__all__ = [
    "DistributedOptimizer", "SyncBatchNorm", "allgather_object", "broadcast_object", "broadcast_optimizer_state",
    "broadcast_parameters", "check_extension", "compression", "elastic", "functions", "mpi_ops", "optimizer",
    "sync_batch_norm",
]  # fmt: skip
__all__ += mpi_ops.__all__
