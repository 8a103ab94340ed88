"""The drop-in for ``horovod.torch``: Horovod's calls on ``torch.distributed``, with no Horovod installed.

    import unidist.hvd as hvd

``python -m unidist.hvd train.py`` runs a script whose imports still say ``horovod``.
"""

from unidist.hvd import compression, elastic, functions, mpi_ops, optimizer, sync_batch_norm
from unidist.hvd.basics import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from unidist.hvd.common.exceptions import HorovodInternalError
from unidist.hvd.common.util import check_extension
from unidist.hvd.compression import Compression
from unidist.hvd.functions import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
from unidist.hvd.mpi_ops import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    poll,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
    synchronize,
)
from unidist.hvd.optimizer import DistributedOptimizer
from unidist.hvd.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from unidist.hvd.run import run
from unidist.hvd.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Adasum", "Average", "Compression", "DistributedOptimizer", "HorovodInternalError", "Max", "Min", "ProcessSet",
    "Product", "Sum", "SyncBatchNorm", "add_process_set", "allgather", "allgather_async", "allgather_object",
    "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall", "alltoall_async", "barrier",
    "broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "broadcast_object", "broadcast_optimizer_state",
    "broadcast_parameters", "ccl_built", "check_extension", "compression", "cross_rank", "cross_size", "cuda_built",
    "ddl_built", "elastic", "functions", "global_process_set", "gloo_built", "gloo_enabled", "grouped_allgather",
    "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async",
    "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async", "init", "is_initialized",
    "join", "local_rank", "local_size", "mpi_built", "mpi_enabled", "mpi_ops", "mpi_threads_supported", "nccl_built",
    "optimizer", "poll", "rank", "reducescatter", "reducescatter_async", "remove_process_set", "rocm_built", "run",
    "shutdown", "size", "sparse_allreduce_async", "start_timeline", "stop_timeline", "sync_batch_norm", "synchronize",
]  # fmt: skip
