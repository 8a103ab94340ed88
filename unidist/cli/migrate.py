"""``unidist migrate``."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import click
from rich.console import Console
from rich.progress import track

import unidist
from unidist.migrate.file_report import FileReport, Remark, as_markdown, headline, reasons, summary


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--to",
    "level",
    type=click.Choice(["native", "hvd"]),
    default="native",
    show_default=True,
    help="native: unidist's own calls, the drop-in where there are none; hvd: only the imports change, to the drop-in.",
)
@click.option(
    "--from",
    "origins",
    default="horovod,ddp,dataparallel,apex",
    show_default=True,
    help="What to migrate from, where a file uses it; ddp: torch.distributed.",
)
@click.option("--write", is_flag=True, help="Change the files.")
@click.option("--force", is_flag=True, help="With --write: also if git has uncommitted changes.")
@click.option("--check", is_flag=True, help="Exit with 1 if a file would change, cannot be read, or imports Horovod.")
@click.option(
    "--partial", is_flag=True, help="Use unidist's own calls also in files in which something stays on the drop-in."
)
@click.option("--summary", "brief", is_flag=True, help="Print the counts and the reasons, and neither diff nor lines.")
@click.option("--report", type=click.Path(dir_okay=False, path_type=Path), help="Write the report, as Markdown.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object, and no diff.")
def command(
    paths: tuple[Path, ...],
    level: str,
    origins: str,
    write: bool,
    force: bool,
    check: bool,
    partial: bool,
    brief: bool,
    report: Path | None,
    as_json: bool,
) -> None:
    """Migrate code that uses horovod.torch, torch.distributed, DataParallel or apex.

    PATH: Python files, notebooks, job files, or directories of them. Prints the counts, and for each file its diff
    and what to review; files change only with --write. A file in which something cannot be migrated safely uses the
    drop-in, unidist.hvd, if it is Horovod's; others stay as they are. Job files (shell scripts, YAML, Makefiles,
    Dockerfiles, ...) do not change: the report shows what can replace each launch line.

    The exit status is 1 if a file could not be read or written, and with --check if there is something to migrate.
    """
    if missing := [name for name in ("libcst",) if not find_spec(name)]:
        raise click.ClickException(f"unidist migrate needs {', '.join(missing)}: pip install 'unidist-torch[cli]'")
    from unidist.migrate import files
    from unidist.migrate.context import ORIGINS, Options
    from unidist.migrate.project import find_exports, migrate_files

    if write and check:
        raise click.UsageError("--check changes nothing: leave out --write")
    chosen = frozenset(origins.split(","))
    if unknown := sorted(chosen - set(ORIGINS)):
        raise click.UsageError(f"--from {','.join(unknown)} is unknown: use some of {', '.join(ORIGINS)}")
    found = list(files.find_files(paths))
    console = Console(stderr=True)
    watched = track(
        found, "reading", console=console, transient=True, disable=not console.is_terminal or len(found) < 20
    )
    exports = find_exports(files.possible_importers(paths))
    options = Options(partial=partial, origins=chosen)
    reports = list(migrate_files(watched, level, exports, options))  # type: ignore[arg-type]
    changed = [each for each in reports if each.status == "changed"]
    if write:
        if not force and (dirty := _uncommitted([each.path for each in changed])):
            raise click.ClickException(
                f"git has uncommitted changes ({dirty}): commit or stash them first, so that the migration can be "
                "reviewed and undone by itself, or pass --force"
            )
        for each in changed:
            _write(each)
    if report is not None:
        report.write_text(as_markdown(reports, written=write))
    if as_json:
        written = {"unidist": unidist.__version__, "to": level, "written": write, "summary": summary(reports)}
        click.echo(json.dumps({**written, "files": [each.as_json() for each in reports]}, indent=1))
    else:
        _show_counts(reports, write)
        if check:
            _show_names(reports)
        elif not brief:
            _show(reports, write)
    failed = any(each.status == "failed" for each in reports)
    if failed or (check and (changed or any(each.needs_horovod for each in reports))):
        raise SystemExit(1)


def _show_counts(reports: Sequence[FileReport], written: bool) -> None:
    for line in headline(summary(reports), written=written):
        click.echo(line)
    if found := reasons(reports):
        click.echo("\nwhat stays, and how many lines")
        for why, count in found:
            click.echo(f"  {count:>4}  {why}")
    click.echo()


def _show_names(reports: Sequence[FileReport]) -> None:
    for report in reports:
        uses = "imports Horovod" if report.needs_horovod else "uses the drop-in" if report.uses_drop_in else ""
        status = "would change" if report.status == "changed" else report.status
        click.echo(f"{report.path}: {', '.join(filter(None, (status, uses)))}; {len(report.remarks)} lines to review")


def _show(reports: Sequence[FileReport], written: bool) -> None:
    colours = {"+": "green", "-": "red", "@": "cyan"}
    for report in reports:
        if report.status == "changed" and not written:
            for line in report.diff().splitlines():
                click.secho(line, fg=colours.get(line[:1]))
        elif report.status == "changed":
            click.echo(f"changed {report.path}")
        if report.remarks:
            click.secho(f"\n{report.path}", bold=True)
        for remark in report.remarks:
            click.echo(f"  {report.location(remark, written=written):>4}  {remark.what}\n        {remark.why}")
            click.secho(f"        -> {remark.remedy}", fg="cyan")
        click.echo()


def _uncommitted(paths: Sequence[Path]) -> str | None:
    """Return the first uncommitted change in the repositories of some files; None if there is none, or no git."""
    found = [path.resolve() for path in paths]
    for directory in sorted({path.parent for path in found}):
        if changes := _git_status(directory, "--untracked-files=no"):
            return changes
    for path in found:
        if changes := _git_status(path.parent, "--", path.name):
            return changes
    return None


def _git_status(directory: Path, *arguments: str) -> str:
    """Return the first change that git reports; empty if there is none, no repository, or no git.

    Raises:
        click.ClickException: git fails in a repository.
    """
    command = ["git", "-C", str(directory), "status", "--porcelain", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    except FileNotFoundError:
        return ""
    if done.returncode == 0:
        return next((line.strip() for line in done.stdout.splitlines()), "")
    if "not a git repository (or any" in done.stderr:
        return ""
    why = done.stderr.strip().splitlines()[0] if done.stderr.strip() else f"exit status {done.returncode}"
    raise click.ClickException(
        f"git status fails in {directory}, so uncommitted changes cannot be ruled out ({why}): nothing was written. "
        "Fix the repository, or pass --force"
    )


def _write(report: FileReport) -> None:
    """Change a file; if it cannot be written, report it."""
    from unidist.migrate import files
    from unidist.migrate.project import imports_horovod

    try:
        files.write(report.path, report.after.encode(report.encoding))
    except OSError as error:
        report.status, report.needs_horovod = "failed", imports_horovod(report.before)
        why = f"it cannot be written, and is unchanged: {error.strerror or error}"
        report.remarks = [Remark(1, report.path.name, why, "make it writable, then migrate again"), *report.remarks]
