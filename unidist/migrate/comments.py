"""Comments of Horovod's examples where Horovod is gone: rewritten, or removed with what they are about."""

from __future__ import annotations

import io
import re
import tokenize

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|$)")
#: A number, the name, and the rest.
_COMMENT = re.compile(r"#+[ \t]*((?:\d+[.)][ \t]*)?)(Horovod[ \t]*:[ \t]*)?(.*)", re.IGNORECASE | re.DOTALL)
#: Horovod's own sentences, and a word that the statement has if they still fit; "" if they never do. The first are
#: found without Horovod's name before them, too.
_OF_HOROVOD = [
    (r"(import|initiali[sz]e) (the )?horovod( library)?", ""),
    (r"(wrap|add) (the )?(horovod |optimizer with |horovod )?distributed *optimizer", ""),
    (r"wrap (the )?optimizer for distributed allreduce", ""),
    (r"use distributed *sampler to partition (the )?(\w+ )?data(set)? among workers(\. manually specify)?", "Sampler("),
    (r"partition (the )?(\w+ )?data(set)? among workers using distributed *sampler", "Sampler("),
    (r"make sure all async allreduces are done", "synchronize"),
]
_STALE = [
    *_OF_HOROVOD,
    (r"initiali[sz]e library", ""),
    (r"wrap optimizer with distributed *optimizer,", ""),
    (r"broadcast (initial variable states|parameters)( and optimizer state| & optimizer state)?", "broadcast"),
    (r"broadcast parameters from rank 0 to all other processes", "broadcast"),
    (r"set epoch to sampler( for shuffling)?", "set_epoch"),
    (r"use (train|test|val)\w* *sampler to determine the number of examples in", "sampler"),
    (r"\(optional\) compression algorithm", "compression"),
]
#: Second lines of these.
_CONTINUED = re.compile(r"`num_replicas=|this worker's partition")


def rewrite_comments(text: str) -> str:
    """Return the text without ``Horovod:`` at the beginning of comments, and those of statements that are gone."""
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
                removed, line = "", f"{content}# {count}{rest}" + end
            elif alone and removed and _continues(removed.rstrip(), rest):
                removed, line = rest, ""
            else:
                removed = ""
        elif removed and not body.strip():
            removed, line = "", "" if not found or not found[-1].strip() else line
        else:
            removed = ""
        if line:
            found.append(line)
    return "".join(found)


def _columns_of_comments(text: str) -> dict[int, int]:
    """Return the columns at which comments begin, by their lines, from 1."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, SyntaxError):
        return {}
    return {token.start[0]: token.start[1] for token in tokens if token.type == tokenize.COMMENT}


def _statement_below(lines: list[str], number: int) -> str:
    """Return the first line below that is neither a comment nor empty."""
    below = (line.strip() for line in lines[number + 1 :])
    return next((line for line in below if line and not line.startswith("#")), "")


def _is_stale(comment: str, named: bool, statement: str) -> bool:
    sentence = comment.strip().rstrip(".:!")
    for known, word in _STALE if named else _OF_HOROVOD:
        if re.fullmatch(known, sentence, re.IGNORECASE):
            return not word or word not in statement
    return False


def _continues(comment: str, following: str) -> bool:
    """Return whether a comment is the rest of the sentence before it."""
    return comment.endswith(",") or _CONTINUED.match(following) is not None
