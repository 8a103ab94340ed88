"""What the ranks print: with their rank before each line, in files, and the last lines of one that failed."""

from __future__ import annotations

import os
import re
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from unidist.errors import LaunchError

#: Lines that are kept of each rank.
_LAST = 20
_LINES = re.compile("[^\r\n]*[\r\n]|[^\r\n]+")
#: The file and the rank of the progress bar that was printed last, and whose line has no end yet.
_bar: tuple[TextIO, int] | None = None


class Output:
    """The output of all ranks.

    Args:
        ranks: number of ranks.
        directory: where to write it as well, in ``rank.RANK/stdout`` and ``rank.RANK/stderr``; zeros before the ranks
            make them equally long.
        timestamps: whether the time comes before each line.

    Raises:
        LaunchError: the directory cannot be made.
    """

    def __init__(self, ranks: int, directory: str | None = None, *, timestamps: bool = False) -> None:
        self._timestamps = timestamps
        self._last: dict[int, deque[str]] = {}
        self._files: dict[tuple[int, str], TextIO] = {}
        self._directory = None if directory is None else Path(directory)
        self._digits = len(str(max(ranks - 1, 0)))
        try:
            for rank in range(ranks):
                self._open(rank)
        except OSError as error:
            raise LaunchError(f"--output-filename {directory}: {error}") from error

    def _open(self, rank: int) -> None:
        """Begin the files of a rank."""
        if self._directory is None:
            return
        home = self._directory / f"rank.{rank:0{self._digits}}"
        home.mkdir(parents=True, exist_ok=True)
        for stream in ("stdout", "stderr"):
            path = home / stream
            self._files[rank, stream] = path.open("w", buffering=1, encoding="utf-8", errors="surrogateescape")

    def write(self, rank: int, stream: str, text: str) -> None:
        """Print the lines of a rank to the stream of this process that they had in it; a progress bar stays a line."""
        found = [line for line in _LINES.findall(text.replace("\r\n", "\n")) if line != "\r"]
        lines = [line if line[-1] in "\r\n" else f"{line}\n" for line in found]
        stamp = time.strftime("%a %b %d %H:%M:%S %Y") if self._timestamps else ""
        printed = "".join(f"{stamp}[{rank}]<{stream}>:{line}" for line in lines)
        self._last.setdefault(rank, deque(maxlen=_LAST)).extend(line[:-1] for line in lines if line[-1] == "\n")
        _print(sys.stdout if stream == "stdout" else sys.stderr, printed, rank)
        if (rank, stream) not in self._files:  # a worker of an elastic run, which came later
            self._open(rank)
        if file := self._files.get((rank, stream)):
            file.write(text)

    def last_lines(self, rank: int) -> list[str]:
        """Return what a rank printed last, on either stream."""
        return list(self._last.get(rank, ()))

    def close(self) -> None:
        """Close the files, and end the line of a progress bar."""
        _print(sys.stderr, "")
        for file in self._files.values():
            file.close()


def say(text: str) -> None:
    """Print a message of the driver, to standard error."""
    with suppress(OSError):
        _print(sys.stderr, f"unidist run: {text}\n")


def _print(file: TextIO, text: str, rank: int = -1) -> None:
    global _bar
    if _bar is not None and _bar != (file, rank):
        os.write(_bar[0].fileno(), b"\n")
        _bar = None
    # Bytes as they are: a rank may print what is no text. No buffer, which would be written once more at the end.
    data = text.encode("utf-8", "surrogateescape")
    while data:
        data = data[os.write(file.fileno(), data) :]
    if text:
        _bar = (file, rank) if text.endswith("\r") else None
