"""Comments of Horovod's examples where Horovod is gone: rewritten, or removed with what they are about."""

from __future__ import annotations

import io
import re
import tokenize

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|$)")
#: A number, the name, and the rest.
_COMMENT = re.compile(r"#+[ \t]*((?:\d+[.)][ \t]*)?)(Horovod[ \t]*:[ \t]*)?(.*)", re.IGNORECASE | re.DOTALL)
#: Comments by their first words, and a word that the statement has if they still fit; "" if they never do. The first
#: are found without Horovod's name before them, too.
_OF_HOROVOD = [
    (r"(import|initiali[sz]e) (the )?horovod\b", ""),
    (r"(wrap|add) (the )?(optimizer with |horovod )*distributed *optimizer", ""),
    (r"wrap (the )?optimizer for distributed allreduce", ""),
    (r"use distributed *sampler to partition", "DistributedSampler("),
    (r"partition .*\bdistributed *sampler", "DistributedSampler("),
    (r"make sure all async allreduces are done", "synchronize"),
]
_STALE = [
    *_OF_HOROVOD,
    (r"initiali[sz]e library", ""),
    (r"broadcast (initial variable|parameters)", "broadcast"),
    (r"set epoch to sampler", "set_epoch"),
    (r"use (train|test|val)\w* *sampler to determine", "sampler"),
    (r"\(optional\) compression", "compression"),
]
#: Second lines of Horovod's own comments, and commented-out code, which is none.
_CONTINUED = re.compile(r"`num_replicas=|this worker's partition")
_CODE = re.compile(r"\w\(|\w *=|^\w+\.\w+|^@|^(import|from|if|for|with|def|return)\b")


def rewrite_comments(text: str) -> str:
    """The text without ``Horovod:`` at the beginning of comments, and without those of statements that are gone."""
    lines = _LINE.findall(text)
    columns = _columns_of_comments(text)
    found: list[str] = []
    removed = ""  # the comment that has just been removed
    for number, line in enumerate(lines):
        body = line.rstrip("\r\n")
        end, column = line[len(body) :], columns.get(number + 1)
        match = _COMMENT.fullmatch(body[column:]) if column is not None else None
        if match is not None:
            (count, name, rest), content = match.groups(), body[:column]
            alone = not content.strip()
            if _is_stale(rest, bool(name), _statement_below(lines, number) if alone else content):
                removed = rest if alone else ""
                line = "" if alone else content.rstrip() + end
            elif alone and name:
                removed, line = "", f"{content}# {count}{rest}{end}"
            elif alone and removed and _continues(removed.rstrip(), rest):
                removed, line = rest, ""
            else:
                removed = ""
        elif removed and not body.strip():
            line = "" if not found or not found[-1].strip() else line
        else:
            removed = ""
        if line:
            found.append(line)
    return "".join(found)


def _columns_of_comments(text: str) -> dict[int, int]:
    """The columns at which comments begin, by their lines, from 1."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, SyntaxError):
        return {}
    return {token.start[0]: token.start[1] for token in tokens if token.type == tokenize.COMMENT}


def _statement_below(lines: list[str], number: int) -> str:
    """The first line below that is neither a comment nor empty."""
    below = (line.strip() for line in lines[number + 1 :])
    return next((line for line in below if line and not line.startswith("#")), "")


def _is_stale(comment: str, named: bool, statement: str) -> bool:
    for start, word in _STALE if named else _OF_HOROVOD:
        if re.match(start, comment, re.IGNORECASE):
            return not word or word not in statement
    return False


def _continues(comment: str, following: str) -> bool:
    """Whether a comment is the rest of the sentence before it."""
    prose = not comment.endswith((".", ":", "!")) and following[:1].islower() and not _CODE.search(following)
    return prose or _CONTINUED.match(following) is not None
