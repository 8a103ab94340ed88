"""The commands and programs that README and the pages of ``docs`` show."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: What a command begins with, after variables that are set for it.
PROGRAMS = {
    "bash", "docker", "git", "horovodrun", "make", "mpiexec", "mpirun", "pip", "python", "sbatch", "scancel", "srun",
    "ssh", "torchrun", "unidist",
}  # fmt: skip
SHELLS = ("", "sh", "bash", "console", "shell")


@dataclass(frozen=True)
class Block:
    """A code block: of a fence, or indented by four spaces."""

    page: str
    line: int
    language: str
    text: str
    #: The files that it is a part of, or for a diff, that it compares: words after the language.
    files: tuple[str, ...] = ()


def blocks() -> list[Block]:
    """All code blocks; those that are parts of files are tested as these files."""
    return [block for block in _all_blocks() if not block.files]


def excerpts() -> list[Block]:
    """The code blocks that are parts of files."""
    return [block for block in _all_blocks() if block.files]


def _all_blocks() -> list[Block]:
    return [block for page in PAGES for block in _blocks(page)]


def commands() -> list[tuple[str, str]]:
    """Each command, with its page, in the order of the pages; a program in a shell block counts as its commands."""
    found: dict[tuple[str, str], None] = {}
    for block in blocks():
        if block.language in SHELLS:
            lines = block.text.replace("\\\n", " ").splitlines()
            for command in filter(None, map(_command, lines)):
                found[block.page, command] = None
    return list(found)


def programs() -> list[Block]:
    """The blocks of Python."""
    return [block for block in blocks() if block.language == "python"]


def _command(line: str) -> str:
    text = re.sub(r"\s+#\s.*$", "", line.strip().removeprefix("$ "))
    words = re.sub(r"^([A-Z_]+=\S+ +)+", "", text).split()
    is_command = len(words) > 1 and words[0] in PROGRAMS and not text.endswith((":", ","))
    return " ".join(text.split()) if is_command else ""


def _blocks(page: Path) -> list[Block]:
    found, lines, start = [], page.read_text().splitlines(), 0
    while start < len(lines):
        fence = re.fullmatch(r"( *)(```+|:::+)(.*)", lines[start])
        end = start + 1
        if fence:
            while lines[end].strip() != fence[2]:
                end += 1
            language, body, after = fence[3].strip(), lines[start + 1 : end], end + 1
            if named := re.fullmatch(r"\{code-block\} *(\w*)", language):
                language = named[1]
        elif lines[start].startswith("    ") and not lines[start - 1].strip():
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            language, body, after = "", lines[start:end], end
        else:
            start += 1
            continue
        if not language.startswith("{"):
            text = "\n".join(line.removeprefix("    ") if not fence else line for line in body)
            first, *files = language.split() or [""]
            found.append(Block(page.name, start + 1, first, text.strip("\n") + "\n", tuple(files)))
        start = after
    return found
