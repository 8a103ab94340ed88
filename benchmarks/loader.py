"""Iterating over a rank's shard of a dataset in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import unidist
from benchmarks import peers
from benchmarks.measure import OURS, Case, alternate

#: Samples on each rank, and in a batch.
SAMPLES, BATCH = 8192, 32


def cases(world: str, rounds: int, quick: bool) -> Iterator[Case]:
    """Yield one epoch, shuffled, in this process."""
    dataset = TensorDataset(torch.randn(SAMPLES * unidist.world_size(), 8))

    def make(**how: Any) -> DataLoader[Any]:
        return DataLoader(dataset, batch_size=BATCH, **how)

    loaders = {OURS: unidist.shard_loader(make(shuffle=True)), **dict(peers.loaders(make))}

    def epoch(loader: DataLoader[Any]) -> Callable[[], object]:
        return lambda: sum(1 for _ in loader)

    for name, loader in loaders.items():
        if epoch(loader)() != SAMPLES // BATCH:
            raise AssertionError(f"{name} does not yield {SAMPLES // BATCH} batches")
    seconds = alternate({name: epoch(loader) for name, loader in loaders.items()}, rounds)
    yield Case("loader", world, f"epoch of {SAMPLES // BATCH} batches", seconds)
