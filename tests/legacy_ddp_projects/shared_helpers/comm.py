"""Wrappers that work with and without a process group."""

import torch
import torch.distributed as dist


def start():
    dist.init_process_group(backend="gloo", init_method="env://")
    synchronize()


def synchronize():
    """Wait for all processes."""
    if not dist.is_available():
        return
    if not dist.is_initialized():
        return
    if dist.get_world_size() == 1:
        return
    dist.barrier()


def average(value):
    if not dist.is_initialized():
        return value
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.item() / dist.get_world_size()


def all_gather(data):
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if world_size == 1:
        return [data]
    output = [None for _ in range(world_size)]
    dist.all_gather_object(output, data)
    return output
