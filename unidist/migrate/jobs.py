"""Job scripts: the torchrun line that can replace each launch by horovodrun or mpirun.

An offer, not a need: unidist runs under horovodrun and mpirun as well.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile, pairwise
from pathlib import PurePosixPath
from typing import NamedTuple


@dataclass(frozen=True)
class LaunchLine:
    """One launch in a job script."""

    #: The line on which the command begins, from 1.
    line: int
    #: The command as it is written, on one line.
    command: str
    #: What can replace it, or None.
    torchrun: str | None
    #: What the reader must look at.
    notes: tuple[str, ...]


def find_launches(text: str) -> list[LaunchLine]:
    """The launches in a shell script: all by horovodrun, and those of Python by mpirun or mpiexec.

    Comments and here-documents are passed over, unless a shell or sbatch reads the latter; strings are read where they are code
    (``bash -c "..."``, ``eval "..."``, ``COMMAND="..."``).
    """
    text = text.replace("\r\n", "\n")
    commands = sorted(_commands(text), key=lambda words: words[0].start)
    return [launch for words in commands if (launch := _launch(text, words))]


# The shell's language, as far as it is needed.


@dataclass(frozen=True)
class _Word:
    start: int
    end: int
    #: As it is written, quotes included.
    text: str
    kind: str = "word"  # or "redirection", or "broken": a quote or a bracket that nothing closes

    @property
    def value(self) -> str:
        return _unquoted(self.text)

    @property
    def name(self) -> str:
        return PurePosixPath(self.value).name


def _unquoted(word: str) -> str:
    """A word without its quotes; variables stay."""
    try:
        parts = shlex.split(word)
    except ValueError:
        return word
    return parts[0] if len(parts) == 1 else word


class _Unclosed(Exception):
    """A quote or a bracket that nothing closes."""


REDIRECTION = re.compile(r"(?:\d*|&)(?:<<<|<<-?|>>|>\||[<>]&|<>|[<>])(?!\()")
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
KEYWORDS = {"if", "then", "else", "elif", "while", "until", "do", "!", "{"}
SHELLS = {"bash", "sh", "zsh", "ksh", "ssh", "sbatch", "qsub", "bsub"}
DEEPEST = 40


def _commands(text: str, place: int = 0, depth: int = 0) -> list[list[_Word]]:
    """The words of each simple command from a place on; those in substitutions are commands too."""
    scanner = _Scanner(text, depth)
    while place < len(text) and depth <= DEEPEST:
        try:
            place = scanner.commands(place, "", depth)
        except _Unclosed:
            place = scanner.give_up()
    return scanner.found


class _Scanner:
    def __init__(self, text: str, outermost: int) -> None:
        self.text = text
        self.outermost = outermost
        self.found: list[list[_Word]] = []
        #: Bodies that begin on the next line: the delimiter, whether tabs are cut off, whether it is code.
        self.here_documents: list[tuple[str, bool, bool]] = []
        # Where to go on after something unclosed: the outermost command's words, its next word, what was found before it.
        self.words: list[_Word] = []
        self.word_start = 0
        self.found_before = 0

    def commands(self, i: int, closing: str, depth: int) -> int:
        """Read commands to the end or behind ``closing``, and return that place."""
        if depth > DEEPEST:
            raise _Unclosed
        words: list[_Word] = []
        while i < len(self.text):
            if depth == self.outermost:
                self.words, self.word_start, self.found_before = words, i, len(self.found)
            char = self.text[i]
            redirection = REDIRECTION.match(self.text, i)
            if char in " \t\r":
                i += 1
            elif self.text.startswith("\\\n", i):
                i += 2
            elif char == "#":
                i = self._line_end(i)
            elif self.text.startswith("((", i):
                i = self._find("))", i + 2) + 2
            elif redirection:
                i = self._redirection(i, redirection, words, depth)
            elif char not in "\n;&|()":
                start, i = i, self._word(i, depth)
                words.append(_Word(start, i, self.text[start:i]))
            else:
                self._end(words, depth)
                words = []
                i += 1
                if char == "\n":
                    i = self._bodies(i, depth)
                elif char == "(":
                    i = self.commands(i, ")", depth + 1)
                elif char == closing:
                    return i
        if closing:
            raise _Unclosed
        self._end(words, depth)
        return i

    def give_up(self) -> int:
        """Take the rest of the line for one broken word, and return the next line's place."""
        end = self._line_end(self.word_start)
        del self.found[self.found_before :]
        self.here_documents.clear()
        self.found.append([*self.words, _Word(self.word_start, end, self.text[self.word_start : end], "broken")])
        return end + 1

    def _end(self, words: list[_Word], depth: int) -> None:
        if words:
            self.found.append(words)
            for start, end in _code_in_strings(words):
                self.found += _commands(self.text[:end], start, depth + 1)

    def _word(self, i: int, depth: int) -> int:
        while i < len(self.text) and (end := self._piece(i, depth)) > i:
            i = end
        return i

    def _piece(self, i: int, depth: int) -> int:
        """The end of the character, quotation or substitution at i; i itself if the word ends there."""
        char, two = self.text[i], self.text[i : i + 2]
        if self.text.startswith("$((", i):
            return self._find("))", i + 3) + 2
        if two in ("$(", "<(", ">("):
            return self.commands(i + 2, ")", depth + 1)
        if two == "${":
            return self._quoted(i + 2, "}", "\\`$\"'", depth + 1)
        if char == "\\":
            return min(i + 2, len(self.text))
        if char == "'":
            return self._find("'", i + 1) + 1
        if char == '"':
            return self._quoted(i + 1, '"', "\\`$", depth + 1)
        if char == "`":
            end = self._find("`", i + 1)
            self.found += _commands(self.text[:end], i + 1, depth + 1)
            return end + 1
        return i if char in " \t\r\n;&|()<>" else i + 1

    def _quoted(self, i: int, closing: str, special: str, depth: int) -> int:
        if depth > DEEPEST:
            raise _Unclosed
        while i < len(self.text):
            if self.text[i] == closing:
                return i + 1
            i = self._piece(i, depth) if self.text[i] in special else i + 1
        raise _Unclosed

    def _find(self, closing: str, i: int) -> int:
        place = self.text.find(closing, i)
        if place < 0:
            raise _Unclosed
        return place

    def _line_end(self, i: int) -> int:
        place = self.text.find("\n", i)
        return len(self.text) if place < 0 else place

    def _redirection(self, i: int, match: re.Match[str], words: list[_Word], depth: int) -> int:
        start = match.end()
        while self.text[start : start + 1] in (" ", "\t"):
            start += 1
        end = self._word(start, depth)
        if match[0].endswith(("<<", "<<-")):
            delimiter = _unquoted(self.text[start:end])
            code = any(word.name in SHELLS for word in words)
            self.here_documents.append((delimiter, match[0].endswith("-"), code))
        words.append(_Word(i, end, self.text[i:end], "redirection"))
        return end

    def _bodies(self, i: int, depth: int) -> int:
        """The place behind the here-documents that begin at i."""
        for delimiter, tabs, code in self.here_documents:
            start = i
            while i < len(self.text):
                line = self.text[i : self._line_end(i)]
                if (line.lstrip("\t") if tabs else line) == delimiter:
                    break
                i = self._line_end(i) + 1
            if code:
                self.found += _commands(self.text[:i], start, depth + 1)
            i = min(self._line_end(min(i, len(self.text))) + 1, len(self.text))
        self.here_documents.clear()
        return i


def _code_in_strings(words: Sequence[_Word]) -> Iterator[tuple[int, int]]:
    """Where strings are code: ``COMMAND="..."``, ``eval "..."``, ``bash -c "..."``."""
    assignments = all(ASSIGNMENT.match(word.text) for word in words)
    for before, word in pairwise([_Word(0, 0, ""), *words]):
        cut = word.text.find("=") + 1 if assignments else 0
        quote = word.text[cut : cut + 1]
        code = assignments or before.text == "eval" or re.fullmatch(r"-[a-z]*c", before.text)
        if code and quote in ("'", '"') and len(word.text) > cut + 1 and word.text.endswith(quote):
            yield word.start + cut + 1, word.end - 1


def _verbatim(text: str, words: Sequence[_Word]) -> str:
    """The words as they are written, on one line."""
    parts = [word.text for word in words[:1]]
    for before, word in pairwise(words):
        between = text[before.end : word.start]
        parts += [" " if "\n" in between else between, word.text]
    return "".join(parts)


# Launchers and their options.

LAUNCHER = re.compile(r"horovodrun|orterun|mpi(run|exec)(\.\w+)?")
#: What names a launcher and does not start it.
TALKS_OF_IT = {
    "echo", "printf", "grep", "egrep", "pgrep", "pkill", "killall", "which", "type", "command", "hash", "man", "whereis", "pip",
    "pip3", "for", "case", "select", "[", "[[", "test",
}  # fmt: skip
PYTHON = re.compile(r"(python|pypy)[\d.]*")
PYTHON_VARIABLE = re.compile(r'"?\$\{?\w*(python|py\b|py_)\w*\}?"?', re.IGNORECASE)
VARIABLE = re.compile(r'"?\$(\w+|\{[^}]*\}|@)"?')
BATCH_NODES = re.compile(
    r"^#(?:SBATCH(?:\s.*)?\s(?:-N\s*|--nodes[=\s]\s*)|PBS\s.*?(?:nodes|select)=)(\d+)", re.MULTILINE
)
LOCAL = {"localhost", "127.0.0.1", "::1"}

COUNT = {"np", "n", "num-proc", "c"}
PER_NODE = {"npernode", "N", "ppn", "perhost"}
HOSTS = {"H", "host", "hosts"}
HOST_FILES = {"hostfile", "machinefile", "default-hostfile", "f", "machine"}
ELASTIC = {
    "min-np", "min-num-proc", "max-np", "max-num-proc", "host-discovery-script", "slots-per-host", "elastic-timeout",
    "reset-limit", "blacklist-cooldown-range",
}  # fmt: skip
EXPORT = {"x", "genv", "env", "genvlist", "envlist"}
STARTS_NOTHING = {"check-build", "cb", "version", "V", "help", "h", "info"}
SEVERAL_PROGRAMS = {"app", "configfile"}
#: Left out, with a note that says what does their work, if anything does.
HINTS = {
    "": {
        "autotune", "autotune-log-file", "autotune-warmup-samples", "autotune-steps-per-sample", "autotune-bayes-opt-max-samples",
        "autotune-gaussian-process-noise", "hierarchical-allreduce", "hierarchical-allgather", "torus-allreduce",
        "timeline-mark-cycles", "path", "npersocket", "gpus-per-proc", "rf", "rankfile",
    },
    "torchrun binds no process": {
        "bind-to", "bind-to-core", "bind-to-socket", "binding-args", "membind", "cpus-per-proc", "cpus-per-rank",
    },
    "NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names the interface": {"network-interface", "network-interfaces", "iface"},
    "torchrun has --log-dir FOLDER --redirects 3": {"output-filename", "outfile-pattern", "errfile-pattern"},
    "look at what it sets": {"config-file", "mpi-args"},
    "go to that folder first": {"wdir", "wd"},
    "the command timeout does the same": {"timeout"},
    "unidist.hvd reads HOROVOD_FUSION_THRESHOLD, in bytes": {"fusion-threshold-mb"},
    "unidist.hvd reads HOROVOD_CYCLE_TIME": {"cycle-time-ms"},
    "unidist.hvd reads HOROVOD_TIMELINE": {"timeline-filename"},
    "unidist.hvd reads HOROVOD_STALL_CHECK_TIME_SECONDS": {"no-stall-check", "stall-check-warning-time-seconds"},
    "unidist.hvd reads HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": {"stall-check-shutdown-time-seconds"},
}  # fmt: skip
HINT_OF = {name: hint for hint, names in HINTS.items() for name in names}
#: Left out without a word, with their values.
QUIET = {
    "start-timeout", "p", "ssh-port", "i", "ssh-identity-file", "log-level", "num-nccl-streams", "thread-affinity",
    "gloo-timeout-seconds", "cache-capacity", "mca", "gmca", "omca", "pmca", "prtemca", "am", "tune", "prefix", "launcher",
    "launcher-exec", "rmk", "stdin", "report-uri", "ompi-server", "map-by", "rank-by", "topolib", "demux", "nameserver",
    "usize", "localhost", "order-nodes", "prepend-pattern", "profile",
}  # fmt: skip
#: Options without a value.
FLAGS = {
    *STARTS_NOTHING, "gloo", "mpi", "jsrun", "verbose", "disable-cache", "tcp", "mpi-threads-disable", "no-mpi-threads-disable",
    "autotune", "no-autotune", "timeline-mark-cycles", "no-timeline-mark-cycles", "stall-check", "no-stall-check",
    "log-with-timestamp", "log-without-timestamp", "log-hide-timestamp", "no-log-hide-timestamp", "prefix-timestamp",
    "prefix-output-with-timestamp", "hierarchical-allreduce", "no-hierarchical-allreduce", "hierarchical-allgather",
    "no-hierarchical-allgather", "torus-allreduce", "no-torus-allreduce", "oversubscribe", "nooversubscribe",
    "allow-run-as-root", "tag-output", "timestamp-output", "display-map", "display-allocation", "report-bindings", "v", "q",
    "quiet", "bynode", "byslot", "bind-to-core", "bind-to-socket", "bind-to-none", "genvall", "genvnone", "envall", "envnone",
    "merge-stderr-to-stdout", "use-hwthread-cpus", "novm", "prepend-rank", "l", "print-all-exitcodes", "pernode",
    "disable-auto-cleanup", "disable-hostname-propagation", "skip-launch-node", "nolocal", "enable-recovery",
    "disable-recovery", "leave-session-attached", "debug-daemons", "enable-x", "disable-x",
}  # fmt: skip
WITH_VALUE = {
    *COUNT, *PER_NODE, *HOSTS, *HOST_FILES, *ELASTIC, *EXPORT, *SEVERAL_PROGRAMS, *HINT_OF, *QUIET,
}.difference(FLAGS)  # fmt: skip
TWO_VALUES = {"mca", "gmca", "omca", "pmca", "prtemca", "genv", "env", "blacklist-cooldown-range"}

PORT = 29500
UNCLOSED = "a quote or a bracket is not closed"


class _NoReplacement(Exception):
    """Why there is no torchrun line."""


@dataclass
class _Options:
    """What a launcher's options ask for; counts as they are written."""

    count: str = ""
    per_node: str = ""
    hosts: str = ""
    host_file: str = ""
    #: ``NAME=value`` as written, and names whose values are the shell's.
    assignments: list[str] = field(default_factory=list)
    exported: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def _launch(text: str, words: Sequence[_Word]) -> LaunchLine | None:
    words = list(dropwhile(lambda word: word.text in KEYWORDS, words))
    place = _launcher_place(words)
    if place is None:
        return _broken_launch(text, words)
    command = _verbatim(text, words)
    if words[place].name != "horovodrun" and not re.search(r"python|pypy|\.py\b", command, re.IGNORECASE):
        return None
    line = text.count("\n", 0, words[0].start) + 1
    try:
        torchrun, notes = _replacement(text, words, place)
    except _NoReplacement as why:
        return LaunchLine(line, command, None, tuple(map(str, why.args)))
    return LaunchLine(line, command, torchrun, tuple(notes))


def _launcher_place(words: Sequence[_Word]) -> int | None:
    """Where the launcher stands: first, or with its options behind a command that starts it."""
    first = next((i for i, word in enumerate(words) if not ASSIGNMENT.match(word.text)), len(words))
    places = [i for i in range(first, len(words)) if LAUNCHER.fullmatch(words[i].name)]
    if not places or places[0] == first:
        return places[0] if places else None
    started = [i for i in places if i + 1 < len(words) and words[i + 1].value.startswith(("-", "$"))]
    return started[0] if started and words[first].name not in TALKS_OF_IT else None


def _broken_launch(text: str, words: Sequence[_Word]) -> LaunchLine | None:
    if not words or words[-1].kind != "broken":
        return None
    command = _verbatim(text, words)
    named = re.search(r"(?<![\w.-])(horovodrun|mpirun|mpiexec)\s", command)
    if not named or (named[1] != "horovodrun" and "python" not in command):
        return None
    return LaunchLine(text.count("\n", 0, words[0].start) + 1, command, None, (UNCLOSED,))


def _replacement(text: str, words: Sequence[_Word], place: int) -> tuple[str | None, list[str]]:
    if words[-1].kind == "broken":
        raise _NoReplacement(UNCLOSED)
    options, start = _read_options(words, place + 1)
    program, notes = _program(text, words[start:])
    spread = _spread(options, words[place].name == "horovodrun", _batch_nodes(text))
    prefix = _prefix(text, words[:place], options.assignments)
    lines = [f"{prefix}torchrun {how} {program}" for how in spread.options]
    notes = [*spread.notes, *options.notes, *notes]
    if options.exported and len(spread.hosts) != 1:
        notes.append(f"set on every host: {', '.join(options.exported)}")
    if not spread.hosts:
        return None, [*notes, f"on every host, with the capitals filled in: {lines[0]}"]
    if len(lines) > 1:
        return None, [*notes, *(f"on {host}: {line}" for host, line in zip(spread.hosts, lines))]
    return lines[0], notes


def _prefix(text: str, before: Sequence[_Word], assignments: Sequence[str]) -> str:
    """What stands before torchrun: what stood before the launcher, and variables that it set."""
    # Behind another command, or in quotes, only env takes them.
    plain = all(ASSIGNMENT.match(written) for written in [*(word.text for word in before), *assignments])
    env = ["env"] if assignments and not plain else []
    return "".join(f"{part} " for part in [*([_verbatim(text, before)] if before else []), *env, *assignments])


def _read_options(words: Sequence[_Word], i: int) -> tuple[_Options, int]:
    """The launcher's options from word i on, and the place of the program."""
    options = _Options()
    while i < len(words):
        word = words[i]
        if word.kind == "redirection":
            raise _NoReplacement(f"{word.text} stands among the options: move it to the end")
        if not word.value.startswith("-"):
            if not _holds_options(words, i):
                return options, i
            options.notes.append(f"look at the options in {word.text}")
            i += 1
            continue
        flag, equals, value = word.text.partition("=")
        name = _unquoted(flag).lstrip("-")
        i += 1
        if name not in WITH_VALUE | FLAGS:
            raise _NoReplacement(f"the option {word.text} is not known here")
        values = [value] if equals else []
        if name in WITH_VALUE and not equals:
            # MPICH takes "-genv NAME value" and "-genv NAME=value".
            single = name not in TWO_VALUES or (name in EXPORT and i < len(words) and "=" in words[i].text)
            values = [word.text for word in words[i : i + (1 if single else 2)]]
            i += len(values)
            if not values:
                raise _NoReplacement(f"the option {flag} lacks its value")
        _apply_option(options, name, values, " ".join([word.text, *values] if not equals else [word.text]))
    raise _NoReplacement("it starts no program")


def _holds_options(words: Sequence[_Word], i: int) -> bool:
    """Whether word i is a variable that holds options, as more options or Python come behind it."""
    if not VARIABLE.fullmatch(words[i].text) or PYTHON_VARIABLE.fullmatch(words[i].text) or i + 1 == len(words):
        return False
    behind = words[i + 1]
    if VARIABLE.fullmatch(behind.text) and not PYTHON_VARIABLE.fullmatch(behind.text):
        return _holds_options(words, i + 1)
    return bool(
        PYTHON.fullmatch(behind.name)
        or PYTHON_VARIABLE.fullmatch(behind.text)
        or behind.value.partition("=")[0].lstrip("-") in (WITH_VALUE | FLAGS if behind.value.startswith("-") else ())
    )


def _apply_option(options: _Options, name: str, values: Sequence[str], written: str) -> None:
    value = values[0] if values else ""
    if name in STARTS_NOTHING:
        raise _NoReplacement(f"{written} starts no training")
    if name in SEVERAL_PROGRAMS:
        raise _NoReplacement(f"{written}: several programs in one world")
    if name in ELASTIC:
        raise _NoReplacement(
            f"elastic ({written}): torchrun --nnodes MIN:MAX restarts all workers from their last checkpoint"
        )
    if name in COUNT:
        options.count = value
    elif name == "pernode":
        options.per_node = "1"
    elif name in PER_NODE:
        options.per_node = value
    elif name in HOSTS:
        options.hosts = value
    elif name in HOST_FILES:
        options.host_file = value
    elif name in EXPORT:
        _export(options, name, values)
    elif name == "map-by" and (ppr := re.match(r"ppr:([^:]+):node", value)):
        options.per_node = ppr[1]
    elif name in HINT_OF and value != "none":
        hint = HINT_OF[name]
        options.notes.append(f"left out: {written}" + (f" ({hint})" if hint else ""))


def _export(options: _Options, name: str, values: Sequence[str]) -> None:
    value = values[0]
    if len(values) == 2:
        options.assignments.append(f"{value}={values[1]}")
    elif "=" in value:
        options.assignments.append(value)
    else:
        options.exported += value.split(",") if name.endswith("list") else [value]


# Processes over hosts.


class _Spread(NamedTuple):
    #: torchrun's options: one set for all hosts, or one for each.
    options: list[str]
    #: None of them: not known.
    hosts: list[str]
    notes: list[str]


def _spread(options: _Options, horovod: bool, batch_nodes: int) -> _Spread:
    per_node, count = _number(options.per_node), _number(options.count)
    unknown = options.host_file or (options.hosts if _hides_hosts(options.hosts) else "")
    if unknown:
        return _template(f"the hosts are in {unknown}", "NODES", options.per_node or "PROCESSES")
    if options.hosts:
        return _over_hosts(options, horovod)
    if not horovod and batch_nodes > 1:
        share = str(count // batch_nodes) if count and count % batch_nodes == 0 else "PROCESSES"
        return _template(f"the job has {batch_nodes} nodes", str(batch_nodes), options.per_node or share)
    if options.per_node and not (count and per_node and count <= per_node):
        nodes = str(-(-count // per_node)) if count and per_node else "NODES"
        return _template(f"{options.per_node} processes on each host", nodes, options.per_node)
    if not options.count:
        return _template("the number of processes is not in the command", "NODES", "PROCESSES")
    return _Spread([f"--standalone --nproc-per-node {options.count}"], ["localhost"], [])


def _template(why: str, nodes: str, processes: str) -> _Spread:
    return _Spread([_several(nodes, processes, "FIRSTHOST")], [], [why])


def _several(nodes: str, processes: str, first: str) -> str:
    return f"--nnodes {nodes} --nproc-per-node {processes} --rdzv-backend c10d --rdzv-endpoint {first}:{PORT}"


def _over_hosts(options: _Options, horovod: bool) -> _Spread:
    slots = _slots(options.hosts)
    shares, notes = _shares(options, slots, horovod)
    hosts = list(shares)
    if len(hosts) < len(slots):
        notes.append(f"not needed for {options.count} processes: {', '.join(list(slots)[len(hosts) :])}")
    if len(hosts) == 1:
        where = [] if hosts[0] in LOCAL else [f"start it on {hosts[0]}"]
        return _Spread([f"--standalone --nproc-per-node {shares[hosts[0]]}"], hosts, [*where, *notes])
    notes.insert(
        0,
        f"start it once on each of {', '.join(hosts)} (ssh, pdsh, or srun --nodes={len(hosts)} --ntasks-per-node=1); "
        "rank 0 may be on any of them",
    )
    lines = [_several(str(len(hosts)), share, hosts[0]) for share in shares.values()]
    return _Spread(lines if len(set(lines)) > 1 else lines[:1], hosts, notes)


def _slots(hosts: str) -> dict[str, str]:
    """Each host's slots; a host without a number has one, as often as it is named."""
    slots: dict[str, str] = {}
    for entry in _unquoted(hosts).split(","):
        host, _, number = entry.strip().partition(":") if "$" not in entry else entry.strip().rpartition(":")
        before = _number(slots.get(host, "0"))
        here = _number(number or "1")
        slots[host] = number if before is None or here is None else str(before + here)
    return slots


def _shares(options: _Options, slots: dict[str, str], horovod: bool) -> tuple[dict[str, str], list[str]]:
    """Each host's number of processes: hosts are filled in their order."""
    count, per_node = _number(options.count), _number(options.per_node)
    if options.per_node:
        needed = -(-count // per_node) if count and per_node else len(slots)
        return dict.fromkeys(list(slots)[:needed], options.per_node), []
    if len(slots) == 1 and options.count:
        return dict.fromkeys(slots, options.count), []
    numbers = {host: _number(number) or 0 for host, number in slots.items()}
    total = sum(numbers.values())
    if not count or not all(numbers.values()):
        given = options.count and options.count != str(total)
        return slots, [f"-np {options.count} is taken to be all slots"] if given else []
    if count > total:
        if horovod or count % total:
            raise _NoReplacement(f"{count} processes on {total} slots")
        return {host: str(number * count // total) for host, number in numbers.items()}, []
    shares = {}
    for host, number in numbers.items():
        if count:
            shares[host] = str(min(number, count))
            count -= min(number, count)
    return shares, []


def _hides_hosts(hosts: str) -> bool:
    """Whether a list of hosts is in a variable or a substitution."""
    return "$(" in hosts or "`" in hosts or any("$" in entry and ":" not in entry for entry in hosts.split(","))


def _number(written: str) -> int | None:
    value = _unquoted(written)
    return int(value) if value.isascii() and value.isdigit() else None


def _batch_nodes(text: str) -> int:
    return max(map(int, BATCH_NODES.findall(text)), default=1)


# The program.


def _program(text: str, words: Sequence[_Word]) -> tuple[str, list[str]]:
    """The program as torchrun takes it, and notes."""
    if any(word.text == ":" for word in words):
        raise _NoReplacement("several programs in one world")
    first = words[0]
    if first.name.endswith(".py"):
        return _verbatim(text, words), []
    whole = f"--no-python {_verbatim(text, words)}"
    if not (PYTHON.fullmatch(first.name) or PYTHON_VARIABLE.fullmatch(first.text)):
        if VARIABLE.fullmatch(first.text):
            raise _NoReplacement(f"the program is in {first.text}: torchrun wants the script, without python")
        return whole, [f"every rank starts {first.text}; better, name the Python script that it starts to torchrun"]
    notes = [f"it must be the torchrun of {first.text}"] if re.search(r"[/$]", first.text) else []
    rest = list(dropwhile(lambda word: word.text == "-u", words[1:]))
    script = next((word for word in rest if word.kind == "word"), None)
    if not script or script.text == "-":
        raise _NoReplacement("Python reads its program from standard input: put it into a file")
    if script is rest[0] and script.text in ("-m", "-um"):
        return f"-m {_verbatim(text, rest[1:])}", notes
    if script.text.startswith("-"):
        return whole, [f"Python's option {script.text} stays: torchrun starts the whole command on every rank"]
    return _verbatim(text, rest), notes
