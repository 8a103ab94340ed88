"""What grows with samples, or with the size of a checkpoint: at several sizes, beside PyTorch alone."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

import unidist
from benchmarks.measure import OURS, Case, alternate
from unidist.data import ShardSampler, ShardStream
from unidist.data.sharding import Position, Sharding

BATCH = 256
#: The world whose rank 3 is measured: its cost depends on the data alone.
RANKS, WORKERS = 64, 8
_MIB = 2**20


def cases(world: str, rounds: int, quick: bool) -> Iterator[Case]:
    """Yield one case for each cost and size."""
    few = max(3, rounds // 3)
    yield _epoch(world, few, 20_000 if quick else 200_000)
    for resumed in (False, True):
        for samples in (10**6, 10**9) if quick else (10**6, 10**7, 10**8, 10**9):
            yield _first_batch(world, few, samples, resumed)
    yield _stream(world, few, 20 * RANKS * WORKERS)
    sizes = (16, 64) if quick else (64, 256, 1024)
    checkpoints = [case for mib in sizes for case in _checkpoints(world, few, mib)]
    yield from sorted(checkpoints, key=lambda case: case.name.rsplit(", ", 1)[0])


class _Numbers(Sequence[int]):
    """A dataset of any length."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        return index


def _nothing(batch: list[int]) -> list[int]:
    return batch


def _epoch(world: str, rounds: int, samples: int) -> Case:
    """Whole epochs of this rank's samples, which cost nothing themselves."""
    data = _Numbers(samples * unidist.world_size())
    ours = unidist.shard_loader(DataLoader[Any](data, BATCH, shuffle=True, collate_fn=_nothing))  # type: ignore[arg-type]
    sampler: DistributedSampler[Any] = DistributedSampler(data, unidist.world_size(), unidist.rank())  # type: ignore[arg-type]
    torchs = DataLoader[Any](data, BATCH, sampler=sampler, collate_fn=_nothing)  # type: ignore[arg-type]
    seconds = alternate({OURS: lambda: sum(1 for _ in ours), "torch": lambda: sum(1 for _ in torchs)}, rounds)
    return Case("scale", world, f"shard_loader, an epoch, {samples:,} samples", seconds)


def _first_batch(world: str, rounds: int, samples: int, resumed: bool) -> Case:
    """Until one rank has the indices of its first batch, at the beginning or in the middle of an epoch."""
    data = _Numbers(samples)
    ours = ShardSampler(RandomSampler(data), Sharding(3, RANKS, pad=True), 0)

    def begin() -> object:
        ours.progress.seek(Position(1, samples // 2 * resumed))
        return list(islice(ours, BATCH))

    contenders: dict[str, Callable[[], object]] = {OURS: begin}
    if samples <= 10**7:  # beyond, it is a list of gigabytes; DistributedSampler cannot resume
        sampler: DistributedSampler[Any] = DistributedSampler(data, RANKS, 3)  # type: ignore[arg-type]
        contenders["torch"] = lambda: list(islice(sampler, BATCH))
    where = "resumed in the middle" if resumed else "first batch"
    return Case("scale", world, f"shard_loader, {where}, {samples:,} samples", alternate(contenders, rounds))


class _Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


class _ToldStream(_Stream):
    shard = (0, 1)

    def set_shard(self, index: int, num_shards: int) -> None:
        self.shard = (index, num_shards)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.shard[0], self.length, self.shard[1]))


def _stream(world: str, rounds: int, samples: int) -> Case:
    """Return an epoch of one worker's samples of an iterable dataset."""
    every = RANKS * WORKERS
    streams = {
        OURS: ShardStream(_ToldStream(samples), Sharding(3, every), 1),
        "without set_shard": ShardStream(_Stream(samples), Sharding(3, every), 1),
    }
    seconds = alternate({name: lambda s=stream: len(list(s)) for name, stream in streams.items()}, rounds)  # type: ignore[misc]
    return Case("scale", world, f"a stream, {RANKS} ranks x {WORKERS} workers, {samples:,} samples", seconds)


def _checkpoints(world: str, rounds: int, mib: int) -> Iterator[Case]:
    """Yield a model saved and loaded, and ``torch.save`` with ``fsync`` by rank 0 and ``torch.load`` by all ranks."""
    model = nn.ParameterList([nn.Parameter(torch.full((_MIB // 4,), float(index))) for index in range(mib)])
    folder = Path(unidist.broadcast_object(tempfile.mkdtemp() if unidist.is_main() else ""))
    ours, torchs = folder / "ours.pt", folder / "torch.pt"

    def save() -> None:
        if unidist.is_main():
            with torchs.open("wb") as file:
                torch.save(model.state_dict(), file)
                os.fsync(file.fileno())

    def save_ours() -> None:
        unidist.save_checkpoint(ours, model=model)

    try:
        yield Case("scale", world, f"save_checkpoint, {mib:,} MiB", alternate({OURS: save_ours, "torch": save}, rounds))
        loads = {
            OURS: lambda: unidist.load_checkpoint(ours, model=model),
            "torch": lambda: model.load_state_dict(torch.load(torchs, weights_only=True)),
        }
        yield Case("scale", world, f"load_checkpoint, {mib:,} MiB", alternate(loads, rounds))
        seconds: dict[str, list[float]] = {OURS: [], "torch": []}
        for _ in range(rounds):
            seconds[OURS].append(_timed(lambda: unidist.save_checkpoint(ours, wait=False, model=model)))
            unidist.latest_checkpoint(folder)  # waits for the file
            seconds["torch"].append(_timed(save))
        yield Case("scale", world, f"save_checkpoint(wait=False), until it returns, {mib:,} MiB", seconds)
    finally:
        unidist.barrier()
        if unidist.is_main():
            shutil.rmtree(folder, ignore_errors=True)


def _timed(call: Callable[[], object]) -> float:
    unidist.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
