"""What a migration has found and done."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["changed", "unchanged", "failed"]


@dataclass(frozen=True)
class Finding:
    """A place that a person must look at."""

    line: int
    #: The code.
    what: str
    why: str
    #: What to do.
    remedy: str


@dataclass
class FileReport:
    """One file that names Horovod."""

    path: Path
    status: Status
    findings: list[Finding] = field(default_factory=list)
    #: Whether it still imports Horovod itself when the migration is written.
    needs_horovod: bool = False
    before: str = ""
    after: str = ""

    def as_json(self) -> dict[str, Any]:
        """All but the texts."""
        return {
            "path": str(self.path),
            "status": self.status,
            "needs_horovod": self.needs_horovod,
            "findings": [asdict(finding) for finding in self.findings],
        }
