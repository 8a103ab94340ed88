"""Comments of Horovod's examples where Horovod is gone: rewritten, or removed with what they are about."""

from __future__ import annotations

import re

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
    lines = text.splitlines(keepends=True)
    found: list[str] = []
    skips = False
    for number, line in enumerate(lines):
        is_comment = line.lstrip().startswith("#")
        match = _COMMENT.match(line.rstrip("\r\n"))
        if match is None and not (skips and is_comment):
            skips = False
            found.append(line)
        elif match is not None:
            skips = _is_stale(match[2], _statement_below(lines, number))
            if not skips:
                end = line[len(line.rstrip("\r\n")) :]
                found.append(f"{match[1]}# {match[2]}{end}")
    return "".join(found)


def _statement_below(lines: list[str], number: int) -> str:
    """The first line below that is neither a comment nor empty."""
    below = (line.strip() for line in lines[number + 1 :])
    return next((line for line in below if line and not line.startswith("#")), "")


def _is_stale(comment: str, below: str) -> bool:
    for start, word in _STALE:
        if re.match(start, comment, re.IGNORECASE):
            return not word or word not in below
    return False
