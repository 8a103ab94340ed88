"""A whole code base: each file that names Horovod, migrated in memory."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import libcst as cst

from unidist.migrate import files
from unidist.migrate.files import Kind
from unidist.migrate.jobs import find_launches
from unidist.migrate.native import Level, migrate
from unidist.migrate.notebooks import Migrate, code_of_notebook, migrate_notebook
from unidist.migrate.report import FileReport, Finding

_NAMED = re.compile(
    rb"horovod|unidist\.hvd|from unidist import .*hvd|Horovod(?:Strategy|Plugin|Accelerator)|HOROVOD_\w*(?:RANK|SIZE)"
    rb"|OMPI_COMM_WORLD_\w*(?:RANK|SIZE)|PMIX?_RANK"
)
_LAUNCHED = re.compile(rb"horovodrun|mpirun|mpiexec")
_FROM = re.compile(r"^[ \t]*from\s+(?!horovod\b)([.\w]+)\s+import\s+(?:\(([^)]*)\)|([^\n#]+))", re.MULTILINE)
_OF_MODULE = re.compile(r"\b(\w+)\.hvd\b")
#: Calls whose names Horovod has and unidist has not.
_OF_ATTRIBUTE = re.compile(
    r"\.(\w+)\.(?:size|cross_rank|cross_size|all(?:reduce|gather|toall)\w*|broadcast_\w+|DistributedOptimizer|Compression)\b"
)
_IMPORTS = re.compile(r"^\s*(?:>>>\s*)?(?:from\s+horovod\b|import\s+(?:[\w.]+\s*,\s*)*horovod\b)", re.MULTILINE)
_LOADED = re.compile(r"(?:import_module|__import__)\(\s*[fF]?['\"]horovod\b")
#: Lightning's ways to Horovod.
_LIGHTNING = re.compile(
    r"""(?:accelerator|strategy|distributed_backend)["']?\s*[=:]\s*["']horovod["']|\bHorovod(?:Strategy|Plugin|Accelerator)\b"""
)

_VENDORED = ("these are Horovod's own sources: they are left as they are", "remove them once no file imports Horovod")


@dataclass
class Exports:
    """What files use of each other's names for Horovod."""

    #: Names that are imported, by the last part of the module's name.
    names: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    #: Attributes through which Horovod's calls are made, and the files that do so.
    attributes: dict[str, set[Path]] = field(default_factory=lambda: defaultdict(set))

    def of(self, path: Path) -> set[str]:
        """The names of a file, and ``.attr`` for the attributes, that other files use."""
        stem = path.parent.name if path.stem == "__init__" else path.stem
        return self.names.get(stem, set()) | {
            f".{name}" for name, paths in self.attributes.items() if paths - {path.resolve()}
        }


def migrate_files(paths: Iterable[Path], level: Level, exports: Exports) -> Iterator[FileReport]:
    """A report of each file that names Horovod or starts it; nothing is written."""
    vendored: set[Path] = set()
    for path in paths:
        package = files.horovods_own(path)
        if package is not None:
            if package not in vendored:
                yield FileReport(package, "unchanged", [Finding(1, f"{package.name}/", *_VENDORED)])
            vendored.add(package)
            continue
        report = migrate_file(path, level, exports)
        if report is not None:
            yield report


def find_exports(paths: Iterable[Path]) -> Exports:
    """What the Python files among some paths use of each other."""
    found = Exports()
    for path in paths:
        if files.kind(path) != "python" or files.horovods_own(path) is not None:
            continue
        with suppress(OSError):
            text = path.read_bytes().decode("latin-1")
            for match in _FROM.finditer(text):
                names = (match[2] or match[3]).split(",")
                found.names[match[1].split(".")[-1]].update(name.split(" as ")[0].strip() for name in names)
            for match in _OF_MODULE.finditer(text):
                found.names[match[1]].add("hvd")
            for match in _OF_ATTRIBUTE.finditer(text):
                found.attributes[match[1]].add(path.resolve())
    return found


def migrate_file(path: Path, level: Level, exports: Exports) -> FileReport | None:
    """One file's report; None if Horovod is not in it."""
    what = files.kind(path) or "python"
    try:
        data = path.read_bytes()
    except OSError as error:
        return _failed(path, 1, f"it cannot be read: {error.strerror}", "see to it that it can")
    if what == "shell":
        return _jobs(path, data) if _LAUNCHED.search(data) else None
    if not _NAMED.search(data):
        return None
    try:
        text, encoding = files.decode(data, what)
    except (UnicodeDecodeError, SyntaxError, LookupError) as error:
        report = _failed(path, 1, f"its bytes are no text: {error}", "declare its encoding (PEP 263)")
        report.needs_horovod = bool(_IMPORTS.search(data.decode("latin-1")))
        return report
    report = _migrated(path, text, what, partial(migrate, level=level, exported=exports.of(path)))
    report.encoding = encoding
    return report


def _migrated(path: Path, text: str, what: Kind, rules: Migrate) -> FileReport:
    try:
        after, findings = migrate_notebook(text, rules) if what == "notebook" else rules(text)
    except cst.ParserSyntaxError as error:
        report = _failed(
            path, error.raw_line, f"it does not parse: {error.message.splitlines()[0]}", "mend it, then migrate again"
        )
    except Exception as error:  # one file must not end a run over thousands
        report = _failed(path, 1, f"it cannot be migrated: {type(error).__name__}: {error}", "migrate it by hand")
    else:
        report = FileReport(path, "changed" if after != text else "unchanged", findings, before=text, after=after)
    code = _code_of(report.after or text, what)
    report.needs_horovod = imports_horovod(code)
    report.uses_drop_in = "unidist.hvd" in code or bool(re.search(r"from unidist import .*\bhvd\b", code))
    if report.needs_horovod and not report.findings:
        report.findings.append(
            Finding(1, "import horovod", "the file still imports Horovod", "replace what it uses by hand")
        )
    return report


def _jobs(path: Path, data: bytes) -> FileReport:
    findings = []
    for launch in find_launches(data.decode("utf-8", errors="replace")):
        why = "; ".join(["unidist runs under it as it is, and under torchrun", *launch.notes])
        findings.append(
            Finding(launch.line, launch.command.splitlines()[0], why, launch.torchrun or "none in one line")
        )
    return FileReport(path, "unchanged", findings)


def _failed(path: Path, line: int, why: str, remedy: str) -> FileReport:
    return FileReport(path, "failed", [Finding(line, path.name, why, remedy)])


def _code_of(text: str, what: Kind) -> str:
    try:
        return code_of_notebook(text) if what == "notebook" else text
    except ValueError:
        return text


def imports_horovod(code: str) -> bool:
    """Whether a module imports Horovod itself; of one that does not parse, whether a line looks so."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError):
        return bool(_IMPORTS.search(code) or _LOADED.search(code) or _LIGHTNING.search(code))
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
        if any(name.split(".")[0] == "horovod" for name in names):
            return True
    return bool(_LOADED.search(code) or _LIGHTNING.search(code))
