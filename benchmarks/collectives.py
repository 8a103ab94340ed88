"""Collectives from 4 B to 256 MB, beside the raw libraries' calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import unidist
from benchmarks import peers
from benchmarks.measure import OURS, Case, alternate

SIZES = [4, 1024, 64 * 1024, 1024**2, 16 * 1024**2, 256 * 1024**2]
QUICK_SIZES = SIZES[:-1]
OURS_BY_NAME: dict[str, Callable[[Tensor], Tensor]] = {
    "all_reduce": unidist.all_reduce,
    "all_reduce_": unidist.all_reduce_,
    "all_gather": unidist.all_gather,
    "broadcast": unidist.broadcast,
}


def cases(world: str, rounds: int, quick: bool) -> Iterator[Case]:
    """Yield one case for each operation and size; of all_gather, the size is the result's."""
    for operation in OURS_BY_NAME:
        for nbytes in QUICK_SIZES if quick else SIZES:
            yield measure("collectives", world, operation, nbytes, rounds)


def measure(suite: str, world: str, operation: str, nbytes: int, rounds: int) -> Case:
    """Return the case of an operation at a size."""
    ours, raw = OURS_BY_NAME[operation], operation.rstrip("_")
    whole = max(1, nbytes // 4)
    numel = max(1, whole // unidist.world_size()) if raw == "all_gather" else whole
    tensor = torch.zeros(numel, device=unidist.device())
    seconds = alternate({OURS: lambda: ours(tensor), **dict(peers.collectives(raw, tensor))}, rounds)
    bus = nbytes * bus_factor(raw, unidist.world_size())
    return Case(suite, world, f"{operation} {size_name(nbytes)}", seconds, bus)


def bus_factor(operation: str, ranks: int) -> float:
    """Return bus bandwidth over algorithm bandwidth, by nccl-tests' doc/PERFORMANCE.md."""
    factors = {"all_reduce": 2 * (ranks - 1) / ranks, "all_gather": (ranks - 1) / ranks, "broadcast": 1.0}
    return factors[operation]


def size_name(nbytes: int) -> str:
    """Return a size as text: 4 B, 64 KiB, 16 MiB."""
    for unit in ("B", "KiB"):
        if nbytes < 1024:
            return f"{nbytes} {unit}"
        nbytes //= 1024
    return f"{nbytes} MiB"
