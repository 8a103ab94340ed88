"""Shares of every world, in one process: which rank gets what follows from rank and world size alone."""

import gc
import math
import random
from collections.abc import Iterator
from itertools import islice, permutations, product
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
    get_worker_info,
)

import unidist
from tests.support.datasets import Numbers, Stream
from unidist.data import ShardLoader, ShardSampler, ShardStream
from unidist.data.permutation import FeistelPermutation
from unidist.data.sharding import Sharding, mix_seeds
from unidist.data.stream import WorkerInit

pytestmark = pytest.mark.unit


class SplitStream(Stream):
    """Splits itself among the workers, as torch's documentation shows."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(self.n)) if info is None else iter(range(info.id, self.n, info.num_workers))


def split_by_worker_init(worker: int) -> None:
    """The other way that torch's documentation shows: the dataset's copy is changed."""
    dataset: Any = get_worker_info().dataset  # type: ignore[union-attr]
    dataset.numbers = list(range(worker, dataset.n, 2))


class ChangedStream(Stream):
    numbers: list[int] | None = None

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n) if self.numbers is None else self.numbers)


def sharded(
    source: Any,
    sharding: Sharding,
    batch_size: int | None,
    seed: int = 0,
    permutation: Literal["randperm", "feistel"] | None = None,
    **options: Any,
) -> ShardLoader:
    if isinstance(source, IterableDataset):
        split = "dataset" if isinstance(source, (SplitStream, ChangedStream)) else "loader"
        stream = ShardStream(source, sharding, batch_size or 1, split)
        options["worker_init_fn"] = WorkerInit(options.get("worker_init_fn"))
        return ShardLoader(stream, seed, dataset=stream, batch_size=batch_size, drop_last=sharding.drop_last, **options)
    sampler = ShardSampler(source, sharding, seed, permutation)
    if isinstance(source, BatchSampler):
        return ShardLoader(sampler, seed, dataset=Numbers(10**6), batch_sampler=sampler, **options)
    options.update(dataset=Numbers(10**6), sampler=sampler, batch_size=batch_size, drop_last=sharding.drop_last)
    return ShardLoader(sampler, seed, **options)


def flat(batches: list[Any]) -> list[int]:
    return [index for batch in batches for index in batch.tolist()]


def world(source: Any, size: int, batch_size: int = 2, **options: Any) -> list[ShardLoader]:
    rule = {name: options.pop(name) for name in ("pad", "drop_last") if name in options}
    return [sharded(source, Sharding(rank, size, **rule), batch_size, **options) for rank in range(size)]


SIZES = list(product(range(1, 18), range(1, 7), range(1, 5)))


@pytest.mark.parametrize("kind", [SequentialSampler, RandomSampler, Stream])
def test_evaluation_is_exact_for_every_dataset_batch_and_world(kind: type) -> None:
    for n, batch_size, size in SIZES:
        source = kind(n) if kind is Stream else kind(range(n))
        loaders = world(source, size, batch_size)
        shards = [list(loader) for loader in loaders]
        assert sorted(index for shard in shards for index in flat(shard)) == list(range(n))
        if kind is not Stream:
            assert [len(loader) for loader in loaders] == [len(shard) for shard in shards]


@pytest.mark.parametrize("kind", [SequentialSampler, Stream])
@pytest.mark.parametrize("rule", ["pad", "drop_last"])
def test_training_shares_are_equally_long(kind: type, rule: str) -> None:
    for n, batch_size, size in SIZES:
        source = kind(n) if kind is Stream else kind(range(n))
        shards = [list(loader) for loader in world(source, size, batch_size, **{rule: True})]
        drawn = [index for shard in shards for index in flat(shard)]
        assert len({len(shard) for shard in shards}) == 1
        if rule == "pad":
            assert len(drawn) == -(-n // size) * size and set(drawn) == set(range(n))
        else:
            assert len(set(drawn)) == len(drawn) == n // size // batch_size * batch_size * size


@pytest.mark.parametrize("dataset", [Stream(23), SplitStream(23), ChangedStream(23)], ids=lambda d: type(d).__name__)
@pytest.mark.parametrize("persistent", [False, True])
def test_streams_with_workers(dataset: Stream, persistent: bool) -> None:
    """Each sample once over ranks and workers, whether or not the dataset splits itself among the workers."""
    init = split_by_worker_init if isinstance(dataset, ChangedStream) else None
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": persistent, "worker_init_fn": init}
    loaders = world(dataset, 3, 2, **options)
    for _ in range(2):
        assert sorted(index for loader in loaders for index in flat(list(loader))) == list(range(23))
    lengths = {len(flat(list(loader))) for loader in world(dataset, 3, 2, pad=True, **options)}
    assert len(lengths) == 1


def test_batches_of_a_stream_do_not_depend_on_the_number_of_workers() -> None:
    alone, helped = (list(world(Stream(29), 2, 3, num_workers=n)[1]) for n in (0, 2))
    assert [batch.tolist() for batch in alone] == [batch.tolist() for batch in helped]


def test_a_stream_hears_of_the_epoch() -> None:
    class Epochs(Stream):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter([self.epoch])

    for options in ({}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}):
        (loader,) = world(Epochs(1), 1, **options)
        assert [flat(list(loader)) for _ in range(3)] == [[0], [1], [2]]
        assert loader.epoch == 3


def sources(n: int) -> dict[str, Any]:
    return {
        "sequential": SequentialSampler(range(n)),
        "shuffled": RandomSampler(range(n)),
        "feistel": RandomSampler(range(n)),
        "weighted": WeightedRandomSampler([1.0] * n, n, replacement=False),
        "stream": Stream(n),
    }


@settings(max_examples=300)
@given(
    kind=st.sampled_from(["sequential", "shuffled", "feistel", "weighted", "stream"]),
    n=st.integers(1, 40), batch_sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    worlds=st.tuples(st.integers(1, 4), st.integers(1, 4)), epoch=st.integers(0, 3), steps=st.integers(0, 6),
    pad=st.booleans(),
)  # fmt: skip
def test_each_remaining_sample_once_on_any_other_world(
    kind: str, n: int, batch_sizes: tuple[int, int], worlds: tuple[int, int], epoch: int, steps: int, pad: bool
) -> None:
    permutation: dict[str, Any] = {"permutation": "feistel"} if kind == "feistel" else {}
    before = world(sources(n)[kind], worlds[0], batch_sizes[0], pad=True, **permutation)
    taken: list[int] = []
    steps = min(steps, len(list(before[0])))
    for loader in before:
        loader.set_epoch(epoch)
        taken += [index for _, batch in zip(range(steps), loader) for index in batch.tolist()]
    states = [loader.state_dict() for loader in before]
    assert all(state == states[0] for state in states) and states[0]["epoch"] == epoch

    after = world(sources(n)[kind], worlds[1], batch_sizes[1], pad=pad, **permutation)
    rest: list[int] = []
    for loader in after:
        loader.load_state_dict(states[0])
        rest += flat(list(loader))
    left = set(range(n)) - set(taken)
    assert set(rest) >= left and len(taken) >= n - len(left)
    if pad:
        assert len(rest) == -(-len(left) // worlds[1]) * worlds[1]
    else:
        assert sorted(rest) == sorted(left)
    for loader in after:  # the next epoch is whole
        assert loader.epoch == epoch + 1
    assert {index for loader in after for index in flat(list(loader))} == set(range(n))


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
@pytest.mark.parametrize("kind", ["shuffled", "stream"])
def test_resume_with_workers(kind: str, options: dict[str, Any]) -> None:
    loaders = world(sources(50)[kind], 2, 3, pad=True, **options)
    whole = [[batch.tolist() for batch in loader] for loader in loaders]
    for loader, batches in zip(loaders, whole):
        loader.load_state_dict({**loader.state_dict(), "epoch": 0, "position": 12})
        assert [batch.tolist() for batch in loader] == batches[2:]
        assert (loader.epoch, loader.state_dict()["position"]) == (1, 0)
        assert len(list(loader)) == len(batches)
        loader.load_state_dict({**loader.state_dict(), "epoch": 0, "position": 12})
        assert [batch.tolist() for _, batch in zip(range(2), loader)] == batches[2:4]
        assert loader.state_dict()["position"] == 24  # resumed once more, it repeats nothing


def test_a_stream_that_splits_itself_has_no_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)  # torch waits for workers that failed
    (loader,) = world(SplitStream(20), 1, num_workers=2)
    state = {**loader.state_dict(), "position": 4}
    (one,), (none,) = (world(SplitStream(20), 1, num_workers=n) for n in (1, 0))
    (whole,) = world(Stream(20), 1, num_workers=1)  # worker_split="loader"
    for other in (loader, one, none):
        with pytest.raises(ValueError, match="SplitStream splits itself among 2 workers"):
            other.load_state_dict(state)
    with pytest.raises(ValueError, match="splits itself among 2 workers"):
        whole.load_state_dict({**state, "order": whole.state_dict()["order"]})
    with pytest.raises(ValueError, match="a stream that 2 workers read"):
        none.load_state_dict({**state, "worker_split": "loader"})
    one.load_state_dict({**state, "workers": 1})
    assert flat(list(one)) == list(range(4, 20))
    gc.collect()


def test_workers_of_a_stream_need_worker_split() -> None:
    unidist.init("single")
    try:
        with pytest.raises(
            ValueError, match=r"2 workers read .* Stream: pass worker_split='dataset' if it splits itself"
        ):
            unidist.shard_loader(DataLoader(Stream(4), num_workers=2))
        with pytest.raises(ValueError, match="use 'dataset' or 'loader'"):
            unidist.shard_loader(DataLoader(Stream(4)), worker_split="both")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="not an IterableDataset"):
            unidist.shard_loader(DataLoader(Numbers(4)), worker_split="loader")
        splits = [(Stream, "loader"), (SplitStream, "dataset")]
        for kind, split in splits:
            loader = unidist.shard_loader(DataLoader(kind(9), 2, num_workers=2), pad=False, worker_split=split)  # type: ignore[arg-type]
            assert sorted(flat(list(loader))) == list(range(9))
    finally:
        unidist.shutdown()


class SelfSharded(Stream):
    """Reads what it yields."""

    shard = (0, 1)

    def set_shard(self, index: int, num_shards: int) -> None:
        self.shard = (index, num_shards)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.shard[0], self.n, self.shard[1]))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_shards_itself(workers: int) -> None:
    loaders = world(SelfSharded(23), 3, 2, num_workers=workers)
    for _ in range(2):
        assert sorted(index for loader in loaders for index in flat(list(loader))) == list(range(23))
    with pytest.raises(ValueError, match=r"SelfSharded shards itself .* at the end of an epoch"):
        loaders[0].load_state_dict({**loaders[0].state_dict(), "position": 6})
    loaders[0].load_state_dict({**loaders[0].state_dict(), "epoch": 5})
    assert loaders[0].epoch == 5
    unidist.init("single")
    try:
        loader = DataLoader(SelfSharded(9), 2, num_workers=workers)
        assert sorted(flat(list(unidist.shard_loader(loader)))) == list(range(9))
        with pytest.raises(ValueError, match=r"pad=True\): SelfSharded shards itself"):
            unidist.shard_loader(loader, pad=True)
        with pytest.raises(ValueError, match="leave worker_split out"):
            unidist.shard_loader(loader, worker_split="loader")
    finally:
        unidist.shutdown()


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_reading_much_more_than_is_kept() -> None:
    unidist.init("single")
    try:
        unidist.shard_loader(DataLoader(Stream(9), num_workers=16), worker_split="loader")
        with pytest.warns(UserWarning, match=r"reads 17 samples of Stream for one that it keeps: .* set_shard"):
            unidist.shard_loader(DataLoader(Stream(9), num_workers=17), worker_split="loader")
        unidist.shard_loader(DataLoader(SelfSharded(9), num_workers=17))
    finally:
        unidist.shutdown()
    stream = ShardStream(Stream(9), Sharding(5, 64), 1)
    assert (stream.read_per_kept(8), ShardStream(SelfSharded(9), Sharding(5, 64), 1).read_per_kept(8)) == (512, 1)


def test_an_iteration_of_one_batch_does_not_count() -> None:
    for options in ({}, {"num_workers": 1, "persistent_workers": True}):
        for source in (RandomSampler(range(12)), Stream(12)):
            (loader,) = world(source, 1, 2, **options)
            first = next(iter(loader)).tolist()
            assert flat(list(loader))[:2] == first and loader.epoch == 1
            loader.load_state_dict({**loader.state_dict(), "epoch": 0, "position": 4})
            next(iter(loader))
            assert len(list(loader)) == 4
            for index, _ in enumerate(loader):
                if index == 1:
                    break
            assert loader.epoch == 1 and len(list(loader)) == 6 and loader.epoch == 3


def test_iterators_beside_each_other() -> None:
    """Each is an epoch of its own; an older one that goes on is not counted."""
    (loader,) = world(RandomSampler(range(12)), 1, 2)
    expected = [flat(list(loader)), flat(list(loader))]
    (loader,) = world(RandomSampler(range(12)), 1, 2)
    pairs = [(a.tolist(), b.tolist()) for a, b in zip(loader, loader)]
    assert [[index for pair in pairs for index in pair[i]] for i in (0, 1)] == expected
    (loader,) = world(SequentialSampler(range(12)), 1, 3)
    peeked = iter(loader)
    next(peeked)
    for index, _ in enumerate(loader):
        if index == 1:
            break
    next(peeked)
    assert loader.state_dict()["position"] == 6 and loader.epoch == 0
    assert len(list(peeked)) == 2
    assert loader.state_dict()["position"] == 6 and loader.epoch == 0


def test_the_sampler_alone_goes_on_to_the_next_epoch() -> None:
    (loader,) = world(RandomSampler(range(9)), 1)
    assert list(loader.sampler) != list(loader.sampler)


def test_a_worker_sees_its_own_dataset() -> None:
    class Looking(Stream):
        def __iter__(self) -> Iterator[int]:
            info = get_worker_info()
            return iter([int(info is not None and info.dataset is self)])

    (loader,) = world(Looking(1), 1, 1, num_workers=1)
    assert flat(list(loader)) == [1]


def test_set_epoch_leaves_persistent_workers() -> None:
    (loader,) = world(SequentialSampler(range(4)), 1, num_workers=1, persistent_workers=True)
    list(loader)
    workers = loader._iterator
    loader.set_epoch(1)
    list(loader)
    assert workers is not None and loader._iterator is workers


def test_batch_samplers_resume_in_batches() -> None:
    source = BatchSampler(RandomSampler(range(20)), 3, drop_last=False)
    batches = [batch.tolist() for batch in sharded(source, Sharding(0, 1), None)]
    (first, _) = before = world(source, 2, pad=True)
    for loader in before:
        next(iter(loader))
    assert first.state_dict()["position"] == 2
    after = world(source, 3, pad=False)
    for loader in after:
        loader.load_state_dict(first.state_dict())
    assert sorted(batch.tolist() for loader in after for batch in loader) == sorted(batches[2:])


def test_set_epoch_keeps_the_position_that_was_loaded_for_it() -> None:
    (loader,) = world(RandomSampler(range(10)), 1, 2)
    whole = [flat(list(loader)), flat(list(loader))]
    for epoch, expected in ((1, whole[1][4:]), (0, whole[0])):
        loader.load_state_dict({**loader.state_dict(), "epoch": 1, "position": 4})
        loader.set_epoch(epoch)
        assert flat(list(loader)) == expected


def test_states_that_do_not_fit_are_refused() -> None:
    (loader,) = world(RandomSampler(range(10)), 1)
    state = loader.state_dict()
    with pytest.raises(ValueError, match=r"seed=3.*seed=0"):
        loader.load_state_dict({**state, "seed": 3})
    (unlike,) = world(RandomSampler(range(10)), 1, permutation="feistel")
    with pytest.raises(ValueError, match=r"in the middle of 10 items of RandomSampler, .* RandomSampler by feistel"):
        unlike.load_state_dict({**state, "position": 2})
    others = [
        SequentialSampler(range(10)),
        RandomSampler(range(11)),
        BatchSampler(RandomSampler(range(10)), 2, False),
        Stream(10),
    ]
    for other in others:
        (unlike,) = world(other, 1)
        unlike.load_state_dict(state)  # at the beginning of an epoch, whatever its order
        with pytest.raises(ValueError, match=r"in the middle of 10 items of RandomSampler, and this loader has"):
            unlike.load_state_dict({**state, "position": 2})


def order_of(n: int, seed: int) -> torch.Tensor:
    return FeistelPermutation(n, seed)[:]


def test_a_feistel_permutation_has_every_index_once() -> None:
    around = (2**k + d for k in range(2, 17, 2) for d in (-1, 0, 1))
    for n in (*range(50), 97, 997, 7919, 10**5 + 3, *around):
        for seed in range(3):
            assert torch.equal(order_of(n, seed).sort().values, torch.arange(n)), n


def test_parts_of_a_feistel_permutation_are_those_of_the_whole() -> None:
    whole = order_of(1000, 5)
    for start, stop, step in ((0, 1000, 8), (3, 990, 7), (999, 1000, 1), (5, 5, 1), (500, 2000, 64)):
        assert torch.equal(FeistelPermutation(1000, 5)[start:stop:step], whole[start:stop:step])


def chi_square(values: torch.Tensor, cells: int) -> float:
    """How many standard deviations the counts of ``cells`` equally likely values are from those expected."""
    expected = values.numel() / cells
    statistic = (torch.bincount(values, minlength=cells).double() - expected).square().sum() / expected
    return (float(statistic) - (cells - 1)) / math.sqrt(2 * (cells - 1))


def correlation(x: torch.Tensor, y: torch.Tensor) -> float:
    """In standard deviations."""
    return float(torch.corrcoef(torch.stack([x.double(), y.double()]))[0, 1]) * math.sqrt(len(x))


@pytest.mark.parametrize("n", [10**7 + 19, 2**30 - 1, 2**30, 10**12 + 39])
def test_a_feistel_permutation_looks_random(n: int) -> None:
    part = slice(3 * 10**6, 3 * 10**6 + 200_000)
    one, next_one = FeistelPermutation(n, 1)[part], FeistelPermutation(n, 2)[part]
    assert not torch.equal(one, next_one)
    assert abs(correlation(one, next_one)) < 4.5
    assert abs(correlation(one, torch.arange(len(one)))) < 4.5
    for lag in (1, 2, 3, 8, 64, 4096):
        assert abs(correlation(one[:-lag], one[lag:])) < 4.5, lag
    assert abs(chi_square(one * 1000 // n, 1000)) < 4.5
    assert abs(chi_square(one % 1009, 1009)) < 4.5
    pairs = one[:-1] * 32 // n * 32 + one[1:] * 32 // n
    assert abs(chi_square(pairs, 1024)) < 4.5
    assert abs(chi_square(one[:-1] % 8 * 8 + one[1:] % 8, 64)) < 4.5


def test_every_place_of_a_small_feistel_permutation_is_as_likely() -> None:
    orders = torch.stack([order_of(101, seed) for seed in range(2500)])
    assert max(abs(chi_square(orders[:, place], 101)) for place in range(101)) < 5
    assert {tuple(order_of(3, seed).tolist()) for seed in range(100)} == set(permutations(range(3)))


def test_the_order_is_drawn_at_once_below_ten_million_samples() -> None:
    """There it is exactly that of DistributedSampler."""
    theirs = DistributedSampler(Numbers(1000), 3, 1, seed=4)
    theirs.set_epoch(2)
    ours = ShardSampler(RandomSampler(Numbers(1000)), Sharding(1, 3, pad=True), 4)
    ours.set_epoch(2)
    assert list(ours) == list(theirs)
    for n, permutation in ((10**7 - 1, "randperm"), (10**7, "feistel")):
        assert ShardSampler(RandomSampler(Numbers(n)), Sharding(0, 1), 0).permutation == permutation


def test_resuming_in_a_billion_samples() -> None:
    """By another world, from the middle of an epoch, without drawing that."""
    n = 10**9 + 7
    (before, *_) = world(RandomSampler(Numbers(n)), 8, 256, pad=True)
    before.set_epoch(3)
    assert len(before) == -(-n // 8 // 256)
    assert len({mix_seeds(*parts) for parts in ((0, 3), (3, 0), (1, 2), (0, 0, 3))}) == 4  # seed, epoch
    order = FeistelPermutation(n, mix_seeds(0, 3))
    batches = iter(before.sampler)
    assert [next(batches) for _ in range(3)] == order[0:24:8].tolist()
    position = 10**9 - 8
    after = world(RandomSampler(Numbers(n)), 4, 2, pad=True)
    rest = []
    for loader in after:
        loader.load_state_dict({**before.state_dict(), "epoch": 3, "position": position})
        rest.append(list(loader.sampler))
    assert [index for turn in zip(*rest) for index in turn] == [*order[position:].tolist(), *order[0:1].tolist()]


def test_permutation_is_for_loaders_that_shuffle() -> None:
    unidist.init("single")
    try:
        loader = unidist.shard_loader(DataLoader(Numbers(100), 10, shuffle=True), permutation="feistel")
        assert sorted(flat(list(loader))) == list(range(100))
        for dataset in (Numbers(4), Stream(4)):
            with pytest.raises(ValueError, match="does not shuffle"):
                unidist.shard_loader(DataLoader(dataset), permutation="randperm")
        with pytest.raises(ValueError, match="use 'randperm' or 'feistel'"):
            unidist.shard_loader(DataLoader(Numbers(4)), permutation="fast")  # type: ignore[arg-type]
    finally:
        unidist.shutdown()


def test_a_sampler_draws_from_its_generator_or_the_global_ones() -> None:
    """Whatever their states on this rank, and leaving them as they are."""

    class Own(Sampler[int]):
        def __init__(self) -> None:
            self.generator = torch.Generator().manual_seed(random.randrange(100))

        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Iterator[int]:
            import numpy

            drawn = torch.randint(1000, (1,), generator=self.generator)
            return iter([int(drawn), random.randrange(1000), int(numpy.random.randint(1000))])

    import numpy

    drawn = []
    for seed in (1, 2):
        random.seed(seed), numpy.random.seed(seed)
        source = Own()
        before = random.getstate(), numpy.random.get_state()[1].tolist(), source.generator.get_state()
        drawn.append(list(ShardSampler(source, Sharding(0, 1), 7)))
        assert random.getstate() == before[0] and numpy.random.get_state()[1].tolist() == before[1]
        assert torch.equal(source.generator.get_state(), before[2])
    assert drawn[0] == drawn[1]


def test_a_sampler_of_another_length_than_it_says() -> None:
    class Short(Sampler[int]):
        def __len__(self) -> int:
            return 5

        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    with pytest.raises(ValueError, match="Short has length 5 and drew 4"):
        list(ShardSampler(Short(), Sharding(0, 2), 0))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_data_loader_stays_one(workers: int) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    unidist.init("single")
    try:

        def make() -> Any:
            plain = StatefulDataLoader(Numbers(20), 3, shuffle=True, num_workers=workers)
            return unidist.shard_loader(plain, seed=4)

        loader = make()
        assert type(loader) is StatefulDataLoader
        first = [batch.tolist() for batch in loader]
        second = []
        for batch in loader:
            second.append(batch.tolist())
            if len(second) == 2:
                state = loader.state_dict()
        again = make()
        again.load_state_dict(state)
        assert [batch.tolist() for batch in again] == second[2:]
        assert [batch.tolist() for batch in make()] == first
        with pytest.raises(TypeError, match="iterable dataset in a StatefulDataLoader"):
            unidist.shard_loader(StatefulDataLoader(Stream(4)))
    finally:
        unidist.shutdown()


def test_an_unloaded_loader_is_a_data_loader() -> None:
    (loader,) = world(SequentialSampler(range(4)), 1)
    assert isinstance(loader, DataLoader) and len(loader.dataset) == 10**6  # type: ignore[arg-type]


class OwnOrder:
    """A batch sampler that shuffles its own list, and so goes on from the last epoch's order."""

    def __init__(self, n: int) -> None:
        self.batches = [[2 * i, 2 * i + 1] for i in range(n)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        random.shuffle(self.batches)
        return iter(self.batches)


def test_a_sampler_that_shuffles_its_own_list_resumes() -> None:
    def batches(loader: ShardLoader, count: int) -> list[list[int]]:
        return [batch.tolist() for batch in islice(iter(loader), count)]

    def make() -> ShardLoader:
        sampler = ShardSampler(OwnOrder(10), Sharding(0, 1), 0)
        return ShardLoader(sampler, 0, dataset=Numbers(20), batch_sampler=sampler)

    whole, first, second = make(), make(), make()
    epochs = [batches(whole, 10) for _ in range(3)]
    assert batches(first, 1) == epochs[0][:1] and batches(first, 10) == epochs[0]  # the first one begins again
    assert [batches(first, 10), batches(first, 4)] == [epochs[1], epochs[2][:4]]
    second.load_state_dict(first.state_dict())
    assert batches(second, 10) == epochs[2][4:]
