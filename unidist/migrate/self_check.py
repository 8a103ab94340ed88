"""Whether a migrated module is as sound as it was: it parses, its names are defined, unplanned lines are the same."""

from __future__ import annotations

import ast
import builtins
import re
import symtable
from collections.abc import Collection, Iterator

_NEWLINE = re.compile(r"\r\n?|\n")
_DEFINED = {*dir(builtins), "__file__", "__builtins__", "__path__", "__module__", "__qualname__", "__annotations__"}


def fault(before: str, after: str, planned: Collection[int] | None = None) -> str | None:
    """Return what is wrong with the new text of a module; None if nothing is.

    Args:
        planned: the lines of the old text that the edits change, from 1; None if they are not known.
    """
    if after == before or parsed(before) is None:
        return None
    if parsed(after) is None:
        return "it would not parse"
    new = undefined_names(after) - undefined_names(before)
    if new:
        return f"the name {min(new)} would not be defined"
    lost = None if planned is None else _lost_line(before, after, planned)
    return None if lost is None else f"line {lost} would change, which no rule has planned"


def parsed(text: str) -> ast.Module | None:
    """Return a module's syntax tree; None if it does not parse."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None


def undefined_names(text: str) -> set[str]:
    """Return the names that a module reads and nothing in it defines; none if ``import *`` may define them."""
    if any(isinstance(node, ast.alias) and node.name == "*" for node in ast.walk(ast.parse(text))):
        return set()
    top = symtable.symtable(text, "module", "exec")
    tables = list(_tables(top))
    symbols = [(symbol, table is top) for table in tables for symbol in table.get_symbols()]
    defined = {
        symbol.get_name()
        for symbol, at_top in symbols
        if (at_top or symbol.is_declared_global()) and (symbol.is_assigned() or symbol.is_imported())
    }
    read = {
        symbol.get_name() for symbol, at_top in symbols if symbol.is_referenced() and (at_top or symbol.is_global())
    }
    return read - defined - _DEFINED


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)


def _lost_line(before: str, after: str, planned: Collection[int]) -> int | None:
    """Return the first line that no edit covers and that is not in its place in the new text, however indented."""
    remaining = iter([line.strip() for line in _NEWLINE.split(after)])
    for number, line in enumerate(_NEWLINE.split(before), 1):
        text = line.strip()
        if text and number not in planned and text not in remaining:  # ``in`` goes on to the line that it finds
            return number
    return None
