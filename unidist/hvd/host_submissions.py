"""What a leader sends to the coordinator: what the ranks of its host submit by ids, once for all of them. Pure."""

from __future__ import annotations

from collections.abc import Collection
from functools import reduce
from operator import and_
from typing import Any

from unidist.hvd.messages import Submit

#: Messages, with the ranks that have sent them.
Forwarded = list[tuple[tuple[int, ...], Any]]


class HostSubmissions:
    """Holds what a rank has submitted until all ranks of the host have, since nothing executes before that.

    Some ids never come from all of them: the process set lacks a rank, or a rank has joined. Therefore nothing may be
    held for long (``take``). An id that a rank submits again before the others did is one of those, and not held.

    Args:
        ranks: all ranks of the host.
    """

    def __init__(self, ranks: Collection[int]) -> None:
        #: A bit for each id that the rank, and not all of them, has submitted.
        self._submitted = dict.fromkeys(ranks, 0)
        #: Of these what has not been taken.
        self._held = dict.fromkeys(ranks, 0)
        #: Ids that do not come from all ranks.
        self._partial = 0

    def forward(self, rank: int, message: Any) -> Forwarded:
        """Return what is sent on when a rank has sent a message. Only what it submits by ids may be held."""
        if not isinstance(message, Submit):
            return [*self.take([rank]), ((rank,), message)]
        ids, rest = message.cached, message._replace(cached=0)
        self._partial |= ids & self._submitted[rank]
        self._submitted[rank] |= ids
        self._held[rank] |= ids
        # A request may be one for another process set, which must not come first.
        forwarded = self.take([rank] if rest.requests else ())
        return [*forwarded, ((rank,), rest)] if rest != Submit() else forwarded

    def take(self, ranks: Collection[int] = ()) -> Forwarded:
        """Return what all ranks of the host have submitted and has not been taken, and what is held of some ranks."""
        complete = reduce(and_, self._submitted.values())
        found: dict[int, list[int]] = {}
        for rank, held in self._held.items():
            if ids := held if rank in ranks else held & (complete | self._partial):
                found.setdefault(ids, []).append(rank)
                self._held[rank] &= ~ids
        if complete:
            for rank in self._submitted:
                self._submitted[rank] &= ~complete
        return [(tuple(same), Submit(ids)) for ids, same in found.items()]

    @property
    def holds(self) -> bool:
        """Whether something has not been taken."""
        return any(self._held.values())

    def forget(self) -> None:
        """Forget what has been taken, and which ids do not come from all ranks: that may change with each ``join``."""
        self._submitted = dict(self._held)
        self._partial = 0
