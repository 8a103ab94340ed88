"""Types of options that several commands have."""

from __future__ import annotations

import click

from unidist.launchers.table import COMMANDS, ENGINES, known_launchers


class EngineAtLauncher(click.ParamType):  # type: ignore[type-arg]  # generic in newer releases only
    """``ENGINE`` or ``ENGINE@LAUNCHER``; the value is (launcher, engine)."""

    name = "ENGINE[@LAUNCHER]"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        engine, _, launcher = value.partition("@")
        if engine not in ENGINES:
            self.fail(f"{engine!r} is not an engine: use one of {', '.join(ENGINES)}", param, ctx)
        launcher = launcher or ENGINES[engine]
        if launcher not in COMMANDS:
            self.fail(f"{launcher!r} is not a launcher: use one of {known_launchers()}", param, ctx)
        return launcher, engine
