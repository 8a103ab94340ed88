"""What one rank does, as it says itself, or as can be seen where it does not answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from unidist.diagnosis.operations import OperationRecord


@dataclass(frozen=True)
class RankState:
    """What one rank does."""

    rank: int
    host: str
    pid: int
    #: That it has ended, or why it does not answer; empty: it takes part.
    silence: str = ""
    #: The line of the user's code in which it is.
    place: str = ""
    #: The pending operations and the last ones that are done, the newest last.
    operations: tuple[OperationRecord, ...] = ()
    #: The error with which it has failed, or how it has ended.
    error: str = ""
    #: Whether that error is one of a collective call, so that another rank may have failed first.
    follows: bool = False
    #: The Python stacks of its threads, if they were asked for.
    stacks: str = ""

    @property
    def pending(self) -> list[OperationRecord]:
        """The operations that are not done, the oldest first."""
        return sorted((each for each in self.operations if not each.done), key=lambda each: -each.seconds)

    @property
    def last_done(self) -> OperationRecord | None:
        """The newest operation that is done."""
        return min((each for each in self.operations if each.done), key=lambda each: each.seconds, default=None)

    def waiting_in(self, operation: OperationRecord) -> RankState:
        """Return the same, with an operation that has failed as a pending one."""
        others = tuple(each for each in self.operations if each.key != operation.key)
        before = operation.executed - operation.done  # without itself
        pending = operation._replace(done=False, executed=before)
        return replace(self, operations=(*others, pending), error="", follows=False)

    def to_row(self) -> dict[str, Any]:
        """Return a dict for JSON, and ``from_row``."""
        return asdict(self) | {"operations": [each._asdict() for each in self.operations]}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> RankState:
        """Return the state of ``to_row``."""
        operations = tuple(
            OperationRecord(
                **{
                    **each,
                    "ranks": tuple(each["ranks"]),
                    "shape": None if each["shape"] is None else tuple(each["shape"]),
                }
            )
            for each in row["operations"]
        )
        return cls(**{**row, "operations": operations})
