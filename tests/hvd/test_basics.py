import json
import os
import time
from pathlib import Path

import torch

from tests.hvd.api import REAL, hvd


def test_place(rank: int, size: int) -> None:
    assert hvd.is_initialized()
    assert 0 <= rank < size == int(os.environ.get("WORLD_SIZE", size))
    # All on one host.
    assert (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (rank, size, 0, 1)
    assert hvd.mpi_ops.is_homogeneous()
    assert hvd.init() is None  # again


def test_what_is_there(rank: int, size: int) -> None:
    assert hvd.mpi_enabled() != hvd.gloo_enabled()
    assert hvd.gloo_built() and hvd.mpi_built()
    if hvd.mpi_enabled() or not REAL:  # Horovod on Gloo raises
        assert hvd.mpi_threads_supported() in (True, False)
    for name in ("ccl_built", "ddl_built", "rocm_built", "cuda_built"):
        assert getattr(hvd, name)() in (True, False)
    assert hvd.nccl_built() in (0, False) or torch.cuda.is_available()
    assert [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product] == [0, 1, 2, 3, 4, 5]
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    hvd.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", hvd.__file__, "mpi_lib_v2")
    tensor = torch.ones(2)
    for compressor in (hvd.Compression.none, hvd.Compression.fp16):
        compressed, ctx = compressor.compress(tensor)
        assert torch.equal(compressor.decompress(compressed, ctx), tensor)
    assert hvd.compression.Compression is hvd.Compression
    assert hvd.functions.broadcast_parameters is hvd.broadcast_parameters
    assert hvd.optimizer.DistributedOptimizer is hvd.DistributedOptimizer
    assert hvd.sync_batch_norm.SyncBatchNorm is hvd.SyncBatchNorm


def test_timeline(rank: int, size: int, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    hvd.start_timeline(str(path), mark_cycles=False)
    hvd.barrier()
    hvd.allreduce(torch.ones(1), name="traced")
    hvd.barrier()
    hvd.stop_timeline()
    if rank > 0:
        return
    end = time.monotonic() + 10
    while "allreduce.traced" not in path.read_text():
        assert time.monotonic() < end
        time.sleep(0.05)
    if not REAL:  # Horovod leaves the list open, as Chrome allows
        rows = [event["args"]["name"] for event in json.loads(path.read_text()) if event["ph"] == "M"]
        assert "allreduce.traced" in rows
