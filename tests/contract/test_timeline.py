"""A timeline of all ranks."""

import json
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unidist
from unidist.context import current
from unidist.diagnosis.timeline.trace import read_all
from unidist.diagnosis.timeline.waiting import waits


@pytest.mark.processes
def test_it_shows_who_is_late(tmp_path: Path) -> None:
    rank, size = unidist.rank(), unidist.world_size()
    directory = Path(unidist.broadcast_object(str(tmp_path)))
    loader = unidist.shard_loader(DataLoader(TensorDataset(torch.ones(8 * size, 4)), batch_size=2))

    def train(late: float = 0.0) -> None:
        for (batch,) in loader:
            model(batch).sum().backward()
            time.sleep(late * (rank == size - 1))

    unidist.timeline(directory / "first.json")
    model = unidist.wrap_model(nn.Linear(4, 4))
    train()  # what is imported and connected in a first step takes a while
    with unidist.timeline(directory / "trace.json") as timeline:
        train(0.4)
        group = unidist.new_group([0])
        if rank == 0:
            unidist.all_reduce(torch.ones(3), group=group)
        unidist.barrier()
    train()  # not in the files any more
    unidist.barrier()
    traces, _ = read_all(list(directory.glob("trace.*.json")))
    assert [trace.rank for trace in traces] == list(range(size)) and timeline.path == traces[rank].path
    by_name = [[each.name for each in trace.spans] for trace in traces]
    for trace, names in zip(traces, by_name, strict=True):
        assert json.loads(trace.path.read_text())
        assert names.count("next batch") == 4
        calls = unidist.backend_name() != "single"  # which makes no collective calls
        assert names.count("backward") == 4 * calls and (names[-1] == "barrier") is calls, names
    assert by_name[0].count("all_reduce") - by_name[-1].count("all_reduce") == (size > 1)
    found = waits(traces)
    if size > 1:
        assert found.ranks[-1] is max(found.ranks, key=lambda time: time.waited_for), found
        assert found.ranks[-1].waited_for >= 1 and found.ranks[0].waiting >= 1, found


def test_a_second_one_takes_the_place_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current(), "calls", {None: 1000})  # else calls are compared first
    directory = Path(unidist.broadcast_object(str(tmp_path)))
    unidist.timeline(directory / "first.json")
    unidist.all_reduce(torch.ones(1))
    second = unidist.timeline(directory / "second")
    unidist.all_reduce(torch.ones(1))
    unidist.all_reduce(torch.ones(1))
    second.close()
    second.close()
    unidist.all_reduce(torch.ones(1))
    for name, count in (("first", 1), ("second", 2)):
        (trace,), _ = read_all([directory / f"{name}.{unidist.rank()}.json"])
        names = [each.name for each in trace.spans]
        assert names.count("all_reduce") == count * (unidist.backend_name() != "single"), names
