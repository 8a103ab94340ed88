"""The shard of what a sampler or batch sampler draws."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.utils.data import RandomSampler, Sampler, SequentialSampler

from unidist.data.permutation import FeistelPermutation
from unidist.data.sharding import Position, Progress, Sharding, mix_seeds

#: How a shuffled order is drawn.
Permutation = Literal["randperm", "feistel"]
#: Number of samples from which it is not drawn as a whole unless the user says so.
_LARGE = 10_000_000
#: Items of this rank that are computed at once: so many that torch's time per call does not count.
_CHUNK = 8192


class ShardSampler(Sampler[Any]):
    """This rank's shard of the items that ``source`` draws: indices, or the batches of a batch sampler.

    Every rank draws the whole epoch, from ``seed`` and the epoch alone, and takes its items; of a Feistel permutation
    it computes its own items only. A sampler that is not torch's may go on from the order it has drawn last, as with
    ``random.shuffle(self.batches)``, so it draws the epochs before first. The global random state is left untouched.

    Args:
        source: a sampler or batch sampler with a length. What it draws at random must come from its ``generator``
            attribute or from the global generators of torch, Python or NumPy.
        sharding: how the epoch is divided.
        seed: the same on every rank.
        permutation: how the order of a shuffled epoch is drawn. Default: by the number of samples.
    """

    def __init__(self, source: Any, sharding: Sharding, seed: int, permutation: Permutation | None = None) -> None:
        self.source = source
        self.sharding = sharding
        self.seed = seed
        self.permutation: Permutation = permutation or ("feistel" if len(source) >= _LARGE else "randperm")
        #: Each iteration is the next epoch; the loader counts what it has yielded of it.
        self.progress = Progress()
        #: Epochs that the source has drawn, and the items of the last one.
        self._drawn = 0
        self._items: list[Any] = []
        #: Whether the next iteration is the last one again, of which no more than one batch has been taken.
        self.repeats = False

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration this epoch; without this call, epochs count up from 0."""
        self.progress.set_epoch(epoch)

    def total(self) -> int:
        """Return the number of items of a whole epoch, over all ranks."""
        return len(self.source)

    def __len__(self) -> int:
        return self.sharding.length(self.total() - self.progress.iteration.position)

    def __iter__(self) -> Iterator[Any]:
        start = self.progress.begin()
        order = self._draw(start.epoch)
        size, total = self.sharding.world_size, len(order)
        first = start.position + self.sharding.rank
        end = first + self.sharding.length(total - start.position) * size
        for low in range(first, min(end, total), _CHUNK * size):
            part = order[low : min(low + _CHUNK * size, end, total) : size]
            yield from part.tolist() if isinstance(part, torch.Tensor) else part
        if end > first and end - size >= total:  # padding wraps around
            at = (end - size) % total
            (item,) = order[at : at + 1]
            yield int(item) if isinstance(item, torch.Tensor) else item

    def order(self) -> str:
        """Return a description that differs between orders of one seed."""
        drawn = " by feistel" if self.permutation == "feistel" and is_shuffle(self.source) else ""
        return f"{self.total()} items of {type(self.source).__name__}{drawn}"

    def is_random(self) -> bool:
        """Return whether epochs may differ: anything but the dataset's order."""
        return type(getattr(self.source, "sampler", self.source)) is not SequentialSampler

    def _draw(self, epoch: int) -> Sequence[Any] | torch.Tensor | FeistelPermutation:
        source = self.source
        if type(source) is SequentialSampler:
            return range(len(source))
        if is_shuffle(source):
            if self.permutation == "feistel":
                return FeistelPermutation(len(source), mix_seeds(self.seed, epoch))
            # The order of DistributedSampler.
            generator = torch.Generator().manual_seed(self.seed + epoch)
            return torch.randperm(len(source), generator=generator, device="cpu")
        repeats, self.repeats = self.repeats, False
        if _is_torchs(source) and _is_torchs(getattr(source, "sampler", None)):
            return self._items_of(source, epoch)
        if repeats and epoch == self._drawn - 1 and len(self._items) == len(source):
            return self._items
        for earlier in range(self._drawn, epoch):
            self._items_of(source, earlier)
        self._drawn, self._items = epoch + 1, self._items_of(source, epoch)
        return self._items

    def _items_of(self, source: Any, epoch: int) -> list[Any]:
        with seeded(source, mix_seeds(self.seed, epoch)):
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
        """Return the epoch, and how many items of it all ranks have drawn; the same on all that have drawn as many."""
        epoch, position = self.progress.current()
        return {"epoch": epoch, "position": min(position, self.total())}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Make the next iteration the rest of the epoch of a saved state, on a world of any size."""
        self.progress.seek(Position(state["epoch"], state["position"]))


def is_shuffle(sampler: object) -> bool:
    """Return whether a sampler draws every index once in random order: what ``shuffle=True`` makes."""
    return (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    )


def _is_torchs(sampler: object) -> bool:
    return sampler is None or type(sampler).__module__ == "torch.utils.data.sampler"


@contextmanager
def seeded(source: Any, seed: int) -> Iterator[None]:
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
