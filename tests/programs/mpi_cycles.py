"""Make and end many worlds with a group each: ``mpi_cycles.py CYCLES``. Communicators that leak run out at about 2,000."""

import sys
import threading

import psutil
import torch
import torch.distributed as dist

import unidist

cycles = int(sys.argv[1])
unidist.init("mpi")
rank, size = unidist.rank(), unidist.world_size()
backend, store = dist.get_backend(), dist.distributed_c10d._get_default_store()
memory = 0
for cycle in range(cycles):
    dist.destroy_process_group()
    here = dist.PrefixStore(f"cycle {cycle}", store)
    dist.init_process_group(backend, store=here, rank=rank, world_size=size)
    group = dist.new_group()
    for numel in (1, 10_000):  # the second needs a thread
        tensor = torch.ones(numel)
        dist.all_reduce(tensor, group=group)
        dist.all_reduce(tensor)
        assert tensor[0].item() == size**2
    if cycle == cycles // 5:  # by then all pools have their size
        memory = psutil.Process().memory_info().rss
grown = (psutil.Process().memory_info().rss - memory) / 2**20
threads = sum(thread.name.startswith("unidist") for thread in threading.enumerate())
sys.stdout.write(f"rank {rank}: {cycles} cycles, {threads} threads left, {grown:.0f} MiB grown\n")
unidist.shutdown()
