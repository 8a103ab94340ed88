"""``unidist bench``: the benchmarks, which are in the checkout and not in the installed package."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import click

import unidist

_found = find_spec("benchmarks")
if _found is not None and _found.origin and Path(_found.origin).parents[1] == Path(unidist.__file__).parents[1]:
    from benchmarks.command import command
else:

    @click.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
    @click.argument("argv", nargs=-1, type=click.UNPROCESSED)
    def command(argv: tuple[str, ...]) -> None:
        """Measure unidist beside the raw libraries; in a checkout only."""
        raise click.ClickException(
            "the benchmarks are not in the installed package: use a checkout, pip install -e '.[bench,cli]' there."
        )


__all__ = ["command"]
