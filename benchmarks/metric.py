"""``allreduce_metric`` of a few numbers."""

from __future__ import annotations

from collections.abc import Iterator

import unidist
from benchmarks import peers
from benchmarks.measure import OURS, Case, alternate


def cases(world: str, rounds: int, quick: bool) -> Iterator[Case]:
    """Yield a case of 1 and one of 16 numbers."""
    for count in (1, 16):
        figures = {f"figure{i}": 0.5 * i for i in range(count)}

        def ours(figures: dict[str, float] = figures) -> dict[str, float]:
            return unidist.allreduce_metric(figures)

        seconds = alternate({OURS: ours, **dict(peers.metrics(figures))}, rounds)
        yield Case("metric", world, f"{count} number{'s' * (count > 1)}", seconds)
