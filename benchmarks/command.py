"""``unidist bench``."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import click
from rich.console import Console

import unidist
from benchmarks import machine, scale
from benchmarks.measure import Case
from benchmarks.report import plot, tables
from unidist.cli.machine import describe
from unidist.cli.status import status
from unidist.launch.topology import NONE, detect
from unidist.launchers.table import BACKENDS, unavailable
from unidist.launchers.world import run_world

#: Suites that run inside a world, and those that start worlds of their own.
INSIDE = ("collectives", "step", "metric", "loader", "scale")
OUTSIDE = ("hvd", "control", "startup", "memory")
#: Where the former run.
WORLDS = [*((launcher, backend) for backend, launcher in BACKENDS.items()), ("openmpi", "horovod")]
FILE = click.Path(path_type=Path, dir_okay=False)
#: What a rank in a world of ours prints before the name of each case that is done.
PROGRESS = "unidist bench: "


def _numbers(context: click.Context, option: click.Parameter, text: str | None) -> tuple[int, ...]:
    """Numbers of ranks, from 2 up."""
    numbers = text.split(",") if text else []
    if not all(number.isdecimal() and int(number) >= 2 for number in numbers):
        raise click.BadParameter(f"{text!r} is not a list of numbers from 2 up, such as 2 or 8,128.")
    return tuple(map(int, numbers))


@click.command()
@click.argument("suites", nargs=-1, metavar="[SUITE]...", type=click.Choice(["all", *INSIDE, *OUTSIDE]))
@click.option("--quick", is_flag=True, help="Fewer rounds and sizes; under 5 minutes on 2 cores.")
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    help="Turns of each contender; a quarter in hvd, control, startup and memory.  [default: 25; quick: 5]",
)
@click.option(
    "--ranks",
    "asked",
    callback=_numbers,
    metavar="N[,N]...",
    help="Processes of each world; several for startup and control.  [default: 2; startup: 2, 4, 8, 16; control: 8 "
    "to 1,024]",
)
@click.option(
    "--per-host",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Ranks on each simulated host (control).",
)
@click.option("--backend", "backends", multiple=True, type=click.Choice(list(BACKENDS)), help="Only worlds on these.")
@click.option("--json", "json_path", type=FILE, help="Write all figures here.")
@click.option("--plot", "plot_path", type=FILE, help="Draw them here (.png, .svg, .pdf).")
@click.option("--world", hidden=True, help="Name of the world that this process is in.")
def command(
    suites: tuple[str, ...],
    quick: bool,
    rounds: int | None,
    asked: tuple[int, ...],
    per_host: int,
    backends: tuple[str, ...],
    json_path: Path | None,
    plot_path: Path | None,
    world: str | None,
) -> None:
    """Measure unidist beside the raw libraries, and beside ignite, Accelerate and Fabric where they are installed.

    SUITE: collectives, step, metric, loader, scale (what grows with the model, the data and the ranks, and how), hvd
    (the drop-in beside Horovod), control (what its coordinator costs rank
    0, with simulated ranks), startup, memory, or all (default).
    Contenders take turns within one world, so that noise affects all of them; figures are medians over the rounds,
    with half the interquartile range. A ratio is unidist's median over the other's: below 1, unidist is faster.

    Starts its own worlds on this host. Under a launcher (torchrun -m unidist bench step) it measures that world.
    """
    if plot_path and plot_path.suffix not in (".png", ".svg", ".pdf"):
        raise click.ClickException(f"--plot {plot_path}: the name must end in .png, .svg or .pdf")
    if plot_path and not find_spec("matplotlib"):
        raise click.ClickException("--plot needs matplotlib: pip install 'unidist-torch[bench]'")
    for path in (json_path, plot_path):
        if path and not path.absolute().parent.is_dir():
            raise click.ClickException(f"{path.absolute().parent} is not a directory: create it first")
    wanted = [name for name in (*INSIDE, *OUTSIDE) if name in suites or "all" in suites or not suites]
    rounds = rounds or (5 if quick else 25)
    failed: list[str] = []
    launched = detect(os.environ).launcher is not NONE
    if world and not launched:
        raise click.ClickException("no launcher's variables are set in this rank of a world: start it with a launcher")
    if len(asked) > 1 and not {"startup", "control"}.issuperset(wanted):
        raise click.UsageError("--ranks takes several numbers for startup and control only")
    if launched:
        if asked or backends:
            raise click.UsageError(
                "--ranks and --backend choose the worlds to start; under a launcher, the world is given"
            )
        wanted = [name for name in wanted if name in INSIDE]
        if not wanted:
            raise click.UsageError(f"{' and '.join(OUTSIDE)} start their own worlds: run them without a launcher")
        measured = _measure_here(wanted, rounds, quick, world)
        if measured is None:
            return
        cases = measured
    else:
        cases, failed = _measure_in_worlds(wanted, rounds, quick, asked, per_host, backends)
    limits = machine.limits() if "collectives" in wanted and not world else {}
    facts = describe()
    report = {"machine": facts, "limits": limits, "cases": [case.as_json() for case in cases]}
    if json_path:
        json_path.write_text(json.dumps(report, indent=1))
    show(facts, limits, cases)
    if plot_path and cases:
        plot(cases, limits, plot_path)
    if failed:
        raise click.ClickException("\n".join(failed))


def _measure_here(wanted: Sequence[str], rounds: int, quick: bool, world: str | None) -> list[Case] | None:
    """Return the suites inside this world. Collective; None on all ranks but 0."""
    unidist.init()
    world = world or f"{unidist.backend_name()} under {detect(os.environ).launcher.name}, {unidist.world_size()} ranks"
    cases = []
    for suite in wanted:
        for case in import_module(f"benchmarks.{suite}").cases(world, rounds, quick):
            cases.append(case)
            if unidist.is_main():
                click.echo(f"{PROGRESS}{case.suite}: {case.name}", err=True)
    main = unidist.is_main()
    unidist.shutdown()
    return cases if main else None


def _measure_in_worlds(
    wanted: Sequence[str], rounds: int, quick: bool, asked: Sequence[int], per_host: int, backends: Sequence[str]
) -> tuple[list[Case], list[str]]:
    """Return the suites in worlds of our own: what they measured, and what went wrong."""
    cases: list[Case] = []
    failed: list[str] = []
    suites = [name for name in wanted if name in INSIDE]
    ranks = asked[0] if asked else 2
    with status() as update:
        for launcher, backend in WORLDS if suites else ():
            if backends and backend not in backends:
                continue
            if why := _unavailable(launcher, backend, ranks):
                if backend in backends:
                    failed.append(f"{backend} under {launcher}: {why}")
                continue
            world = f"{backend} under {launcher}, {ranks} ranks"
            update(world)
            try:
                cases += _run_world(launcher, backend, world, suites, rounds, quick, ranks, update)
                # The loader does not depend on the backend.
                suites = [name for name in suites if name != "loader"]
            except (RuntimeError, TimeoutError) as error:
                failed.append(f"{world}: {error}")
        for name in [name for name in wanted if name in OUTSIDE]:
            update(name)
            try:
                more = {"per_host": per_host} if name == "control" else {}
                for case in import_module(f"benchmarks.{name}").cases(
                    max(1, rounds // 4), quick, asked, backends or list(BACKENDS), **more
                ):
                    cases.append(case)
                    update(f"{name}: {case.name}, {case.world}")
            except (RuntimeError, TimeoutError) as error:
                failed.append(str(error))
    return sorted(cases, key=lambda case: wanted.index(case.suite)), failed


def _run_world(
    launcher: str,
    backend: str,
    world: str,
    suites: Sequence[str],
    rounds: int,
    quick: bool,
    ranks: int,
    progress: Callable[[str], None],
) -> list[Case]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "world.json")
        argv = ["-m", "unidist", "bench", *suites, "--rounds", str(rounds), "--json", str(path), "--world", world]

        def on_line(line: str) -> None:
            if PROGRESS in line:
                progress(f"{world}: {line.split(PROGRESS)[1].strip()}")

        argv += ["--quick"] * quick
        result = run_world(launcher, backend, ranks, argv, timeout=3600, on_line=on_line)
        if result.returncode or not path.exists():
            raise RuntimeError(f"ended with status {result.returncode}:\n{result.output[-4000:]}")
        return [Case.from_json(data) for data in json.loads(path.read_text())["cases"]]


def _unavailable(launcher: str, backend: str, ranks: int) -> str | None:
    why = unavailable(launcher, backend, ranks)
    if why is None and (launcher, backend) == ("openmpi", "horovod"):
        import horovod.torch as hvd

        # Without MPI, this is another world of Horovod on Gloo.
        return None if hvd.mpi_built() else "this Horovod was built without MPI"
    return why


def show(facts: dict[str, str], limits: dict[str, float], cases: Sequence[Case]) -> None:
    """Print the report."""
    console = Console()
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()), highlight=False)
    if limits:
        console.print(", ".join(f"{name} {speed / 1e9:.1f} GB/s" for name, speed in limits.items()), highlight=False)
    for title, table in tables(cases):
        console.print(f"\n{title}", highlight=False)
        console.print(table)
    for world, name, exponent in scale.laws(cases):
        console.print(f"{name} grows with its size to the power of {exponent:.2f} ({world})", highlight=False)
