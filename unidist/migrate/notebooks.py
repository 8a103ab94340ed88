"""Notebooks: all code cells form one module, as they share their names; magics stay where they are."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import libcst as cst

from unidist.migrate.file_report import Remark
from unidist.migrate.launch_lines import launch_lines

#: Placeholders in the module: for the start of a cell, and for a line that is not Python.
_CELL, _LINE = "__unidist_cell__", "__unidist_line__"
_MAGIC = re.compile(r"^(\s*)(?:[%!?]|[\w, ]+=\s*[%!]|[^#'\"]*\?\s*$)")
_USES_HOROVOD = re.compile(r"\bhvd\.|horovod")
#: Magics of cells that contain Python.
_PYTHON = ("%%time", "%%timeit", "%%capture", "%%prun")
Migrate = Callable[..., tuple[str, list[Remark]]]


def migrate_notebook(text: str, migrate: Migrate) -> tuple[str, list[Remark]]:
    """Return a notebook with its cells migrated.

    Raises:
        ValueError: it is not a notebook.
        libcst.ParserSyntaxError: its cells together do not parse.
    """
    book = _load(text)
    module, lines, unread, unread_remarks = _as_module(book["cells"])
    changed, remarks = migrate(module, exported={name for text in lines + unread for name in re.findall(r"\w+", text)})
    sources = _as_cells(changed, lines)
    starts = {number: module[: module.index(f"{_CELL}({number})\n")].count("\n") + 1 for number in sources}
    for number, source in sources.items():
        cell = book["cells"][number]
        if source != "".join(cell["source"]):
            cell["source"] = source.splitlines(keepends=True) if isinstance(cell["source"], list) else source
    in_cells = [_relative_to_cell(remark, starts) for remark in remarks]
    return (_dump(text, book) if changed != module else text), in_cells + unread_remarks


def source_of_notebook(text: str) -> str:
    """Return the text of all code cells that parse.

    Raises:
        ValueError: it is not a notebook.
    """
    return _as_module(_load(text)["cells"])[0]


def _load(text: str) -> Any:
    book = json.loads(text)
    if not isinstance(book, dict) or not isinstance(book.get("cells"), list):
        raise ValueError("it has no list of cells, as a notebook of format 4 has: convert it with jupyter nbconvert")
    return book


def _as_module(cells: list[Any]) -> tuple[str, list[str], list[str], list[Remark]]:
    """Return the text of the code cells, its lines that are not Python, the cells that are not in it, and remarks."""
    parts: list[str] = []
    lines: list[str] = []
    unread: list[str] = []
    remarks: list[Remark] = []

    def hide(match: re.Match[str], line: str) -> str:
        lines.append(line[len(match[1]) :])
        return f"{match[1]}{_LINE}({len(lines) - 1})"

    for number, cell in enumerate(cells):
        source = "".join(cell.get("source", []))
        if cell.get("cell_type") != "code":
            continue
        if source.startswith("%%") and not source.startswith(_PYTHON):
            unread.append(source)
            continue
        hidden, error = source, _syntax_error(source)
        if error is not None:  # else a line that begins with "%" goes on with an expression
            parts_of = []
            for index, line in enumerate(source.split("\n")):
                match = _MAGIC.match(line)
                parts_of.append(hide(match, line) if match else line)
                if match:
                    remarks += [replace(remark, line=index + 1, cell=number + 1) for remark in _of_magic(line)]
            hidden = "\n".join(parts_of)
            error = _syntax_error(hidden)
        if error is not None:
            why = f"the cell does not parse: {error.message.splitlines()[0]}"
            remarks.append(Remark(error.raw_line, source.split("\n")[0], why, "fix it, then migrate again", number + 1))
            unread.append(source)
            continue
        parts.append(f"{_CELL}({number})\n{hidden}\n")
    return "".join(parts), lines, unread, remarks


def _syntax_error(source: str) -> cst.ParserSyntaxError | None:
    try:
        cst.parse_module(source)
    except cst.ParserSyntaxError as error:
        return error
    return None


def _of_magic(line: str) -> list[Remark]:
    """Remarks on a magic or a shell line."""
    found = launch_lines(line, lambda _: None, lists=False)
    if not found and _USES_HOROVOD.search(line):
        found = [Remark(1, line.strip(), "magics and shell lines are not migrated", "change it by hand")]
    return found


def _as_cells(module: str, lines: list[str]) -> dict[int, str]:
    """Return the cells' sources by their numbers."""
    before, *parts = re.split(rf"^{_CELL}\((\d+)\)\n", module, flags=re.MULTILINE)
    found = {int(number): source.removesuffix("\n") for number, source in zip(parts[::2], parts[1::2])}
    if before and found:
        first = min(found)
        found[first] = before + found[first]
    return {
        number: re.sub(rf"{_LINE}\((\d+)\)", lambda match: lines[int(match[1])], source)
        for number, source in found.items()
    }


def _relative_to_cell(remark: Remark, starts: dict[int, int]) -> Remark:
    number = max(
        (each for each in starts if starts[each] < remark.line), key=lambda each: starts[each], default=min(starts)
    )
    return replace(remark, line=max(1, remark.line - starts[number]), cell=number + 1)


def _dump(text: str, book: Any) -> str:
    """Return the notebook as JSON, formatted as it was."""
    end = "\n" if text.endswith("\n") else ""
    before = json.loads(text)
    for indent in (1, 2, 4, None):
        for ascii_only in (False, True):
            if json.dumps(before, indent=indent, ensure_ascii=ascii_only) + end == text:
                return json.dumps(book, indent=indent, ensure_ascii=ascii_only) + end
    return json.dumps(book, indent=1, ensure_ascii=False) + end
