"""``unidist exec``."""

from __future__ import annotations

import click

from unidist.torchrun_env import run


@click.command(
    "exec",
    short_help="Run a script with torchrun's variables.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[-m] SCRIPT [ARGUMENT]...")
def command(program: tuple[str, ...]) -> None:
    """Run a script, or after -m a module, with torchrun's variables.

    Under horovodrun, mpirun, mpiexec and srun, libraries that know torchrun find their world so. Without a launcher the
    script simply runs. The same as python -m unidist SCRIPT.
    """
    run(list(program))
