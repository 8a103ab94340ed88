"""``unidist migrate``."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import click
from rich.console import Console
from rich.progress import track

import unidist
from unidist.migrate.report import FileReport, summary


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--to", "level", type=click.Choice(["native", "hvd"]), default="native", show_default=True,
    help="native: unidist's own calls, and the drop-in for what has none; hvd: the imports alone, to the drop-in.",
)  # fmt: skip
@click.option("--write", is_flag=True, help="Change the files.")
@click.option("--force", is_flag=True, help="With --write: also where git knows of changes that are not committed.")
@click.option("--check", is_flag=True, help="Exit with 1 if a file would change, cannot be read, or imports Horovod.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object, and no diff.")
def command(paths: tuple[Path, ...], level: str, write: bool, force: bool, check: bool, as_json: bool) -> None:
    """Migrate code that uses horovod.torch.

    PATH: Python files, notebooks, shell scripts, or folders of them. Prints a diff and a report of what a person must look at,
    and changes nothing without --write. What cannot be changed safely goes on through the drop-in, unidist.hvd. Launch lines in shell
    scripts are reported with the torchrun line that may replace them, and stay.

    Exits with 1 if a file could not be read, or by --check.
    """
    if not find_spec("libcst"):
        raise click.ClickException("unidist migrate needs libcst: pip install 'unidist-torch[cli]'")
    from unidist.migrate import files
    from unidist.migrate.tree import find_exports, migrate_files

    if write and check:
        raise click.UsageError("--check changes nothing: leave out --write")
    found = list(files.find(paths))
    console = Console(stderr=True)
    watched = track(
        found, "reading", console=console, transient=True, disable=not console.is_terminal or len(found) < 20
    )
    exports = find_exports(files.surroundings(paths))
    reports = list(migrate_files(watched, level, exports))  # type: ignore[arg-type]
    changed = [report for report in reports if report.status == "changed"]
    if write:
        if not force and (dirty := _uncommitted([report.path for report in changed])):
            raise click.ClickException(
                f"git has changes that are not committed ({dirty}): commit or stash them first, so that the migration can be told "
                "from them and undone, or pass --force"
            )
        for report in changed:
            files.write(report.path, report.after.encode(report.encoding))
    if as_json:
        written = {"unidist": unidist.__version__, "to": level, "written": write, "summary": summary(reports)}
        click.echo(json.dumps({**written, "files": [report.as_json() for report in reports]}, indent=1))
    else:
        _show(reports, write)
    failed = any(report.status == "failed" for report in reports)
    if failed or (check and (changed or any(report.needs_horovod for report in reports))):
        raise SystemExit(1)


def _show(reports: Sequence[FileReport], written: bool) -> None:
    colours = {"+": "green", "-": "red", "@": "cyan"}
    for report in reports:
        if report.status == "changed" and not written:
            for line in report.diff().splitlines():
                click.secho(line, fg=colours.get(line[:1]))
    for report in reports:
        if report.findings:
            click.secho(f"\n{report.path}", bold=True)
        for finding in report.findings:
            click.echo(f"  {finding.place:>4}  {finding.what}\n        {finding.why}")
            click.secho(f"        -> {finding.remedy}", fg="cyan")
    counts = summary(list(reports))
    verb = "changed" if written else "would change"
    click.echo(
        f"\n{counts['files']} files with Horovod: {counts['changed']} {verb}, {counts['unchanged']} stay, {counts['failed']} could not be "
        f"read; {counts['use_drop_in']} use the drop-in, {counts['need_horovod']} import Horovod; {counts['findings']} places to look at"
    )


def _uncommitted(paths: Sequence[Path]) -> str | None:
    """What git knows of and has not got, in the repositories of some files; None where all is committed, or there is no git."""
    for folder in sorted({path.resolve().parent for path in paths}):
        asked = ["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"]
        try:
            done = subprocess.run(asked, capture_output=True, text=True)
        except FileNotFoundError:
            return None
        if done.returncode == 0 and done.stdout:
            return done.stdout.splitlines()[0].strip()
    for path in (path.resolve() for path in paths):
        asked = ["git", "-C", str(path.parent), "status", "--porcelain", "--", path.name]
        done = subprocess.run(asked, capture_output=True, text=True)
        if done.returncode == 0 and done.stdout:
            return done.stdout.splitlines()[0].strip()
    return None
