"""Who waits for whom; pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from unidist.diagnosis.timeline.trace import RankTrace, RecordedSpan

#: Of all ranks' time: below it, waiting is not worth a word.
_LITTLE = 0.02
#: Of all waiting: from it on it is mostly for one rank.
_MOSTLY = 2 / 3


@dataclass
class RankTime:
    """Where the time of a rank went, in seconds."""

    rank: int
    host: str
    total: float = 0.0
    #: Waiting for the next batch.
    data: float = 0.0
    #: In collectives until the last rank had come to them.
    waiting: float = 0.0
    #: In collectives since then.
    communication: float = 0.0
    #: Collectives to which it came last.
    last: int = 0
    #: What the other ranks waited for it there, added up.
    waited_for: float = 0.0
    #: The part of that in which it was late because it waited for a batch.
    waited_for_data: float = 0.0

    @property
    def compute(self) -> float:
        """All other time."""
        return max(0.0, self.total - self.data - self.waiting - self.communication)


@dataclass(frozen=True)
class Waits:
    """What ``waits`` found."""

    ranks: list[RankTime]
    #: The collectives in which all of their ranks were found.
    collectives: int


@dataclass
class _Rank:
    time: RankTime
    #: Its waits for batches.
    data: list[RecordedSpan] = field(default_factory=list)
    #: When it came to the last collective that it waited in.
    came: float = 0.0

    def on_data(self, until: float) -> float:
        """Return how long it waited for batches since it came to the last collective that it waited in."""
        first = bisect_left(self.data, self.came, key=lambda each: each.begin)
        last = bisect_left(self.data, until, key=lambda each: each.begin)
        return sum(each.end - each.begin for each in self.data[first:last])


def waits(traces: Sequence[RankTrace]) -> Waits:
    """Return where the time of each rank went, and for whom the others waited.

    A collective is found on all ranks by its group and number. Until the last rank has come to it the others wait; the
    rest of it is communication. Time in which an operation went on beside computing counts as computing.
    """
    ranks = {trace.rank: _Rank(RankTime(trace.rank, trace.host)) for trace in traces}
    met: dict[tuple[str, int], dict[int, RecordedSpan]] = defaultdict(dict)
    for trace in traces:
        rank, operations = ranks[trace.rank], trace.spans
        if operations:
            rank.time.total = (max(each.end for each in operations) - operations[0].begin) / 1e6
        for each in operations:
            if each.category == "data":
                rank.data.append(each)
                rank.time.data += (each.end - each.begin) / 1e6
            else:
                met[each.arguments["group"], each.arguments["number"]][trace.rank] = each
    complete = [came for came in met.values() if all(len(came) == each.arguments["ranks"] for each in came.values())]
    for came in sorted(complete, key=_last_begin):
        _add(came, ranks)
    return Waits([ranks[rank].time for rank in sorted(ranks)], len(complete))


def verdict(found: Waits) -> str:
    """Return what to read first."""
    if not found.collectives:
        return "No collective was found on all of its ranks: give the files of all ranks."
    total, waiting = (sum(getattr(time, name) for time in found.ranks) for name in ("total", "waiting"))
    share = f"{waiting / total:.1%} of their time"
    if waiting < _LITTLE * total:
        return f"The ranks wait little for each other: {share}."
    slowest = max(found.ranks, key=lambda time: time.waited_for)
    if slowest.waited_for < _MOSTLY * waiting:
        return f"The ranks wait for each other {share}, and not for one of them alone: the work differs by step."
    text = (
        f"The ranks wait for each other {share}, mostly for rank {slowest.rank} ({slowest.host}): it came last to "
        f"{slowest.last} of {found.collectives} collectives, where the others waited {slowest.waited_for:.2f} s."
    )
    if slowest.waited_for_data > 0.5 * slowest.waited_for:
        return f"{text} It was waiting for batches: its data loader is slow."
    return f"{text} It was computing, or busy with something that is neither a collective nor a data loader."


def _add(came: Mapping[int, RecordedSpan], ranks: Mapping[int, _Rank]) -> None:
    """Add one collective, of which all ranks' operations are known."""
    slowest = max(came, key=lambda rank: came[rank].begin)
    since = came[slowest].begin
    waited = 0.0
    for rank, each in came.items():
        waiting = max(0.0, min(since, each.end) - each.blocked)
        waited += waiting
        ranks[rank].time.waiting += waiting / 1e6
        ranks[rank].time.communication += max(0.0, each.end - max(each.blocked, since)) / 1e6
    late = ranks[slowest]
    late.time.last += 1
    late.time.waited_for += waited / 1e6
    if late.on_data(since) > 0.5 * (since - min(each.begin for each in came.values())):
        late.time.waited_for_data += waited / 1e6
    for rank, each in came.items():
        if each.blocked < each.end:
            ranks[rank].came = each.begin


def _last_begin(came: Mapping[int, RecordedSpan]) -> float:
    return max(each.begin for each in came.values())
