"""This rank's share of the data."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import unidist
from tests.support.datasets import Numbers, Stream
from unidist.data import ShardSampler
from unidist.data.sharding import Sharding


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
    one = ShardSampler(RandomSampler(Numbers(12 * size)), Sharding(0, 1), seed=7)
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
    kept = "dataset batch_size num_workers collate_fn persistent_workers prefetch_factor timeout pin_memory drop_last"
    for name in kept.split():
        assert getattr(loader, name) == getattr(source, name), name
    single = unidist.shard_loader(DataLoader(Numbers(4), batch_size=None), pad=False)
    assert list(single) == list(range(4))[unidist.rank() :: unidist.world_size()]


def test_shuffle_follows_the_loader_or_the_argument() -> None:
    n = 30 * unidist.world_size()
    mine = list(range(n))[unidist.rank() :: unidist.world_size()]
    assert flat(seen(unidist.shard_loader(DataLoader(Numbers(n), 5)))) == mine
    assert flat(seen(unidist.shard_loader(DataLoader(Numbers(n), 5), shuffle=True))) != mine
    assert flat(seen(unidist.shard_loader(DataLoader(Numbers(n), 5, shuffle=True), shuffle=False))) == mine


def test_weighted_and_random_samplers_are_shared_without_repeats() -> None:
    """Every rank draws the same order and takes its own places; the global random state stays."""
    size = unidist.world_size()
    torch.manual_seed(unidist.rank()), random.seed(unidist.rank())  # must not matter
    samplers: list[Any] = [
        SubsetRandomSampler(range(0, 24 * size, 2)),
        WeightedRandomSampler([1.0] * (24 * size), 12 * size, replacement=False),
        RandomSampler(
            Numbers(24 * size), num_samples=12 * size, generator=torch.Generator().manual_seed(unidist.rank())
        ),
    ]
    for sampler in samplers:
        before = torch.get_rng_state(), random.getstate()
        loader = unidist.shard_loader(DataLoader(Numbers(24 * size), 5, sampler=sampler), seed=2)
        shards = everyones(loader)
        assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
        drawn = [index for shard in shards for index in flat(shard)]
        assert len(drawn) == len(set(drawn)) == 12 * size, type(sampler).__name__
        assert seen(loader) != shards[unidist.rank()], "the next epoch has another order"
        loader.set_epoch(0)
        assert seen(loader) == shards[unidist.rank()]


def test_batch_samplers_deal_whole_batches() -> None:
    size = unidist.world_size()
    source = BatchSampler(SequentialSampler(range(20)), 3, drop_last=False)
    batches = list(source)
    for pad in (False, True):
        shards = everyones(unidist.shard_loader(DataLoader(Numbers(20), batch_sampler=source), pad=pad))
        dealt = [batch for shard in shards for batch in shard]
        assert (
            sorted(dealt[: len(batches)]) == sorted(batches) if size == 1 else all(batch in dealt for batch in batches)
        )
        assert len(dealt) == (-(-len(batches) // size) * size if pad else len(batches))
        assert shards[0][1] == batches[size]


@pytest.mark.parametrize("workers", [0, 2])
def test_iterable_datasets_are_shared_over_ranks_and_workers(workers: int) -> None:
    for n in (13, 1):
        loader = unidist.shard_loader(DataLoader(Stream(n), 2, num_workers=workers), pad=False, worker_split="loader")
        for _ in range(2):
            assert sorted(index for shard in everyones(loader) for index in flat(shard)) == list(range(n))
    shards = everyones(unidist.shard_loader(DataLoader(Stream(13), 2, num_workers=workers), worker_split="loader"))
    assert {len(flat(shard)) for shard in shards} == {-(-13 // unidist.world_size())}
    assert {index for shard in shards for index in flat(shard)} == set(range(13))


def test_a_run_resumes_where_it_was(tmp_path: Path) -> None:
    loader = unidist.shard_loader(DataLoader(Numbers(40), 3, shuffle=True), seed=5)
    seen(loader)
    for step, _ in enumerate(loader, 1):
        if step == 2:
            break
    state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (1, 6 * unidist.world_size())
    torch.save(state, tmp_path / "state.pt")
    again = unidist.shard_loader(DataLoader(Numbers(40), 3, shuffle=True), seed=5)
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    loader.set_epoch(1)
    whole = seen(loader)
    assert len(again) == len(whole) - 2 and again.epoch == 1
    assert seen(again) == whole[2:] and seen(again) == seen(loader)


class OwnLoader(DataLoader[int]):
    def __iter__(self) -> Any:
        return iter([1])


@pytest.mark.parametrize(
    ("loader", "options", "error", "match"),
    [
        (DataLoader(Stream(4)), {"shuffle": True}, TypeError, "an order of its own"),
        (DataLoader(Numbers(4), sampler=SubsetRandomSampler([1, 2])), {"shuffle": True}, TypeError, "SubsetRandom"),
        (DataLoader(Numbers(4), sampler=(i for i in (1, 2))), {}, TypeError, "no length"),
        (DataLoader(Numbers(4), sampler=DistributedSampler(Numbers(4), 2, 0)), {}, TypeError, "replaces Distributed"),
        (DataLoader(Numbers(4), 2, drop_last=True), {"pad": True}, ValueError, "not both"),
        (OwnLoader(Numbers(4)), {}, TypeError, "OwnLoader.__iter__"),
        (DataLoader(TensorDataset(torch.empty(0)), 2), {}, ValueError, "empty"),
    ],
)  # fmt: skip
def test_bad_input(loader: DataLoader[Any], options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        unidist.shard_loader(loader, **options)


def test_a_share_is_not_shared_again() -> None:
    with pytest.raises(TypeError, match="a rank's shard already"):
        unidist.shard_loader(unidist.shard_loader(DataLoader(Numbers(4))))
