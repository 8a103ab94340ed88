"""The plot of a comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unidist.compare.comparison import SERIES, Comparison, verdict

#: On a curve.
_MARKERS = 25


def plot(found: Comparison, path: Path) -> None:
    """Plot both losses, and below them the relative distances; the suffix of ``path`` selects the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(10, 7), sharex=True, layout="constrained")
    # Two curves that are equal are seen both: a broad one, and markers on it.
    styles: tuple[dict[str, Any], ...] = ({"linewidth": 6, "alpha": 0.35}, {"linestyle": "--", "marker": "o"})
    for (name, side), style in zip(found.sides.items(), styles):
        losses = [side.recording.loss(step) for step in range(side.recording.steps)]
        known = [(step, loss) for step, loss in enumerate(losses, 1) if loss is not None]
        label = f"{name}: {Path(side.script).name}, {side.backend} under {side.launcher}"
        every = max(1, len(known) // _MARKERS)
        upper.plot([step for step, _ in known], [loss for _, loss in known], label=label, markevery=every, **style)
    upper.set(ylabel="loss, mean over the ranks", title=verdict(found).splitlines()[0].split(":")[0].split(" (")[0])
    for index, (key, name) in enumerate(SERIES.items()):
        values = [(point.step, value) for point in found.points if (value := point.apart[key]) is not None]
        lower.plot(
            [step for step, _ in values], [value for _, value in values], ".-", color=f"C{index + 2}", label=name
        )
    lower.axhline(found.tolerance.rtol, color="black", linewidth=1, linestyle="--", label="rtol")
    # A distance of 0 does not fit on a logarithmic axis.
    lower.set_yscale("symlog", linthresh=1e-9)
    lower.set(xlabel="step", ylabel="relative difference")
    lower.set_ylim(bottom=0)
    lower.xaxis.get_major_locator().set_params(integer=True)
    for axis in (upper, lower):
        if found.first and found.first.step:
            axis.axvline(found.first.step, color="C3", linewidth=1, label="first difference")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=9)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
