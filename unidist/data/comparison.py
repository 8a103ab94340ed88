"""The comparison of the ranks' data in the first iteration of a loader."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from unidist.backends.base import Group
from unidist.collectives.agreement import first_difference
from unidist.collectives.operations import all_gather
from unidist.context import current
from unidist.data.same_stream import ITEMS, differ, fingerprint, first_rows, first_samples
from unidist.data.stream import ShardStream
from unidist.errors import MismatchError

T = TypeVar("T")


@dataclass
class DataComparison(ABC):
    """Compares the data of a group's ranks while a loader is iterated for the first time."""

    group: Group | None

    @abstractmethod
    def at(self, batch: int, *, end: bool) -> None:
        """Compare when a batch has come, from 0, and at the end. Collective for batch 0."""

    def compared(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches, with a comparison at the first one, or at the end where there is none."""
        end = object()
        iterator, number = iter(batches), 0
        while (batch := next(iterator, end)) is not end:
            self.at(number, end=False)
            number += 1
            yield batch  # type: ignore[misc]  # not the end
        self.at(number, end=True)


@dataclass
class Rows(DataComparison):
    """Of a map-style dataset, of which nothing else tells that it is split."""

    dataset: Any

    def at(self, batch: int, *, end: bool) -> None:
        """See ``DataComparison``."""
        # The first entry is in the error where another rank makes another call.
        mine = ["the data of shard_loader", str(fingerprint(self.dataset))]
        if batch or not current().compares or first_difference(mine, self.group) is None:
            return  # the fingerprint of a transform that cannot be hashed is random
        difference = first_difference([str(each) for each in first_rows(self.dataset)], self.group)
        if difference is None:
            return
        kind = type(self.dataset).__name__
        if difference.position > 0 and isinstance(self.dataset, ITEMS):
            if current().topology.rank == 0:
                warnings.warn(
                    f"shard_loader: the ranks have different items in this {kind}, so that each would skip items that "
                    "no other has: is it split by rank already? If they are random numbers in place of data, draw them "
                    "after unidist.init(seed=...), or pass check_stream=False.",
                    stacklevel=2,
                )
            return
        raise MismatchError(
            f"shard_loader: the ranks have different rows of this {kind}, so that each would skip rows that no other "
            "has: is it split by rank already, as by split_dataset_by_node, or by random numbers? Leave that out, call "
            "random_split after unidist.init(seed=...), or pass check_stream=False."
        )


@dataclass
class Streams(DataComparison):
    """Of an iterable dataset."""

    stream: ShardStream
    workers: int

    def at(self, batch: int, *, end: bool) -> None:
        """See ``DataComparison``."""
        if batch == 0:
            self._compare_ranks()
        if self.workers > 1 and (batch == self.workers or (end and batch < self.workers)):  # each has begun
            self._compare_workers()
            self.stream.table = None

    def _compare_ranks(self) -> None:
        table, dataset = self.stream.table, self.stream.dataset
        assert table is not None
        if not current().compares or not differ(first := self._gathered(table[0])):
            return
        # By random numbers? Read again, with fixed seeds.
        again = first_samples(dataset, self.workers)
        if _differ_when_repeated(self._gathered(torch.zeros_like(table[0]) if again is None else again), first):
            raise MismatchError(
                f"shard_loader: {type(dataset).__name__} yields another stream on each rank, so that each would skip "
                "samples that no other has: is it split by rank already? Let it yield the whole stream on every rank, "
                "give it a method set_shard(index, num_shards), or pass check_stream=False if its samples are random."
            )
        if current().topology.rank == 0:
            warnings.warn(
                f"shard_loader: {type(dataset).__name__} yields other samples on each rank. If it is split by rank "
                "already, or shuffles by random numbers, samples are lost and others repeated: let it yield the whole "
                "stream, in an order from a generator that its set_epoch(epoch) seeds. If its samples are random "
                "numbers, or augmented by them, pass check_stream=False.",
                stacklevel=2,
            )

    def _gathered(self, table: Tensor) -> Tensor:
        return all_gather(table.unsqueeze(0), self.group)

    def _compare_workers(self) -> None:
        table, dataset = self.stream.table, self.stream.dataset
        assert table is not None
        if self.stream.worker_split == "dataset":
            if bool((table == table[0]).all()) and len(set(map(str, table[0].tolist()))) > 1:
                raise MismatchError(
                    f"shard_loader(worker_split='dataset'): each worker yields the same samples of "
                    f"{type(dataset).__name__}, which does not split itself among them: pass worker_split='loader'."
                )
        elif differ(table):
            again = [first_samples(dataset, self.workers, worker) for worker in range(self.workers)]
            found = [each for each in again if each is not None]  # the workers of a rank have equal random numbers
            if len(found) < self.workers or _differ_when_repeated(torch.stack(found), table):
                raise MismatchError(
                    f"shard_loader(worker_split='loader'): each worker yields other samples of "
                    f"{type(dataset).__name__}, which splits itself among them, so that most of them would be skipped: "
                    "pass worker_split='dataset'."
                )


def _differ_when_repeated(again: Tensor, first: Tensor) -> bool:
    """Return whether streams differ in what is not random; what cannot be repeated counts as random."""
    return bool((again != again[0]).any()) and bool(again.any(2).any(1).sum() == first.any(2).any(1).sum())
