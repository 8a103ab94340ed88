"""Comments of Horovod's examples where Horovod is gone: rewritten, or removed with what they are about."""

from __future__ import annotations

import io
import re
import tokenize

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|$)")
_COMMENT = re.compile(r"^([ \t]*)#[ \t]*Horovod:[ \t]*(.*)$")
#: Comments by their first words, and a word that the statement below has if they still fit; "" if they never do.
_STALE = [
    (r"initiali[sz]e (horovod|library)", ""),
    (r"(wrap optimizer with|add horovod) *distributed ?optimizer", ""),
    (r"broadcast (initial variable|parameters)", "broadcast"),
    (r"set epoch to sampler", "set_epoch"),
    (r"\(optional\) compression", "compression"),
]


def rewrite_comments(text: str) -> str:
    """The text without ``Horovod:`` at the beginning of comments, and without those of statements that are gone."""
    lines = _LINE.findall(text)
    comments = _lines_with_comments(text)
    found: list[str] = []
    is_gone = False
    for number, line in enumerate(lines):
        match = _COMMENT.match(line.rstrip("\r\n")) if number + 1 in comments else None
        if match is not None:
            is_gone = _is_stale(match[2], _statement_below(lines, number))
            line = f"{match[1]}# {match[2].rstrip()}{line[len(line.rstrip()) :]}"
        elif is_gone and not line.strip():
            line = "" if not found or not found[-1].strip() else line
        elif not line.lstrip().startswith("#"):
            is_gone = False
        if line and not (is_gone and line.strip()):
            found.append(line)
    return "".join(found)


def _lines_with_comments(text: str) -> set[int]:
    """The numbers of the lines on which comments begin, from 1."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, SyntaxError):
        return set()
    return {token.start[0] for token in tokens if token.type == tokenize.COMMENT}


def _statement_below(lines: list[str], number: int) -> str:
    """The first line below that is neither a comment nor empty."""
    below = (line.strip() for line in lines[number + 1 :])
    return next((line for line in below if line and not line.startswith("#")), "")


def _is_stale(comment: str, below: str) -> bool:
    for start, word in _STALE:
        if re.match(start, comment, re.IGNORECASE):
            return not word or word not in below
    return False
