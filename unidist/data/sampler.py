"""This rank's share of what a sampler or batch sampler draws."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import RandomSampler, Sampler, SequentialSampler

from unidist.data.shares import Cursor, Shares, mixed


class ShardSampler(Sampler[Any]):
    """This rank's share of the items that ``source`` draws: indices, or the batches of a batch sampler.

    Every rank draws the whole epoch, from ``seed`` and the epoch alone, and takes its places. The global random
    state stays as it is. Each iteration is the next epoch.

    Args:
        source: a sampler or batch sampler with a length. What it draws at random must come from its ``generator``
            attribute or from the global generators of torch, Python or NumPy.
        shares: the rule by which the ranks share.
        seed: the same on every rank.
    """

    def __init__(self, source: Any, shares: Shares, seed: int) -> None:
        self.source = source
        self.shares = shares
        self.seed = seed
        self.cursor = Cursor()
        self._begun: Cursor | None = None
        self._taken = 0

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration this epoch; without this, epochs count up from 0 by themselves."""
        self.cursor.set_epoch(epoch)

    def total(self) -> int:
        """The number of items of a whole epoch, over all ranks."""
        return len(self.source)

    def __len__(self) -> int:
        return self.shares.length(self.total() - self.cursor.position)

    def __iter__(self) -> Iterator[Any]:
        begun = self.cursor.begin()
        self._begun, self._taken = begun, 0
        order = self._draw(begun.epoch)
        first = begun.position + self.shares.rank
        for turn in range(self.shares.length(len(order) - begun.position)):
            self._taken += 1
            # Places past the end wrap around; there are some only when padding.
            yield order[(first + turn * self.shares.world_size) % len(order)]
        self._begun = None

    def order(self) -> str:
        """What tells this order from others of the same seed."""
        return f"{self.total()} items of {type(self.source).__name__}"

    def state_dict(self) -> dict[str, int]:
        """Epoch, and items taken of it over all ranks; the same on every rank that took as many."""
        if self._begun is None:
            return {"epoch": self.cursor.epoch, "position": self.cursor.position}
        position = self._begun.position + self._taken * self.shares.world_size
        return {"epoch": self._begun.epoch, "position": min(self.total(), position)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Make the next iteration the rest of the epoch that ``state_dict`` told of; the world may have another size."""
        self.cursor = Cursor(state["epoch"], state["position"])
        self._begun = None

    def _draw(self, epoch: int) -> Sequence[Any]:
        source = self.source
        if type(source) is SequentialSampler:
            return range(len(source))
        if is_shuffle(source):  # the order of DistributedSampler
            order = torch.randperm(len(source), generator=torch.Generator().manual_seed(self.seed + epoch))
            return _Integers(order)
        with _seeded(source, mixed(self.seed, epoch)):
            if hasattr(source, "set_epoch"):
                source.set_epoch(epoch)
            items = list(source)
        if len(items) != len(source):
            raise ValueError(
                f"{type(source).__name__} has length {len(source)} and drew {len(items)} items: the ranks cannot share it."
            )
        return items


class _Integers(Sequence[int]):
    """A tensor of indices, which takes a fourth of the memory of a list."""

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
    """Inside, everything that a sampler may draw from starts at ``seed``; outside, nothing has changed."""
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
