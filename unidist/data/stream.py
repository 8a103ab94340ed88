"""The shard of an iterable dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol, TypeGuard

from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from unidist.data.same_stream import recorded
from unidist.data.sharding import Progress, Sharding, mix_seeds
from unidist.seed import set_seed

#: Who divides a stream among the workers of a rank.
WorkerSplit = Literal["dataset", "loader"]


class ShardedDataset(Protocol):
    """An iterable dataset that yields one shard of its stream."""

    def set_shard(self, index: int, num_shards: int) -> None:
        """Yield only this shard from now on, of which no other shard has a sample."""

    def __iter__(self) -> Iterator[Any]: ...


class ShardStream(IterableDataset[Any]):
    """This rank's and worker's shard of a stream.

    With ``worker_split="loader"`` every worker of every rank reads the whole stream and keeps its own samples: the
    ranks take samples in turn, and the workers of a rank batches. With ``"dataset"`` each worker's stream is divided
    among the ranks only. Workers that read the same stream draw the same random numbers for it, from ``seed`` and the
    epoch: it may shuffle by them.

    The method ``set_shard(index, num_shards)`` of a dataset is called with the shard of this rank and worker, if it has
    one; the dataset yields no other samples then.

    Args:
        dataset: yields the same samples in the same order on every rank. Its ``set_epoch``, if it has one, is called.
        sharding: how the stream is divided among the ranks.
        batch_size: number of samples that a worker makes a batch of.
        worker_split: who divides the stream among the workers.
        seed: the same on every rank.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        sharding: Sharding,
        batch_size: int,
        worker_split: WorkerSplit = "loader",
        seed: int = 0,
    ) -> None:
        self.dataset = dataset
        self.sharding = sharding
        self.batch_size = batch_size
        self.worker_split = worker_split
        self.seed = seed
        #: Each iteration is the next epoch, also in a worker's copy; the loader counts what it has yielded of it.
        self.progress = Progress()
        #: The digests of each worker's first samples, until they are compared; in memory that workers share.
        self.table: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def read_per_kept(self, workers: int) -> int:
        """Return how many samples each of a rank's workers reads for one that it keeps."""
        if shards_itself(self.dataset):
            return 1
        return self.sharding.world_size * (max(workers, 1) if self.worker_split == "loader" else 1)

    def splits_itself(self, workers: int) -> bool:
        """Return whether the dataset divides its samples among ranks or workers."""
        return shards_itself(self.dataset) or (self.worker_split == "dataset" and workers > 1)

    def total(self) -> int:
        """Return the number of samples of a whole epoch, over all ranks, where the dataset has a length."""
        return len(self.dataset)  # type: ignore[arg-type]

    def order(self) -> str:
        """Return a description that differs between orders of one seed."""
        return f"a stream of {type(self.dataset).__name__}"

    def __iter__(self) -> Iterator[Any]:
        start = self.progress.begin()
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(start.epoch)
        info = get_worker_info()
        if info is not None and not shards_itself(self.dataset):
            set_seed(mix_seeds(self.seed, start.epoch, info.id if self.worker_split == "dataset" else 0))
        return self._shard(start.position)

    def _shard(self, skip: int) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        if shards_itself(self.dataset):
            self.dataset.set_shard(self.sharding.rank * workers + worker, self.sharding.world_size * workers)
            yield from self.dataset
            return
        samples = iter(self.dataset)
        if self.table is not None:
            samples = recorded(samples, self.table[worker])
        if self.worker_split == "dataset":
            worker, workers = 0, 1
        sharding = self.sharding
        size = sharding.world_size
        head: list[Any] = []  # the first samples of the epoch, for padding
        mine: Any = None
        count = 0  # samples of what remains of the epoch
        for index, sample in enumerate(samples):
            if sharding.pad and index < size:
                head.append(sample)
            if index < skip:
                continue
            turn, rank = divmod(count, size)
            count += 1
            if turn // self.batch_size % workers != worker:
                continue
            if rank == sharding.rank:
                mine = sample
            # With drop_last a sample counts once all ranks have one.
            if rank == (size - 1 if sharding.drop_last else sharding.rank):
                yield mine
        turns, rest = divmod(count, size)
        if sharding.pad and 0 < rest <= sharding.rank and turns // self.batch_size % workers == worker:
            yield head[(sharding.rank - rest) % len(head)]


class SizedShardStream(ShardStream):
    """A ``ShardStream`` of a dataset with a length, which is that of the whole stream, as other ``loader.dataset``."""

    def __len__(self) -> int:
        return self.total()


def shards_itself(dataset: object) -> TypeGuard[ShardedDataset]:
    """Return whether a dataset has a method ``set_shard``."""
    return hasattr(dataset, "set_shard")


class WorkerInit:
    """A ``worker_init_fn`` that puts the user's dataset into ``get_worker_info().dataset``, then calls the user's."""

    def __init__(self, user_init: Callable[[int], None] | None) -> None:
        self.user_init = user_init

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None and isinstance(info.dataset, ShardStream)
        # WorkerInfo's own __setattr__ refuses changes.
        object.__setattr__(info, "dataset", info.dataset.dataset)
        if self.user_init is not None:
            self.user_init(worker)
