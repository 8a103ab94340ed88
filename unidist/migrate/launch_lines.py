"""The lines that start or install Horovod in files of all kinds, and what to write instead; nothing is changed.

The files are read line by line, without a parser of their format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from unidist.migrate.file_report import Remark

#: Longer files are data.
LONGEST = 1_000_000
#: A launcher as a word of a command, and as an item of a list in JSON, YAML or Python.
_HOROVODRUN = re.compile(r"""(?<![\w.-])(?P<quote>["']?)(?:[\w./-]*/)?horovodrun(?![\w-])(?(quote)(?P=quote)?)""")
_MPIRUN = re.compile(r"(?<![\w.-])(?:orterun|mpi(?:run|exec)(?:\.\w+)?)(?![\w-])")
_PYTHON = re.compile(r"\bpy(?:thon|py)[\d.]*\b|\.py\b|\bsys\.executable\b", re.IGNORECASE)
_SCRIPT = re.compile(r"(?<![\w$])[\w./-]+\.py\b|(?<=-m )[\w.]+")
#: Commands that may name a launcher and do not start it, and comments.
_NO_START = re.compile(r"^\s*(?:#|//|@?(?:echo|printf|e?grep|pkill|killall|which|type|command\s+-|pip)\b)")
#: In Python, a command is the beginning of a string.
_IN_PYTHON = re.compile(r"""(?<!["'])[fF]?["'](?:[\w./-]*/)?(?:horovodrun|orterun|mpi(?:run|exec))(?![\w-])""")


class _Pattern(NamedTuple):
    pattern: re.Pattern[str]
    why: str
    remedy: str
    #: Whether it means anything in lists of requirements only.
    in_lists: bool = False


_INSTALLED = ("it installs Horovod", "unidist-torch in its place, once no file imports Horovod")
_INSTALLS = (
    _Pattern(re.compile(r"\bpip3?\s(?:[^#]*\s)?install\b[^#]*?(?<![\w/.-])horovod(?![\w-])"), *_INSTALLED),
    _Pattern(re.compile(r"github\.com[/:](?:horovod|uber)/horovod"), *_INSTALLED),
    _Pattern(
        re.compile(r"""(?:^|["'\[,])[\s-]*["']?(?:[\w-]+::)?horovod(?:\[[^\]]*\])?\s*(?:$|[<>=!~"',;#@\\]|\s--)"""),
        *_INSTALLED,
        in_lists=True,
    ),
    _Pattern(
        re.compile(r"""(?:\bimage["']?\s*:|^\s*FROM\s).*horovod"""),
        "the image has Horovod",
        "an image with PyTorch, and pip install unidist-torch",
    ),
    _Pattern(
        re.compile(r"\bHOROVOD_(?:WITH(?:OUT)?_|GPU|NCCL_|CUDA_HOME|CPU_OPERATIONS|BUILD_|MPICXX_SHOW|ROCM_|CMAKE)"),
        "the variable configures the build of Horovod",
        "remove it with Horovod",
    ),
    _Pattern(
        re.compile(r"""^\s*kind:\s*["']?MPIJob\b"""),
        "the MPI operator starts mpirun, under which unidist runs",
        "keep it, or use templates/kubernetes.yaml",
    ),
)

#: Whether a script imports Horovod after its migration; None if it is not found.
ImportsHorovod = Callable[[str], bool | None]


def launch_lines(text: str, imports_horovod: ImportsHorovod, *, lists: bool) -> list[Remark]:
    """Return the remarks on a file that is neither Python nor a notebook.

    Args:
        text: the file's.
        imports_horovod: see there.
        lists: whether it lists requirements, so that Horovod's name alone is one.
    """
    lines = text.split("\n")
    return _in_order({**dict(_installs(lines, lists)), **dict(_launches(lines, imports_horovod))})


def launch_lines_of_python(text: str, imports_horovod: ImportsHorovod, *, lists: bool) -> list[Remark]:
    """Return the remarks on commands in strings of a Python file, and on the requirements of a ``setup.py``."""
    lines = text.split("\n")
    launches = {row: remark for row, remark in _launches(lines, imports_horovod) if _IN_PYTHON.search(lines[row])}
    return _in_order({**(dict(_installs(lines, lists)) if lists else {}), **launches})


def _in_order(found: dict[int, Remark]) -> list[Remark]:
    return [found[number] for number in sorted(found)]


def _installs(lines: list[str], lists: bool) -> Iterator[tuple[int, Remark]]:
    for number, line in enumerate(lines):
        row = next((row for row in _INSTALLS if row.pattern.search(line) and (lists or not row.in_lists)), None)
        if row is not None and not line.lstrip().startswith(("#", "//")):
            yield number, Remark(number + 1, line.strip(), row.why, row.remedy)


def _launches(lines: list[str], imports_horovod: ImportsHorovod) -> Iterator[tuple[int, Remark]]:
    for number, line in enumerate(lines):
        if _NO_START.match(line):
            continue
        command = _whole(lines, number)
        script = _SCRIPT.search(command)
        stays = imports_horovod(script[0]) if script else None
        if _HOROVODRUN.search(line):
            yield number, Remark(number + 1, line.strip(), *_for_horovodrun(line.strip(), stays))
        elif _MPIRUN.search(line) and _PYTHON.search(command):
            why, remedy = "unidist runs under mpirun", "keep it"
            if stays:
                why, remedy = "the script still imports Horovod", f"python -m unidist.hvd {script[0] if script else ''}"
            yield number, Remark(number + 1, line.strip(), why, remedy)


def _for_horovodrun(line: str, stays: bool | None) -> tuple[str, str]:
    words = ["unidist", "run", *["--hvd"] * bool(stays)]

    def replaced(match: re.Match[str]) -> str:
        quote = match["quote"]
        is_item = quote and match[0].endswith(quote)
        return ", ".join(f"{quote}{word}{quote}" for word in words) if is_item else quote + " ".join(words)

    why = "horovodrun comes with Horovod; unidist run takes its command line"
    if stays is None:
        why += ", and --hvd for a script that still imports Horovod"
    return why, _HOROVODRUN.sub(replaced, line)


def _whole(lines: list[str], number: int) -> str:
    """Return a command with its continuation lines, and of a list its next items."""
    end = number + 1
    while end < len(lines) and end < number + 30 and re.search(r"(?:\\|,|\[)\s*$|^\s*-\s", lines[end - 1]):
        end += 1
    return " ".join(line.rstrip("\\ ") for line in lines[number:end])
