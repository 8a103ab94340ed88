"""Migrate a whole code base in memory: a report for each file that names Horovod, torch.distributed and the like."""

from __future__ import annotations

import ast
import gc
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import libcst as cst

from unidist.migrate import files
from unidist.migrate.context import Elsewhere, Options
from unidist.migrate.file_report import FileReport, Remark
from unidist.migrate.files import FileKind
from unidist.migrate.formatting import formatted
from unidist.migrate.gradients import assigns_gradients
from unidist.migrate.launch_lines import LONGEST, ImportsHorovod, launch_lines, launch_lines_of_python
from unidist.migrate.module import DEFAULT_OPTIONS, Level, imports_drop_in, migrate_module
from unidist.migrate.notebooks import Migrate, migrate_notebook, source_of_notebook
from unidist.migrate.self_check import parsed
from unidist.migrate.syntax import SyntaxTree, syntax_tree
from unidist.migrate.torch_module import names_torch
from unidist.migrate.workers import results_in_order

Has = Callable[[SyntaxTree], bool]
_HOROVOD = re.compile(
    rb"horovod|unidist\.hvd|from unidist import .*hvd|Horovod(?:Strategy|Plugin|Accelerator)|HOROVOD_\w*(?:RANK|SIZE)"
    rb"|OMPI_COMM_WORLD_\w*(?:RANK|SIZE)|PMIX?_RANK"
)
_NAMES_LAUNCHER = re.compile(rb"horovodrun|mpirun|mpiexec|orterun")
#: In files that are neither Python nor notebooks: also what installs Horovod.
_NAMES_JOB = re.compile(rb"horovod|HOROVOD_|mpirun|mpiexec|orterun|MPIJob")
_FROM = re.compile(r"^[ \t]*from\s+(?!horovod\b)([.\w]+)\s+import\s+(?:\(([^)]*)\)|([^\n#]+))", re.MULTILINE)
_IMPORT = re.compile(r"^[ \t]*import\s+([.\w]+)", re.MULTILINE)
#: Packages whose modules are not the program's own.
_LIBRARIES = {"torch", "horovod", "unidist", "torchvision", "numpy"}
#: Optimizers of Horovod's, their methods, and gradients that are assigned, as they look like.
_OPTIMIZER = re.compile(r"\bDistributedOptimizer\b")
_OF_OPTIMIZER = re.compile(r"(?i:opt\w*)\.synchronize\(\)|\.(?:skip_synchronize|set_backward_passes_per_step)\(")
_GRADIENT = re.compile(r"\.grad\b.*(?:=|_\()|setattr\(.*grad|_foreach_")
_OF_MODULE = re.compile(r"\b(\w+)\.hvd\b")
#: Calls through an attribute, by names that Horovod has and unidist does not.
_OF_ATTRIBUTE = re.compile(
    r"\.(\w+)\.(?:size|cross_rank|cross_size|all(?:reduce|gather|toall)\w*|broadcast_\w+|DistributedOptimizer|Compression)\b"
)
_IMPORTS = re.compile(r"^\s*(?:>>>\s*)?(?:from\s+horovod\b|import\s+(?:[\w.]+\s*,\s*)*horovod\b)", re.MULTILINE)
#: What starts the world.
_STARTS_TORCH = re.compile(r"^[^#\n]*\binit_process_group\s*\(", re.MULTILINE)
_STARTS = re.compile(r"\binit_process_group\s*\(|\bunidist\.init\s*\(")
_LOADED = re.compile(r"(?:import_module|__import__)\(\s*[fF]?['\"]horovod\b")
#: Lightning's ways to Horovod.
_USES_LIGHTNING = re.compile(
    r"""(?:accelerator|strategy|distributed_backend)["']?\s*[=:]\s*["']horovod["']|\bHorovod(?:Strategy|Plugin|Accelerator)\b"""
)

_VENDORED = ("these are Horovod's own sources, which are not migrated", "remove them once no file imports Horovod")


@dataclass
class Exports:
    """Names for Horovod that files use of each other."""

    #: Names that are imported, by the last part of the module's name.
    names: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    #: Attributes through which Horovod's calls are made, and the files that do so.
    attributes: dict[str, set[Path]] = field(default_factory=lambda: defaultdict(set))
    #: Files that make Horovod's optimizers.
    optimizers: set[Path] = field(default_factory=set)
    #: Files that seem to call methods that only Horovod's optimizers have.
    optimizer_methods: set[Path] = field(default_factory=set)
    #: Files that seem to assign gradients by hand.
    gradients: set[Path] = field(default_factory=set)
    #: Whether they do, as far as that has been asked.
    verified: dict[tuple[Path, Has], bool] = field(default_factory=dict)
    #: Files that start the process group, or unidist.
    starts: set[Path] = field(default_factory=set)
    #: Whether those of them start unidist once they are migrated, as far as that has been asked.
    migrated_starts: dict[Path, bool] = field(default_factory=dict)
    #: The full names that each file imports, of modules and of what is in them.
    imports: dict[Path, set[str]] = field(default_factory=lambda: defaultdict(set))

    def of(self, path: Path) -> set[str]:
        """Return the names of a file, and ``.attr`` for the attributes, that other files use."""
        program = self._program(path.resolve()) if self.attributes else set()
        attributes = {f".{name}" for name, paths in self.attributes.items() if paths & program}
        package = {"*"} if path.stem == "__init__" else set()
        return self.names.get(_module_name(path), set()) | attributes | package

    def elsewhere(self, path: Path) -> Elsewhere:
        """Return what other files of the same program do with a file's optimizers and gradients."""
        own = path.resolve()
        seem = self.optimizers | self.optimizer_methods | self.gradients
        program = self._program(own) if seem - {own} else set()
        optimizer = min(self.optimizers & program, default=Path()).name
        method = self._first(self.optimizer_methods & program, _calls_methods)
        gradient = self._first(self.gradients & program, assigns_gradients)
        return Elsewhere(optimizer, method, gradient, self._why_not_started(own))

    def _first(self, paths: set[Path], has: Has) -> str:
        """Return the name of the first file that has something; empty if none does. A file is read once."""
        for path in sorted(paths):
            if (path, has) not in self.verified:
                self.verified[path, has] = _has(path, has)
            if self.verified[path, has]:
                return path.name
        return ""

    def _why_not_started(self, path: Path) -> str:
        """Return why a file's world is not unidist's; empty if it is, or if the file starts it itself."""
        if path in self.starts or path not in self.imports:
            return ""
        starts = sorted(self.starts & self._program(path))
        if not starts:
            return "no file of its program visibly starts the process group, and unidist.rank() needs unidist.init()"
        others = [each for each in starts if not self._starts_unidist(each)]
        return f"{others[0].name} starts the process group by torch.distributed, and stays" if others else ""

    def _starts_unidist(self, path: Path) -> bool:
        if path not in self.migrated_starts:
            with suppress(Exception), _no_garbage_collection():
                text, _ = files.decode(path.read_bytes(), "python")
                text, _ = migrate_module(text, "native", self.of(path))
                self.migrated_starts[path] = _STARTS_TORCH.search(text) is None
        return self.migrated_starts.setdefault(path, False)

    def _program(self, path: Path) -> set[Path]:
        """Return the other files that what a file makes can reach: those that import it, and what it or they import."""
        imported, importers = self._edges
        return _reached(_reached({path}, importers), imported) - {path}

    @cached_property
    def _edges(self) -> tuple[dict[Path, set[Path]], dict[Path, set[Path]]]:
        """The files that each file imports, and those that import it."""
        by_name: dict[str, set[Path]] = defaultdict(set)
        for each in self.imports:
            by_name[_module_name(each)].add(each)
        imported: dict[Path, set[Path]] = {}
        importers: dict[Path, set[Path]] = defaultdict(set)
        for each, names in self.imports.items():
            imported[each] = {other for name in names for other in _nearest(each, name, by_name)}
            for other in imported[each]:
                importers[other].add(each)
        return imported, importers


def _reached(start: set[Path], edges: Mapping[Path, set[Path]]) -> set[Path]:
    """Return some files, and all that a chain of edges leads to."""
    found, waiting = set(start), list(start)
    while waiting:
        new = edges.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def _nearest(importer: Path, name: str, by_name: Mapping[str, set[Path]]) -> set[Path]:
    """Return the files that an import may mean: below the nearest directory above the importing file in which there is
    one, as scripts and packages find them; else all with the whole dotted name.
    """
    parts = [part for part in name.split(".") if part]
    if not parts or parts[0] in _LIBRARIES:
        return set()
    ends = [each.with_suffix("").parts for each in (Path(*parts, "__init__.py"), Path(*parts))]
    found = {
        each: each.parents[len(end) - 1]
        for each in by_name.get(parts[-1], ())
        for end in ends
        if each.with_suffix("").parts[-len(end) :] == end
    }
    above = {each: root for each, root in found.items() if root in importer.parents}
    depth = max((len(root.parts) for root in above.values()), default=0)
    return {each for each, root in above.items() if len(root.parts) == depth} or set(found)


def _module_name(path: Path) -> str:
    return path.parent.name if path.stem == "__init__" else path.stem


def migrate_files(
    paths: Iterable[Path], level: Level, exports: Exports, options: Options = DEFAULT_OPTIONS
) -> Iterator[FileReport]:
    """Yield a report of each file that names Horovod or starts it, in the order of the files; nothing is written.

    Many files are read by several processes.
    """
    migrate = partial(migrate_file, level=level, exports=exports, options=options)
    for report in results_in_order(migrate, _to_migrate(paths, level, options), _died):
        if report is not None:
            yield report


def _to_migrate(paths: Iterable[Path], level: Level, options: Options) -> Iterator[Path]:
    """Yield the files that may have a report, and in place of copies of Horovod's own sources their directory, once."""
    vendored: set[Path] = set()
    for path in paths:
        package = files.vendored_horovod(path)
        if package is None and _may_have_report(path, level, options):
            yield path
        elif package is not None and package not in vendored:
            vendored.add(package)
            yield package


def _may_have_report(path: Path, level: Level, options: Options) -> bool:
    """Return whether a file names what it may be migrated from, or a launcher; also if it cannot be read, which its
    report says.
    """
    what = files.kind(path)
    try:
        if what not in ("python", "notebook") and path.stat().st_size > LONGEST:
            return False
        data = path.read_bytes()
    except OSError:
        return True
    if what in ("python", "notebook"):
        return _names_horovod(data, what, options) or _names_torch(data, level, options)
    return "horovod" in options.origins and bool(
        _NAMES_JOB.search(data)
        or (what is None and _HOROVOD.search(data))
        or (what is None and _names_torch(data, level, options))
    )


def _names_horovod(data: bytes, what: FileKind, options: Options) -> bool:
    launches = what == "python" and _NAMES_LAUNCHER.search(data)
    return "horovod" in options.origins and bool(_HOROVOD.search(data) or launches)


def _names_torch(data: bytes, level: Level, options: Options) -> bool:
    return level == "native" and names_torch(data.decode("latin-1"), options)


def _died(path: Path) -> FileReport:
    return _failed(path, 1, "the process that read it died, perhaps for want of memory", "migrate it by hand")


def find_exports(paths: Iterable[Path]) -> Exports:
    """Return the names for Horovod that the Python files among some paths use of each other."""
    found = Exports()
    for path in paths:
        if files.kind(path) not in ("python", "notebook") or files.vendored_horovod(path) is not None:
            continue
        with suppress(OSError, ValueError):
            text = _text_of(path)
            own = path.resolve()
            found.imports[own] = {match[1] for match in _IMPORT.finditer(text)}
            for match in _FROM.finditer(text):
                names = [name.split(" as ")[0].strip() for name in (match[2] or match[3]).split(",")]
                found.names[match[1].split(".")[-1]].update(names)
                found.imports[own].update([match[1], *(f"{match[1].rstrip('.')}.{name}" for name in names)])
            if _STARTS.search(text):
                found.starts.add(own)
            if _OPTIMIZER.search(text) and ("horovod" in text or "hvd" in text):
                found.optimizers.add(own)
            if _OF_OPTIMIZER.search(text):
                found.optimizer_methods.add(own)
            if _GRADIENT.search(text):
                found.gradients.add(own)
            for match in _OF_MODULE.finditer(text):
                found.names[match[1]].add("hvd")
            for match in _OF_ATTRIBUTE.finditer(text):
                found.attributes[match[1]].add(own)
    return found


def _text_of(path: Path) -> str:
    """Return a Python file's text, or the code of a notebook."""
    text = path.read_bytes().decode("latin-1")
    return source_of_notebook(text) if files.kind(path) == "notebook" else text


def _has(path: Path, what: Has) -> bool:
    """Return whether a module has something; also if it cannot be read."""
    try:
        return what(syntax_tree(_text_of(path)))
    except Exception:
        return True


def _calls_methods(tree: SyntaxTree) -> bool:
    """Return whether a module calls a method that only Horovod's optimizers have."""
    return any(_OF_OPTIMIZER.search(f"{tree.text(call.func)}()") for call in tree.all(cst.Call))


def migrate_file(path: Path, level: Level, exports: Exports, options: Options = DEFAULT_OPTIONS) -> FileReport | None:
    """Return one file's report; None if it does not name Horovod. A directory is a copy of Horovod's own sources."""
    if path.is_dir():
        return FileReport(path, "unchanged", [Remark(1, f"{path.name}/", *_VENDORED)])
    try:
        data = path.read_bytes()
    except OSError as error:
        return _failed(path, 1, f"it cannot be read: {error.strerror}", "make it readable, then migrate again")
    what = files.kind(path) or ("python" if _is_python(data) else "requirements")
    if what not in ("python", "notebook"):
        text = data.decode("utf-8", errors="replace")
        remarks = launch_lines(text, _scripts(path, level, exports), lists=what == "requirements")
        return FileReport(path, "unchanged", remarks, is_code=False) if remarks else None
    of_torch, is_torch = not _names_horovod(data, what, options), _names_torch(data, level, options)
    if of_torch and not is_torch:
        return None
    try:
        text, encoding = files.decode(data, what)
    except (UnicodeDecodeError, SyntaxError, LookupError) as error:
        report = _failed(path, 1, f"it cannot be decoded: {error}", "declare its encoding (PEP 263)")
        report.needs_horovod, report.of_torch = bool(_IMPORTS.search(data.decode("latin-1"))), of_torch
        return report
    if of_torch and what == "python" and imports_horovod(text):
        return None  # which --from leaves out
    report = FileReport(path, "unchanged", is_code=False, of_torch=of_torch)
    if _HOROVOD.search(data) or is_torch:
        exported = exports.of(path) if what == "python" else set()
        elsewhere = exports.elsewhere(path)
        rules = partial(migrate_module, level=level, exported=exported, elsewhere=elsewhere, options=options)
        report = _migrate_text(path, text, what, rules, of_torch=of_torch)
    report.encoding = encoding
    if what == "python" and "horovod" in options.origins:
        found = launch_lines_of_python(text, _scripts(path, level, exports), lists=path.name == "setup.py")
        lines = {remark.line for remark in found}
        others = [remark for remark in report.remarks if remark.line not in lines]
        report.remarks = sorted([*others, *found], key=lambda remark: remark.line)
    is_listed = report.status != "unchanged" or _HOROVOD.search(data) is not None
    return report if report.remarks or is_listed else None


def _is_python(data: bytes) -> bool:
    """Return whether a file of unknown kind, named on the command line, is a Python module that imports Horovod."""
    text = data.decode("latin-1")
    return _IMPORTS.search(text) is not None and parsed(text) is not None


def _scripts(path: Path, level: Level, exports: Exports) -> ImportsHorovod:
    """Return the scripts that the launch lines in a file name: beside it, or in a directory above."""
    roots = [path.resolve().parent]
    while not (roots[-1] / ".git").exists() and len(roots) < 4 and roots[-1] != roots[-1].parent:
        roots.append(roots[-1].parent)

    def imports_horovod_after(script: str) -> bool | None:
        parts = Path(script if script.endswith(".py") else f"{script.replace('.', '/')}.py").parts
        # The paths in an image begin with other directories.
        ends = [Path(*parts[start:]) for start in range(len(parts)) if parts[start] != "/"]
        found = next((root / end for end in ends for root in roots if (root / end).is_file()), None)
        return None if found is None else _still_imports_horovod(found, level, exports)

    return imports_horovod_after


def _still_imports_horovod(path: Path, level: Level, exports: Exports) -> bool:
    """Return whether a script imports Horovod itself, migrated or not."""
    try:
        text, _ = files.decode(path.read_bytes(), "python")
    except (OSError, UnicodeDecodeError, SyntaxError, LookupError):
        return True
    if not imports_horovod(text):
        return False
    with suppress(Exception), _no_garbage_collection():
        text, _ = migrate_module(text, level, exports.of(path))
    return imports_horovod(text)


def _migrate_text(path: Path, text: str, what: FileKind, rules: Migrate, *, of_torch: bool) -> FileReport:
    try:
        with _no_garbage_collection():
            migrated = partial(_with_remaining_import, rules)
            after, remarks = migrate_notebook(text, migrated) if what == "notebook" else migrated(text)
    except cst.ParserSyntaxError as error:
        report = _failed(
            path, error.raw_line, f"it does not parse: {error.message.splitlines()[0]}", "fix it, then migrate again"
        )
    except Exception as error:  # one file must not end a run over thousands
        report = _failed(path, 1, f"it cannot be migrated: {type(error).__name__}: {error}", "migrate it by hand")
    else:
        if after != text and what == "python":
            after = formatted(path, text, after)
        report = FileReport(path, "changed" if after != text else "unchanged", remarks, before=text, after=after)
    code = _code_of(report.after or text, what)
    report.of_torch = of_torch
    report.count(_code_of(text, what), code)
    report.needs_horovod = imports_horovod(code)
    report.uses_drop_in = imports_drop_in(code)
    return report


def _with_remaining_import(rules: Migrate, text: str, **options: Any) -> tuple[str, list[Remark]]:
    """Return what the rules make of a module; a remark on an import of Horovod that is left, if they make none."""
    after, remarks = rules(text, **options)
    if not remarks and imports_horovod(after):
        found = (pattern.search(text) for pattern in (_IMPORTS, _LOADED, _USES_LIGHTNING))
        line = next((text.count("\n", 0, match.end()) + 1 for match in found if match), 1)
        shown = text.splitlines()[line - 1].strip()
        remarks = [Remark(line, shown, "the file still imports Horovod", "replace what it uses by hand")]
    return after, remarks


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Reading a module makes many objects and no garbage; the collector would look through all of them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _failed(path: Path, line: int, why: str, remedy: str) -> FileReport:
    return FileReport(path, "failed", [Remark(line, path.name, why, remedy)])


def _code_of(text: str, what: FileKind) -> str:
    try:
        return source_of_notebook(text) if what == "notebook" else text
    except ValueError:
        return text


def imports_horovod(code: str) -> bool:
    """Return whether a module imports Horovod itself; if it does not parse, whether a line looks like an import."""
    tree = parsed(code)
    names = []
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
    named = any(name.split(".")[0] == "horovod" for name in names) or (tree is None and _IMPORTS.search(code))
    return bool(named or _LOADED.search(code) or _USES_LIGHTNING.search(code))
