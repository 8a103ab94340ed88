"""What a migration has found and done."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from difflib import unified_diff
from pathlib import Path
from typing import Any, Literal

Status = Literal["changed", "unchanged", "failed"]


@dataclass(frozen=True)
class Finding:
    """A place that a person must look at."""

    #: From 1; in a notebook, within the cell.
    line: int
    #: The code.
    what: str
    why: str
    #: What to do.
    remedy: str
    #: The notebook's cell, from 1.
    cell: int | None = None

    @property
    def place(self) -> str:
        """Where it is within its file."""
        return f"{self.line}" if self.cell is None else f"cell {self.cell}, {self.line}"


@dataclass
class FileReport:
    """One file that names Horovod, or starts it."""

    path: Path
    status: Status
    findings: list[Finding] = field(default_factory=list)
    #: Whether it imports Horovod itself when the migration is written.
    needs_horovod: bool = False
    #: Whether some calls go through the drop-in then.
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
        """All but the texts."""
        return {
            "path": str(self.path),
            "status": self.status,
            "needs_horovod": self.needs_horovod,
            "uses_drop_in": self.uses_drop_in,
            "findings": [asdict(finding) for finding in self.findings],
        }


def _lines(text: str) -> list[str]:
    return [f"{line}\n" for line in text.split("\n")[:-1]] + (
        [text.split("\n")[-1]] if not text.endswith("\n") and text else []
    )


def summary(reports: list[FileReport]) -> dict[str, int]:
    """The counts at a report's end."""
    return {
        "files": len(reports),
        **{status: sum(report.status == status for report in reports) for status in ("changed", "unchanged", "failed")},
        "use_drop_in": sum(report.uses_drop_in for report in reports),
        "need_horovod": sum(report.needs_horovod for report in reports),
        "findings": sum(len(report.findings) for report in reports),
    }
