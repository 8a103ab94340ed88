"""``unidist compare``."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape

from unidist.cli.machine import describe
from unidist.cli.options import BackendAtLauncher
from unidist.cli.status import status
from unidist.compare.comparison import Comparison, Side, notes, tables, verdict
from unidist.compare.plot import plot
from unidist.compare.recording import read
from unidist.launchers.table import unavailable
from unidist.launchers.world import run_world

DROP_IN = "drop-in"
#: Replaced by a side's name in the script's arguments.
SIDE = "{side}"
FILE = click.Path(path_type=Path, dir_okay=False)


@dataclass(frozen=True)
class RunTarget:
    """A backend and a launcher to run a side with."""

    launcher: str
    backend: str
    drop_in: bool

    @property
    def name(self) -> str:
        return f"{DROP_IN}:{self.backend}" if self.drop_in else self.backend


class SideType(click.ParamType):  # type: ignore[type-arg]  # generic in newer releases only
    """``[drop-in:]BACKEND[@LAUNCHER]``."""

    name = "BACKEND[@LAUNCHER]"

    def convert(self, value: str | RunTarget, param: click.Parameter | None, ctx: click.Context | None) -> RunTarget:
        if isinstance(value, RunTarget):
            return value
        drop_in = value.startswith(f"{DROP_IN}:")
        launcher, backend = BackendAtLauncher().convert(value.removeprefix(f"{DROP_IN}:"), param, ctx)
        if drop_in and backend == "horovod":
            self.fail("the drop-in replaces Horovod: use drop-in:gloo, drop-in:nccl or drop-in:mpi", param, ctx)
        return RunTarget(launcher, backend, drop_in)


class WithArguments(click.Command):
    """A command that passes on what follows ``--``, in ``ctx.obj``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        separator = args.index("--") if "--" in args else len(args)
        ctx.obj = args[separator + 1 :]
        return super().parse_args(ctx, args[:separator])


@click.command(
    cls=WithArguments,
    options_metavar="[OPTIONS]",
    epilog="Exit status: 0 they agree, 1 they differ or a side failed, 2 wrong usage.",
)
@click.argument("left_script", metavar="LEFT.py", type=click.Path(exists=True, dir_okay=False))
@click.argument(
    "right_script", metavar="[RIGHT.py] [-- ARGS...]", required=False, type=click.Path(exists=True, dir_okay=False)
)
@click.option(
    "--left", "left_target", type=SideType(), default="horovod", show_default=True, help="What runs the left script."
)
@click.option(
    "--right",
    "right_target",
    type=SideType(),
    help="What runs the right script.  [default: gloo; with one script: drop-in:gloo]",
)
@click.option(
    "-np", "--ranks", type=click.IntRange(min=1), default=2, show_default=True, help="Processes of each side."
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    default=0,
    show_default=True,
    help="Seeds all random generators, on every rank.",
)
@click.option("--steps", type=click.IntRange(min=1), help="Stop after this many optimizer steps on each rank.")
@click.option(
    "--rtol",
    type=click.FloatRange(min=0),
    help="Relative tolerance.  [default: 1e-4; 2e-3 with float16, 1.6e-2 with bfloat16]",
)
@click.option(
    "--atol",
    type=click.FloatRange(min=0),
    default=1e-6,
    show_default=True,
    help="Absolute tolerance, for each element.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=3600,
    show_default=True,
    help="Seconds for each side.",
)
@click.option(
    "--json", "json_path", type=FILE, default="compare.json", show_default=True, help="The file for all figures."
)
@click.option(
    "--plot", "plot_path", type=FILE, help="The file for the plot (.png, .svg, .pdf).  [default: compare.png]"
)
@click.pass_context
def command(
    ctx: click.Context,
    left_script: str,
    right_script: str | None,
    left_target: RunTarget,
    right_target: RunTarget | None,
    ranks: int,
    seed: int,
    steps: int | None,
    rtol: float | None,
    atol: float,
    timeout: float,
    json_path: Path,
    plot_path: Path | None,
) -> None:
    """Train a script, or two versions of it, on two backends, and report where the trainings first differ.

    The sides run one after the other in the current directory, with the same seed and number of ranks. Losses,
    gradients and weights are recorded at every step() of torch.optim; the scripts are not changed.

    --left and --right take BACKEND or BACKEND@LAUNCHER, named as in `unidist doctor`. drop-in:BACKEND is for scripts
    that import horovod: it runs them as `python -m unidist.hvd` does. In ARGS, {side} becomes left or right: use it to
    give each side a directory of its own, so that the right one does not resume from the left one's checkpoint.
    """
    right_target = right_target or RunTarget("torchrun", "gloo", drop_in=right_script is None)
    drawn = _plot_path(plot_path)
    for path in filter(None, (json_path, drawn)):
        if not path.absolute().parent.is_dir():
            raise click.UsageError(f"{path.absolute().parent} is not a directory: create it first")
    targets = {"left": (left_script, left_target), "right": (right_script or left_script, right_target)}

    def trained(name: str, *, undo_idle: bool = False) -> Side:
        script, target = targets[name]
        # Another name than in the first run, or the script would resume from what that has saved.
        side = f"{name}-again" if undo_idle else name
        program = [script, *(argument.replace(SIDE, side) for argument in ctx.obj)]
        with status(f"{name}: {script}, {target.name} under {target.launcher}, {ranks} ranks"):
            return run(name, program, target, ranks, seed, steps, timeout, undo_idle=undo_idle)

    sides = {name: trained(name) for name in targets}
    found = Comparison(sides["left"], sides["right"], rtol, atol)
    if found.first is not None and (more := found.side_with_more_idle_steps):
        sides[more] = trained(more, undo_idle=True)
        found = Comparison(sides["left"], sides["right"], rtol, atol, with_idle_steps=found)
    settings = {"ranks": ranks, "seed": seed, "arguments": ctx.obj, "machine": describe()}
    json_path.write_text(json.dumps({**settings, **found.as_json()}, indent=1, allow_nan=False))
    if drawn:
        plot(found, drawn)
    show(found, f"{ranks} ranks, seed {seed}", [json_path, drawn])
    sys.exit(0 if found.first is None else 1)


def _plot_path(requested: Path | None) -> Path | None:
    """Return the file for the plot; None without --plot if matplotlib is not installed."""
    if requested and requested.suffix not in (".png", ".svg", ".pdf"):
        raise click.UsageError(f"--plot {requested}: the name must end in .png, .svg or .pdf")
    if find_spec("matplotlib"):
        return requested or Path("compare.png")
    if requested:
        raise click.UsageError("--plot needs matplotlib: pip install 'unidist-torch[bench]'")
    return None


def run(
    name: str,
    program: Sequence[str],
    target: RunTarget,
    ranks: int,
    seed: int,
    steps: int | None,
    timeout: float,
    *,
    undo_idle: bool = False,
) -> Side:
    """Run a side.

    Args:
        name: ``left`` or ``right``, for messages.
        program: the script and its arguments.
        undo_idle: undo its steps without backward pass and gradients.

    Raises:
        click.ClickException: the world cannot be started here, failed or took too long, or no step was recorded.
    """
    where = f"the {name} side ({target.name} under {target.launcher})"
    if lack := unavailable(target.launcher, target.backend, ranks):
        raise click.ClickException(f"{where} cannot run here: {lack}")
    with tempfile.TemporaryDirectory(prefix="unidist-compare-") as directory:
        options = [
            "--seed",
            str(seed),
            *(["--steps", str(steps)] if steps else []),
            *(["--drop-in"] if target.drop_in else []),
            *(["--undo-idle"] if undo_idle else []),
        ]
        argv = ["-m", "unidist.compare", *options, directory, *program]
        try:
            result = run_world(target.launcher, target.backend, ranks, argv, timeout=timeout)
        except TimeoutError as error:
            raise click.ClickException(
                f"{where} did not end within {timeout:g} s (--timeout):\n{_excerpt(str(error))}"
            ) from None
        if result.returncode:
            raise click.ClickException(f"{where} ended with status {result.returncode}:\n{_excerpt(result.output)}")
        try:
            recording = read(Path(directory), ranks)
        except ValueError as error:
            raise click.ClickException(f"{where}: {error}\n{_excerpt(result.output)}") from None
    return Side(program[0], target.name, target.launcher, result.seconds, recording)


def _excerpt(output: str, length: int = 4000) -> str:
    """Return the end of the output of a world, and before it the first traceback, which launchers' words follow."""
    start = output.find("Traceback (most recent call last)")
    tail = max(0, len(output) - length)
    if not 0 <= start < tail:
        return output[tail:]
    end = start + length
    return output[start:] if end >= tail else f"{output[start:end]}\n[...]\n{output[tail:]}"


def show(found: Comparison, settings: str, paths: Sequence[Path | None]) -> None:
    """Print the report."""
    console = Console()
    console.print(settings, highlight=False)
    for table in tables(found):
        console.print(table)
    for note in notes(found):
        console.print(f"[yellow]note:[/yellow] {escape(note)}", highlight=False)
    style = "green" if found.first is None else "red"
    console.print(f"[{style}]{escape(verdict(found))}[/{style}]", highlight=False)
    written = " and ".join(str(path) for path in paths if path)
    hint = "" if all(paths) else "; no plot: pip install 'unidist-torch[bench]'"
    console.print(f"wrote {escape(written + hint)}", highlight=False)
