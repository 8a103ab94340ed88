"""A DataLoader that yields this rank's shard of the samples, and can resume in the middle of an epoch."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, Sampler, SequentialSampler

from unidist.backends.base import Group
from unidist.collectives.operations import Mesh, member, ranks_of
from unidist.context import current, is_initialized
from unidist.data.comparison import DataComparison, Rows, Streams
from unidist.data.same_stream import empty_table, fingerprint, own_split
from unidist.data.sampler import Permutation, ShardSampler, StatefulShardSampler, is_shuffle
from unidist.data.sharding import Position, Sharding, mix_seeds
from unidist.data.stream import ShardStream, SizedShardStream, WorkerInit, WorkerSplit, shards_itself
from unidist.diagnosis.spans import spans
from unidist.seed import integer

T = TypeVar("T")
#: Samples that a worker reads for one that it keeps, above which there is a warning.
_READ_PER_KEPT = 16
_LEFT = (
    "a shard_loader that is left before its second batch begins the same epoch again, with the same batch, so that one "
    "rank may look at a batch, and this one was left so twice in a row. For other batches keep the iterator (batches = "
    "iter(loader), next(batches)), or call loader.set_epoch(n) on every rank before each next(iter(loader))."
)


class ShardLoader(DataLoader[T]):
    """What ``shard_loader`` returns: a DataLoader with this rank's shard and a position that can be saved.

    Its iterators are typed as yielding the type parameter of the loader that it was made of, ``DataLoader[T]``.

    Each iteration is the next epoch; one that is left before its second batch does not count, so that a rank may look
    at a batch by ``next(iter(loader))``. ``len()`` is the number of batches of the running iteration, else of the next
    one: fewer than a whole epoch's when it resumes in the middle.
    """

    def __init__(self, source: ShardSampler | ShardStream, seed: int, draws: bool = True, **options: Any) -> None:
        self._source = source
        self._seed = seed
        self._progress = source.progress
        #: Compares the ranks' data in the first iteration.
        self._comparison: DataComparison | None = None
        #: Whether an epoch begins with a number of the global generator, as with torch's loaders without a generator.
        self._draws = draws
        #: How many iterations in a row were left before their second batch.
        self._left = 0
        super().__init__(**options, generator=torch.Generator())

    @property
    def epoch(self) -> int:
        """The epoch of the last iteration, and once that has come to its end, of the next one; from 0.

        After a ``break`` it is still the epoch that was left, as in ``state_dict()``; the next iteration is the one
        after it.
        """
        return self._progress.current().epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration this epoch, from its beginning, or from the position that was loaded for it."""
        if epoch != self._progress.next.epoch:
            self._iterator = None  # persistent workers would go on with another one
        self._progress.set_epoch(epoch)

    def state_dict(self) -> dict[str, int | str]:
        """Return the epoch, and how much of it all ranks together have consumed. Not collective.

        The same on every rank that has taken as many batches. The batch that was yielded last counts as consumed. A
        state saved at an epoch's last batch resumes with an iteration of no batches; one saved after the loop, with the
        next epoch.

        Raises:
            ValueError: in the middle of an epoch of a loader with ``in_order=False``.
        """
        epoch, position = self._progress.current()
        if position and self.num_workers and not getattr(self, "in_order", True):
            raise ValueError(
                "shard_loader with in_order=False yields batches as workers finish them, so that a position does not "
                "tell which samples have come: pass in_order=True to the DataLoader, or save at the end of an epoch."
            )
        if isinstance(self._source, ShardSampler):  # the length of a stream may be unknown
            position = min(position, self._source.total())
        state: dict[str, int | str] = {"epoch": epoch, "position": position, "seed": self._seed}
        state.update(order=self._source.order(), workers=self.num_workers)
        if isinstance(self._source, ShardStream):
            state["worker_split"] = self._source.worker_split
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration what remains of the saved epoch, on a world of any size. Not collective.

        Every sample that was not consumed is yielded once, with padding as in a whole epoch. The batch size may be
        another.

        Raises:
            ValueError: the state is of a loader with another seed, or it is in the middle of an epoch and this loader
                has another length or kind of order, or workers that cannot resume there.
        """
        if state["seed"] != self._seed:
            raise ValueError(
                f"this state is of shard_loader(seed={state['seed']}), and this loader has seed={self._seed}: in "
                "another order, the position would repeat some samples and miss others. Pass the same seed."
            )
        if state["position"] and state["order"] != self._source.order():
            raise ValueError(
                f"this state is in the middle of {state['order']}, and this loader has {self._source.order()}: pass "
                "the same data, sampler, shuffle and permutation, or resume from a state saved at the end of an epoch."
            )
        if state["position"] and isinstance(self._source, ShardStream):
            self._check_workers(state["workers"], state.get("worker_split"))
        self._progress.seek(Position(state["epoch"], state["position"]))
        self._iterator = None  # persistent workers would go on at another position

    def _check_workers(self, saved_workers: int, saved_split: str | None) -> None:
        """Raise if a position in the middle of a stream cannot be found again."""
        assert isinstance(self._source, ShardStream)
        if shards_itself(self._source.dataset):
            raise ValueError(
                f"{type(self._source.dataset).__name__} shards itself (set_shard), so it cannot resume at a "
                "position of the whole stream: resume from a state saved at the end of an epoch."
            )
        splits = ((saved_split, saved_workers), (self._source.worker_split, self.num_workers))
        workers = max(number if split == "dataset" else 0 for split, number in splits)
        if workers > 1:
            raise ValueError(
                f"{type(self._source.dataset).__name__} splits itself among {workers} workers, so it cannot resume at "
                "a position of the whole stream: resume from a state saved at the end of an epoch. With one worker "
                "from the start, it could resume anywhere."
            )
        if saved_workers > 1 and not self.num_workers:
            raise ValueError(
                f"this state is in the middle of a stream that {saved_workers} workers read: resume with num_workers=1 "
                "or more."
            )

    def __len__(self) -> int:
        items = self._source.sharding.length(self._source.total() - self._progress.iteration.position)
        if self.batch_size is None:
            return items
        return items // self.batch_size if self.drop_last else -(-items // self.batch_size)

    @property
    def global_samples(self) -> int:
        """The number of samples of a whole epoch over all ranks, without repeated and dropped ones.

        What a sum over all ranks is divided by, where one process divides by ``len(loader.dataset)``.

        Raises:
            TypeError: the loader has a batch sampler, an iterable dataset without a length, or ``drop_last=True`` with
                one that splits itself.
        """
        if self.batch_size is None and self.batch_sampler is not None:
            raise TypeError("global_samples: a batch sampler yields batches of any length: sum up len(batch).")
        if self.drop_last and isinstance(self._source, ShardStream) and self._source.splits_itself(self.num_workers):
            raise TypeError(
                f"global_samples: with drop_last=True each part of {type(self._source.dataset).__name__}, which splits "
                "itself, drops samples of its own: sum up len(batch)."
            )
        total, size = self._source.total(), self._source.sharding.world_size
        if not self.drop_last:
            return total
        batch = self.batch_size or 1
        return total // size // batch * batch * size

    def __iter__(self) -> Iterator[T]:  # type: ignore[override]
        progress = self._progress
        if progress.start is not None and progress.consumed <= self._items_per_batch:
            progress.restart()  # the last iteration does not count
            self._iterator = None
            if isinstance(self._source, ShardSampler):
                self._source.repeats = True
            self._left += 1
            if self._left == 2 and isinstance(self._source, ShardSampler) and self._source.is_random():
                warnings.warn(_LEFT, stacklevel=2)
        else:
            self._left = 0
        if self._draws and not progress.next.position:  # an epoch that resumes has drawn it at its beginning
            torch.empty((), dtype=torch.int64).random_()
        assert self.generator is not None
        # It seeds the workers: other numbers on each rank and in each epoch, the same in every run.
        self.generator.manual_seed(mix_seeds(self._seed, self._source.sharding.rank, *progress.next))
        if self.num_workers and self._iterator is None and is_initialized():
            current().quiesce()
        before = progress.iterations
        iterator = super().__iter__()
        if isinstance(self._source, ShardStream) and self.num_workers:
            progress.begin()  # the workers have copies of the stream
        # Without workers, a sampler begins at the first batch.
        return self._count(iterator, progress.iterations if progress.iterations > before else None)

    @property
    def _items_per_batch(self) -> int:
        return (self.batch_size or 1) * self._source.sharding.world_size

    def _count(self, iterator: Iterator[T], iteration: int | None) -> Iterator[T]:
        comparison, self._comparison = self._comparison, None
        batches = spans.data(iterator) if spans.on else iterator
        for batch in comparison.compared(batches) if comparison is not None and is_initialized() else batches:
            iteration = iteration or self._progress.iterations
            if iteration == self._progress.iterations:  # else another one has begun
                self._progress.consumed += self._items_per_batch
            yield batch
        if iteration in (None, self._progress.iterations):
            self._progress.end()


def shard_loader(
    loader: DataLoader[T],
    *,
    shuffle: bool | None = None,
    seed: int = 0,
    drop_last: bool | None = None,
    pad: bool | None = None,
    worker_split: WorkerSplit | None = None,
    permutation: Permutation | None = None,
    check_stream: bool = True,
    group: Group | Mesh | None = None,
) -> ShardLoader[T]:
    """Return a DataLoader like ``loader`` that yields this rank's shard of the samples.

    The batch size is each rank's own, as before. Order and workers' seeds depend on ``seed`` alone. Each epoch draws
    one number of torch's global generator, as a ``DataLoader`` with a ``DistributedSampler`` does, unless ``loader``
    has a generator of its own; so dropout has the same masks. Each iteration is a new epoch, whose number is
    ``loader.epoch``, but after one that was left before its second batch, as by ``next(iter(loader))``, which begins
    again; call ``loader.set_epoch`` only to choose another one. ``loader.state_dict()`` and
    ``loader.load_state_dict()`` resume in the middle of an epoch, on a world of any size. Not collective, but every
    rank must pass the same arguments.

    * A sampler (weighted, random with replacement, of a subset, your own) is drawn by every rank with the same random
      numbers, and the ranks take its items in turn. It must draw from its ``generator`` attribute or from the global
      generators of torch, Python or NumPy; any other generator would not follow the epoch when a run resumes. A
      sampler of your own then draws the epochs before, too, as it may go on from the order that it has drawn last.
    * A batch sampler is drawn in the same way, and the ranks take whole batches in turn.
    * An iterable dataset must yield the same stream on every rank, and the ranks take its samples in turn. If it
      shuffles, let it draw from a generator that its ``set_epoch`` seeds, or in workers, which draw the same numbers on
      every rank (unless ``collate_fn`` draws some of them). With two or more workers, ``worker_split`` says who
      divides the stream among those of a rank.
      A dataset with a method ``set_shard(index, num_shards)`` shards itself: it is called before each epoch, in each
      worker of each rank, and the dataset yields no other samples: nothing is read that is not used.
    * torchdata's ``StatefulDataLoader`` remains one; its own ``state_dict()`` contains the position.

    Args:
        loader: what one process would use.
        shuffle: a new order in each epoch. Default: as ``loader`` does.
        seed: of the order and the workers; the same on every rank.
        drop_last: drop what does not fill a batch on every rank. Default: as ``loader`` does.
        pad: repeat samples so that every rank has the same number of batches, which training needs. ``False``
            gives every sample to exactly one rank, for evaluation: shards then differ in length by up to one
            sample, and are empty on some ranks if the world is larger than the dataset. Default: ``not drop_last``, and
            ``False`` for a dataset with ``set_shard``, whose shards are as long as it makes them.
        worker_split: of an iterable dataset with ``num_workers`` of 2 or more. ``"dataset"``: it splits itself among
            the workers, through ``get_worker_info()`` or a ``worker_init_fn``, as PyTorch's documentation shows.
            ``"loader"``: it yields the whole stream in each worker, of which the workers take batches in turn.
        permutation: how ``shuffle`` draws an epoch's order. ``"randperm"``: ``torch.randperm`` of the whole epoch on
            every rank, which is the order of ``DistributedSampler``; 8 bytes a sample. ``"feistel"``: a Feistel network
            that computes each rank's part of the order as it is needed; no memory, and resuming takes no time. Default:
            ``"feistel"`` from 10,000,000 samples on, else ``"randperm"``.
        check_stream: the ranks compare the first samples of an iterable dataset, the first and last row of tensors,
            lists and Hugging Face's map-style datasets, the first indices of a ``Subset``, and the length of other
            datasets, in one small collective at the first batch of the first epoch, so that data that is split by rank
            already, or in another way on each rank (``random_split``), is an error; other tensors and lists of the same
            length are a warning. ``False``: ranks may have other data, not all of them iterate, or a thread does (a
            prefetcher), beside which the main thread makes collective calls.
        group: the ranks that the samples are divided among, this one included; default: the world. With tensor
            parallelism, the ranks of one model must get the same samples: pass the ranks of this rank's data-parallel
            dimension, as what ``new_group`` returned or as ``mesh["dp"]``.

    Raises:
        TypeError: not a DataLoader, a seed that is no integer, a ``DistributedSampler``, a sampler without a length,
            ``shuffle`` for a sampler of your own, a loader that is a shard already, or one whose class overrides
            ``__iter__``.
        ValueError: ``pad=True`` with ``drop_last=True`` or a dataset with ``set_shard``; padding an empty dataset;
            ``worker_split`` is missing, or has no meaning for this dataset; ``permutation`` of a loader that does not
            shuffle; a dataset that is split by rank already, such as by ``split_dataset_by_node``.
        MismatchError: from the first iteration, on every rank: see ``check_stream``.
    """
    _check_loader(loader)
    seed = integer(seed, f"shard_loader(seed={seed!r})")
    drop_last = loader.drop_last if drop_last is None else drop_last
    sharded = isinstance(loader.dataset, IterableDataset) and shards_itself(loader.dataset)
    if sharded and pad:
        raise ValueError(
            f"shard_loader(pad=True): {type(loader.dataset).__name__} shards itself (set_shard), and no rank knows "
            "how long the others are: make them equally long, or train inside unidist.join."
        )
    pad = (not drop_last and not sharded) if pad is None else pad
    if pad and drop_last:
        raise ValueError(
            "shard_loader(pad=True, drop_last=True): the last samples can be repeated or dropped, not both."
        )
    among = None if isinstance(group, Mesh) else group
    backend = member(among)
    ranks = ranks_of(group) if isinstance(group, Mesh) else backend.ranks(group)
    sharding = Sharding(ranks.index(backend.topology.rank), len(ranks), drop_last, pad)
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
            raise TypeError("shard_loader(shuffle=True): an iterable dataset has an order of its own.")
        _check_permutation(permutation, None)
        stream = SizedShardStream if hasattr(loader.dataset, "__len__") else ShardStream
        source = stream(loader.dataset, sharding, loader.batch_size or 1, _worker_split(loader, worker_split), seed)
        _warn_of_waste(source, loader.num_workers)
        options.update(dataset=source, batch_size=loader.batch_size, drop_last=drop_last)
        options["worker_init_fn"] = WorkerInit(loader.worker_init_fn)
    else:
        if worker_split is not None:
            raise ValueError(f"shard_loader(worker_split={worker_split!r}): this dataset is not an IterableDataset.")
        kind = StatefulShardSampler if _is_stateful(loader) else ShardSampler
        drawn = _source(loader, shuffle)
        _check_permutation(permutation, drawn)
        source = kind(drawn, sharding, seed, permutation)
        if pad and source.total() == 0:
            raise ValueError("shard_loader cannot pad an empty dataset: pass pad=False if it may be empty.")
        options["dataset"] = loader.dataset
        if _own_batches(loader):
            options.update(batch_sampler=source)
        else:
            options.update(sampler=source, batch_size=loader.batch_size, drop_last=drop_last)
    if _is_stateful(loader):
        if isinstance(source, ShardStream):
            raise TypeError("shard_loader cannot divide an iterable dataset in a StatefulDataLoader: use a DataLoader.")
        seeds = torch.Generator().manual_seed(mix_seeds(seed, sharding.rank))
        return type(loader)(**options, generator=seeds)  # type: ignore[return-value]
    options.pop("snapshot_every_n_steps", None)
    sharding_loader: ShardLoader[T] = ShardLoader(source, seed, draws=loader.generator is None, **options)
    if check_stream and isinstance(source, ShardStream) and not sharded:
        source.table = empty_table(loader.num_workers)
        if loader.num_workers:
            source.table.share_memory_()  # type: ignore[no-untyped-call]
        sharding_loader._comparison = Streams(among, source, loader.num_workers)
    elif check_stream and fingerprint(loader.dataset) is not None:
        sharding_loader._comparison = Rows(among, loader.dataset)
    return sharding_loader


def _check_loader(loader: DataLoader[Any]) -> None:
    """Raise an error for a loader that cannot be divided, or is divided already."""
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"shard_loader takes a torch.utils.data.DataLoader, not {type(loader).__name__}: pass the DataLoader that "
            "one process would use, as DataLoader(dataset, batch_size=...)."
        )
    if isinstance(loader, ShardLoader):
        raise TypeError("shard_loader: this loader is a rank's shard already.")
    if not _is_stateful(loader) and type(loader).__iter__ is not DataLoader.__iter__:
        raise TypeError(
            f"shard_loader cannot keep what {type(loader).__name__}.__iter__ does: pass a plain DataLoader, and wrap "
            "the result."
        )
    if split := own_split(loader.dataset):
        raise ValueError(
            f"shard_loader: this {type(loader.dataset).__name__} is split by rank already, by {split}: each rank would "
            "get a part of its part, and most samples none. Leave that split out, or use the DataLoader as it is."
        )


def _source(loader: DataLoader[Any], shuffle: bool | None) -> Sampler[Any]:
    """Return the sampler or batch sampler whose items are divided among the ranks."""
    source: Any = loader.batch_sampler if _own_batches(loader) else loader.sampler
    if any(isinstance(part, DistributedSampler) for part in (source, loader.sampler, getattr(source, "sampler", None))):
        raise TypeError(
            "shard_loader replaces DistributedSampler: leave the sampler out, and pass shuffle= to the DataLoader."
        )
    if shuffle is not None:
        if not (is_shuffle(source) or type(source) is SequentialSampler):
            raise TypeError(
                f"shard_loader(shuffle={shuffle}): the loader's {type(source).__name__} determines the order."
            )
        dataset: Any = loader.dataset
        return RandomSampler(dataset) if shuffle and len(dataset) else SequentialSampler(dataset)
    if not hasattr(source, "__len__"):
        raise TypeError(
            f"shard_loader cannot divide the items of {type(source).__name__}, which has no length: give it a __len__."
        )
    found: Sampler[Any] = source
    return found


def _check_permutation(permutation: str | None, drawn: Sampler[Any] | None) -> None:
    if permutation not in (None, "randperm", "feistel"):
        raise ValueError(f"shard_loader(permutation={permutation!r}): use 'randperm' or 'feistel'.")
    if permutation is not None and not is_shuffle(drawn):
        raise ValueError(f"shard_loader(permutation={permutation!r}): this loader does not shuffle: pass shuffle=True.")


def _warn_of_waste(source: ShardStream, workers: int) -> None:
    read = source.read_per_kept(workers)
    if read > _READ_PER_KEPT and source.sharding.rank == 0:
        warnings.warn(
            f"each worker of shard_loader reads {read} samples of {type(source.dataset).__name__} for one that it "
            "keeps: give it a method set_shard(index, num_shards), and let it read that shard only.",
            stacklevel=3,
        )


def _worker_split(loader: DataLoader[Any], worker_split: WorkerSplit | None) -> WorkerSplit:
    if worker_split not in (None, "dataset", "loader"):
        raise ValueError(f"shard_loader(worker_split={worker_split!r}): use 'dataset' or 'loader'.")
    if worker_split is not None and shards_itself(loader.dataset):
        raise ValueError(
            f"shard_loader(worker_split={worker_split!r}): {type(loader.dataset).__name__} shards itself "
            "(set_shard), among ranks and workers: leave worker_split out."
        )
    if worker_split is None and loader.num_workers > 1 and not shards_itself(loader.dataset):
        raise ValueError(
            f"shard_loader: {loader.num_workers} workers read the iterable dataset {type(loader.dataset).__name__}: "
            "pass worker_split='dataset' if it splits itself among them (by get_worker_info() or a worker_init_fn), "
            "or worker_split='loader' if each of them yields the whole stream."
        )
    return worker_split or "loader"


def _own_batches(loader: DataLoader[Any]) -> bool:
    return loader.batch_size is None and loader.batch_sampler is not None


def _is_stateful(loader: DataLoader[Any]) -> bool:
    torchdata = sys.modules.get("torchdata.stateful_dataloader")  # imported by whoever made such a loader
    return torchdata is not None and isinstance(loader, torchdata.StatefulDataLoader)
