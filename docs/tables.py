"""The tables of the reference that are made from the code."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import unidist.hvd
from unidist import settings
from unidist.launch.topology import LAUNCHERS, Launcher
from unidist.launchers.table import COMMANDS
from unidist.run import options


def write(directory: Path) -> None:
    """Write each table to a file of its own; files that are as they should be are not touched."""
    directory.mkdir(exist_ok=True)
    for name, text in {
        "environment.md": environment(),
        "launchers.md": launchers(),
        "hvd.md": hvd_names(),
        "run.md": f"```text\n{options.parser().format_help()}```\n",
    }.items():
        path = directory / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def environment() -> str:
    """unidist's variables, by the list of ``unidist.settings``, and those of Horovod that the drop-in reads."""
    own = re.findall(r"^(UNIDIST_\w+)\s+(.+)$", settings.__doc__ or "", re.MULTILINE)
    horovod = [[f"`{each.variable}`", f"`{each.flag}`", each.help] for each in options.SETTINGS if each.drop_in]
    return (
        table(["variable", "meaning"], ([f"`{name}`", text.replace("``", "`")] for name, text in own))
        + "\n## Horovod's variables that the drop-in reads\n\n"
        + "`unidist run` sets each of them by the option of horovodrun's name.\n\n"
        + table(["variable", "option", "meaning"], horovod)
    )


def launchers() -> str:
    """Every launcher, what it sets, and the engines that run under it."""
    return table(
        ["launcher", "what you type", "gloo, nccl", "mpi", "horovod", "found by"],
        (_launcher(row) for row in LAUNCHERS),
    )


def _launcher(row: Launcher) -> list[str]:
    typed = f"`{COMMANDS[row.name].typed}`" if row.name in COMMANDS else ""
    mpi = {"slurm": "with `--mpi=pmix` or `--mpi=pmi2`"}.get(row.name, "yes" if row.mpi else "no")
    marks = ", ".join(f"`{mark}`" for mark in row.marks)
    drop_in = row.name in COMMANDS and COMMANDS[row.name].drop_in
    auto = "yes, chosen by `auto`" if row.backend == "horovod" else "the drop-in" if drop_in else "yes"
    return [f"`{row.name}`", typed, "yes", mpi, auto, marks]


def hvd_names() -> str:
    """Every public name of the drop-in. A test compares them, and their parameters, with the installed Horovod."""
    rows = _names("", unidist.hvd) + _names("elastic.", unidist.hvd.elastic)
    return table(["name", "parameters or value", "what it does"], rows)


def _names(prefix: str, module: ModuleType) -> list[list[str]]:
    return [[f"`{prefix}{name}`", *_described(getattr(module, name))] for name in sorted(module.__all__)]


def _described(value: Any) -> list[str]:
    if isinstance(value, int):
        return [f"`{value}`", "a reduction, for `op=`"]
    if isinstance(value, ModuleType):
        return ["", "a module, as in Horovod"]
    about = (inspect.getdoc(value) or "").split("\n")[0].replace("``", "`")
    if inspect.isclass(value) and issubclass(value, Exception):
        return ["an exception", about]
    return [f"`({', '.join(inspect.signature(value).parameters)})`" if callable(value) else "", about]
