"""The report of a migration: for each file what changes, and what a person must look at."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from difflib import SequenceMatcher, unified_diff
from pathlib import Path
from typing import Any, Literal

from unidist.migrate.self_check import parsed

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
    #: Whether it is why something stays, in a file in which other remarks are on what changes.
    stays: bool = False


@dataclass
class FileReport:
    """One file that is migrated from something, or a job script that starts Horovod."""

    path: Path
    status: Status
    remarks: list[Remark] = field(default_factory=list)
    #: Whether the migrated file still imports Horovod itself.
    needs_horovod: bool = False
    #: Whether the migrated file uses the drop-in.
    uses_drop_in: bool = False
    #: Whether it is Python, and not a script that starts some.
    is_code: bool = True
    #: Whether it is one of torch.distributed, DataParallel or apex, and names nothing of Horovod's.
    of_torch: bool = False
    #: Calls of ``DistributedOptimizer`` before, and those of them that stay.
    optimizers: int = 0
    optimizers_left: int = 0
    #: Calls of unidist's own that are new.
    loaders: int = 0
    metrics: int = 0
    #: Models that are wrapped by unidist now, and those that are wrapped by torch or apex still.
    models: int = 0
    models_left: int = 0
    encoding: str = "utf-8"
    before: str = ""
    after: str = ""

    @property
    def is_free(self) -> bool:
        """Whether nothing of Horovod's is left, not even the drop-in; or of what else it is migrated from."""
        if self.of_torch:
            return self.status == "changed"
        return self.is_code and self.status != "failed" and not self.needs_horovod and not self.uses_drop_in

    def count(self, before: str, after: str) -> None:
        """Count calls in the code before and after."""
        old, new = _calls(before), _calls(after)
        if not self.of_torch:  # which has another class of this name
            self.optimizers, self.optimizers_left = old["DistributedOptimizer"], new["DistributedOptimizer"]
        self.loaders = new["shard_loader"] - old["shard_loader"]
        self.metrics = new["allreduce_metric"] - old["allreduce_metric"]
        self.models = new["wrap_model"] - old["wrap_model"]
        self.models_left = new["DistributedDataParallel"] + new["DDP"] + new["DataParallel"]

    def location(self, remark: Remark, *, written: bool) -> str:
        """Return the line of a remark, in the new text if that is written, and the cell of a notebook."""
        if remark.cell is not None:
            return f"cell {remark.cell}, {remark.line}"
        return str(self.new_line(remark.line) if written and self.status == "changed" else remark.line)

    def new_line(self, line: int) -> int:
        """Return the line of the new text at which a line of the old one is, or would be."""
        matcher = SequenceMatcher(None, self.before.splitlines(), (self.after or self.before).splitlines(), False)
        for _, start, end, new_start, new_end in matcher.get_opcodes():
            if start <= line - 1 < end:
                return min(new_start + line - 1 - start, max(new_end - 1, new_start)) + 1
        return line

    def diff(self) -> str:
        """Return the change in unified form, for ``git apply`` and ``patch -p1``."""
        name = self.path.as_posix().lstrip("/")
        lines = unified_diff(_lines(self.before), _lines(self.after), f"a/{name}", f"b/{name}")
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)

    def as_json(self) -> dict[str, Any]:
        """Return the report without the file's text."""
        return {
            "path": str(self.path),
            "status": self.status,
            "needs_horovod": self.needs_horovod,
            "uses_drop_in": self.uses_drop_in,
            "findings": [
                {name: value for name, value in asdict(remark).items() if name != "stays"} for remark in self.remarks
            ],
        }


def _lines(text: str) -> list[str]:
    return [f"{line}\n" for line in text.split("\n")[:-1]] + (
        [text.split("\n")[-1]] if not text.endswith("\n") and text else []
    )


def _calls(code: str) -> Counter[str]:
    """Return how often functions of each name are called; nothing if the code does not parse."""
    tree = parsed(code)
    functions = [node.func for node in (ast.walk(tree) if tree else ()) if isinstance(node, ast.Call)]
    return Counter(
        each.attr if isinstance(each, ast.Attribute) else each.id
        for each in functions
        if isinstance(each, (ast.Attribute, ast.Name))
    )


def summary(reports: Sequence[FileReport]) -> dict[str, int]:
    """Return the counts with which the report begins."""
    of_torch = [report for report in reports if report.of_torch]
    others = [report for report in reports if not report.of_torch]
    statuses = ("changed", "unchanged", "failed")
    return {
        "files": len(reports),
        **{status: sum(report.status == status for report in reports) for status in statuses},
        "use_drop_in": sum(report.uses_drop_in for report in reports),
        "need_horovod": sum(report.needs_horovod for report in reports),
        "code": sum(report.is_code for report in others),
        "free": sum(report.is_free for report in others),
        "torch": len(of_torch),
        **{f"torch_{status}": sum(report.status == status for report in of_torch) for status in statuses},
        "models": sum(report.models for report in reports),
        "models_left": sum(report.models_left for report in of_torch),
        "optimizers_native": sum(report.optimizers - report.optimizers_left for report in reports),
        "optimizers_drop_in": sum(report.optimizers_left for report in reports if not report.needs_horovod),
        "optimizers_horovod": sum(report.optimizers_left for report in reports if report.needs_horovod),
        "loaders": sum(report.loaders for report in reports),
        "metrics": sum(report.metrics for report in reports),
        "findings": sum(len(report.remarks) for report in reports),
    }


def reasons(reports: Sequence[FileReport]) -> list[tuple[str, int]]:
    """Return why files are not free of Horovod, and how many findings say so, the most frequent first."""
    found = Counter(
        remark.why.split(" (line ")[0]
        for report in reports
        if report.is_code and not report.is_free
        for remark in [each for each in report.remarks if each.stays] or report.remarks
    )
    return found.most_common()


#: The lines of the summary, each with the count or the counts without which it is left out.
_LINES = (
    (
        "horovod",
        "{horovod} files with Horovod: {horovod_changed} {verb}, {horovod_unchanged} unchanged, {horovod_failed} could "
        "not be {read}",
    ),
    (
        "horovod",
        "optimizers: {optimizers_native} to plain ones with a data-parallel model, {optimizers_drop_in} on the "
        "drop-in, {optimizers_horovod} in files that import Horovod",
    ),
    (
        "torch",
        "{torch} files with torch.distributed, DataParallel or apex: {torch_changed} {verb}, {torch_unchanged} "
        "unchanged, {torch_failed} could not be {read}",
    ),
    ("torch", "models: {models} to wrap_model, {models_left} as they are"),
    ("", "loaders: {loaders} sharded; metrics: {metrics} averaged"),
    (
        "horovod",
        "{free} of {code} Python files free of Horovod; {use_drop_in} use the drop-in, {need_horovod} import Horovod; "
        "{findings} lines to review",
    ),
    ("torch alone", "{findings} lines to review"),
    (
        "torch_changed torch_unchanged",
        "Some files stay on torch.distributed: a program with both kinds of files runs on its backends (nccl, gloo, "
        "mpi), and not on Horovod",
    ),
    (
        "need_horovod changed",
        "Some files still import Horovod: a program with both kinds of files would be in two worlds. Start it with "
        "`python -m unidist.hvd`, which gives these files the drop-in",
    ),
)


def headline(counts: dict[str, int], *, written: bool) -> list[str]:
    """Return the summary in words, a line each."""
    verb, read = ("changed", "read or written") if written else ("would change", "read")
    horovod = {f"horovod_{each}": counts[each] - counts[f"torch_{each}"] for each in ("changed", "unchanged", "failed")}
    values = {**counts, **horovod, "horovod": counts["files"] - counts["torch"]}
    shown = {name for name, value in values.items() if value}
    shown.add("horovod" if values["horovod"] or not counts["files"] else "alone")
    return [line.format(**values, verb=verb, read=read) for needs, line in _LINES if shown.issuperset(needs.split())]


def as_markdown(reports: Sequence[FileReport], *, written: bool) -> str:
    """Return the report for a pull request."""
    lines = ["## To unidist", "", *(f"- {line}" for line in headline(summary(reports), written=written))]
    if found := reasons(reports):
        lines += ["", "| lines | why they stay |", "|---:|---|", *(f"| {n} | {_cell(why)} |" for why, n in found)]
    for report in reports:
        if report.remarks:
            lines += ["", f"### `{report.path}`", "", "| line | code | why | what to do |", "|---:|---|---|---|"]
            for remark in report.remarks:
                line = report.location(remark, written=written)
                code = remark.what.strip().replace("`", "'")
                lines.append(f"| {line} | `{_cell(code)}` | {_cell(remark.why)} | {_cell(remark.remedy)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
