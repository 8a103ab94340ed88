"""Timelines of several ranks: who waits for whom, files that are cut off, profiles beside them, the command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from unidist.cli import main
from unidist.diagnosis.timeline.recorder import path_of_rank
from unidist.diagnosis.timeline.trace import RankTrace, merged, read_all
from unidist.diagnosis.timeline.waiting import verdict, waits
from unidist.errors import UnidistError

pytestmark = pytest.mark.unit
ZERO = 1_700_000_000_000_000_000


def span(name: str, begin: float, end: float, number: int | None = None, ranks: int = 2) -> dict[str, Any]:
    """A blocking collective, or waiting for a batch; in milliseconds."""
    arguments = {} if number is None else {"group": ",".join(map(str, range(ranks))), "number": number, "ranks": ranks}
    category = "data" if number is None else "collective"
    return {
        "name": name, "cat": category, "ph": "X", "tid": 0, "ts": begin * 1e3, "dur": (end - begin) * 1e3,
        "args": arguments,
    }  # fmt: skip


def bucket(begin: float, end: float, number: int, blocked: float) -> list[dict[str, Any]]:
    """A collective beside others, for which the rank waits from ``blocked`` on."""
    event = {"name": "backward", "cat": "collective", "tid": 1, "id": f"0,1 {number}"}
    arguments = {"group": "0,1", "number": number, "ranks": 2, "blocked": blocked * 1e3}
    return [{**event, "ph": "b", "ts": begin * 1e3, "args": arguments}, {**event, "ph": "e", "ts": end * 1e3}]


def write(directory: Path, ranks: Sequence[Sequence[dict[str, Any]]], zero: int = ZERO) -> list[Path]:
    """A file for each rank."""
    paths = []
    for rank, events in enumerate(ranks):
        about = {
            "rank": rank, "world_size": len(ranks), "host": f"host{rank}", "backend": "gloo", "zero_ns": zero,
            "clock_offset_ns": 1_000_000 * rank,
        }  # fmt: skip
        header = {"name": "unidist", "ph": "M", "pid": rank, "args": about}
        paths.append(path_of_rank(directory / "trace.json", rank))
        lines = ",\n".join(json.dumps({"pid": rank, **event}) for event in (header, *events))
        paths[-1].write_text(f"[\n{lines}\n]\n")
    return paths


def traces_of(directory: Path, *ranks: Sequence[dict[str, Any]]) -> list[RankTrace]:
    return read_all(write(directory, ranks))[0]


def test_waiting_and_communication(tmp_path: Path) -> None:
    """Rank 1 comes 60 ms after rank 0, since it waits for its batch; then the collective takes 10 ms."""
    found = waits(
        traces_of(
            tmp_path,
            [span("next batch", 0, 10), span("all_reduce", 30, 100, 0)],
            [span("next batch", 0, 75), span("all_reduce", 90, 100, 0)],
        )
    )
    first, second = found.ranks
    assert found.collectives == 1
    assert [first.total, first.data, first.waiting, first.communication] == pytest.approx([0.1, 0.01, 0.06, 0.01])
    assert [second.total, second.data, second.waiting, second.communication] == pytest.approx([0.1, 0.075, 0, 0.01])
    assert [first.compute, second.compute] == pytest.approx([0.02, 0.015])
    assert (second.last, second.waited_for, second.waited_for_data) == (1, pytest.approx(0.06), pytest.approx(0.06))
    assert verdict(found) == (
        "The ranks wait for each other 30.0% of their time, mostly for rank 1 (host1): it came last to 1 of 1 "
        "collectives, where the others waited 0.06 s. It was waiting for batches: its data loader is slow."
    )


def test_a_collective_beside_computing_costs_what_is_waited(tmp_path: Path) -> None:
    """Two buckets of a pass: nobody waits for the first, and for the second from 40 ms on."""
    pass_of = [*bucket(10, 50, 0, blocked=50), *bucket(30, 60, 1, blocked=40)]
    late = [*bucket(20, 50, 0, blocked=50), *bucket(52, 60, 1, blocked=52)]
    found = waits(traces_of(tmp_path, pass_of, late))
    assert found.collectives == 2
    assert [found.ranks[0].waiting, found.ranks[0].communication] == pytest.approx([0.012, 0.008])
    assert [found.ranks[1].waiting, found.ranks[1].communication] == pytest.approx([0, 0.008])
    assert found.ranks[1].waited_for_data == 0 and "It was computing" in verdict(found)


def test_even_ranks_and_lost_files(tmp_path: Path) -> None:
    even = [[span("all_reduce", 10 * i, 10 * i + 2, i) for i in range(5)] for _ in range(2)]
    traces = traces_of(tmp_path, *even)
    assert verdict(waits(traces)) == "The ranks wait little for each other: 0.0% of their time."
    assert "files of all ranks" in verdict(waits(traces[:1]))
    by_turns = [[span("all_reduce", 10 * i + 5 * (i % 2 == rank), 10 * i + 6, i) for i in range(6)] for rank in (0, 1)]
    assert "not for one of them alone" in verdict(waits(traces_of(tmp_path, *by_turns)))


def test_files_that_are_cut_off_or_foreign(tmp_path: Path) -> None:
    paths = write(tmp_path, [[span("all_reduce", 0, 1, 0), span("all_reduce", 2, 3, 1)]] * 2)
    text = paths[1].read_text()
    for cut in (text[:-2], text[:-3], text[:-60], text.rstrip("]\n") + ",\n"):
        paths[1].write_text(cut)
        assert len(read_all(paths)[0][1].spans) in (1, 2)
    for broken in ("", "[", "{}", "[1, 2]", "no JSON", '{"traceEvents": 3}'):
        paths[1].write_text(broken)
        with pytest.raises(UnidistError, match=r"trace.1.json is neither a file of unidist.timeline nor"):
            read_all(paths)
    paths[1].write_bytes(b"\xff\xfe")
    with pytest.raises(UnidistError, match="cannot be read"):
        read_all(paths)
    with pytest.raises(UnidistError, match="both of rank 0"):
        read_all([paths[0], paths[0]])
    (tmp_path / "other").mkdir()
    other = write(tmp_path / "other", [[], []], ZERO + 1)
    with pytest.raises(UnidistError, match="different runs"):
        read_all([paths[0], other[1]])


def test_a_profile_is_moved_to_its_rank_and_time(tmp_path: Path) -> None:
    """By the profiler's clock, and the offset of the rank's host."""
    traces = traces_of(tmp_path, [span("all_reduce", 0, 1, 0)], [span("all_reduce", 0, 1, 0)])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(3).add(1)
    path = tmp_path / "profile.json"
    profiler.export_chrome_trace(str(path))
    whole = json.loads(path.read_text())
    path.write_text(json.dumps({**whole, "distributedInfo": {"rank": 1}}))
    _, profiles = read_all([path])
    events = list(merged(traces, profiles))
    before = next(event for event in whole["traceEvents"] if event.get("name") == "aten::add")
    after = next(event for event in events if event.get("name") == "aten::add")
    nanoseconds = before["ts"] * 1000 + whole["baseTimeNanoseconds"]
    assert after["ts"] * 1000 + ZERO == pytest.approx(nanoseconds + 1_000_000, abs=2000)
    assert after["pid"] not in (0, 1, before["pid"])
    names = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
    assert names[after["pid"]].startswith("rank 1: ")
    with pytest.raises(UnidistError, match="is of rank 1, whose file"):
        list(merged(traces[:1], profiles))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = write(tmp_path, [[span("all_reduce", 0, 50, 0, 3)], [span("all_reduce", 40, 50, 0, 3)], []])

    def unidist_timeline(*arguments: object, status: int = 0) -> str:
        done = CliRunner().invoke(main, ["timeline", *map(str, arguments)])
        assert done.exit_code == status, done.output
        return done.output

    shown = unidist_timeline(*paths[:2], "--merge", "all.json")
    assert "1 (host1)" in shown and "these ranks are missing: 2" in shown and "files of all ranks" in shown
    assert len(json.loads((tmp_path / "all.json").read_text())) == 2
    figures = json.loads(unidist_timeline(*paths, "--json"))
    assert figures["missing"] == [] and [row["host"] for row in figures["ranks"]] == ["host0", "host1", "host2"]
    (tmp_path / "foreign.json").write_text("[]")
    assert "is neither a file" in unidist_timeline("foreign.json", status=1)
