"""The files of a timeline, read and put together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from unidist.diagnosis.timeline.recorder import ABOUT
from unidist.diagnosis.timeline.trace_file import Event
from unidist.errors import UnidistError

#: Process ids of a profile's rows in a merged file: apart from the ranks'.
_PROFILE_IDS = 1_000_000


@dataclass(frozen=True)
class RecordedSpan:
    """A span of one rank; times in microseconds on rank 0's clock, from the start of the timeline."""

    name: str
    category: str
    begin: float
    end: float
    #: When the rank began to wait for it; ``end`` if it never did.
    blocked: float
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RankTrace:
    """One rank's file."""

    path: Path
    rank: int
    world_size: int
    host: str
    backend: str
    zero_ns: int
    clock_offset_ns: int
    events: list[Event] = field(repr=False)

    @cached_property
    def spans(self) -> list[RecordedSpan]:
        """Its spans, by their begin."""
        found, begun = [], {}
        for event in self.events:
            if event["ph"] == "X" and event["cat"] != "wait":
                found.append(_recorded(event, event["ts"] + event["dur"], event["ts"]))
            elif event["ph"] == "b":
                begun[event["id"]] = event
            elif event["ph"] == "e" and (first := begun.pop(event["id"], None)):
                found.append(_recorded(first, event["ts"], first["args"]["blocked"]))
        return sorted(found, key=lambda operation: operation.begin)


@dataclass(frozen=True)
class Profile:
    """A file of ``torch.profiler``'s ``export_chrome_trace``."""

    path: Path
    #: None outside a process group.
    rank: int | None
    base_ns: int
    events: list[Event] = field(repr=False)


def read(path: Path) -> RankTrace | Profile:
    """Return a file of ``unidist.timeline``, whose end may be missing, or of ``torch.profiler``.

    Raises:
        UnidistError: it is neither.
    """
    try:
        text = path.read_text()
    except (OSError, ValueError) as error:
        raise UnidistError(f"{path} cannot be read: {error}") from error
    try:
        data = json.loads(text)
    except ValueError:
        data = _whole_events(text)
    if isinstance(data, dict) and isinstance(data.get("traceEvents"), list):
        rank = data.get("distributedInfo", {}).get("rank")
        return Profile(path, rank, int(data.get("baseTimeNanoseconds", 0)), data["traceEvents"])
    if isinstance(data, list) and all(isinstance(event, dict) for event in data):
        about = next((event["args"] for event in data if event.get("name") == ABOUT and event.get("ph") == "M"), None)
        if about is not None:
            return RankTrace(path, **about, events=[event for event in data if event.get("name") != ABOUT])
    raise UnidistError(f"{path} is neither a file of unidist.timeline nor one of torch.profiler's export_chrome_trace.")


def read_all(paths: Sequence[Path]) -> tuple[list[RankTrace], list[Profile]]:
    """Return the files of one run, in rank order.

    Raises:
        UnidistError: a file cannot be read, or they are not of one run.
    """
    files = [read(path) for path in paths]
    traces = sorted((file for file in files if isinstance(file, RankTrace)), key=lambda trace: trace.rank)
    for one, other in pairwise(traces):
        if one.rank == other.rank:
            raise UnidistError(f"{one.path} and {other.path} are both of rank {one.rank}: give the files of one run.")
        if one.zero_ns != other.zero_ns:
            raise UnidistError(f"{one.path} and {other.path} are of different runs: give the files of one run.")
    return traces, [file for file in files if isinstance(file, Profile)]


def merged(traces: Sequence[RankTrace], profiles: Sequence[Profile]) -> Iterator[Event]:
    """Yield all events, on rank 0's clock; the rows of a profile follow those of its rank."""
    for each in traces:
        yield from each.events
    by_rank = {each.rank: each for each in traces}
    for index, profile in enumerate(profiles):
        rank = index if profile.rank is None else profile.rank
        if rank not in by_rank:
            raise UnidistError(f"{profile.path} is of rank {rank}, whose file of unidist.timeline is not given.")
        trace = by_rank[rank]
        shift = (profile.base_ns + trace.clock_offset_ns - trace.zero_ns) / 1000
        yield from _moved(profile.events, rank, shift)


def _moved(events: Iterable[Event], rank: int, shift: float) -> Iterator[Event]:
    ids: dict[Any, int] = {}
    for event in events:
        event = dict(event)
        if "pid" in event:
            event["pid"] = ids.setdefault(event["pid"], _PROFILE_IDS * (rank + 1) + len(ids))
        if event.get("ph") == "M" and event.get("name") == "process_name":
            event["args"] = {"name": f"rank {rank}: {event['args'].get('name', '')}"}
        elif event.get("ph") == "M" and event.get("name") == "process_sort_index":
            event["args"] = {"sort_index": rank}
        if "ts" in event and event.get("ph") != "M":
            event["ts"] += shift
        if "id" in event:  # flows of two ranks may have equal ids
            event["id"] = f"{rank}.{event['id']}"
        yield event


def _recorded(event: Event, end: float, blocked: float) -> RecordedSpan:
    return RecordedSpan(event["name"], event["cat"], event["ts"], end, blocked, event.get("args", {}))


def _whole_events(text: str) -> list[Event]:
    """Return the complete lines of a file whose end is missing."""
    found = []
    for line in text.splitlines():
        with suppress(ValueError):
            found.append(json.loads(line.strip().rstrip(",")))
    return [event for event in found if isinstance(event, dict)]
