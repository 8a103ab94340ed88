"""A DataLoader that yields this rank's share of the samples, and knows where it stands."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, Sampler, SequentialSampler

from unidist.context import current, is_initialized
from unidist.data.sampler import ShardSampler, is_shuffle
from unidist.data.shares import Cursor, Shares, mixed
from unidist.data.stream import ShardStream, WorkerInit

T = TypeVar("T")


class ShardLoader(DataLoader[T]):
    """What ``shard_loader`` returns: a DataLoader with this rank's share and a position that can be saved.

    Its iterators are typed as yielding the type parameter of the loader that it was made of, ``DataLoader[T]``.

    Each iteration is the next epoch; one that is left after its first batch was a look and does not count. ``len()`` is the
    number of batches that the running iteration yields, else the next one: fewer than a whole epoch's when
    it resumes in the middle.
    """

    def __init__(self, source: ShardSampler | ShardStream, seed: int, **options: Any) -> None:
        self._source = source
        self._seed = seed
        #: Where the running iteration began, and how many batches it has yielded.
        self._begun: Cursor | None = None
        self._yielded = 0
        super().__init__(**options, generator=torch.Generator())

    @property
    def epoch(self) -> int:
        """The epoch of the iteration that was begun last, and once that has come to its end, of the next one; from 0.

        After a ``break`` it is still the epoch that was left, as in ``state_dict()``; the next iteration is the one after it.
        """
        return self._now().epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration this epoch, from its beginning, or from the position that was loaded for it."""
        moved = self._source.cursor.set_epoch(epoch)
        self._begun = None
        if moved:
            self._restart_workers()

    def state_dict(self) -> dict[str, int | str]:
        """Where the run stands: the epoch, and how much of it all ranks together have consumed. Not collective.

        The same on every rank that has taken as many batches. The batch that was yielded last counts as consumed. A state
        saved at an epoch's last batch resumes with an iteration of no batches; one saved after the loop, with the next epoch.
        """
        now = self._now()
        return {
            "epoch": now.epoch,
            "position": now.position,
            "seed": self._seed,
            "order": self._source.order(),
            "workers": self.num_workers,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration what is left of the saved epoch, on a world of any size. Not collective.

        Every sample that was not consumed comes once, and padding as in a whole epoch. The batch size may be another.

        Raises:
            ValueError: the state is of a loader with another seed, or it is in the middle of an epoch and this loader has another
                length or kind of order.
        """
        if state["seed"] != self._seed:
            raise ValueError(
                f"this state is of shard_loader(seed={state['seed']}), and this loader has seed={self._seed}: other orders, in "
                "which the position would repeat some samples and miss others. Pass the same seed."
            )
        if state["position"] and state["order"] != self._source.order():
            raise ValueError(
                f"this state is in the middle of {state['order']}, and this loader has {self._source.order()}: pass the same data, "
                "sampler and shuffle, or resume from a state saved at the end of an epoch."
            )
        if isinstance(self._source, ShardStream):
            if state["position"] and state["workers"] > 1 and not self.num_workers:
                raise ValueError(
                    f"this state is in the middle of a stream that {state['workers']} workers read: resume with num_workers=1 or more."
                )
            self._source.workers_before = state["workers"]
        self._source.cursor = Cursor(state["epoch"], state["position"])
        self._begun = None
        self._restart_workers()

    def __len__(self) -> int:
        total = self._source.total()
        start = self._begun or self._source.cursor
        items = self._source.shares.length(total - start.position)
        if self.batch_size is None:
            return items
        return items // self.batch_size if self.drop_last else -(-items // self.batch_size)

    def __iter__(self) -> Iterator[T]:  # type: ignore[override]
        cursor = self._source.cursor
        if self._begun is not None and self._yielded <= 1:  # it was a look
            cursor = self._source.cursor = self._begun
            self._restart_workers()
        begun = self._begun = replace(cursor)
        self._yielded = 0
        assert self.generator is not None
        # It seeds the workers: other numbers on each rank and in each epoch, the same in every run.
        self.generator.manual_seed(mixed(self._seed, self._source.shares.rank, begun.epoch, begun.position))
        if self.num_workers and self._iterator is None and is_initialized():
            current().quiesce()
        iterator = super().__iter__()
        if isinstance(self._source, ShardStream) and self.num_workers:
            cursor.begin()  # the workers' copies do it for themselves
        return self._counted(iterator, begun)

    def _counted(self, iterator: Iterator[T], begun: Cursor) -> Iterator[T]:
        for batch in iterator:
            if self._begun is begun:
                self._yielded += 1
            yield batch
        if self._begun is begun:
            self._begun = None

    def _now(self) -> Cursor:
        if self._begun is None:
            return self._source.cursor
        step = (self.batch_size or 1) * self._source.shares.world_size
        position = self._begun.position + self._yielded * step
        if isinstance(self._source, ShardSampler):  # a stream's length may be a guess
            position = min(position, self._source.total())
        return Cursor(self._begun.epoch, position)

    def _restart_workers(self) -> None:
        self._iterator = None  # persistent ones know nothing of another position


def shard_loader(
    loader: DataLoader[T],
    *,
    shuffle: bool | None = None,
    seed: int = 0,
    drop_last: bool | None = None,
    pad: bool | None = None,
) -> ShardLoader[T]:
    """A DataLoader like ``loader`` that yields this rank's share of the samples.

    The batch size stays: it is each rank's. Order and workers' seeds follow from ``seed`` alone and leave the
    global random state untouched. Each iteration is a new epoch, which ``loader.epoch`` tells; ``loader.set_epoch`` is there
    for whoever counts epochs otherwise. ``loader.state_dict()`` and ``loader.load_state_dict()`` resume in the middle of an
    epoch, on a world of any size. Not collective, but every rank must pass the same arguments.

    * A sampler (weighted, random with replacement, of a subset, your own) is drawn by every rank with the same random
      numbers, and the ranks take its items in turn. It must draw from its ``generator`` attribute or from the global
      generators of torch, Python or NumPy; one of its own would not follow the epoch when a run resumes.
    * A batch sampler is drawn likewise, and the ranks take whole batches in turn.
    * An iterable dataset must yield the same stream on every rank; the ranks take its samples in turn, their workers
      batches. One that asks ``get_worker_info`` splits itself among the workers, and only the ranks' turns are added.
    * torchdata's ``StatefulDataLoader`` stays one; what is said of positions holds for its own ``state_dict()``.

    Args:
        loader: what one process would use.
        shuffle: draw a new order each epoch. Default: as ``loader`` does.
        seed: of the order and the workers; the same on every rank.
        drop_last: drop what does not fill a batch on every rank. Default: as ``loader`` does.
        pad: repeat samples so that every rank has the same number of batches, which training needs. ``False``
            gives every sample to exactly one rank, for evaluation: shares then differ in length by up to one
            sample, and are empty on some ranks if the world is larger than the dataset. Default: ``not drop_last``.

    Raises:
        TypeError: a ``DistributedSampler``, a sampler without a length, ``shuffle`` for a sampler of your own, a loader that
            is a share already, or one of a class that iterates in its own way.
        ValueError: ``pad=True`` with ``drop_last=True``, or padding an empty dataset.
    """
    if isinstance(loader, ShardLoader):
        raise TypeError("shard_loader: this loader is a rank's share already.")
    if not _is_stateful(loader) and type(loader).__iter__ is not DataLoader.__iter__:
        raise TypeError(
            f"shard_loader cannot keep what {type(loader).__name__}.__iter__ does: pass a DataLoader, and wrap its share."
        )
    drop_last = loader.drop_last if drop_last is None else drop_last
    pad = (not drop_last) if pad is None else pad
    if pad and drop_last:
        raise ValueError(
            "shard_loader(pad=True, drop_last=True): the last samples can be repeated or dropped, not both."
        )
    place = current().topology
    shares = Shares(place.rank, place.world_size, drop_last, pad)
    options: dict[str, Any] = {
        name: getattr(loader, name)
        for name in (
            "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
            "prefetch_factor", "persistent_workers", "in_order", "snapshot_every_n_steps",
        )
        if hasattr(loader, name)
    }  # fmt: skip
    source: ShardSampler | ShardStream
    if isinstance(loader.dataset, IterableDataset):
        if shuffle:
            raise TypeError("shard_loader(shuffle=True): an iterable dataset comes in its own order.")
        source = ShardStream(loader.dataset, shares, loader.batch_size or 1)
        options.update(dataset=source, batch_size=loader.batch_size, drop_last=drop_last)
        options["worker_init_fn"] = WorkerInit(loader.worker_init_fn)
    else:
        source = ShardSampler(_source(loader, shuffle), shares, seed)
        if pad and source.total() == 0:
            raise ValueError("shard_loader cannot pad an empty dataset: pass pad=False if it may be empty.")
        options["dataset"] = loader.dataset
        if _own_batches(loader):
            options.update(batch_sampler=source)
        else:
            options.update(sampler=source, batch_size=loader.batch_size, drop_last=drop_last)
    if _is_stateful(loader):
        if isinstance(source, ShardStream):
            raise TypeError(
                "shard_loader cannot share out an iterable dataset in a StatefulDataLoader: use a DataLoader."
            )
        seeds = torch.Generator().manual_seed(mixed(seed, place.rank))
        return type(loader)(**options, generator=seeds)  # type: ignore[return-value]
    options.pop("snapshot_every_n_steps", None)
    return ShardLoader(source, seed, **options)


def _source(loader: DataLoader[Any], shuffle: bool | None) -> Sampler[Any]:
    """The sampler or batch sampler whose items the ranks share."""
    source: Any = loader.batch_sampler if _own_batches(loader) else loader.sampler
    if any(isinstance(part, DistributedSampler) for part in (source, loader.sampler, getattr(source, "sampler", None))):
        raise TypeError(
            "shard_loader does DistributedSampler's work: leave the sampler out, and pass shuffle= to the DataLoader."
        )
    if shuffle is not None:
        if not (is_shuffle(source) or type(source) is SequentialSampler):
            raise TypeError(
                f"shard_loader(shuffle={shuffle}): the order is up to the {type(source).__name__} that the loader has."
            )
        dataset: Any = loader.dataset
        return RandomSampler(dataset) if shuffle and len(dataset) else SequentialSampler(dataset)
    if not hasattr(source, "__len__"):
        raise TypeError(
            f"shard_loader cannot share out {type(source).__name__}, which has no length: give it a __len__."
        )
    found: Sampler[Any] = source
    return found


def _own_batches(loader: DataLoader[Any]) -> bool:
    return loader.batch_size is None and loader.batch_sampler is not None


def _is_stateful(loader: DataLoader[Any]) -> bool:
    torchdata = sys.modules.get("torchdata.stateful_dataloader")  # whoever has such a loader has imported it
    return torchdata is not None and isinstance(loader, torchdata.StatefulDataLoader)
