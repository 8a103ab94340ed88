"""The remarks on launches and on what installs Horovod, in files of all kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from unidist.migrate.dependencies import OPERATOR, dependencies
from unidist.migrate.file_report import Remark
from unidist.migrate.files import FileKind
from unidist.migrate.fragments import (
    Fragment,
    dockerfile_fragments,
    line_fragments,
    makefile_fragments,
    python_fragments,
    yaml_fragments,
)
from unidist.migrate.jobs import LaunchLine, Surroundings, find_launches

_FRAGMENTS: dict[FileKind, Callable[[str], Iterable[Fragment]]] = {
    "shell": lambda text: [Fragment(1, text)],
    "text": lambda text: [Fragment(1, text)],
    "yaml": yaml_fragments,
    "json": yaml_fragments,
    "makefile": makefile_fragments,
    "dockerfile": dockerfile_fragments,
    "requirements": line_fragments,
}


def job_remarks(path: Path, text: str, what: FileKind, surroundings: Surroundings) -> list[Remark]:
    """The remarks on a file that is neither Python nor a notebook."""
    surroundings = replace(surroundings, mpi_operator=OPERATOR.search(text) is not None)
    launches = _launches(_FRAGMENTS[what](text), surroundings)
    lists = what in ("requirements", "text") or (what == "yaml" and "dependencies:" in text)
    return sorted([*launches, *dependencies(text, lists)], key=lambda remark: remark.line)


def python_remarks(path: Path, text: str, surroundings: Surroundings) -> list[Remark]:
    """The remarks on programs that a Python file starts, and on the requirements in a ``setup.py``."""
    installed = dependencies(text, lists=True) if path.name == "setup.py" else []
    return [*_launches(python_fragments(text), surroundings), *installed]


def _launches(fragments: Iterable[Fragment], surroundings: Surroundings) -> Iterator[Remark]:
    for fragment in fragments:
        for launch in find_launches(fragment.text, surroundings):
            written = fragment.as_written(launch.command)
            what = written(launch.command).splitlines()[0]
            why = fragment.written_inside(_why(launch))
            yield Remark(fragment.line + launch.line - 1, what, why, _remedy(launch, written))


def _why(launch: LaunchLine) -> str:
    if any("hvd.elastic" in note for note in launch.notes):
        return "; ".join(launch.notes)
    if launch.by_horovodrun:
        why = "horovodrun comes with Horovod"
    elif "-m unidist.hvd" in (launch.torchrun or ""):
        why = "the script still imports Horovod, and -m unidist.hvd runs it without"
    else:
        why = "unidist runs under this launcher as it is, and under torchrun"
    return "; ".join([why, *launch.notes])


def _remedy(launch: LaunchLine, written: Callable[[str], str]) -> str:
    if launch.torchrun is not None:
        return written(launch.torchrun)
    if any("starts no training" in note for note in launch.notes):
        return "remove it with Horovod; `unidist doctor` shows what runs here"
    return "no single line can replace it" if launch.by_horovodrun else "keep it"
