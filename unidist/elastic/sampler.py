"""A sampler that knows which samples of the epoch have been processed, and shares the others among the ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

import torch

from unidist.context import rank, world_size
from unidist.data.sharding import Sharding


class ElasticSampler(torch.utils.data.Sampler[int]):
    """This rank's share of the samples of an epoch that have not been processed.

    As part of a ``TorchState`` it follows the workers: when they change, what is left of the epoch is shared among
    those that train then. With ``record_batch`` before each ``state.commit()``, each sample of an epoch is in exactly
    one committed batch, whatever comes and goes; only at the end of the epoch up to ``world size - 1`` samples are
    repeated, so that all ranks have as many.

    Args:
        dataset: of constant size.
        shuffle: whether each epoch has a random order of its own.
        seed: of that order, the same on every rank.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        #: Samples of this epoch that all ranks together have processed.
        self.processed_num = 0
        self.num_replicas = self.rank = self.num_samples = self.total_size = 0
        #: What is left of the epoch, in its order.
        self.remaining_indices: list[int] = []
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. Call it at the end of the one before, when all of that has been processed."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that every rank has processed a batch.

        Args:
            batch_idx: its number; of no effect.
            batch_size: samples of each rank.
        """
        self.processed_num += batch_size * self.num_replicas

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the sampler was whose ``state_dict`` this is, on a world of any size."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and how many of its samples have been processed."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def reset(self) -> None:
        """Share what is left of the epoch among the ranks that there are now."""
        self.num_replicas, self.rank = world_size(), rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        # The k-th batches of all ranks are consecutive: what has been processed is the first part of the epoch.
        self.num_samples = Sharding(self.rank, self.num_replicas, pad=True).length(len(self.remaining_indices))
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        left = self.remaining_indices
        for position in range(self.rank, self.total_size, self.num_replicas):
            yield left[position % len(left)]

    def __len__(self) -> int:
        return self.num_samples
