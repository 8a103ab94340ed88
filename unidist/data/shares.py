"""How an epoch is cut into shares, and where in which epoch a loader stands."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shares:
    """The rule by which the ranks share an epoch: place by place in turn.

    So the union of the ranks' k-th batches is the k-th batch of one process with a batch ``world_size`` times as
    large, and what has been consumed is always the first part of the epoch, whatever the world's size.

    Args:
        rank, world_size: which of how many shares.
        drop_last: leave out the last places that do not make a whole round over the ranks.
        pad: fill the last round from the epoch's beginning, so that all shares are equally long.
    """

    rank: int
    world_size: int
    drop_last: bool = False
    pad: bool = False

    def length(self, places: int) -> int:
        """How many of the ``places`` that an epoch has left belong to this rank."""
        if self.drop_last:
            return places // self.world_size
        if self.pad:
            return -(-places // self.world_size)
        return len(range(self.rank, places, self.world_size))


@dataclass
class Cursor:
    """The epoch that the next iteration will be, and how much of it all ranks together have consumed before."""

    epoch: int = 0
    position: int = 0

    def set_epoch(self, epoch: int) -> bool:
        """Go to the beginning of an epoch, unless it is the next one already, lest a resumed position be lost; whether it moved."""
        moved = epoch != self.epoch
        if moved:
            self.epoch, self.position = epoch, 0
        return moved

    def begin(self) -> Cursor:
        """The epoch and position to begin at; the next iteration will be the epoch after it."""
        now = replace(self)
        self.epoch, self.position = self.epoch + 1, 0
        return now


def mixed(*parts: int) -> int:
    """A 32-bit seed that differs wherever one of the parts does: as many as torch's generator takes on the CPU."""
    return random.Random(repr(parts)).getrandbits(32)
