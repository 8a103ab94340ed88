"""Make and end many worlds with a group each: ``mpi_cycles.py CYCLES SPARE``.

With SPARE above 0, only so many communicators of the MPI library are left: worlds that leak them run out.
"""

import sys
import threading

import psutil
import torch
import torch.distributed as dist

import unidist

cycles, spare = map(int, sys.argv[1:])
unidist.init("mpi")
rank, size = unidist.rank(), unidist.world_size()
backend, store = dist.get_backend(), dist.distributed_c10d._get_default_store()


def use_up_communicators() -> int:
    """Make communicators until there are no more, and free some; how many could be made."""
    from mpi4py import MPI  # not before init(), which picks the library

    made = []
    try:
        while True:
            made.append(MPI.COMM_WORLD.Dup())
    except MPI.Exception:
        for comm in made[-spare:]:
            comm.Free()
    return len(made)


memory, most = 0, use_up_communicators() if spare else None
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
sys.stdout.write(
    f"rank {rank}: {cycles} cycles, {threads} threads left, {grown:.0f} MiB grown, most communicators: {most}\n"
)
unidist.shutdown()
