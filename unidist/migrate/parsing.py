"""Parses a module; a long one in parts, as libcst takes 600 bytes of memory for each byte that it parses at once."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise

import libcst as cst

LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|$)")


def parse(text: str, longest: int = 100_000) -> cst.Module:
    """The module, as ``libcst.parse_module`` returns it.

    Args:
        longest: number of characters above which it is parsed in parts of about this length.

    Raises:
        libcst.ParserSyntaxError: the text does not parse.
    """
    if len(text) > longest:
        try:
            parts = [cst.parse_module(part) for part in _parts(text, longest)]
        except (SyntaxError, ValueError, RecursionError, cst.ParserSyntaxError):
            return cst.parse_module(text)
        if _fit(parts):
            return _joined(parts)
    return cst.parse_module(text)


def _parts(text: str, longest: int) -> Iterator[str]:
    """The text in parts of whole statements. A comment belongs to a statement, so that no part begins or ends with one.

    Raises:
        SyntaxError, ValueError, RecursionError: Python cannot parse it.
    """
    lines = LINE.findall(text)
    part: list[str] = []
    length, done = 0, 0
    for before, after in _neighbours(ast.parse(text).body):
        end = before.end_lineno or 0
        part += lines[done:end]
        length += sum(map(len, lines[done:end]))
        done = end
        if length > longest and after > end and not "".join(lines[end : after - 1]).strip():
            yield "".join(part)
            part, length = [], 0
    yield "".join([*part, *lines[done:]])


def _neighbours(statements: list[ast.stmt]) -> Iterator[tuple[ast.stmt, int]]:
    """Each statement with the first line of the next one."""
    for before, after in pairwise(statements):
        yield before, min([after.lineno, *(each.lineno for each in getattr(after, "decorator_list", ()))])


def _fit(parts: list[cst.Module]) -> bool:
    """Whether the parts are indented by the same and end their lines with the same, and their ends are empty."""
    first, *others = parts
    return all(
        (part.default_indent, part.default_newline) == (first.default_indent, first.default_newline) and part.body
        for part in others
    ) and not any(part.footer for part in parts[:-1])


def _joined(parts: list[cst.Module]) -> cst.Module:
    body = list(parts[0].body)
    for part in parts[1:]:
        head, *rest = part.body
        body += [head.with_changes(leading_lines=[*part.header, *head.leading_lines]), *rest]
    last = parts[-1]
    return parts[0].with_changes(body=body, footer=last.footer, has_trailing_newline=last.has_trailing_newline)
