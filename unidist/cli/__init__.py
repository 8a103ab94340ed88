"""The command line: ``unidist COMMAND``, also ``python -m unidist COMMAND``.

One module per command: ``build-horovod`` is ``command`` in ``build_horovod.py``.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

try:
    import click
    import psutil  # noqa: F401
    import rich  # noqa: F401
except ModuleNotFoundError as error:
    # The console script imports this module before anything else: a traceback would hide the remedy.
    raise SystemExit(f"unidist: {error.name} is not installed: pip install 'unidist-torch[cli]'") from None

from unidist import __version__
from unidist.errors import UnidistError

# The help lines are here, so that `unidist --help` imports no command.
HELP = {
    "run": "Start a world on this and other hosts, with horovodrun's options.",
    "migrate": "Turn code that uses Horovod into unidist's, with a diff and a report.",
    "bench": "Measure unidist beside the raw libraries and its peers.",
    "compare": "Train on two backends, and show where they first differ.",
    "timeline": "Show where the time of each rank goes, and who waits for whom.",
    "where": "Show what each rank of a running job does, and who keeps it waiting.",
    "doctor": "Show what this machine can run, and how to fix what it cannot.",
    "build-horovod": "Build Horovod for the installed PyTorch.",
}


class LazyCommands(click.Group):
    """A group that imports a command's module when the command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(HELP)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in HELP:
            return None
        command: click.Command = import_module(f"{__name__}.{cmd_name.replace('-', '_')}").command
        return command

    def invoke(self, ctx: click.Context) -> object:
        for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
            if getattr(sys, name) is None:  # closed by the caller: the next file would get its number
                setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
        try:
            return super().invoke(ctx)
        except UnidistError as error:
            raise click.ClickException(str(error)) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(HELP.items()))


main = click.version_option(__version__, prog_name="unidist", message="%(prog)s %(version)s")(
    LazyCommands("unidist", help="One PyTorch training script for every launcher and backend.")
)
