"""The plot of a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unidist.diagnosis.timeline.trace import RankTrace
from unidist.diagnosis.timeline.waiting import Waits, verdict

_COLORS = {"compute": "C0", "data": "C1", "communication": "C2", "waiting": "C3"}


def plot(traces: Sequence[RankTrace], found: Waits, path: Path) -> None:
    """Plot where each rank's time went, and below it each rank's row of data waits and collectives.

    Args:
        traces: in rank order.
        found: of the same traces.
        path: its suffix selects the format (``.png``, ``.svg``, ``.pdf``).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = [f"rank {trace.rank}" for trace in traces]
    height = 1.2 + 0.3 * len(traces)
    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(11, 2 * height + 1), layout="constrained")
    left = [0.0] * len(traces)
    for name, color in _COLORS.items():
        widths = [float(getattr(time, name)) for time in found.ranks]
        upper.barh(labels, widths, left=left, color=color, label=name)
        left = [a + b for a, b in zip(left, widths)]
    upper.set(xlabel="seconds in all", title=verdict(found).split(":")[0])
    upper.legend(fontsize=9, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.25))
    for row, trace in enumerate(traces):
        for category, color in (("collective", _COLORS["communication"]), ("data", _COLORS["data"])):
            operations = [each for each in trace.spans if each.category == category]
            bars = [(each.blocked / 1e6, (each.end - each.blocked) / 1e6) for each in operations]
            lower.broken_barh(bars, (row - 0.4, 0.8), color=color)
    lower.set_yticks(range(len(traces)), labels)
    lower.set(xlabel="seconds since the start: in collectives, and waiting for batches")
    for axis in (upper, lower):
        axis.invert_yaxis()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
