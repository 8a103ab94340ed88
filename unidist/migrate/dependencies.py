"""Where a code base installs Horovod: requirements, setup.py, conda environments, images, build variables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from unidist.migrate.file_report import Remark

#: The name of the package.
PACKAGE = "unidist-torch"
#: A requirement that begins a line, or an item of a list; the quotes of TOML and Python around it.
_REQUIREMENT = re.compile(
    r"""^([ \t]*(?:-[ \t]+)?["']?(?:[\w-]+::)?)horovod(?:\[[^\]\n]*\])?(?=\s*(?:$|["',;#\]@\\]|[<>=!~]=?|\s--))"""
    r"""(?:[^"',;#\]\n]|,\s*[<>=!~])*?(?=\s*(?:$|["';#\]]|,(?!\s*[<>=!~])))""",
    re.MULTILINE,
)
#: In a list on one line: ``install_requires=["torch", "horovod>=0.22"]``.
_QUOTED = re.compile(r"""(["'])horovod(?:\[[^\]]*\])?(?:\s*[<>=!~@][^"']*)?\1(?!\s*:)""")
_TABLE = re.compile(r"""^[ \t]*horovod[ \t]*=[ \t]*["'{].*$""", re.MULTILINE)
_REPOSITORY = re.compile(r"\S*github\.com[/:](?:horovod|uber)/horovod\S*")
_PIP = re.compile(
    r"""\bpip3?[ \t]+(?:[^\s;&|]+[ \t]+)*?install\b[^\n;&|]*?(?<![\w/.-])["']?(horovod(?:\[[^\]\s]*\])?[^\s"';&|\\]*)"""
)
_BUILD = re.compile(
    r"\bHOROVOD_(?:WITH(?:OUT)?_\w+|GPU\w*|NCCL_\w+|CUDA_HOME|CPU_OPERATIONS|BUILD_\w+|MPICXX_SHOW|ROCM_\w+|CMAKE)\b"
)
_IMAGE = re.compile(
    r"""^[ \t]*(?:-[ \t]*)?(?:["']?image["']?[ \t]*:|FROM(?:[ \t]+--platform=\S+)?)[ \t]*["']?[^\s"',]*horovod\S*""",
    re.MULTILINE,
)
#: A job of Kubeflow's MPI operator.
OPERATOR = re.compile(r"^\s*kind:\s*[\"']?MPIJob\b", re.MULTILINE)

_INSTALLED = "it installs Horovod, which is needed only while a file imports it"
_BUILT = "the variable configures the build of Horovod; unidist is not built"
_IN_IMAGE = "the image has Horovod"
_MPI_OPERATOR = "the MPI operator starts mpirun, under which unidist runs as it is"


class _Found(NamedTuple):
    start: int
    why: str
    remedy: str


def dependencies(text: str, lists: bool) -> list[Remark]:
    """A remark on each line that installs Horovod, or configures its build.

    Args:
        lists: whether the text lists requirements, so that Horovod's name alone is one.
    """
    lines = text.split("\n")
    remarks: dict[int, Remark] = {}
    for start, why, remedy in _findings(text, lists):
        number = text.count("\n", 0, start)
        if not lines[number].lstrip().startswith(("#", "//")) and number not in remarks:
            remarks[number] = Remark(number + 1, lines[number].strip(), why, remedy)
    return [remarks[number] for number in sorted(remarks)]


def _findings(text: str, lists: bool) -> Iterator[_Found]:
    for match in _PIP.finditer(text):
        line = _line(text, match.start(1))
        without = " ".join(re.sub(r"\bHOROVOD_\w+=\S+\s*", "", line).replace(match[1], PACKAGE).split())
        yield _Found(match.start(1), _INSTALLED, without)
    for match in _REPOSITORY.finditer(text):
        yield _Found(match.start(), _INSTALLED, PACKAGE)
    for match in _TABLE.finditer(text) if lists else ():
        yield _Found(match.end() - 1, _INSTALLED, f'{PACKAGE} = "*"')
    for match in _REQUIREMENT.finditer(text) if lists else ():
        line = _line(text, match.end() - 1)
        yield _Found(match.end() - 1, _INSTALLED, line.replace(match[0][len(match[1]) :], PACKAGE, 1).strip())
    for match in _QUOTED.finditer(text) if lists else ():
        line = _line(text, match.start())
        yield _Found(match.start(), _INSTALLED, line.replace(match[0], f"{match[1]}{PACKAGE}{match[1]}").strip())
    for match in _IMAGE.finditer(text):
        yield _Found(match.end() - 1, _IN_IMAGE, f"an image with PyTorch, and pip install {PACKAGE}")
    for match in _BUILD.finditer(text):
        yield _Found(match.start(), _BUILT, "remove it with Horovod")
    for match in OPERATOR.finditer(text):
        instead = "keep it; or kind: PyTorchJob, whose operator sets torchrun's options: torchrun train.py"
        yield _Found(match.end() - 1, _MPI_OPERATOR, instead)


def _line(text: str, position: int) -> str:
    """The line around a position."""
    end = text.find("\n", position)
    return text[text.rfind("\n", 0, position) + 1 : len(text) if end < 0 else end]
