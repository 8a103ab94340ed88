"""This rank's share of the data."""

import contextlib
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)
from torch.utils.data.distributed import DistributedSampler

import unidist
from tests.support.datasets import Made, Numbers, Stream
from unidist.context import current
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


def test_an_epoch_draws_one_global_number_as_with_torch() -> None:
    """So that dropout has the masks that it has beside a DistributedSampler; in the middle of an epoch none is left."""

    def following(loader: Any) -> float:
        torch.manual_seed(9)
        seen(loader)
        return torch.rand(1).item()

    plain = DataLoader(Numbers(40), 5, sampler=SequentialSampler(range(40)))
    shuffled = DataLoader(Numbers(40), 5, shuffle=True)
    generator = torch.Generator()
    assert following(unidist.shard_loader(shuffled)) == following(plain)
    resumed = unidist.shard_loader(shuffled)
    resumed.load_state_dict({**resumed.state_dict(), "position": unidist.world_size()})
    torch.manual_seed(9)
    untouched = torch.rand(1).item()
    assert following(resumed) == untouched
    assert following(unidist.shard_loader(DataLoader(Numbers(40), 5, generator=generator))) == untouched


class Collective(Numbers):
    def __getitem__(self, index: int) -> int:
        return unidist.allreduce_metric(index)


@pytest.mark.parametrize("workers", [1])
def test_a_collective_call_in_a_worker_is_an_error(workers: int) -> None:
    """A worker is a copy of the rank without its threads; it would wait for ever, but in a world of one process."""
    loader = unidist.shard_loader(DataLoader(Collective(8), 2, num_workers=workers))
    error = pytest.raises(unidist.CollectiveError, match="forked from a rank, such as a DataLoader's worker")
    with contextlib.nullcontext() if current().works_in_forks else error:
        assert next(iter(loader)).tolist() == [0.0, 1.0]


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
    """Every rank draws the same order and takes its own places; of the global random state, an epoch takes a number."""
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
        after = torch.get_rng_state()
        torch.set_rng_state(before[0])
        list(DataLoader(Numbers(2), sampler=[0, 1]))  # as this does
        assert torch.equal(torch.get_rng_state(), after) and random.getstate() == before[1]
        drawn = [index for shard in shards for index in flat(shard)]
        assert len(drawn) == len(set(drawn)) == 12 * size, type(sampler).__name__
        assert seen(loader) != shards[unidist.rank()], "the next epoch has another order"
        loader.set_epoch(0)
        assert seen(loader) == shards[unidist.rank()]


def test_batch_samplers_deal_whole_batches() -> None:
    size = unidist.world_size()
    source = BatchSampler(SequentialSampler(range(50)), 3, drop_last=False)
    batches = list(source)
    for pad in (False, True):
        shards = everyones(unidist.shard_loader(DataLoader(Numbers(50), batch_sampler=source), pad=pad))
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
    size = unidist.world_size()
    n = 7 * size + 1
    padded = [*range(n), *range(-n % size)]
    shards = everyones(unidist.shard_loader(DataLoader(Stream(n), 2, num_workers=workers), worker_split="loader"))
    for rank, shard in enumerate(shards):
        mine = padded[rank::size]
        assert shard == [mine[i : i + 2] for i in range(0, len(mine), 2)]


def test_a_run_resumes_where_it_was(tmp_path: Path) -> None:
    loader = unidist.shard_loader(DataLoader(Numbers(60), 3, shuffle=True), seed=5)
    seen(loader)
    for step, _ in enumerate(loader, 1):
        if step == 2:
            break
    state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (1, 6 * unidist.world_size())
    torch.save(state, tmp_path / "state.pt")
    again = unidist.shard_loader(DataLoader(Numbers(60), 3, shuffle=True), seed=5)
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
        (DataLoader(Numbers(4), shuffle=True), {"seed": "0"}, TypeError, r"seed='0'\): pass an integer"),
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


# ------------------------------------------------------------------------------------ data that is split already
N = 48


def by_rank() -> Iterable[int]:
    return islice(range(N), unidist.rank(), None, unidist.world_size())


def by_rank_and_worker() -> Iterable[int]:
    info = get_worker_info()
    if info is None:
        return range(N)
    return islice(range(N), unidist.rank() * info.num_workers + info.id, None, unidist.world_size() * info.num_workers)


def by_worker() -> Iterable[int]:
    info = get_worker_info()
    return range(N) if info is None else islice(range(N), info.id, None, info.num_workers)


def whole() -> Iterable[int]:
    return range(N)


def augmented(samples: Iterable[int]) -> Iterator[tuple[torch.Tensor, int]]:
    return ((torch.rand(3), sample) for sample in samples)


def noise() -> Iterator[torch.Tensor]:
    return (torch.rand(3) for _ in range(N))


def noise_of_its_own() -> Iterator[torch.Tensor]:
    generator = torch.Generator()
    generator.seed()
    return (torch.rand(3, generator=generator) for _ in range(N))


def noise_of_the_worker() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(torch.initial_seed() % 2**31)
    return (torch.rand(3, generator=generator) for _ in range(N))


def not_compared() -> Iterator[object]:
    return (SimpleNamespace(number=number, function=lambda: None) for number in by_rank())


def loader_of(make: Callable[[], Iterable[Any]], workers: int, **options: Any) -> unidist.ShardLoader[Any]:
    loader = DataLoader(Made(make), batch_size=4, num_workers=workers, collate_fn=list)
    return unidist.shard_loader(loader, pad=False, **options)


@pytest.mark.parametrize(
    ("make", "workers", "split"),
    [
        (by_rank, 0, None),
        (by_rank, 1, None),
        (by_rank_and_worker, 2, "dataset"),
        (lambda: augmented(by_rank()), 0, None),
        (lambda: islice(range(N), 0 if unidist.rank() else None), 0, None),  # the others have nothing
    ],
)
def test_a_stream_that_is_split_by_rank_is_an_error(make: Any, workers: int, split: Any) -> None:
    if unidist.world_size() == 1:
        return
    torch.manual_seed(unidist.rank())
    with pytest.raises(unidist.MismatchError, match="Made yields another stream on each rank"):
        next(iter(loader_of(make, workers, worker_split=split)))
    assert len(list(loader_of(make, workers, worker_split=split, check_stream=False))) < N / 4
    unidist.barrier()


@pytest.mark.parametrize(("make", "split"), [(by_worker, "loader"), (whole, "dataset")])
def test_a_wrong_worker_split_is_an_error(make: Any, split: Any) -> None:
    with pytest.raises(unidist.MismatchError, match=rf"worker_split='{split}'\): each worker"):
        list(loader_of(make, 2, worker_split=split))


@pytest.mark.parametrize(
    ("make", "workers", "split"),
    [
        (whole, 0, None),
        (whole, 2, "loader"),
        (by_worker, 2, "dataset"),
        (lambda: augmented(whole()), 0, None),
        (lambda: augmented(whole()), 2, "loader"),
        (noise, 0, None),
        (noise, 2, "dataset"),
        (noise_of_its_own, 0, None),
        (noise_of_the_worker, 2, "dataset"),
        (not_compared, 0, None),
        (lambda: range(1), 0, None),  # no batch on most ranks
        (lambda: range(0), 0, None),
    ],
)
def test_no_false_alarm(make: Any, workers: int, split: Any) -> None:
    torch.manual_seed(unidist.rank())
    loader = loader_of(make, workers, worker_split=split)
    may_shuffle = make in (noise, noise_of_its_own) and not workers and unidist.is_main() and unidist.world_size() > 1
    with (
        pytest.warns(UserWarning, match="yields other samples on each rank")
        if may_shuffle
        else contextlib.nullcontext()
    ):
        list(loader)
    list(loader)
    if unidist.rank() == 0:
        list(loader)  # nothing is compared any more
    unidist.barrier()
    torch.manual_seed(0)


def split_by_node(samples: Iterable[int]) -> Iterable[int]:
    return samples


def known_splits() -> dict[str, Any]:
    """Datasets with the attributes of those of datasets, webdataset, litdata and Mosaic."""
    hub, web, lit, mosaic, around = Stream(8), Stream(8), Stream(8), Stream(8), Stream(8)
    hub._distributed = SimpleNamespace(rank=0, world_size=2)  # type: ignore[attr-defined]
    web.pipeline = [range(8), [split_by_node], tuple]  # type: ignore[attr-defined]
    lit.distributed_env = SimpleNamespace(world_size=2)  # type: ignore[attr-defined]
    mosaic._unique_rank_world = SimpleNamespace(num_ranks=2)  # type: ignore[attr-defined]
    around.dataset = hub  # type: ignore[attr-defined]
    return {"split_dataset_by_node": hub, "split_by_node": web, "Stream": lit, "tests's": mosaic, "by split_": around}


@pytest.mark.parametrize("named", known_splits())
@pytest.mark.parametrize("call", [unidist.shard_loader, unidist.prepare])
def test_libraries_that_split_by_rank_are_refused(call: Any, named: str) -> None:
    with pytest.raises(ValueError, match=f"is split by rank already, by .*{named}|already, {named}"):
        call(DataLoader(known_splits()[named]))
    alone = Stream(8)
    alone._distributed, alone.distributed_env = None, SimpleNamespace(world_size=1)  # type: ignore[attr-defined]
    assert isinstance(call(DataLoader(alone)), unidist.ShardLoader)


class HubDataset(Numbers):
    """The calls of datasets.Dataset that matter, with a fingerprint that is another one on each rank."""

    def __init__(self, first: int) -> None:
        super().__init__(8)
        self.first = first
        self._fingerprint = f"{unidist.rank()}"

    def with_format(self, name: str) -> Any:
        assert name == "arrow"
        return self

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return SimpleNamespace(to_pydict=lambda: {"x": [self.first + index.start]})
        return self.first + index


def test_a_shard_of_a_map_style_dataset_is_an_error() -> None:
    list(unidist.shard_loader(DataLoader(HubDataset(0))))
    if unidist.world_size() > 1:
        with pytest.raises(unidist.MismatchError, match="different rows of this HubDataset"):
            list(unidist.shard_loader(DataLoader(HubDataset(8 * unidist.rank()))))


def test_a_subset_that_is_another_one_on_each_rank_is_an_error() -> None:
    rank, size = unidist.rank(), unidist.world_size()
    seeds = torch.Generator().manual_seed(1), torch.Generator().manual_seed(rank)
    same, other = (random_split(Numbers(20), [16, 4], generator)[0] for generator in seeds)  # type: ignore[arg-type]
    list(unidist.shard_loader(DataLoader(same)))
    list(unidist.shard_loader(DataLoader(Subset({"a": 1}, ["a"]))))  # type: ignore[arg-type]  # indices of any kind
    for subset in (other, Subset(Numbers(20), range(rank, 20, size))):
        list(unidist.shard_loader(DataLoader(subset), check_stream=False))
        if size > 1:
            with pytest.raises(unidist.MismatchError, match="different rows of this Subset"):
                list(unidist.shard_loader(DataLoader(subset)))


def test_items_that_are_split_by_rank_already_are_an_error() -> None:
    rank, size = unidist.rank(), unidist.world_size()
    mine = torch.arange(rank, 20 * size, size)  # as many on each rank
    list(unidist.shard_loader(DataLoader(TensorDataset(torch.arange(20)))))
    for dataset in (Numbers(10 + rank), TensorDataset(torch.zeros(10 + rank))):
        if size > 1:
            with pytest.raises(unidist.MismatchError, match=f"different rows of this {type(dataset).__name__}"):
                list(unidist.shard_loader(DataLoader(dataset)))
    for items in (TensorDataset(mine), mine.tolist()):
        loader = unidist.shard_loader(DataLoader(items))
        with pytest.warns(match="different items in this") if rank == 0 < size - 1 else contextlib.nullcontext():
            list(loader)
    list(unidist.shard_loader(DataLoader(TensorDataset(mine)), check_stream=False))


def test_samples_over_all_ranks() -> None:
    size = unidist.world_size()
    loader = unidist.shard_loader(DataLoader(Numbers(10), 2), pad=False)
    assert loader.global_samples == 10
    assert unidist.all_reduce(
        torch.tensor(float(sum(map(len, loader))) / loader.global_samples)
    ).item() == pytest.approx(1.0)
    assert unidist.shard_loader(DataLoader(Numbers(10), 2)).global_samples == 10
    dropping = unidist.shard_loader(DataLoader(Numbers(10), 2, drop_last=True))
    assert dropping.global_samples == sum(map(len, dropping)) * size == 10 // (2 * size) * 2 * size
    with pytest.raises(TypeError, match="no len"):
        _ = unidist.shard_loader(DataLoader(Stream(7))).global_samples
    with pytest.raises(TypeError, match="batch sampler"):
        _ = unidist.shard_loader(
            DataLoader(Numbers(8), batch_sampler=BatchSampler(SequentialSampler(range(8)), 2, False))
        ).global_samples


def test_only_data_loaders_are_sharded() -> None:
    for thing in (Numbers(4), [1, 2], None):
        with pytest.raises(TypeError, match=r"shard_loader takes a torch\.utils\.data\.DataLoader"):
            unidist.shard_loader(thing)  # type: ignore[arg-type]

    class WebLoader(Stream):
        """As webdataset's: an iterable dataset around a DataLoader."""

    with pytest.raises(TypeError, match="prepare cannot shard this WebLoader"):
        unidist.prepare(WebLoader(4))


def test_the_ranks_of_one_model_get_the_same_samples() -> None:
    """Two models at most, each on some ranks (tensor parallelism), whose data-parallel groups are across them."""
    rank, size = unidist.rank(), unidist.world_size()
    models = 2 if size % 2 == 0 else 1
    width = size // models
    groups = [unidist.new_group(range(column, size, width)) for column in range(width)]
    group = groups[rank % width]
    data = TensorDataset(torch.arange(12.0))
    loader = unidist.shard_loader(DataLoader(data, batch_size=2, shuffle=True), group=group)
    mean, total = unidist.Mean(group), unidist.Sum(group)
    seen = []
    for (batch,) in loader:
        seen += batch.tolist()
        mean.update(batch)
        total.update(batch)
    assert group.size() == models and len(seen) == 12 // models
    everyone = unidist.all_gather_object(seen)
    for model in range(models):
        assert all(each == everyone[model * width] for each in everyone[model * width : (model + 1) * width])
    assert sorted(number for each in everyone[::width] for number in each) == list(range(12))
    assert mean.compute() == 5.5 and total.compute() == 66
    assert unidist.allreduce_metric(1, op="sum", group=group) == models
    if unidist.backend_name() in ("gloo", "mpi"):
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (models, width), mesh_dim_names=("dp", "tp"))
        again = unidist.shard_loader(DataLoader(data, batch_size=2, shuffle=True), group=mesh["dp"])
        assert [number for (batch,) in again for number in batch.tolist()] == seen
        assert unidist.new_group(mesh["dp"]) == group
        with pytest.raises(TypeError, match=r"pass what new_group\(ranks\), or new_group\(mesh\['dp'\]\), returned"):
            unidist.Mean(mesh["dp"]).compute()
        for call in (lambda: unidist.new_group(mesh), lambda: unidist.shard_loader(DataLoader(data), group=mesh)):
            with pytest.raises(ValueError, match=r"has 2 dimensions: pass one of them, as mesh\['dp'\]"):
                call()


def test_each_group_compares_its_own_stream() -> None:
    rank, half = unidist.rank(), (unidist.world_size() + 1) // 2
    ranks = unidist.all_gather_object([*range(half)] if rank < half else [*range(half, unidist.world_size())])
    groups = [unidist.new_group(ranks[0]), unidist.new_group(ranks[-1])]
    group = groups[rank >= half]
    first = 100 * group.ranks[0]
    seen = [number for batch in loader_of(lambda: range(first, first + 12), 0, group=group) for number in batch]
    assert seen == [*range(first + group.rank(), first + 12, group.size())]
    if rank < half and half > 1:  # the others read nothing
        with pytest.raises(unidist.MismatchError, match="Made yields another stream on each rank"):
            list(loader_of(by_rank, 0, group=group))


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_loader_that_is_left_after_each_first_batch(shuffle: bool) -> None:
    """It begins again, as one rank may look at a batch; who trains so is warned."""
    loader = unidist.shard_loader(DataLoader(Numbers(100), 2, shuffle=shuffle))
    first = next(iter(loader)).tolist()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [next(iter(loader)).tolist() for _ in range(3)] == [first] * 3
    assert [str(each.message).startswith("a shard_loader that is left") for each in caught] == [True] * shuffle
    loader.set_epoch(1)
    assert (next(iter(loader)).tolist() != first) == shuffle


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.n


def test_the_length_of_a_streams_dataset_is_that_of_the_whole_stream() -> None:
    loader = unidist.shard_loader(DataLoader(SizedStream(24), batch_size=4))
    assert len(loader.dataset) == 24  # type: ignore[arg-type]
    assert len(list(loader)) == len(loader)
    assert not hasattr(unidist.shard_loader(DataLoader(Stream(4))).dataset, "__len__")


class ShuffledStream(IterableDataset[int]):
    """Shuffles by the global generators."""

    def __init__(self, n: int, kind: str) -> None:
        self.n, self.kind = n, kind

    def __iter__(self) -> Iterator[int]:
        numbers = list(range(self.n))
        if self.kind == "python":
            random.shuffle(numbers)
            return iter(numbers)
        return iter(torch.randperm(self.n).tolist())


@pytest.mark.parametrize("kind", ["python", "torch"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_stream_that_shuffles_in_its_workers(kind: str, workers: int) -> None:
    source = DataLoader(ShuffledStream(20, kind), 2, num_workers=workers)
    loader = unidist.shard_loader(source, pad=False, worker_split="loader" if workers > 1 else None)
    orders = []
    for _ in range(2):
        mine = flat(seen(loader))
        everyone = [number for numbers in unidist.all_gather_object(mine) for number in numbers]
        assert sorted(everyone) == list(range(20))
        orders.append(mine)
    assert orders[0] != orders[1]
    again = unidist.shard_loader(source, pad=False, worker_split="loader" if workers > 1 else None)
    again.set_epoch(1)
    assert flat(seen(again)) == orders[1]


def test_a_stream_that_shuffles_otherwise_on_each_rank_is_a_warning() -> None:
    torch.manual_seed(unidist.rank())
    loader = unidist.shard_loader(DataLoader(ShuffledStream(20, "torch"), 2))
    if unidist.is_main() and unidist.world_size() > 1:
        with pytest.warns(UserWarning, match="yields other samples on each rank"):
            list(loader)
    else:
        list(loader)


class Cursor(IterableDataset[float]):
    """Reads on from where it is."""

    def __init__(self) -> None:
        self.numbers = iter(range(24))

    def __iter__(self) -> Iterator[float]:
        for number in self.numbers:
            yield number + 0.1 * torch.rand(()).item()


def test_a_stream_that_cannot_be_read_again_loses_nothing() -> None:
    torch.manual_seed(unidist.rank())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mine = [int(each) for batch in unidist.shard_loader(DataLoader(Cursor(), 2), pad=False) for each in batch]
    assert sorted(number for each in unidist.all_gather_object(mine) for number in each) == list(range(24))


def test_no_position_without_order() -> None:
    loader = unidist.shard_loader(DataLoader(Numbers(24), 1, num_workers=1, in_order=False))
    batches = iter(loader)
    next(batches)
    with pytest.raises(ValueError, match="in_order=False"):
        loader.state_dict()
    list(batches)
    assert loader.state_dict()["position"] == 0
