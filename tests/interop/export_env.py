"""Accelerate after unidist.init(), under a launcher that it does not know."""

import os

import torch.distributed as dist
from accelerate import Accelerator

import unidist
from unidist import context

NAMES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR",
         "MASTER_PORT", "TORCHELASTIC_RUN_ID", "ACCELERATE_USE_CPU"}  # fmt: skip


def are_set() -> dict[str, str]:
    """Those of the names that are in the environment."""
    return {name: os.environ[name] for name in NAMES if name in os.environ}


unidist.init()  # warns
assert not are_set()
unidist.shutdown()

os.environ["GROUP_RANK"] = "of another world"
unidist.init(export_env=True)
assert are_set().keys() == NAMES and os.environ["GROUP_RANK"] == "0"
accelerator = Accelerator()
assert accelerator.num_processes == unidist.world_size() == 2 and accelerator.process_index == unidist.rank()
assert context.current().topology.launcher == "openmpi"
unidist.barrier()
unidist.shutdown()
assert are_set() == {"GROUP_RANK": "of another world"}

# A group of the script's own finds the store at MASTER_PORT.
del os.environ["GROUP_RANK"]
unidist.init("mpi", export_env=True)
assert are_set().keys() == NAMES
store, rank, size = next(dist.rendezvous("env://"))
store.set(f"from {rank}", "there")
assert store.get(f"from {1 - rank}") == b"there" and size == 2
unidist.shutdown()
print("EXPORTED", flush=True)
