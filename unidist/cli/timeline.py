"""``unidist timeline``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from unidist.diagnosis.timeline.trace import merged, read_all
from unidist.diagnosis.timeline.waiting import Waits, verdict, waits

FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--merge", "merge_path", type=FILE, help="Write all events to one file, for Perfetto or chrome://tracing."
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def command(files: Sequence[Path], merge_path: Path | None, as_json: bool) -> None:
    """Print where the time of each rank went, and for whom the others waited.

    FILES are those that unidist.timeline wrote, one per rank, and for --merge also those of torch.profiler's
    export_chrome_trace.
    """
    traces, profiles = read_all(files)
    if not traces:
        raise click.UsageError("none of these files is of unidist.timeline: give one for each rank")
    missing = sorted(set(range(traces[0].world_size)) - {trace.rank for trace in traces})
    found = waits(traces)
    if as_json:
        rows = [{**vars(time), "compute": time.compute} for time in found.ranks]
        click.echo(json.dumps({"ranks": rows, "collectives": found.collectives, "missing": missing}, indent=1))
    else:
        show(found, missing)
    if merge_path:
        merge_path.write_text(json.dumps(list(merged(traces, profiles))))


def show(found: Waits, missing: Sequence[int]) -> None:
    """Print the table, and what to read first."""
    console = Console()
    headers = ("rank", "seconds", "compute", "data", "communication", "waiting", "last", "waited for")
    table = Table(*headers, box=SIMPLE, collapse_padding=True)
    for time in found.ranks:
        parts = (time.compute, time.data, time.communication, time.waiting)
        shares = [f"{part / time.total:.1%}" if time.total else "-" for part in parts]
        figures = [f"{time.total:.2f}", *shares, str(time.last), f"{time.waited_for:.2f} s"]
        table.add_row(f"{time.rank} ({escape(time.host)})", *figures)
    console.print(table)
    if missing:
        console.print(f"the files of these ranks are missing: {', '.join(map(str, missing))}", highlight=False)
    console.print(escape(verdict(found)), highlight=False, soft_wrap=True)
