"""The messages of the errors that the package raises, as they stand in its source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: An expression in a message.
GAP = "…"
#: What ``Backend.label`` stands for.
LABEL = f"rank {GAP} of {GAP} ({GAP})"
#: What a user never sees: they are caught where they are called, or end in another error's text.
INTERNAL = {"NotImplementedError", "AssertionError", "StopIteration", "KeyError", "ConnectionResetError"}


def first_words() -> dict[str, str]:
    """The first words of each message, with ``…`` for what differs; of each, where it is raised first."""
    found: dict[str, str] = {}
    for path in sorted([*(ROOT / "unidist").rglob("*.py"), *(ROOT / "backends").rglob("*.py")]):
        home = str(path.relative_to(ROOT))
        if home.startswith("unidist/backends/"):  # the former is a link
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and _is_error(node.func):
                for text in _texts(node.args[0] if node.args else None):
                    if words := _shortened(text):
                        found.setdefault(words, f"{home}:{node.lineno}")
    return found


def _is_error(function: ast.expr) -> bool:
    name = ast.unparse(function).rsplit(".", 1)[-1]
    return bool(re.search(r"(Error|Exception|BadParameter|SystemExit|Interrupt)$", name)) and name not in INTERNAL


def _texts(node: ast.expr | None) -> Iterator[str]:
    if isinstance(node, ast.IfExp):
        yield from _texts(node.body)
        yield from _texts(node.orelse)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(_shown(part) for part in node.values)


def _shown(part: ast.expr) -> str:
    if isinstance(part, ast.FormattedValue):
        return LABEL if ast.unparse(part.value) in ("self.label", "backend.label", "self.backend.label") else GAP
    return str(ast.literal_eval(part))


def _shortened(text: str) -> str:
    """Up to ten words; nothing for a message that only passes on another one."""
    words = re.sub(rf"{GAP}[{GAP} ]*{GAP}", GAP, text.replace("`", "'")).split()[:10]
    return " ".join(words).rstrip(".:;,") if sum(word.strip(".,:;()'") not in (GAP, "") for word in words) > 1 else ""
