"""How an epoch is divided among the ranks, and the position of a loader in it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Sharding:
    """Item i of an epoch belongs to rank ``i % world_size``.

    So the union of the ranks' k-th batches is the k-th batch of one process with a batch ``world_size`` times as large,
    and what has been consumed is always the first part of the epoch, whatever the world size.

    Args:
        rank, world_size: which of how many shards.
        drop_last: drop the last items if there is not one for every rank.
        pad: repeat the first items of the epoch so that all shards are equally long.
    """

    rank: int
    world_size: int
    drop_last: bool = False
    pad: bool = False

    def length(self, items: int) -> int:
        """Return how many of the remaining ``items`` of an epoch belong to this rank."""
        if self.drop_last:
            return items // self.world_size
        if self.pad:
            return -(-items // self.world_size)
        return len(range(self.rank, items, self.world_size))


class Position(NamedTuple):
    """An epoch, and how many items of it all ranks together have consumed."""

    epoch: int = 0
    position: int = 0

    def next_epoch(self) -> Position:
        """Return the beginning of the epoch after it."""
        return Position(self.epoch + 1)


class Progress:
    """The position of a loader: that of the running iteration, or of the next one."""

    def __init__(self) -> None:
        #: Where the next iteration starts.
        self.next = Position()
        #: Where the running iteration started; None when it has come to its end.
        self.start: Position | None = None
        #: Items that all ranks together have consumed since.
        self.consumed = 0
        #: The number of iterations that have begun.
        self.iterations = 0

    @property
    def iteration(self) -> Position:
        """Where the running iteration started, else where the next one starts."""
        return self.next if self.start is None else self.start

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration this epoch, from its beginning, or from the position that was loaded for it."""
        self.seek(self.next if epoch == self.next.epoch else Position(epoch))

    def begin(self) -> Position:
        """Begin an iteration, and return where it starts."""
        self.start, self.consumed = self.next, 0
        self.iterations += 1
        self.next = self.start.next_epoch()
        return self.start

    def end(self) -> None:
        """Record that the running iteration has come to its end."""
        self.start = None

    def restart(self) -> None:
        """Make the next iteration start where the running one did."""
        if self.start is not None:
            self.next, self.start = self.start, None

    def seek(self, position: Position) -> None:
        """Make the next iteration start there."""
        self.next, self.start = position, None

    def current(self) -> Position:
        """Return the position in the running iteration, else where the next one starts."""
        if self.start is None:
            return self.next
        return Position(self.start.epoch, self.start.position + self.consumed)


def mix_seeds(*parts: int) -> int:
    """Return a 32-bit seed (what torch's CPU generator takes) that is another one wherever a part is another one."""
    return random.Random(repr(parts)).getrandbits(32)
