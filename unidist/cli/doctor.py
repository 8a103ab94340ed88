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
from rich.markup import escape as _plain
from rich.table import Table

from unidist import knobs
from unidist.cli import worlds
from unidist.cli.checkup import Finding, State, findings
from unidist.cli.worlds import ENGINES

#: Size of the worlds that the doctor starts.
RANKS = 2
#: Seconds until a world that does not end is killed; its start-up gives up after half of them.
TIMEOUT_S = 90
MARKS: dict[State, str] = {
    "ok": "[green]ok[/green]",
    "none": "[dim]-[/dim]",
    "warn": "[yellow]mind[/yellow]",
    "error": "[red]no[/red]",
}


class Pair(click.ParamType):  # type: ignore[type-arg]  # generic in newer releases only
    """``ENGINE`` or ``ENGINE@LAUNCHER``."""

    name = "ENGINE[@LAUNCHER]"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        engine, _, launcher = value.partition("@")
        known = {short(name): name for name in worlds.LAUNCHERS}
        if engine not in ENGINES:
            self.fail(f"{engine!r} is no engine: use one of {', '.join(ENGINES)}", param, ctx)
        launcher = launcher or ENGINES[engine]
        if short(launcher) not in known:
            self.fail(f"{launcher!r} is no launcher: use one of {', '.join(known)}", param, ctx)
        return known[short(launcher)], engine


def short(launcher: str) -> str:
    """A launcher's name on the command line: ``horovodrun --mpi`` is ``horovodrun-mpi``."""
    return re.sub(r"[ -]+", "-", launcher.split(" (")[0].lower()) + ("-mpich" if "MPICH" in launcher else "")


@click.command()
@click.option("--run", "run_all", is_flag=True, help="Start a world of 2 ranks for every pair of launcher and engine.")
@click.option(
    "--need", "needed", type=Pair(), multiple=True, help="Start this pair; exit status 1 if it does not work."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def command(run_all: bool, needed: tuple[tuple[str, str], ...], as_json: bool) -> None:
    """Tell what this machine can run, and what to mend.

    Reads the installed libraries, the launchers on PATH, this process's environment and the network, and says what
    `unidist.init()` would make of them. Under a launcher (srun -n 1 unidist doctor) it tells what a rank would see.

    LAUNCHER is torchrun, spawn, horovodrun-gloo, horovodrun-mpi, mpirun, mpiexec-mpich or srun; if it is left out,
    horovodrun-gloo for horovod, mpirun for mpi, else torchrun. Exit status: 1 if a pair asked for with --need does not work, else 0.
    """
    found = list(findings(os.environ))
    pairs = list(dict.fromkeys([*needed, *(all_pairs() if run_all else [])]))
    matrix: dict[tuple[str, str], Finding] = {}
    with Console(stderr=True).status("") as status:
        for launcher, engine in pairs:
            status.update(f"{engine} under {launcher}")
            matrix[launcher, engine] = attempt(launcher, engine)
    if as_json:
        click.echo(json.dumps(report(found, matrix), indent=1))
    else:
        show(found, matrix)
    if any(matrix[pair].state != "ok" for pair in needed):
        sys.exit(1)


def all_pairs() -> Iterator[tuple[str, str]]:
    for launcher in worlds.LAUNCHERS:
        for engine in ENGINES:
            yield launcher, engine


def attempt(launcher: str, engine: str) -> Finding:
    """Start a world, and say how it went."""
    subject = f"{engine} under {launcher}"
    lack = worlds.lacking(launcher, engine) or lacks_gpus(engine)
    if lack:
        return Finding(subject, "none", lack)
    env = worlds.environment(os.environ, RANKS, engine) | {knobs.TIMEOUT: str(TIMEOUT_S / 2)}
    command = worlds.LAUNCHERS[launcher](RANKS, ["-m", "unidist.cli.probe"])
    try:
        result = worlds.run([command], env, timeout=TIMEOUT_S)
    except TimeoutError as error:
        return Finding(subject, "error", f"no end within {TIMEOUT_S} s; {reason(str(error))}")
    if result.returncode == 0 and f"WORKS with {RANKS} ranks" in result.output:
        return Finding(subject, "ok", f"{result.seconds:.1f} s")
    return Finding(subject, "error", reason(result.output) or f"exit status {result.returncode}")


def lacks_gpus(engine: str) -> str | None:
    import torch

    count = torch.cuda.device_count()
    return f"{RANKS} GPUs are needed, {count} are visible" if engine == "nccl" and count < RANKS else None


def reason(output: str) -> str:
    """The line of a failed world's output that says why."""
    lines = [re.sub(r"^(\[.*?\](<\w+>)?:? ?)+", "", line).strip() for line in output.splitlines()]
    lines = [line for line in lines if line]
    ours = [line for line in lines if line.startswith("unidist.errors.")]
    errors = [line for line in lines if re.match(r"([\w.]*(Error|Exception)\b|srun: error|mpirun|.*[Ee]rror:)", line)]
    return (ours or errors or lines[-1:] or [""])[0].removeprefix("unidist.errors.")


def report(found: list[Finding], matrix: dict[tuple[str, str], Finding]) -> dict[str, object]:
    """All of it, for programs."""
    return {
        "findings": [vars(finding) for finding in found],
        "pairs": [
            {"launcher": launcher, "engine": engine, "state": finding.state, "text": finding.text}
            for (launcher, engine), finding in matrix.items()
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
        remedy = f"\n[yellow]> {_plain(finding.remedy)}[/yellow]" if finding.remedy else ""
        subject = "" if finding.subject == before else finding.subject
        table.add_row(subject, MARKS[finding.state], _plain(finding.text) + remedy)
        before = finding.subject
    console.print(table)
    if not matrix:
        return
    engines = [engine for engine in ENGINES if any(engine == e for _, e in matrix)]
    grid = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in (f"{RANKS} ranks", *engines):
        grid.add_column(name)
    for launcher in dict.fromkeys(launcher for launcher, _ in matrix):
        cells = [matrix.get((launcher, engine)) for engine in engines]
        grid.add_row(launcher, *(f"{MARKS[cell.state]} {cell.text if cell.state == 'ok' else ''}" if cell else "" for cell in cells))  # fmt: skip
    console.print(grid)
    # A reason that holds under several launchers is told once.
    reasons: dict[tuple[str, str, State], list[str]] = {}
    for (launcher, engine), finding in matrix.items():
        if finding.state != "ok":
            reasons.setdefault((engine, finding.text, finding.state), []).append(launcher)
    for (engine, text, state), places in reasons.items():
        where = "" if len(places) == len({launcher for launcher, _ in matrix}) else f" under {', '.join(places)}"
        console.print(f"{MARKS[state]} {engine}{where}: {_plain(text)}", highlight=False)
