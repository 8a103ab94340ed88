"""The report of a migration: for each file what changes, and what a person must look at."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from difflib import unified_diff
from pathlib import Path
from typing import Any, Literal

Status = Literal["changed", "unchanged", "failed"]


@dataclass(frozen=True)
class Remark:
    """A line that a person must look at."""

    #: From 1; in a notebook, within the cell.
    line: int
    #: The code.
    what: str
    why: str
    #: What to do about it.
    remedy: str
    #: The notebook's cell, from 1.
    cell: int | None = None

    @property
    def location(self) -> str:
        """The line, and the cell of a notebook."""
        return f"{self.line}" if self.cell is None else f"cell {self.cell}, {self.line}"


@dataclass
class FileReport:
    """One file that names Horovod, or a job script that starts it."""

    path: Path
    status: Status
    remarks: list[Remark] = field(default_factory=list)
    #: Whether the migrated file still imports Horovod itself.
    needs_horovod: bool = False
    #: Whether the migrated file uses the drop-in.
    uses_drop_in: bool = False
    encoding: str = "utf-8"
    before: str = ""
    after: str = ""

    def diff(self) -> str:
        """The change in unified form, for ``git apply`` and ``patch -p1``."""
        name = self.path.as_posix().lstrip("/")
        lines = unified_diff(_lines(self.before), _lines(self.after), f"a/{name}", f"b/{name}")
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)

    def as_json(self) -> dict[str, Any]:
        """The report without the file's text."""
        return {
            "path": str(self.path),
            "status": self.status,
            "needs_horovod": self.needs_horovod,
            "uses_drop_in": self.uses_drop_in,
            "findings": [asdict(remark) for remark in self.remarks],
        }


def _lines(text: str) -> list[str]:
    return [f"{line}\n" for line in text.split("\n")[:-1]] + (
        [text.split("\n")[-1]] if not text.endswith("\n") and text else []
    )


def summary(reports: list[FileReport]) -> dict[str, int]:
    """The counts in the last line of the report."""
    return {
        "files": len(reports),
        **{status: sum(report.status == status for report in reports) for status in ("changed", "unchanged", "failed")},
        "use_drop_in": sum(report.uses_drop_in for report in reports),
        "need_horovod": sum(report.needs_horovod for report in reports),
        "findings": sum(len(report.remarks) for report in reports),
    }
