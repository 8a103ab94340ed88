"""The shard of an iterable dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

from torch.utils.data import IterableDataset, get_worker_info

from unidist.data.sharding import Progress, Sharding
from unidist.errors import UnidistError

#: Who divides a stream among the workers of a rank.
WorkerSplit = Literal["dataset", "loader"]


class ShardStream(IterableDataset[Any]):
    """This rank's and worker's shard of a stream.

    With ``worker_split="loader"`` every worker of every rank reads the whole stream and keeps its own samples: the
    ranks take samples in turn, and the workers of a rank batches. With ``"dataset"`` each worker's stream is divided
    among the ranks only.

    Args:
        dataset: yields the same samples in the same order on every rank. Its ``set_epoch``, if it has one, is called.
        sharding: how the stream is divided among the ranks.
        batch_size: number of samples that a worker makes a batch of.
        worker_split: who divides the stream among the workers.
    """

    def __init__(
        self, dataset: IterableDataset[Any], sharding: Sharding, batch_size: int, worker_split: WorkerSplit = "loader"
    ) -> None:
        self.dataset = dataset
        self.sharding = sharding
        self.batch_size = batch_size
        self.worker_split = worker_split
        #: Advanced by the loader.
        self.progress = Progress()
        #: Number of workers per rank in the run that saved the position.
        self.saved_workers = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def total(self) -> int:
        """The number of samples of a whole epoch, over all ranks, where the dataset has a length."""
        return len(self.dataset)  # type: ignore[arg-type]

    def order(self) -> str:
        """A description that differs between orders of one seed."""
        return f"a stream of {type(self.dataset).__name__}"

    def __iter__(self) -> Iterator[Any]:
        start = self.progress.iteration
        if get_worker_info() is not None:
            self.progress.begin()  # this copy, for the next epoch of a persistent worker
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(start.epoch)
        return self._shard(start.offset)

    def _shard(self, skip: int) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        if self.worker_split == "dataset":
            if skip and max(workers, self.saved_workers) > 1:
                raise UnidistError(
                    f"{type(self.dataset).__name__} splits itself among {max(workers, self.saved_workers)} workers, so "
                    "it cannot resume at a position of the whole stream: resume from a state saved at the end of an "
                    "epoch. With one worker from the start, it could resume anywhere."
                )
            worker, workers = 0, 1
        sharding = self.sharding
        size = sharding.world_size
        head: list[Any] = []  # the first samples of the epoch, for padding
        mine: Any = None
        count = 0  # samples of what remains of the epoch
        for index, sample in enumerate(self.dataset):
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


class WorkerInit:
    """A ``worker_init_fn`` that calls the user's with the user's dataset in ``get_worker_info().dataset``."""

    def __init__(self, user_init: Callable[[int], None]) -> None:
        self.user_init = user_init

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None and isinstance(info.dataset, ShardStream)
        # WorkerInfo's own __setattr__ refuses changes.
        object.__setattr__(info, "dataset", info.dataset.dataset)
        self.user_init(worker)
