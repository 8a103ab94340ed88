"""The shard of what a sampler or batch sampler draws."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import RandomSampler, Sampler, SequentialSampler

from unidist.data.sharding import Position, Progress, Sharding, mix_seeds


class ShardSampler(Sampler[Any]):
    """This rank's shard of the items that ``source`` draws: indices, or the batches of a batch sampler.

    Every rank draws the whole epoch, from ``seed`` and the epoch alone, and takes its items. The global random state is
    left untouched.

    Args:
        source: a sampler or batch sampler with a length. What it draws at random must come from its ``generator``
            attribute or from the global generators of torch, Python or NumPy.
        sharding: how the epoch is divided.
        seed: the same on every rank.
    """

    def __init__(self, source: Any, sharding: Sharding, seed: int) -> None:
        self.source = source
        self.sharding = sharding
        self.seed = seed
        #: Each iteration is the next epoch; the loader counts what it has yielded of it.
        self.progress = Progress()

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration this epoch; without this call, epochs count up from 0."""
        self.progress.set_epoch(epoch)

    def total(self) -> int:
        """The number of items of a whole epoch, over all ranks."""
        return len(self.source)

    def __len__(self) -> int:
        return self.sharding.length(self.total() - self.progress.iteration.position)

    def __iter__(self) -> Iterator[Any]:
        start = self.progress.begin()
        order = self._draw(start.epoch)
        first = start.position + self.sharding.rank
        for turn in range(self.sharding.length(len(order) - start.position)):
            # An index past the end wraps around: padding.
            yield order[(first + turn * self.sharding.world_size) % len(order)]

    def order(self) -> str:
        """A description that differs between orders of one seed."""
        return f"{self.total()} items of {type(self.source).__name__}"

    def _draw(self, epoch: int) -> Sequence[Any]:
        source = self.source
        if type(source) is SequentialSampler:
            return range(len(source))
        if is_shuffle(source):  # the order of DistributedSampler
            order = torch.randperm(len(source), generator=torch.Generator().manual_seed(self.seed + epoch))
            return _Integers(order)
        with _seeded(source, mix_seeds(self.seed, epoch)):
            if hasattr(source, "set_epoch"):
                source.set_epoch(epoch)
            items = list(source)
        if len(items) != len(source):
            raise ValueError(
                f"{type(source).__name__} has length {len(source)} and drew {len(items)} items: its items cannot be "
                "divided among the ranks."
            )
        return items


class StatefulShardSampler(ShardSampler):
    """``ShardSampler`` for torchdata's ``StatefulDataLoader``, which saves and restores the state of its sampler.

    Each iteration is the next epoch.
    """

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            self.progress.consumed += self.sharding.world_size
            yield item
        self.progress.end()

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how many items of it all ranks have drawn; the same on every rank that has drawn as many."""
        epoch, position = self.progress.current()
        return {"epoch": epoch, "position": min(position, self.total())}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Make the next iteration the rest of the epoch of a saved state, on a world of any size."""
        self.progress.seek(Position(state["epoch"], state["position"]))


class _Integers(Sequence[int]):
    """A tensor of indices, in a fourth of the memory of a list."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: Any) -> Any:
        return int(self._values[index])


def is_shuffle(sampler: object) -> bool:
    """Whether a sampler draws every index once in random order: what ``shuffle=True`` makes."""
    return (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    )


@contextmanager
def _seeded(source: Any, seed: int) -> Iterator[None]:
    """Seed all generators that a sampler may draw from, and restore their states afterwards."""
    parts: list[Any] = [source, getattr(source, "sampler", None)]
    owners = [part for part in parts if isinstance(getattr(part, "generator", None), torch.Generator)]
    before = [part.generator for part in owners]
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        if numpy:
            numpy.random.seed(seed)
        for part in owners:
            part.generator = torch.Generator().manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy:
                numpy.random.set_state(numpy_state)
            for part, generator in zip(owners, before):
                part.generator = generator
