"""This rank's share of an iterable dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from unidist.data.shares import Cursor, Shares
from unidist.errors import UnidistError


class ShardStream(IterableDataset[Any]):
    """This rank's and worker's share of a stream that is the same on every rank.

    Every worker of every rank runs through the whole stream and keeps its own samples; in turn, the ranks take a sample
    and the workers of a rank a batch. A dataset that asks ``get_worker_info`` is taken to split itself
    among the workers of a rank; each worker's stream is then shared among the ranks only.

    Args:
        dataset: yields the same samples in the same order on every rank. Its ``set_epoch``, if it has one, is called.
        shares: the rule by which the ranks share.
        batch_size: how many samples a worker makes a batch of.
    """

    def __init__(self, dataset: IterableDataset[Any], shares: Shares, batch_size: int) -> None:
        self.dataset = dataset
        self.shares = shares
        self.batch_size = batch_size
        self.cursor = Cursor()
        #: How many workers each rank had in the run that wrote the position.
        self.workers_before = 0
        #: Whether somebody in this worker has asked which worker it is.
        self.asked = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def total(self) -> int:
        """The number of samples of a whole epoch, over all ranks, where the dataset has a length."""
        return len(self.dataset)  # type: ignore[arg-type]

    def order(self) -> str:
        """What tells this order from others of the same seed."""
        return f"a stream of {type(self.dataset).__name__}"

    def __iter__(self) -> Iterator[Any]:
        begun = self.cursor.begin()
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(begun.epoch)
        return self._share(begun.position)

    def _share(self, skip: int) -> Iterator[Any]:
        stream = iter(self.dataset)
        try:
            first = [next(stream)]
        except StopIteration:
            first = []
        asked = self.asked
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        self.asked = asked  # by others
        if asked:
            if skip and max(workers, self.workers_before) > 1:
                raise UnidistError(
                    f"{type(self.dataset).__name__} splits itself among {max(workers, self.workers_before)} workers, so a position "
                    "in the whole stream means nothing to it: resume from a state saved at the end of an epoch. With one worker from "
                    "the start, it could resume anywhere."
                )
            worker, workers = 0, 1
        shares = self.shares
        size = shares.world_size
        head: list[Any] = []  # the epoch's first samples, to pad with
        held: Any = None
        place = -1  # among what is left of the epoch
        for index, sample in enumerate(chain(first, stream)):
            if self.asked and not asked and workers > 1:
                raise UnidistError(
                    f"{type(self.dataset).__name__} asked get_worker_info after its first sample, too late for its workers to share "
                    "the stream: ask before."
                )
            if shares.pad and index < size:
                head.append(sample)
            if index < skip:
                continue
            place = index - skip
            if place // size // self.batch_size % workers != worker:
                continue
            if place % size == shares.rank:
                held = sample
            if place % size == (size - 1 if shares.drop_last else shares.rank):
                yield held
        rounds, rest = divmod(place + 1, size)
        if shares.pad and 0 < rest <= shares.rank and rounds // self.batch_size % workers == worker:
            yield head[(shares.rank - rest) % len(head)]


class WorkerInit:
    """A ``worker_init_fn`` that lets a stream see whether its dataset asks which worker it is in."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self.then = then

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None and isinstance(info.dataset, ShardStream)
        stream = info.dataset

        class Watched(type(info)):  # type: ignore[misc]
            """torch's ``WorkerInfo``, which notes whether it is asked for what a dataset needs to split itself."""

            __slots__ = ()

            def __getattribute__(self, name: str) -> Any:
                if name in ("id", "num_workers", "dataset"):
                    stream.asked = True
                return super().__getattribute__(name)

        # WorkerInfo refuses to be changed by its own __setattr__.
        object.__setattr__(info, "dataset", stream.dataset)
        object.__setattr__(info, "__class__", Watched)
        if self.then is not None:
            self.then(worker)
