"""The simple commands of a shell script, word by word, from tree-sitter's syntax tree of bash."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

#: Commands that run the here-document that they read.
_SHELLS = {"bash", "sh", "zsh", "ksh", "ssh", "sbatch", "qsub", "bsub"}
#: How deeply nested strings and here-documents are read as code.
_DEEPEST = 10
#: After as many syntax errors, each line is parsed by itself.
_MOST_ERRORS = 100
_parser = Parser(Language(tree_sitter_bash.language()))


@dataclass(frozen=True)
class Word:
    """A word as it is written, quotes included."""

    text: str
    #: What separates it from the word before: white space, and line continuations.
    space: str = ""
    is_redirection: bool = False

    @property
    def value(self) -> str:
        """The word without its quotes; variables stay."""
        return unquoted(self.text)

    @property
    def name(self) -> str:
        """The last part of the path of a command."""
        return PurePosixPath(self.value).name


@dataclass(frozen=True)
class ShellCommand:
    """A simple command, or a line that does not parse."""

    #: From 1.
    line: int
    words: Sequence[Word]
    is_broken: bool = False


def unquoted(word: str) -> str:
    """A word without its quotes; variables stay."""
    try:
        parts = shlex.split(word)
    except ValueError:
        return word
    return parts[0] if len(parts) == 1 else word


def on_one_line(words: Sequence[Word]) -> str:
    """The words as they are written, without line continuations."""
    return "".join((" " if "\n" in word.space else word.space if i else "") + word.text for i, word in enumerate(words))


def find_commands(script: str) -> list[ShellCommand]:
    """All simple commands in the order of the script, also those in substitutions, arrays, strings and here-documents.

    A string is read as code after ``eval``, ``-c`` and ``ssh``, and as the value of a variable; a here-document if a
    shell reads it.
    """
    source = script.replace("\r\n", "\n").encode()
    found = sorted(_read(source, 0, len(source), 0), key=lambda each: each[0])
    return [command for _, command in found]


#: A command with its first byte.
_Found = Iterator[tuple[int, ShellCommand]]


def _read(source: bytes, start: int, end: int, depth: int) -> _Found:
    """The commands in a part of the source. Of a statement with a syntax error, each line is parsed by itself."""
    errors = 0
    while start < end and depth <= _DEEPEST:
        stop = end if errors < _MOST_ERRORS else _line_end(source, start, end)
        root = _parser.parse(source[start:stop]).root_node
        wrong = next((node for node in root.children if _has_error(node)), None)
        if wrong is None:
            yield from _walk(root.children, source, start, depth)
            start = stop + 1
            continue
        errors += 1
        whole = [node for node in root.children if node.end_byte <= wrong.start_byte]
        while whole and whole[-1].end_point.row == wrong.start_point.row:
            wrong = whole.pop()
        yield from _walk(whole, source, start, depth)
        line, start = start + wrong.start_byte, _line_end(source, start + wrong.start_byte, end) + 1
        root = _parser.parse(source[line : start - 1]).root_node
        if _has_error(root):
            yield line, ShellCommand(_line(source, line), [Word(source[line : start - 1].decode())], is_broken=True)
        else:
            yield from _walk(root.children, source, line, depth)


def _has_error(node: Node) -> bool:
    """Whether a statement has a syntax error; as for bash, a here-document may end with the script."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if (node.is_error or node.is_missing) and node.type != "heredoc_end":
            return True
        waiting += [child for child in node.children if child.has_error]
    return False


def _line(source: bytes, position: int) -> int:
    return source.count(b"\n", 0, position) + 1


def _line_end(source: bytes, start: int, end: int) -> int:
    """The end of the line, with its continuations."""
    match = re.compile(rb"(?:\\\n|[^\n])*").match(source, start, end)
    return match.end() if match else end


def _walk(nodes: Sequence[Node], source: bytes, base: int, depth: int) -> _Found:
    """The commands in some nodes, whose positions in the source are counted from ``base``."""
    waiting = list(nodes)
    redirections: dict[int, list[Node]] = {}
    while waiting:
        node = waiting.pop()
        if node.type == "redirected_statement" and (command := _last_command(node)) is not None:
            redirections.setdefault(command.id, []).extend(node.children_by_field_name("redirect"))
        if node.type in ("command", "array"):
            parts = [
                part for part in node.children if node.type == "command" or (part.is_named and part.type != "comment")
            ]
            parts += redirections.get(node.id, [])
            spans = sorted((base + start, base + end, kind) for part in parts for start, end, kind in _spans(part))
            if spans:
                yield spans[0][0], ShellCommand(_line(source, spans[0][0]), list(_words(source, spans)))
            for start, end in _code(source, spans, base, parts):
                yield from _read(source, start, end, depth + 1)
        value = node.child_by_field_name("value") if node.type == "variable_assignment" else None
        if value is not None and value.type in ("string", "raw_string"):
            yield from _read(source, base + value.start_byte + 1, base + value.end_byte - 1, depth + 1)
        if node.type != "heredoc_body":
            waiting += node.children


def _last_command(node: Node | None) -> Node | None:
    """The simple command to which the redirections after a statement belong."""
    while node is not None and node.type != "command":
        if node.type == "redirected_statement":
            node = node.child_by_field_name("body")
        else:
            node = node.named_children[-1] if node.type in ("pipeline", "list", "negated_command") else None
    return node


def _spans(part: Node) -> Iterator[tuple[int, int, bool]]:
    """The words of a part of a command: start, end, and whether it is a redirection."""
    if part.type in ("file_redirect", "heredoc_redirect"):
        ends = [
            *part.children_by_field_name("destination"),
            *(each for each in part.children if each.type == "heredoc_start"),
        ]
        yield part.start_byte, ends[0].end_byte if ends else part.end_byte, True
        # The grammar makes words after a redirection parts of it.
        more = [each for name in ("argument", "redirect") for each in part.children_by_field_name(name)]
        for each in [*ends[1:], *more]:
            yield from _spans(each)
    else:
        yield part.start_byte, part.end_byte, part.type == "herestring_redirect"


def _words(source: bytes, spans: Sequence[tuple[int, int, bool]]) -> Iterator[Word]:
    before = spans[0][0]
    for start, end, is_redirection in spans:
        yield Word(source[start:end].decode(), source[before:start].decode(), is_redirection)
        before = end


def _code(
    source: bytes, spans: Sequence[tuple[int, int, bool]], base: int, parts: Sequence[Node]
) -> Iterator[tuple[int, int]]:
    """The ranges of words and here-documents of a command that are code."""
    words = list(_words(source, spans)) if spans else []
    is_ssh = any(word.name == "ssh" for word in words[:1])
    for before, (start, end, _), word in zip([Word(""), *words], spans, words):
        is_code = is_ssh or before.text == "eval" or re.fullmatch(r"-[a-z]*c", before.text)
        if is_code and len(word.text) > 1 and word.text[0] == word.text[-1] and word.text[0] in "'\"":
            yield start + 1, end - 1
    if any(word.name in _SHELLS for word in words):
        for part in parts:
            for body in part.children if part.type == "heredoc_redirect" else ():
                if body.type == "heredoc_body":
                    yield base + body.start_byte, base + body.end_byte
