"""This rank's share of the data."""

import random
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import unidist
from unidist.data import ShardSampler


class Numbers(Dataset[int]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


class Draws(Numbers):
    """Each sample is a random number of the worker that made it."""

    def __getitem__(self, index: int) -> int:
        return int(torch.randint(0, 2**40, ()).item()) + random.randrange(1000)


def seen(loader: DataLoader[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def everyones(loader: DataLoader[Any]) -> list[list[list[int]]]:
    return unidist.all_gather_object(seen(loader))


def flat(batches: list[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


def test_evaluation_sees_every_sample_once() -> None:
    cases = [(n, batch_size) for n in range(18) for batch_size in range(1, 7)]
    mine = [flat(seen(unidist.shard_loader(DataLoader(Numbers(n), size), pad=False))) for n, size in cases]
    for (n, _), *shards in zip(cases, *unidist.all_gather_object(mine)):
        assert sorted(index for shard in shards for index in shard) == list(range(n))
        assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_training_pads_to_equal_length() -> None:
    size = unidist.world_size()
    for n in range(1, 12):
        loader = unidist.shard_loader(DataLoader(Numbers(n), 2, shuffle=True))
        shards = everyones(loader)
        assert len({len(flat(shard)) for shard in shards}) == 1
        assert len(flat(shards[0])) == -(-n // size) and len(loader) == len(shards[0])
        assert {index for shard in shards for index in flat(shard)} == set(range(n))


def test_drop_last() -> None:
    size = unidist.world_size()
    loader = unidist.shard_loader(DataLoader(Numbers(11), 2, drop_last=True))
    shards = everyones(loader)
    assert all(len(batch) == 2 for shard in shards for batch in shard)
    assert {len(shard) for shard in shards} == {11 // size // 2}
    drawn = [index for shard in shards for index in flat(shard)]
    assert len(set(drawn)) == len(drawn)
    assert len(unidist.shard_loader(DataLoader(Numbers(11), 2), drop_last=True)) == 11 // size // 2


def test_batches_are_those_of_one_process() -> None:
    size = unidist.world_size()
    shards = everyones(unidist.shard_loader(DataLoader(Numbers(12 * size), 4, shuffle=True), seed=7))
    one = ShardSampler(12 * size, 0, 1, shuffle=True, seed=7, drop_last=False, pad=True)
    order = list(one)
    for step in range(3):
        together = sorted(index for shard in shards for index in shard[step])
        assert together == sorted(order[step * 4 * size : (step + 1) * 4 * size])


def test_epochs_advance_by_themselves_and_can_be_set() -> None:
    loader = unidist.shard_loader(DataLoader(Numbers(40), 5, shuffle=True), seed=3)
    first, second = seen(loader), seen(loader)
    assert first != second
    again = unidist.shard_loader(DataLoader(Numbers(40), 5, shuffle=True), seed=3)
    assert [seen(again), seen(again)] == [first, second]
    loader.sampler.set_epoch(0)  # type: ignore[attr-defined]
    assert seen(loader) == first and seen(loader) == second
    other = unidist.shard_loader(DataLoader(Numbers(40), 5, shuffle=True), seed=4)
    assert seen(other) != first


def test_order_leaves_the_global_random_state() -> None:
    loader = unidist.shard_loader(DataLoader(Numbers(40), 5, shuffle=True))
    torch.manual_seed(9)
    expected = torch.rand(1)
    torch.manual_seed(9)
    seen(loader)
    assert torch.equal(torch.rand(1), expected)


def test_workers_draw_different_numbers_on_every_rank_and_the_same_in_every_run() -> None:
    def draw() -> list[int]:
        return flat(seen(unidist.shard_loader(DataLoader(Draws(12), 2, num_workers=2), seed=1)))

    torch.manual_seed(unidist.rank())  # must not matter
    mine = draw()
    assert draw() == mine
    drawn = [number for numbers in unidist.all_gather_object(mine) for number in numbers]
    assert len(set(drawn)) == len(drawn)


def test_arguments_are_kept() -> None:
    def collate(items: list[int]) -> list[int]:
        return items

    source = DataLoader(
        Numbers(8), 3, num_workers=1, collate_fn=collate, persistent_workers=True, prefetch_factor=4, timeout=20
    )
    loader = unidist.shard_loader(source)
    for name in ("dataset", "batch_size", "num_workers", "collate_fn", "persistent_workers", "prefetch_factor", "timeout", "pin_memory", "drop_last"):  # fmt: skip
        assert getattr(loader, name) == getattr(source, name), name
    single = unidist.shard_loader(DataLoader(Numbers(4), batch_size=None), pad=False)
    assert list(single) == list(range(4))[unidist.rank() :: unidist.world_size()]


def test_shuffle_follows_the_loader_or_the_argument() -> None:
    n = 30 * unidist.world_size()
    mine = list(range(n))[unidist.rank() :: unidist.world_size()]
    assert flat(seen(unidist.shard_loader(DataLoader(Numbers(n), 5)))) == mine
    assert flat(seen(unidist.shard_loader(DataLoader(Numbers(n), 5), shuffle=True))) != mine
    assert flat(seen(unidist.shard_loader(DataLoader(Numbers(n), 5, shuffle=True), shuffle=False))) == mine


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("loader", "options", "error", "match"),
    [
        (DataLoader(Stream()), {}, TypeError, "map-style"),
        (DataLoader(Numbers(4), batch_sampler=BatchSampler(SequentialSampler(range(4)), 2, False)), {}, TypeError, "batch sampler"),
        (DataLoader(Numbers(4), sampler=SubsetRandomSampler([1, 2])), {}, TypeError, "SubsetRandomSampler"),
        (DataLoader(Numbers(4), sampler=WeightedRandomSampler([1.0], 2)), {}, TypeError, "WeightedRandomSampler"),
        (DataLoader(Numbers(4), sampler=RandomSampler(Numbers(4), replacement=True)), {}, TypeError, "RandomSampler"),
        (DataLoader(Numbers(4), sampler=DistributedSampler(Numbers(4), 2, 0)), {}, TypeError, "DistributedSampler's work"),
        (DataLoader(Numbers(4), 2, drop_last=True), {"pad": True}, ValueError, "not both"),
        (DataLoader(TensorDataset(torch.empty(0)), 2), {}, ValueError, "empty"),
    ],
)  # fmt: skip
def test_bad_input(loader: DataLoader[Any], options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        unidist.shard_loader(loader, **options)
