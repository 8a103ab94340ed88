"""The files of a legacy code base: find them, decode them, and write them back with all else unchanged."""

from __future__ import annotations

import io
import os
import re
import stat
import tokenize
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

#: ``job``: what may start training; ``requirements``: what lists packages.
FileKind = Literal["python", "notebook", "job", "requirements"]
#: Directories without code of the user's.
SKIPPED = {".git", ".hg", ".svn", ".tox", ".nox", ".venv", "venv", "__pycache__", "node_modules", "site-packages"}
SUFFIXES: dict[str, FileKind] = {
    ".py": "python", ".pyi": "python", ".pyw": "python", ".ipynb": "notebook",
    **dict.fromkeys(
        (
            ".sh", ".bash", ".zsh", ".ksh", ".slurm", ".sbatch", ".pbs", ".lsf", ".qsub", ".job", ".json", ".mk",
            ".dockerfile",
        ),
        "job",
    ),
    ".yaml": "requirements", ".yml": "requirements",
}  # fmt: skip
#: Files that are known by their names.
NAMES: dict[re.Pattern[str], FileKind] = {
    re.compile(r"(gnu)?makefile|(docker|container)file(\..+)?"): "job",
    re.compile(
        r"(.*(requirements|constraints).*\.(txt|in)|setup\.cfg|pyproject\.toml|pipfile|tox\.ini)"
    ): "requirements",
}


def find_files(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the files under some paths, in order, each once.

    Files that are given are always included; of a directory, those with a known suffix or first line. Links to
    directories are not followed.
    """
    seen: set[Path] = set()
    for path in paths:
        for file in _files_in(path) if path.is_dir() else [path]:
            real = file.resolve()
            if real not in seen:
                seen.add(real)
                yield file


def possible_importers(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the files that may import those under some paths: of their git repository, or else of the directory."""
    found: dict[Path, None] = {}
    for path in (each.resolve() for each in paths):
        root = next((above for above in (path, *path.parents) if (above / ".git").exists()), None)
        if root is not None or path.is_dir():
            found[root or path] = None
        else:
            found.update(dict.fromkeys(sorted(path.parent.glob("*.py"))))
    yield from find_files(found)


def _files_in(directory: Path) -> Iterator[Path]:
    for path, directories, names in os.walk(directory):
        directories[:] = sorted(name for name in directories if name not in SKIPPED)
        for name in sorted(names):
            file = Path(path, name)
            if file.is_file() and kind(file) is not None:
                yield file


def vendored_horovod(path: Path) -> Path | None:
    """Return the package ``horovod`` that contains a file, if it is a copy of Horovod's own sources."""
    return next(
        (above for above in path.parents if above.name == "horovod" and (above / "torch/mpi_ops.py").exists()), None
    )


def kind(path: Path) -> FileKind | None:
    """Return the kind of a file, by its name or suffix, or without a suffix by its first line."""
    for pattern, what in NAMES.items():
        if pattern.fullmatch(path.name.lower()):
            return what
    if path.suffix:
        return SUFFIXES.get(path.suffix.lower())
    try:
        with path.open("rb") as file:
            first = file.readline(200)
    except OSError:
        return None
    if not first.startswith(b"#!"):
        return None
    return "python" if b"python" in first else "job" if first.rstrip().endswith(b"sh") else None


def decode(data: bytes, what: FileKind) -> tuple[str, str]:
    """Return a file's text, with its own line ends, and its encoding: the declared one (PEP 263), else UTF-8.

    Raises:
        UnicodeDecodeError, SyntaxError: the bytes are not of that encoding, or it is unknown.
    """
    encoding = "utf-8-sig" if data.startswith(b"\xef\xbb\xbf") else "utf-8"
    if what == "python":
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    return data.decode(encoding), encoding


def write(path: Path, data: bytes) -> None:
    """Replace a file's content, atomically if possible. Links stay links; owner, group and permissions stay.

    Raises:
        OSError: it cannot be written.
    """
    real = path.resolve()
    before = real.stat()
    part = real.with_name(f".{real.name}.{os.getpid()}.unidist")
    try:
        part.write_bytes(data)
        try:
            os.chown(part, before.st_uid, before.st_gid)
        except PermissionError:  # the file of another user: it keeps its owner only if it is written into
            real.write_bytes(data)
            return
        part.chmod(stat.S_IMODE(before.st_mode))
        part.replace(real)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
