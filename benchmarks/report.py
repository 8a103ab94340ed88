"""Cases as a table for the terminal and as a plot."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from textwrap import fill
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.measure import OURS, Case

#: Characters of a line of a bar's label.
_LABEL = 70
#: What each suite measures.
SUBJECTS = {
    "collectives": "one call",
    "step": "zero_grad, forward, backward, optimizer step",
    "hvd": "one training step, one call, all of the operations",
    "metric": "the mean over the ranks",
    "scale": "what grows with parameters, bytes and samples",
    "loader": "iterating over a rank's shard",
    "control": "CPU time of rank 0 with simulated ranks, and bytes that it sends",
    "startup": "raw: import torch.distributed; torchrun + init_process_group; horovodrun + hvd.init",
    "memory": "growth of the largest rank's resident memory",
}


def tables(cases: Sequence[Case]) -> Iterable[tuple[str, Table]]:
    """Yield a title and a table for each suite and world; a cell's second line is ours over the other's, or our spread.

    Where each case has contenders of its own, they are listed below each other.
    """
    for (suite, world), group in groupby(cases, key=lambda case: (case.suite, case.world)):
        rows = list(group)
        others = list(dict.fromkeys(name for case in rows for name in case.samples if name != OURS))
        table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        table.add_column("")
        title = f"[bold]{suite}[/bold] ({SUBJECTS[suite]}), {world}"
        if suite == "scale":
            yield title, _listed(table, rows)
            continue
        for name in [OURS, *others, *(["bus"] if any(case.bus_bytes for case in rows) else [])]:
            table.add_column(name, justify="right", overflow="fold")
        for case in rows:
            spread = f"±{case.spread():.0%}" if len(case.samples[OURS]) > 1 else "1 round"
            cells = [f"{amount(case.median(), case.unit)}\n[dim]{spread}[/dim]"]
            cells += [versus(case, name) for name in others]
            cells += [f"{case.bus_bytes / case.median() / 1e9:.2f} GB/s"] if case.bus_bytes else []
            table.add_row(case.name, *cells)
        yield title, table


def _listed(table: Table, cases: Sequence[Case]) -> Table:
    for name in (OURS, "", "against", "ratio"):
        table.add_column(name, justify="right")
    for case in cases:
        ours = amount(case.median(), case.unit)
        for other in [name for name in case.samples if name != OURS]:
            ratio = case.ratio(other)
            style = "green" if ratio <= 1 else "yellow"
            table.add_row(case.name, ours, other, amount(case.median(other), case.unit), f"[{style}]{ratio:.2f}[/]")
    return table


def versus(case: Case, other: str) -> str:
    """Return another's figure, and the ratio of ours to it."""
    if other not in case.samples:
        return "-"
    ratio = case.ratio(other)
    style = "green" if ratio <= 1 else "yellow"
    return f"{amount(case.median(other), case.unit)}\n[{style}]{ratio:.2f}[/{style}]"


def amount(value: float, unit: str) -> str:
    """Return seconds or bytes in a readable unit."""
    steps = [(1, "s"), (1e-3, "ms"), (1e-6, "us")] if unit == "s" else [(2**30, "GiB"), (2**20, "MiB"), (1, "B")]
    size, name = next((step for step in steps if value >= step[0]), steps[-1])
    return f"{value / size:.3g} {name}"


def plot(cases: Sequence[Case], limits: dict[str, float], path: Path) -> None:
    """Write a plot: collectives as bandwidth by size beside the machine's own limits, the other suites as ratios.

    Args:
        cases: what was measured.
        limits: bytes a second by name, drawn as lines across the bandwidths.
        path: a file name whose ending gives the format (``.png``, ``.svg``, ``.pdf``).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    moved = [case for case in cases if case.bus_bytes]
    bars = [(case, name) for case in cases if not case.bus_bytes for name in case.samples if name != OURS]
    worlds = list(dict.fromkeys(case.world for case in moved))
    heights = [4.5 * len(worlds)] * bool(moved) + [1.0 + 0.3 * len(bars)] * bool(bars)
    figure = pyplot.figure(figsize=(14, sum(heights)), layout="constrained")
    parts = list(figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])
    if moved:
        operations = list(dict.fromkeys(case.name.split()[0] for case in moved))
        names = list(dict.fromkeys(name for case in moved for name in case.samples))
        grid = parts[0].subplots(len(worlds), len(operations), sharey=True, squeeze=False)
        for row, world in zip(grid, worlds):
            for axis, operation in zip(row, operations):
                here = [case for case in moved if case.world == world and case.name.split()[0] == operation]
                _bandwidths(axis, here, names, limits)
                axis.set_title(f"{operation}, {world}", fontsize=9)
            row[0].set_ylabel("bus bandwidth, GB/s")
        # One entry for each contender and limit, over all worlds.
        handles = {label: handle for axis in grid.flat for handle, label in zip(*axis.get_legend_handles_labels())}
        parts[0].legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=9)
    if bars:
        _ratios(parts[-1].subplots(), bars)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _bandwidths(axis: Any, cases: Sequence[Case], names: Sequence[str], limits: dict[str, float]) -> None:
    for index, name in enumerate(names):
        points = [(_nbytes(case), case.bus_bytes / case.median(name) / 1e9) for case in cases if name in case.samples]
        if points:
            style = {"linewidth": 2.2, "marker": "o"} if name == OURS else {"linestyle": "--", "marker": "."}
            axis.plot(*zip(*points), label=name, color=f"C{index}", **style)
    for (name, speed), dashes in zip(limits.items(), ("-.", (0, (1, 4)))):
        axis.axhline(speed / 1e9, color="black", linewidth=1, linestyle=dashes, label=f"{name} of this machine")
    axis.set(xscale="log", yscale="log")
    sizes = {_nbytes(case): case.name.split(" ", 1)[1] for case in sorted(cases, key=_nbytes)}
    axis.set_xticks(list(sizes), list(sizes.values()))
    axis.minorticks_off()
    axis.tick_params(axis="x", labelrotation=45)
    axis.grid(alpha=0.3)


def _nbytes(case: Case) -> int:
    number, unit = case.name.split()[1:]
    return int(number) * {"B": 1, "KiB": 2**10, "MiB": 2**20}[unit]


def _ratios(axis: Any, bars: Sequence[tuple[Case, str]]) -> None:
    widest = 2.0
    labels = [fill(f"{case.suite}, {case.world}: {case.name} / {name}", _LABEL) for case, name in bars]
    ratios = [case.ratio(name) for case, name in bars]
    # Of the ratio of two medians, each with half its interquartile range.
    spreads = [ratio * math.hypot(case.spread(), case.spread(name)) for ratio, (case, name) in zip(ratios, bars)]
    shown = [min(ratio, widest) for ratio in ratios]
    drawn = axis.barh(range(len(bars)), shown, xerr=spreads, ecolor="0.3", capsize=2)
    for bar, ratio, spread in zip(drawn, ratios, spreads):
        bar.set_color("0.75" if abs(ratio - 1) <= spread else "C2" if ratio < 1 else "C1")
    axis.bar_label(drawn, [f"{ratio:.2f}" for ratio in ratios], padding=3, fontsize=8)
    axis.axvline(1, color="black", linewidth=1)
    axis.set_yticks(range(len(bars)), labels, fontsize=8)
    axis.set(
        title="unidist over the other: below 1, unidist needs less; grey: within the spread of the rounds",
        xlim=(0, widest * 1.1),
        ylim=(len(bars) - 0.4, -0.6),
    )
