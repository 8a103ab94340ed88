"""Files of a legacy code base, read and written back without a loss."""

from __future__ import annotations

import io
import os
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

#: Folders that hold no code of the user's.
SKIPPED = {".git", ".hg", ".svn", ".tox", ".venv", "venv", "__pycache__", "node_modules", "site-packages"}
SUFFIXES = {".py", ".pyi", ".ipynb", ".sh", ".bash", ".slurm", ".sbatch", ".pbs"}


@dataclass(frozen=True)
class Source:
    """A file's text, and how its bytes are made of it."""

    path: Path
    text: str
    encoding: str = "utf-8"
    #: Line ends of the file; the text has plain ones.
    newline: str = "\n"

    def encode(self, text: str) -> bytes:
        """The bytes of another text for this file."""
        return text.replace("\n", self.newline).encode(self.encoding)


def find(paths: Iterable[Path]) -> Iterator[Path]:
    """The files under some paths, in order, each once; links to folders are not followed, and files given by name are always there."""
    seen: set[Path] = set()
    for path in paths:
        for file in _walk(path) if path.is_dir() else [path]:
            real = file.resolve()
            if real not in seen:
                seen.add(real)
                yield file


def _walk(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in SKIPPED)
        for name in sorted(names):
            file = Path(place, name)
            if file.suffix in SUFFIXES and file.is_file():
                yield file


def read(path: Path) -> Source:
    """A file's text by its own declaration of the encoding (PEP 263), else UTF-8.

    Raises:
        UnicodeDecodeError, SyntaxError: the bytes are not of that encoding, or it is unknown.
    """
    data = path.read_bytes()
    encoding = "utf-8"
    if path.suffix in (".py", ".pyi"):
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    elif data.startswith(b"\xef\xbb\xbf"):
        encoding = "utf-8-sig"
    text = data.decode(encoding)
    newline = "\r\n" if text.count("\r\n") * 2 > text.count("\n") else "\n"
    if newline == "\r\n":
        text = text.replace("\r\n", "\n")
    return Source(path, text, encoding, newline)


def write(source: Source, text: str) -> None:
    """Replace a file's content; all of it or nothing. Links stay links, and permissions stay."""
    real = source.path.resolve()
    part = real.with_name(f".{real.name}.unidist")
    part.write_bytes(source.encode(text))
    part.chmod(real.stat().st_mode)
    part.replace(real)
