"""Collective calls, and metrics over all ranks."""

from unidist.collectives.operations import (
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

__all__ = [
    "all_gather", "all_gather_object", "all_reduce", "all_reduce_", "all_to_all", "barrier", "broadcast",
    "broadcast_object", "new_group", "reduce_scatter",
]  # fmt: skip
