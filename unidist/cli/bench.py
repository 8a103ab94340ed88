"""``unidist bench``."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from datetime import datetime
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

import unidist
from unidist.bench import machine
from unidist.bench.measure import Case
from unidist.bench.report import plot, tables
from unidist.cli import worlds
from unidist.cli.worlds import ENGINES
from unidist.topology import NONE, detect

#: Suites that run inside a world, and those that start worlds of their own.
INSIDE = ("collectives", "step", "metric", "loader")
OUTSIDE = ("hvd", "startup", "memory")
#: Where the former run.
WORLDS = [*((launcher, engine) for engine, launcher in ENGINES.items()), ("mpirun", "horovod")]
#: What a rank in a world of ours prints before the name of the case that comes next.
SIGN = "unidist bench: "


@click.command()
@click.argument("suites", nargs=-1, metavar="[SUITE]...", type=click.Choice(["all", *INSIDE, *OUTSIDE]))
@click.option("--quick", is_flag=True, help="Fewer rounds and sizes; under 5 minutes on 2 cores.")
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    help="Turns of each contender; a quarter in hvd, startup and memory.  [default: 25; quick: 5]",
)
@click.option(
    "--ranks", "asked", type=click.IntRange(min=2), help="Processes of each world.  [default: 2; startup: 2, 4, 8, 16]"
)
@click.option("--backend", "engines", multiple=True, type=click.Choice(list(ENGINES)), help="Only worlds on these.")  # fmt: skip
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write all figures here.")
@click.option("--plot", "plot_path", type=click.Path(path_type=Path, dir_okay=False), help="Draw them here (.png, .svg, .pdf).")  # fmt: skip
@click.option("--place", hidden=True, help="Name of the world that this process is in.")
def command(
    suites: tuple[str, ...],
    quick: bool,
    rounds: int | None,
    asked: int | None,
    engines: tuple[str, ...],
    json_path: Path | None,
    plot_path: Path | None,
    place: str | None,
) -> None:
    """Measure unidist beside the raw libraries, and beside ignite, Accelerate and Fabric where they are installed.

    SUITE: collectives, step, metric, loader, hvd (the drop-in beside Horovod), startup, memory, or all (default). Contenders take turns within one world, so
    that noise meets all of them; figures are medians over the rounds, with half the distance between the quartiles.
    A ratio is unidist's median over the other's: below 1, unidist is faster.

    Starts its own worlds on this host. Under a launcher (torchrun -m unidist bench step) it measures that world.
    """
    if plot_path and plot_path.suffix not in (".png", ".svg", ".pdf"):
        raise click.ClickException(f"--plot {plot_path}: the name must end in .png, .svg or .pdf")
    if plot_path and not find_spec("matplotlib"):
        raise click.ClickException("--plot needs matplotlib: pip install 'unidist-torch[bench]'")
    for path in (json_path, plot_path):
        if path and not path.absolute().parent.is_dir():
            raise click.ClickException(f"{path.absolute().parent} is no folder: make it first")
    wanted = [name for name in (*INSIDE, *OUTSIDE) if name in suites or "all" in suites or not suites]
    rounds = rounds or (5 if quick else 25)
    failed: list[str] = []
    launched = detect(os.environ).launcher is not NONE
    if place and not launched:
        raise click.ClickException("this rank sees no launcher: start it with one")
    if launched:
        if asked or engines:
            raise click.UsageError(
                "--ranks and --backend choose the worlds to start; under a launcher there is one already"
            )
        wanted = [name for name in wanted if name in INSIDE]
        if not wanted:
            raise click.UsageError(f"{' and '.join(OUTSIDE)} start their own worlds: run them without a launcher")
        measured = _measure_here(wanted, rounds, quick, place)
        if measured is None:
            return
        cases = measured
    else:
        cases, failed = _measure_in_worlds(wanted, rounds, quick, asked, engines)
    limits = machine.limits() if "collectives" in wanted and not place else {}
    report: dict[str, Any] = {"machine": describe(), "limits": limits, "cases": [case.as_json() for case in cases]}
    if json_path:
        json_path.write_text(json.dumps(report, indent=1))
    show(report["machine"], limits, cases)
    if plot_path and cases:
        plot(cases, limits, plot_path)
    if failed:
        raise click.ClickException("\n".join(failed))


def _measure_here(wanted: Sequence[str], rounds: int, quick: bool, place: str | None) -> list[Case] | None:
    """The suites inside this world. Collective; None on all ranks but 0."""
    unidist.init()
    place = place or f"{unidist.backend_name()} under {detect(os.environ).launcher.name}, {unidist.world_size()} ranks"
    cases = []
    for suite in wanted:
        for case in import_module(f"unidist.bench.{suite}").cases(place, rounds, quick):
            cases.append(case)
            if unidist.is_main():
                click.echo(f"{SIGN}{case.suite}: {case.name}", err=True)
    main = unidist.is_main()
    unidist.shutdown()
    return cases if main else None


def _measure_in_worlds(
    wanted: Sequence[str], rounds: int, quick: bool, asked: int | None, engines: Sequence[str]
) -> tuple[list[Case], list[str]]:
    """The suites in worlds of our own: what they measured, and what went wrong."""
    cases: list[Case] = []
    failed: list[str] = []
    suites = [name for name in wanted if name in INSIDE]
    ranks = asked or 2
    with Console(stderr=True).status("") as status:
        for launcher, engine in WORLDS if suites else ():
            if engines and engine not in engines:
                continue
            if why := cannot(launcher, engine, ranks):
                if engine in engines:
                    failed.append(f"{engine} under {launcher}: {why}")
                continue
            place = f"{engine} under {launcher}, {ranks} ranks"
            status.update(place)
            try:
                cases += _world(launcher, engine, place, suites, rounds, quick, ranks, status.update)
                # The loader does not depend on the engine.
                suites = [name for name in suites if name != "loader"]
            except (RuntimeError, TimeoutError) as error:
                failed.append(f"{place}: {error}")
        for name in [name for name in wanted if name in OUTSIDE]:
            status.update(name)
            try:
                for case in import_module(f"unidist.bench.{name}").cases(
                    max(1, rounds // 4), quick, asked, engines or list(ENGINES)
                ):
                    cases.append(case)
                    status.update(f"{name}: {case.name}, {case.world}")
            except (RuntimeError, TimeoutError) as error:
                failed.append(str(error))
    return sorted(cases, key=lambda case: wanted.index(case.suite)), failed


def _world(launcher: str, engine: str, place: str, suites: Sequence[str], rounds: int, quick: bool, ranks: int, progress: Any) -> list[Case]:  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "world.json")
        argv = ["-m", "unidist", "bench", *suites, "--rounds", str(rounds), "--json", str(path), "--place", place]
        env = worlds.environment(os.environ, ranks, engine)

        def on_line(line: str) -> None:
            if SIGN in line:
                progress(f"{place}: {line.split(SIGN)[1].strip()}")

        command = worlds.LAUNCHERS[launcher](ranks, [*argv, *(["--quick"] if quick else [])])
        result = worlds.run([command], env, timeout=3600, on_line=on_line)
        if result.returncode or not path.exists():
            raise RuntimeError(f"ended with status {result.returncode}:\n{result.output[-4000:]}")
        return [Case.from_json(data) for data in json.loads(path.read_text())["cases"]]


def cannot(launcher: str, engine: str, ranks: int) -> str | None:
    """Why a world cannot be started here, or None."""
    if engine == "nccl" and torch.cuda.device_count() < ranks:
        return f"{ranks} ranks on nccl need {ranks} GPUs, {torch.cuda.device_count()} are visible"
    lack = worlds.lacking(launcher, engine)
    if lack is None and (launcher, engine) == ("mpirun", "horovod"):
        import horovod.torch as hvd

        return None if hvd.mpi_built() else "this Horovod was built without MPI"
    return lack


def describe() -> dict[str, str]:
    """The machine and the versions, for the head of a report."""
    cpu = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), "unknown CPU")
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "date": datetime.now().strftime("%Y-%m-%d %H:%M"),
        "cores": f"{worlds.usable_cores()} x {cpu}",
        "gpus": ", ".join(gpus) or "none",
        "torch": torch.__version__,
        "unidist": unidist.__version__,
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def show(facts: dict[str, str], limits: dict[str, float], cases: Sequence[Case]) -> None:
    """Print the report."""
    console = Console()
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()), highlight=False)
    if limits:
        console.print(", ".join(f"{name} {speed / 1e9:.1f} GB/s" for name, speed in limits.items()), highlight=False)
    for title, table in tables(cases):
        console.print(f"\n{title}", highlight=False)
        console.print(table)
