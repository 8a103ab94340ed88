"""A DataLoader's share for this rank."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from unidist.context import current


class ShardSampler(Sampler[int]):
    """This rank's indices of a dataset, interleaved with the other ranks'.

    The order is that of one process: the union of the ranks' k-th batches is the k-th batch of a single
    process with a batch ``world_size`` times as large. Each iteration starts the next epoch.

    Args:
        length: number of samples of the dataset.
        rank, world_size: which of how many shares.
        shuffle: draw a new order each epoch, from ``seed`` and the epoch alone.
        seed: the same on every rank.
        drop_last: leave out the last samples that do not make a whole round over the ranks.
        pad: fill the last round with samples from the epoch's beginning, so that all shares are equally long.
    """

    def __init__(
        self, length: int, rank: int, world_size: int, *, shuffle: bool, seed: int, drop_last: bool, pad: bool
    ) -> None:
        self.length = length
        self.rank = rank
        self.world_size = world_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.pad = pad
        #: The epoch that the next iteration will be.
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration this epoch; without this, epochs count up from 0 by themselves."""
        self.epoch = epoch

    def __len__(self) -> int:
        if self.drop_last:
            return self.length // self.world_size
        if self.pad:
            return -(-self.length // self.world_size)
        return len(range(self.rank, self.length, self.world_size))

    def __iter__(self) -> Iterator[int]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            order = torch.randperm(self.length, generator=generator)
        else:
            order = torch.arange(self.length)
        places = self.rank + self.world_size * torch.arange(len(self))
        # Places past the end wrap around; there are some only when padding.
        return iter(order[places % max(1, self.length)].tolist())


def shard_loader(
    loader: DataLoader[Any],
    *,
    shuffle: bool | None = None,
    seed: int = 0,
    drop_last: bool | None = None,
    pad: bool | None = None,
) -> DataLoader[Any]:
    """A DataLoader like ``loader`` that yields this rank's share of the samples.

    The batch size stays: it is each rank's. Order and workers' seeds follow from ``seed`` alone and leave the
    global random state untouched. Each iteration is a new epoch; ``loader.sampler.set_epoch`` is there for
    whoever counts epochs otherwise. Not collective, but every rank must pass the same arguments.

    Args:
        loader: over a map-style dataset, with torch's default samplers.
        shuffle: draw a new order each epoch. Default: as ``loader`` does.
        seed: of the order and the workers; the same on every rank.
        drop_last: drop what does not fill a batch on every rank. Default: as ``loader`` does.
        pad: repeat samples so that every rank has the same number of batches, which training needs. ``False``
            gives every sample to exactly one rank, for evaluation: shares then differ in length by up to one
            sample, and are empty on some ranks if the world is larger than the dataset. Default: ``not drop_last``.

    Raises:
        TypeError: an iterable dataset, or a custom sampler or batch sampler.
        ValueError: ``pad=True`` with ``drop_last=True``, or padding an empty dataset.
    """
    _check_shardable(loader)
    place = current().topology
    length = len(loader.dataset)  # type: ignore[arg-type]
    drop_last = loader.drop_last if drop_last is None else drop_last
    pad = (not drop_last) if pad is None else pad
    if pad and drop_last:
        raise ValueError(
            "shard_loader(pad=True, drop_last=True): the last samples can be repeated or dropped, not both."
        )
    if pad and length == 0:
        raise ValueError("shard_loader cannot pad an empty dataset: pass pad=False if it may be empty.")
    sampler = ShardSampler(
        length,
        place.rank,
        place.world_size,
        shuffle=isinstance(loader.sampler, RandomSampler) if shuffle is None else shuffle,
        seed=seed,
        drop_last=drop_last,
        pad=pad,
    )
    newer: dict[str, Any] = {"in_order": loader.in_order} if hasattr(loader, "in_order") else {}
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=_worker_seeds(seed, place.rank),
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        **newer,
    )


def _worker_seeds(seed: int, rank: int) -> torch.Generator:
    """What seeds the workers: another generator for each rank, the same in every run."""
    # torch's generator takes 32 bits, so seed and rank are mixed into as many.
    return torch.Generator().manual_seed(random.Random(f"{seed} {rank}").getrandbits(32))


def _check_shardable(loader: DataLoader[Any]) -> None:
    if isinstance(loader.dataset, IterableDataset):
        raise TypeError("shard_loader needs a map-style dataset: an IterableDataset has no indices to share out.")
    if loader.batch_size is None and loader.batch_sampler is not None:
        raise TypeError(
            f"shard_loader cannot share out the batch sampler {type(loader.batch_sampler).__name__}: pass batch_size= to the DataLoader."
        )
    sampler = loader.sampler
    plain = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    )
    if not plain:
        raise TypeError(
            f"shard_loader cannot share out the sampler {type(sampler).__name__}: pass shuffle= to the DataLoader instead "
            "(a DistributedSampler's work is done here)."
        )
