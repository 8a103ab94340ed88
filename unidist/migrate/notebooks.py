"""Notebooks: all code cells are one module, since they share their names; magics keep their places."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import libcst as cst

from unidist.migrate.report import Finding

#: Statements that stand for a cell's beginning, and for a line that is not Python.
_CELL, _LINE = "__unidist_cell__", "__unidist_line__"
_MAGIC = re.compile(r"^(\s*)(?:[%!?]|[\w, ]+=\s*[%!]|[^#'\"]*\?\s*$)")
_NAMED = re.compile(r"^(?!\s*!pip).*(\bhvd\.|horovod)")
#: Magics whose cell is Python all the same.
_PYTHON = ("%%time", "%%timeit", "%%capture", "%%prun")
Migrate = Callable[..., tuple[str, list[Finding]]]


def migrate_notebook(text: str, migrate: Migrate) -> tuple[str, list[Finding]]:
    """A notebook with its cells migrated.

    Raises:
        ValueError: it is no notebook.
        libcst.ParserSyntaxError: its cells do not make a module.
    """
    book = _read(text)
    module, lines, left = _as_module(book["cells"])
    unread = [*lines, *("".join(cell.get("source", [])) for cell in book["cells"] if cell.get("cell_type") == "code")]
    named = {name for text in unread if text in lines or not _is_in(text, module) for name in re.findall(r"\w+", text)}
    changed, findings = migrate(module, exported=named)
    sources = _as_cells(changed, lines)
    starts = {number: module[: module.index(f"{_CELL}({number})\n")].count("\n") + 1 for number in sources}
    for number, source in sources.items():
        cell = book["cells"][number]
        if source != "".join(cell["source"]):
            cell["source"] = source.splitlines(keepends=True) if isinstance(cell["source"], list) else source
    placed = [_in_cell(finding, starts) for finding in findings] + left
    return (_written(text, book) if changed != module else text), placed


def code_of_notebook(text: str) -> str:
    """The text of all code cells that parse.

    Raises:
        ValueError: it is no notebook.
    """
    return _as_module(_read(text)["cells"])[0]


def _read(text: str) -> Any:
    book = json.loads(text)
    if not isinstance(book, dict) or not isinstance(book.get("cells"), list):
        raise ValueError("there are no cells in it: a notebook of version 4 has a list of them")
    return book


def _is_in(source: str, module: str) -> bool:
    """Whether a cell is a part of the module, so that its names are seen there."""
    return any(line in module for line in source.split("\n")[:1])


def _as_module(cells: list[Any]) -> tuple[str, list[str], list[Finding]]:
    """The text of all code cells, the lines in it that are not Python, and cells that do not parse."""
    parts: list[str] = []
    lines: list[str] = []
    left: list[Finding] = []

    def hide(match: re.Match[str], line: str) -> str:
        lines.append(line[len(match[1]) :])
        return f"{match[1]}{_LINE}({len(lines) - 1})"

    for number, cell in enumerate(cells):
        source = "".join(cell.get("source", []))
        if cell.get("cell_type") != "code" or (source.startswith("%%") and not source.startswith(_PYTHON)):
            continue
        parts_of = []
        for index, line in enumerate(source.split("\n")):
            match = _MAGIC.match(line)
            parts_of.append(hide(match, line) if match else line)
            if match and _NAMED.search(line):
                left.append(
                    Finding(
                        index + 1,
                        line.strip(),
                        "a line that is not Python is not read",
                        "change it by hand",
                        number + 1,
                    )
                )
        hidden = "\n".join(parts_of)
        try:
            cst.parse_module(hidden)
        except cst.ParserSyntaxError as error:
            if "horovod" in source:
                why = f"the cell does not parse: {error.message.splitlines()[0]}"
                left.append(
                    Finding(error.raw_line, source.split("\n")[0], why, "mend it, then migrate again", number + 1)
                )
            continue
        parts.append(f"{_CELL}({number})\n{hidden}\n")
    return "".join(parts), lines, left


def _as_cells(module: str, lines: list[str]) -> dict[int, str]:
    """The cells' sources by their numbers."""
    before, *parts = re.split(rf"^{_CELL}\((\d+)\)\n", module, flags=re.MULTILINE)
    found = {int(number): source.removesuffix("\n") for number, source in zip(parts[::2], parts[1::2])}
    if before and found:
        first = min(found)
        found[first] = before + found[first]
    return {
        number: re.sub(rf"{_LINE}\((\d+)\)", lambda match: lines[int(match[1])], source)
        for number, source in found.items()
    }


def _in_cell(finding: Finding, starts: dict[int, int]) -> Finding:
    number = max(
        (each for each in starts if starts[each] < finding.line), key=lambda each: starts[each], default=min(starts)
    )
    return replace(finding, line=max(1, finding.line - starts[number]), cell=number + 1)


def _written(text: str, book: Any) -> str:
    """The notebook's text in the form that it had."""
    end = "\n" if text.endswith("\n") else ""
    before = json.loads(text)
    for indent in (1, 2, 4, None):
        for ascii_only in (False, True):
            if json.dumps(before, indent=indent, ensure_ascii=ascii_only) + end == text:
                return json.dumps(book, indent=indent, ensure_ascii=ascii_only) + end
    return json.dumps(book, indent=1, ensure_ascii=False) + end
