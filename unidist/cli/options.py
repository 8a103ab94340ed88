"""Types of options that several commands have."""

from __future__ import annotations

import click

from unidist.launchers.table import BACKENDS, COMMANDS, known_launchers


class BackendAtLauncher(click.ParamType):  # type: ignore[type-arg]  # generic in newer releases only
    """``BACKEND`` or ``BACKEND@LAUNCHER``; the value is (launcher, backend)."""

    name = "BACKEND[@LAUNCHER]"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        backend, _, launcher = value.partition("@")
        if backend not in BACKENDS:
            self.fail(f"{backend!r} is not a backend: use one of {', '.join(BACKENDS)}", param, ctx)
        launcher = launcher or BACKENDS[backend]
        if launcher not in COMMANDS:
            self.fail(f"{launcher!r} is not a launcher: use one of {known_launchers()}", param, ctx)
        return launcher, backend
