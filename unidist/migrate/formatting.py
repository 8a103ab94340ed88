"""The formatters of a repository, where it has configured some: what is migrated is left as they leave it."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

#: Each formatter's command, which reads the code from its standard input, and how its configuration is recognised: by
#: a file of its own, or by a line of another.
_FORMATTERS = [
    (["isort", "-q", "-", "--filename"], r"\.isort\.cfg", r"^\[(tool\.|tool:)?isort\]|id: isort\b"),
    (
        ["ruff", "check", "-q", "--fix-only", "--select", "I", "-", "--stdin-filename"],
        r"\.?ruff\.toml",
        r"^\[tool\.ruff|id: ruff(-check)?\b",
    ),
    (["black", "-q", "-", "--stdin-filename"], "", r"^\[tool\.black\]|id: black\b"),
    (["ruff", "format", "-q", "-", "--stdin-filename"], r"\.?ruff\.toml", r"^\[tool\.ruff|id: ruff-format\b"),
]
_CONFIGURATIONS = ("pyproject.toml", "setup.cfg", "tox.ini", ".pre-commit-config.yaml")


def formatted(path: Path, before: str, after: str) -> str:
    """Return a file's new text as the formatters leave it that leave its old text unchanged, and are on PATH."""
    for command in _commands(path.resolve().parent):
        if _output(command, path, before) == before:
            after = _output(command, path, after) or after
    return after


@cache
def _commands(directory: Path) -> list[list[str]]:
    """Return the commands of the nearest directory with a configuration, at most of the repository's root."""
    for above in (directory, *directory.parents):
        found = list(_configured(above))
        if found or (above / ".git").exists():
            return found
    return []


def _configured(directory: Path) -> Iterator[list[str]]:
    texts, own = list[str](), list[str]()
    for name in _CONFIGURATIONS:
        with suppress(OSError, UnicodeDecodeError):
            texts.append((directory / name).read_text())
    with suppress(OSError):
        own = [each.name for each in directory.iterdir()]
    for command, file, line in _FORMATTERS:
        named = any(re.fullmatch(file, name) for name in own) or any(re.search(line, text, re.M) for text in texts)
        if named and shutil.which(command[0]) is not None:
            yield command


def _output(command: list[str], path: Path, text: str) -> str:
    """Return what a formatter makes of a text; nothing if it fails."""
    real = path.resolve()
    with suppress(OSError, subprocess.TimeoutExpired, UnicodeError):
        done = subprocess.run(
            [*command, str(real)], input=text.encode(), capture_output=True, cwd=real.parent, timeout=60
        )
        return done.stdout.decode() if done.returncode == 0 else ""
    return ""
