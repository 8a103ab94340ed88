"""``unidist doctor``."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from unidist import settings
from unidist.cli.checkup import Finding, State, findings
from unidist.cli.options import BackendAtLauncher
from unidist.cli.status import status
from unidist.launchers.table import BACKENDS, COMMANDS, unavailable
from unidist.launchers.world import run_world

#: Size of the worlds that the doctor starts.
RANKS = 2
#: Seconds until a world that does not end is killed; its start-up gives up after half of them.
TIMEOUT_S = 90
MARKS: dict[State, str] = {
    "ok": "[green]ok[/green]",
    "none": "[dim]-[/dim]",
    "warning": "[yellow]warning[/yellow]",
    "error": "[red]error[/red]",
}


@click.command()
@click.option("--run", "run_all", is_flag=True, help="Start a world of 2 ranks for every pair of launcher and backend.")
@click.option(
    "--need",
    "needed",
    type=BackendAtLauncher(),
    multiple=True,
    help="Start this pair; exit status 1 if it does not work.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def command(run_all: bool, needed: tuple[tuple[str, str], ...], as_json: bool) -> None:
    """Show what this machine can run, and how to fix what it cannot.

    Reads the installed libraries, the launchers on PATH, this process's environment and the network, and says what
    `unidist.init()` would make of them. Under a launcher (srun -n 1 unidist doctor) it shows what a rank would see.

    LAUNCHER is torchrun, spawn, unidist-run, horovodrun (with --gloo), horovodrun-mpi, openmpi, mpich or slurm.
    Default: horovodrun for horovod, openmpi for mpi, else torchrun. Exit status: 1 if a pair given with --need does not
    work, else 0.
    """
    found = list(findings(os.environ))
    pairs = list(dict.fromkeys([*needed, *(all_pairs() if run_all else [])]))
    matrix: dict[tuple[str, str], Finding] = {}
    with status() as update:
        for launcher, backend in pairs:
            update(f"{backend} under {launcher}")
            matrix[launcher, backend] = attempt(launcher, backend)
    if as_json:
        click.echo(json.dumps(report(found, matrix), indent=1))
    else:
        show(found, matrix)
    if any(matrix[pair].state != "ok" for pair in needed):
        sys.exit(1)


def all_pairs() -> Iterator[tuple[str, str]]:
    for launcher in COMMANDS:
        for backend in BACKENDS:
            yield launcher, backend


def attempt(launcher: str, backend: str) -> Finding:
    """Start a world, and say how it went."""
    subject = f"{backend} under {launcher}"
    if why := unavailable(launcher, backend, RANKS):
        return Finding(subject, "none", why)
    extra = {settings.TIMEOUT: str(TIMEOUT_S / 2)}
    try:
        result = run_world(launcher, backend, RANKS, ["-m", "unidist.cli.probe"], timeout=TIMEOUT_S, extra=extra)
    except TimeoutError as error:
        return Finding(subject, "error", f"did not end within {TIMEOUT_S} s; {reason(str(error))}")
    if result.returncode == 0 and f"WORKS with {RANKS} ranks" in result.output:
        return Finding(subject, "ok", f"{result.seconds:.1f} s")
    return Finding(subject, "error", reason(result.output) or f"exit status {result.returncode}")


def reason(output: str) -> str:
    """Return the line of a failed world's output that says why."""
    lines = [re.sub(r"^(\[.*?\](<\w+>)?:? ?)+", "", line).strip() for line in output.splitlines()]
    lines = [line for line in lines if line]
    ours = [line for line in lines if line.startswith("unidist.errors.")]
    errors = [line for line in lines if re.match(r"([\w.]*(Error|Exception)\b|srun: error|mpirun|.*[Ee]rror:)", line)]
    return (ours or errors or lines[-1:] or [""])[0].removeprefix("unidist.errors.")


def report(found: list[Finding], matrix: dict[tuple[str, str], Finding]) -> dict[str, object]:
    """Return all of it, for programs."""
    return {
        "findings": [vars(finding) for finding in found],
        "pairs": [
            {"launcher": launcher, "backend": backend, "state": finding.state, "text": finding.text}
            for (launcher, backend), finding in matrix.items()
        ],
    }


def show(found: list[Finding], matrix: dict[tuple[str, str], Finding]) -> None:
    """Print the report."""
    console = Console()
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    before = ""
    for finding in found:
        remedy = f"\n[yellow]> {escape(finding.remedy)}[/yellow]" if finding.remedy else ""
        subject = "" if finding.subject == before else finding.subject
        table.add_row(subject, MARKS[finding.state], escape(finding.text) + remedy)
        before = finding.subject
    console.print(table)
    if not matrix:
        return
    backends = [backend for backend in BACKENDS if any(backend == e for _, e in matrix)]
    grid = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in (f"{RANKS} ranks", *backends):
        grid.add_column(name)
    for launcher in dict.fromkeys(launcher for launcher, _ in matrix):
        cells = [matrix.get((launcher, backend)) for backend in backends]
        grid.add_row(launcher, *(_cell(cell) if cell else "" for cell in cells))
    console.print(grid)
    # A reason that holds under several launchers is printed once.
    reasons: dict[tuple[str, str, State], list[str]] = {}
    for (launcher, backend), finding in matrix.items():
        if finding.state != "ok":
            reasons.setdefault((backend, finding.text, finding.state), []).append(launcher)
    for (backend, text, state), launchers in reasons.items():
        where = "" if len(launchers) == len({launcher for launcher, _ in matrix}) else f" under {', '.join(launchers)}"
        console.print(f"{MARKS[state]} {backend}{where}: {escape(text)}", highlight=False)


def _cell(finding: Finding) -> str:
    return f"{MARKS[finding.state]} {finding.text}" if finding.state == "ok" else MARKS[finding.state]
