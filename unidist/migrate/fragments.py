"""Shell commands in files that are no shell scripts: YAML, JSON, Makefiles, Dockerfiles, Python.

Read line by line, without a parser of the format: what is found is reported and not changed.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

#: Where a command may start a launcher.
_LAUNCHER = re.compile(r"(?<![\w.-])(horovodrun|orterun|mpi(run|exec)(\.\w+)?)(?![\w-])")
_PROGRAM = re.compile(r"(?:[\w./-]*/)?(horovodrun|orterun|mpi(run|exec)(\.\w+)?)")
#: A key of YAML or JSON, as it begins a line, and list items.
_KEY = re.compile(r"""^(\s*(?:-\s+)*)(?:"([\w.-]+)"|([\w.-]+))\s*:(?:\s+|$)(.*)$""")
_ITEM = re.compile(r"^(\s*)-\s+(.*)$")
_BLOCK = re.compile(r"^[|>][+-]?\d?\s*(?:#.*)?$")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
#: ``${{ inputs.epochs }}``, ``{{ .Values.processes }}``: filled in before the shell reads the line.
_TEMPLATE = re.compile(r"\$?\{\{.*?\}\}")
#: Words that need no quotes; ``$(NAME)`` is a variable of Kubernetes.
_PLAIN = re.compile(r"(?:[\w@%+=:,./-]|\$\(\w+\)|\$\{?\w+\}?)+")
#: Longer files are data.
LONGEST = 1_000_000


@dataclass(frozen=True)
class Fragment:
    """Shell commands in a file."""

    #: The line on which they begin, from 1.
    line: int
    text: str
    #: From the command to how this file writes it, and from one in a string of it.
    written: Callable[[str], str] = str
    written_inside: Callable[[str], str] = str

    def as_written(self, command: str) -> Callable[[str], str]:
        """How this file writes what replaces a command."""
        return self.written if command == self.text else self.written_inside


def _as_list(command: str) -> str:
    try:
        return json.dumps(shlex.split(command))
    except ValueError:
        return command


def _joined(words: Sequence[str]) -> str:
    return " ".join(word if _PLAIN.fullmatch(word) else shlex.quote(word) for word in words)


# ------------------------------------------------------------------------------------ YAML and JSON
def yaml_fragments(text: str) -> Iterator[Fragment]:
    """Strings, blocks, and lists of words, as in ``command: ["mpirun", "-np", "2"]``; with the ``args:`` behind it."""
    lines = _TEMPLATE.sub(lambda match: f"$TEMPLATE{match[0].encode().hex()}_", text).split("\n")
    for found in _fragments(lines):
        inside = partial(_with_templates, found.written_inside)
        yield replace(found, written=partial(_with_templates, found.written), written_inside=inside)


def _with_templates(written: Callable[[str], str], command: str) -> str:
    return re.sub(r"\$TEMPLATE([0-9a-f]+)_", lambda match: bytes.fromhex(match[1]).decode(), written(command))


def _fragments(lines: Sequence[str]) -> Iterator[Fragment]:
    pending: Fragment | None = None
    number = 0
    while number < len(lines):
        line = lines[number]
        key, item = _KEY.match(line), _ITEM.match(line)
        value, indent = "", 0
        if key:
            value, indent = key[4], len(key[1])
        elif item:
            value, indent = item[2], len(item[1]) + 1
        name = (key[2] or key[3]) if key else ""
        words, end = _list_at(lines, number, value, indent) if key or item else (None, number + 1)
        if words is not None and (any(map(_LAUNCHER.search, words)) or (pending is not None and name == "args")):
            found = Fragment(number + 1, _joined(words), _as_list)
            if pending is not None and name == "args":
                found = Fragment(pending.line, f"{pending.text} {found.text}", _as_list)
            elif pending is not None:
                yield pending
            pending = found if name in ("command", "entrypoint", "args") else None
            if pending is None:
                yield found
        elif _BLOCK.match(value.strip()):
            body, end = _indented(lines, number + 1, indent)
            folded = value.lstrip().startswith(">")
            yield Fragment(number + 2, " ".join(map(str.strip, body)) if folded else "\n".join(body))
        elif value and _LAUNCHER.search(value):
            more, end = _continuation(lines, number + 1, indent, value)
            yield Fragment(number + 1, _unquoted(" ".join([value.strip().rstrip(","), *map(str.strip, more)])))
        elif not key and not item and _LAUNCHER.search(line):
            yield from (Fragment(number + 1, json.loads(f'"{each}"', strict=False)) for each in _strings(line))
        number = end if words is None or any(map(_LAUNCHER.search, words)) or name == "args" else number + 1
    if pending is not None:
        yield pending


def _list_at(lines: Sequence[str], number: int, value: str, indent: int) -> tuple[list[str] | None, int]:
    """The words of a list that begins in a value or on the next lines, if it is one; and the line after it."""
    if value.lstrip().startswith("["):
        whole, end = value, number + 1
        while "]" not in whole and end < len(lines) and end < number + 200:
            whole, end = f"{whole}\n{lines[end].strip()}", end + 1
        words = _flow_words(whole[whole.index("[") + 1 : whole.rfind("]")])
        return words, end
    if value.strip() or not _KEY.match(lines[number]):
        return None, number + 1
    words, end, block = [], number + 1, indent
    while end < len(lines):
        item = _ITEM.match(lines[end])
        if item and len(item[1]) >= indent and (not words or len(item[1]) == block):
            block = len(item[1])
            if _KEY.match(item[2]):
                return None, number + 1
            if _BLOCK.match(item[2].strip()):
                body, after = _indented(lines, end + 1, block)
                words.append("\n".join(body))
                end = after
                continue
            words.append(_unquoted(re.sub(r"\s+#.*$", "", item[2])))
        elif lines[end].strip() and not lines[end].lstrip().startswith("#"):
            break
        end += 1
    # Of several commands, each is looked at by itself.
    commands = any(" " in word and _LAUNCHER.match(word) for word in words)
    return (words, end) if words and not commands else (None, number + 1)


def _starts(word: str) -> bool:
    return _PROGRAM.fullmatch(word) is not None


def _flow_words(inside: str) -> list[str]:
    parts = re.findall(r"""("(?:[^"\\]|\\.)*"|'(?:[^']|'')*'|[^,\s"'][^,\n]*)""", inside)
    return [_unquoted(part.strip()) for part in parts if not part.strip().startswith("#")]


def _unquoted(value: str) -> str:
    value = value.strip()
    if len(value) > 1 and value[0] == value[-1] == '"':
        try:
            return str(json.loads(value, strict=False))
        except ValueError:
            return value[1:-1]
    if len(value) > 1 and value[0] == value[-1] == "'":
        return value[1:-1].replace("''", "'")
    return value


def _strings(line: str) -> Iterator[str]:
    for match in _QUOTED.finditer(line):
        if _LAUNCHER.search(match[1]) and " " in match[1]:
            yield match[1]


def _indented(lines: Sequence[str], start: int, indent: int) -> tuple[list[str], int]:
    """The lines that are indented more than the key before them, without what they are indented by."""
    end = start
    while end < len(lines) and (not lines[end].strip() or len(lines[end]) - len(lines[end].lstrip()) > indent):
        end += 1
    body = lines[start:end]
    width = min((len(line) - len(line.lstrip()) for line in body if line.strip()), default=0)
    return [line[width:] for line in body], end


def _continuation(lines: Sequence[str], start: int, indent: int, value: str) -> tuple[list[str], int]:
    """The next lines of a string that goes on over several."""
    end = start
    if value.lstrip()[:1] in "\"'" and value.rstrip().rstrip(",")[-1:] == value.lstrip()[:1]:
        return [], end
    while end < len(lines) and lines[end].strip() and not _KEY.match(lines[end]) and not _ITEM.match(lines[end]):
        if len(lines[end]) - len(lines[end].lstrip()) <= indent or lines[end].strip()[0] in "}]":
            break
        end += 1
    return list(lines[start:end]), end


# ------------------------------------------------------------------------------------ Makefiles and Dockerfiles
def makefile_fragments(text: str) -> Iterator[Fragment]:
    """Recipes and the values of variables. ``$(NAME)`` stays; the shell's ``$$`` is a single one in between."""
    for line, whole in _logical_lines(text):
        recipe = re.match(r"^\t\s*[-@+]*\s*(.*)$", whole, re.DOTALL)
        value = re.match(r"^\s*(?:export\s+)?[\w.-]+\s*[:?+!]?=\s*(.*)$", whole, re.DOTALL)
        found = recipe or value
        if found and _LAUNCHER.search(found[1]):
            shell = re.sub(r"\$\{(\w+)\}", r"$(\1)", found[1]).replace("$$(", "$( ").replace("$$", "$")
            yield Fragment(line, shell, _for_make, _for_make)


def _for_make(command: str) -> str:
    return re.sub(r"\$(\( )?(?!\(\w+\))", lambda match: "$$(" if match[1] else "$$", command)


def dockerfile_fragments(text: str) -> Iterator[Fragment]:
    """The commands of RUN, CMD and ENTRYPOINT, in both forms; CMD's words follow those of ENTRYPOINT."""
    entry: Fragment | None = None
    for line, whole in _logical_lines(text, skip_comments=True):
        match = re.match(r"^\s*(?:ONBUILD\s+)?(RUN|CMD|ENTRYPOINT)\s+(.*)$", whole, re.IGNORECASE | re.DOTALL)
        if match is None:
            continue
        kind, command = match[1].upper(), re.sub(r"^(--\w+=\S+\s+)+", "", match[2].strip())
        found = Fragment(line, command)
        if command.startswith("[") and command.endswith("]"):
            found = Fragment(line, _joined(_flow_words(command[1:-1].replace("\\\n", " "))), _as_list)
        if kind == "CMD" and entry is not None:
            found = Fragment(entry.line, f"{entry.text} {found.text}", _as_list)
            entry = None
        elif entry is not None:
            yield entry
            entry = None
        if kind == "ENTRYPOINT" and found.written is _as_list and _LAUNCHER.search(found.text):
            entry = found
        else:
            yield found
    if entry is not None:
        yield entry


def _logical_lines(text: str, skip_comments: bool = False) -> Iterator[tuple[int, str]]:
    """Lines with their continuations, and the numbers of their first lines."""
    parts: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        line = line.rstrip("\r")
        if skip_comments and line.lstrip().startswith("#"):
            continue
        parts.append(line)
        if not line.endswith("\\"):
            yield number - len(parts) + 1, "\n".join(parts)
            parts = []
    if parts:
        yield text.count("\n") + 2 - len(parts), "\n".join(parts)


def line_fragments(text: str) -> Iterator[Fragment]:
    """Lines of a configuration that name a launcher, without their key and quotes."""
    for number, line in enumerate(text.split("\n"), 1):
        if _LAUNCHER.search(line) and not line.lstrip().startswith("#"):
            value = re.sub(r"^\s*[\w.-]+\s*=\s*", "", line).strip().rstrip(",")
            yield Fragment(number, _unquoted(value))


# ------------------------------------------------------------------------------------ Python
#: Calls that start programs, by the last part of their names.
_STARTS = re.compile(
    r"(run|call|check_call|check_output|Popen|system|popen|getoutput|getstatusoutput|create_subprocess_\w+)$"
)


def python_fragments(text: str) -> Iterator[Fragment]:
    """Lists of words that begin with a launcher, and strings that do: arguments of ``subprocess.run`` and the like."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    started = {
        id(argument)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and _STARTS.search(ast.unparse(call.func))
        for argument in [*call.args, *(keyword.value for keyword in call.keywords)]
    }
    started |= {
        id(node.value) for node in ast.walk(tree) if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign))
    }
    for node in ast.walk(tree):
        if isinstance(node, (ast.List, ast.Tuple)) and _is_command(node.elts):
            names = _Placeholders()
            yield Fragment(node.lineno, _joined([names.word(each) for each in node.elts]), names.as_list, names.in_text)
        elif isinstance(node, (ast.Constant, ast.JoinedStr)) and id(node) in started:
            names = _Placeholders()
            command = names.word(node)
            if re.match(r"\s*(\w+=\S+\s+)*[\w./-]*?(horovodrun|mpirun|mpiexec)\s", command):
                yield Fragment(node.lineno, command, names.in_text, names.in_text)


def _is_command(words: Sequence[ast.expr]) -> bool:
    first = words[0] if words else None
    return isinstance(first, ast.Constant) and isinstance(first.value, str) and _starts(first.value)


class _Placeholders:
    """Variables of the shell in place of expressions, whose values are known when the script runs."""

    def __init__(self) -> None:
        self._expressions: list[str] = []
        self._python = False

    def word(self, node: ast.expr) -> str:
        if isinstance(node, ast.Constant):
            return str(node.value)
        if isinstance(node, ast.JoinedStr):
            return "".join(self._part(each) for each in node.values)
        if ast.unparse(node) == "sys.executable":
            self._python = True
            return "python"
        self._expressions.append(ast.unparse(node))
        return f"$UNIDIST{len(self._expressions) - 1}_"

    def _part(self, node: ast.expr) -> str:
        return self.word(node.value if isinstance(node, ast.FormattedValue) else node)

    def in_text(self, command: str) -> str:
        return re.sub(r"\$UNIDIST(\d+)_", lambda match: f"{{{self._expressions[int(match[1])]}}}", command)

    def as_list(self, command: str) -> str:
        try:
            words = shlex.split(command)
        except ValueError:
            return self.in_text(command)
        return f"[{', '.join(map(self._element, words))}]"

    def _element(self, word: str) -> str:
        whole = re.fullmatch(r"\$UNIDIST(\d+)_", word)
        if self._python and word in ("python", "torchrun"):
            return "sys.executable" if word == "python" else 'sys.executable, "-m", "torch.distributed.run"'
        if whole:
            return self._expressions[int(whole[1])]
        return f"f{json.dumps(self.in_text(word))}" if "$UNIDIST" in word else json.dumps(word)
