"""Launches by horovodrun or mpirun in shell commands: the line that can replace each.

For mpirun the replacement is optional, as unidist runs under it as well. horovodrun is a part of Horovod.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from unidist.migrate.shell import ShellCommand, Word, find_commands, on_one_line, unquoted


@dataclass(frozen=True)
class LaunchLine:
    """One launch in a job script."""

    #: The line on which the command begins, from 1.
    line: int
    #: The command as it is written, on one line.
    command: str
    #: The line that can replace it, or None.
    torchrun: str | None
    #: What to check or to change by hand.
    notes: tuple[str, ...]

    @property
    def by_horovodrun(self) -> bool:
        """Whether it needs Horovod's launcher."""
        return re.search(r"\bhorovodrun\b", self.command) is not None


@dataclass(frozen=True)
class Surroundings:
    """What launch lines refer to."""

    #: Whether a script, as written in the launch line, imports Horovod after its migration; None if it is not found.
    imports_horovod: Callable[[str], bool | None] = lambda script: False
    #: Whether it uses ``hvd.elastic``, for which ``unidist run --hvd`` takes horovodrun's command line.
    is_elastic: Callable[[str], bool] = lambda script: False
    #: The text of a file of hosts, or None.
    host_file: Callable[[str], str | None] = lambda path: None
    #: Whether Kubeflow's MPI operator starts the command, on one host, with the others in an environment variable.
    mpi_operator: bool = False


def find_launches(text: str, surroundings: Surroundings | None = None) -> list[LaunchLine]:
    """The launches in a shell script: all by horovodrun, and those of Python by mpirun or mpiexec."""
    job = _job(text, surroundings or Surroundings())
    return [launch for command in find_commands(text) if (launch := _launch(command, job))]


# The job around the launches.


@dataclass(frozen=True)
class _Job:
    surroundings: Surroundings
    #: Whether it is one of Slurm's.
    slurm: bool
    nodes: int
    #: The number of tasks that it asks for, if that is given.
    tasks: int | None
    #: Variables that are assigned once, by name.
    variables: dict[str, str]


def _job(text: str, surroundings: Surroundings) -> _Job:
    nodes = max(map(int, BATCH_NODES.findall(text)), default=1)
    directives = dict(
        re.findall(r"^#SBATCH(?:\s.*)?\s(-n|--ntasks|--ntasks-per-node)(?:\s*|=)(\d+)", text, re.MULTILINE)
    )
    all_tasks = directives.get("--ntasks", directives.get("-n"))
    per_node = directives.get("--ntasks-per-node")
    tasks = int(all_tasks) if all_tasks else int(per_node) * nodes if per_node else None
    found = re.findall(r"^\s*(?:export\s+)?(\w+)=(\"[^\"$`]*\"|'[^']*'|[^\s\"'$`;&|]*)\s*(?:#.*)?$", text, re.MULTILINE)
    names = [name for name, _ in found]
    variables = {name: unquoted(value) for name, value in found if names.count(name) == 1}
    return _Job(surroundings, "#SBATCH" in text or "SLURM_" in text, nodes, tasks, variables)


# Launchers and their options.

LAUNCHER = re.compile(r"horovodrun|orterun|mpi(run|exec)(\.\w+)?")
#: Commands that may name a launcher and do not start it.
STARTS_NO_LAUNCHER = {
    "echo", "printf", "grep", "egrep", "pgrep", "pkill", "killall", "which", "type", "command", "hash", "man",
    "whereis", "pip", "pip3",
}  # fmt: skip
#: Commands that start another one in this shell.
OUTSIDE = {"exec", "time", "nohup", "env", "nice"}
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
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
#: Options that are dropped with a note, by what replaces them.
HINTS = {
    "": {
        "autotune", "autotune-log-file", "autotune-warmup-samples", "autotune-steps-per-sample",
        "autotune-bayes-opt-max-samples", "autotune-gaussian-process-noise", "hierarchical-allreduce",
        "hierarchical-allgather", "torus-allreduce", "timeline-mark-cycles", "path", "npersocket", "gpus-per-proc",
        "rf", "rankfile",
    },
    "torchrun binds no process": {
        "bind-to", "bind-to-core", "bind-to-socket", "binding-args", "membind", "cpus-per-proc", "cpus-per-rank",
    },
    "set NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME to it": {"network-interface", "network-interfaces", "iface"},
    "torchrun has --log-dir DIRECTORY --redirects 3": {"output-filename", "outfile-pattern", "errfile-pattern"},
    "check what it sets": {"config-file", "mpi-args"},
    "change to that directory before": {"wdir", "wd"},
    "the command timeout does the same": {"timeout"},
    "unidist.hvd reads HOROVOD_FUSION_THRESHOLD, in bytes": {"fusion-threshold-mb"},
    "unidist.hvd reads HOROVOD_CYCLE_TIME": {"cycle-time-ms"},
    "unidist.hvd reads HOROVOD_TIMELINE": {"timeline-filename"},
    "unidist.hvd reads HOROVOD_STALL_CHECK_TIME_SECONDS": {"no-stall-check", "stall-check-warning-time-seconds"},
    "unidist.hvd reads HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": {"stall-check-shutdown-time-seconds"},
}  # fmt: skip
HINT_OF = {name: hint for hint, names in HINTS.items() for name in names}
#: Options that are dropped with their values, without a note.
QUIET = {
    "start-timeout", "p", "ssh-port", "i", "ssh-identity-file", "log-level", "num-nccl-streams", "thread-affinity",
    "gloo-timeout-seconds", "cache-capacity", "mca", "gmca", "omca", "pmca", "prtemca", "am", "tune", "prefix",
    "launcher", "launcher-exec", "rmk", "stdin", "report-uri", "ompi-server", "map-by", "rank-by", "topolib", "demux",
    "nameserver", "usize", "localhost", "order-nodes", "prepend-pattern", "profile",
}  # fmt: skip
#: Options without a value.
FLAGS = {
    *STARTS_NOTHING, "gloo", "mpi", "jsrun", "verbose", "disable-cache", "tcp", "mpi-threads-disable",
    "no-mpi-threads-disable", "autotune", "no-autotune", "timeline-mark-cycles", "no-timeline-mark-cycles",
    "stall-check", "no-stall-check", "log-with-timestamp", "log-without-timestamp", "log-hide-timestamp",
    "no-log-hide-timestamp", "prefix-timestamp", "prefix-output-with-timestamp", "hierarchical-allreduce",
    "no-hierarchical-allreduce", "hierarchical-allgather", "no-hierarchical-allgather", "torus-allreduce",
    "no-torus-allreduce", "oversubscribe", "nooversubscribe", "allow-run-as-root", "tag-output", "timestamp-output",
    "display-map", "display-allocation", "report-bindings", "v", "q", "quiet", "bynode", "byslot", "bind-to-core",
    "bind-to-socket", "bind-to-none", "genvall", "genvnone", "envall", "envnone", "merge-stderr-to-stdout",
    "use-hwthread-cpus", "novm", "prepend-rank", "l", "print-all-exitcodes", "pernode", "disable-auto-cleanup",
    "disable-hostname-propagation", "skip-launch-node", "nolocal", "enable-recovery", "disable-recovery",
    "leave-session-attached", "debug-daemons", "enable-x", "disable-x",
}  # fmt: skip
WITH_VALUE = {
    *COUNT, *PER_NODE, *HOSTS, *HOST_FILES, *ELASTIC, *EXPORT, *SEVERAL_PROGRAMS, *HINT_OF, *QUIET,
}.difference(FLAGS)  # fmt: skip
TWO_VALUES = {"mca", "gmca", "omca", "pmca", "prtemca", "genv", "env", "blacklist-cooldown-range"}

PORT = 29500
UNCLOSED = "the line does not parse; perhaps a quote or a bracket is not closed"


class _NoReplacement(Exception):
    """Why there is no torchrun line."""


@dataclass
class _Options:
    """The options of a launcher; counts as they are written."""

    count: str = ""
    per_node: str = ""
    hosts: str = ""
    host_file: str = ""
    #: ``NAME=value`` as written, and names of variables that are passed on.
    assignments: list[str] = field(default_factory=list)
    exported: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def _launch(command: ShellCommand, job: _Job) -> LaunchLine | None:
    text = on_one_line(command.words)
    if command.is_broken:
        named = re.search(r"(?<![\w.-])(horovodrun|mpirun|mpiexec)\s", text)
        is_launch = named and (named[1] == "horovodrun" or "python" in text)
        return LaunchLine(command.line, text, None, (UNCLOSED,)) if is_launch else None
    index = _launcher_index(command.words)
    if index is None:
        return None
    if command.words[index].name != "horovodrun" and not re.search(r"python|pypy|\.py\b", text, re.IGNORECASE):
        return None
    try:
        torchrun, notes = _replacement(command.words, index, job)
    except _NoReplacement as why:
        return LaunchLine(command.line, text, None, tuple(map(str, why.args)))
    return LaunchLine(command.line, text, torchrun, tuple(notes))


def _launcher_index(words: Sequence[Word]) -> int | None:
    """Which word is the launcher: the command itself, or a later word that is followed by options."""
    first = next((i for i, word in enumerate(words) if not ASSIGNMENT.match(word.text)), len(words))
    indices = [i for i in range(first, len(words)) if LAUNCHER.fullmatch(words[i].name)]
    if not indices or indices[0] == first:
        return indices[0] if indices else None
    started = [i for i in indices if i + 1 < len(words) and words[i + 1].value.startswith(("-", "$"))]
    return started[0] if started and words[first].name not in STARTS_NO_LAUNCHER else None


def _replacement(words: Sequence[Word], index: int, job: _Job) -> tuple[str | None, list[str]]:
    options, start = _read_options(words, index + 1)
    _look_up_hosts(options, job)
    script, _ = _script(words[start:])
    if script is not None and job.surroundings.is_elastic(script):
        raise _NoReplacement(f"{script} uses hvd.elastic: unidist run --hvd takes the options of horovodrun")
    stays = script is not None and bool(job.surroundings.imports_horovod(script))
    program, notes = _program(words[start:], job.surroundings)
    prefix = _prefix(words[:index], options.assignments)
    horovod = words[index].name == "horovodrun"
    # By mpirun as before, if only the program changes.
    same = f"{on_one_line(words[:start])} {_with_drop_in(words[start:], job.surroundings)}" if stays else None
    if job.surroundings.mpi_operator:
        line = f"{prefix}{_mpirun(options, words[start:], job)}" if horovod else None
        return line, [
            *options.notes,
            *notes,
            f"in a PyTorchJob, whose operator sets torchrun's options: torchrun {program}",
        ]
    if job.slurm and (line := _under_slurm(options, words, index, start, program, job)):
        return line, [*options.notes, *notes]
    layout = _layout(options, horovod, job.nodes)
    lines = [f"{prefix}torchrun {how} {program}" for how in layout.options]
    notes = [*layout.notes, *options.notes, *notes]
    if options.exported and len(layout.hosts) != 1:
        notes.append(f"set on every host: {', '.join(options.exported)}")
    if not layout.hosts:
        notes.append(f"on every host, with the words in capitals filled in: {lines[0]}")
        if horovod and (options.hosts or options.host_file):
            notes.append(f"or, with Open MPI, from here: {prefix}{_mpirun(options, words[start:], job)}")
        return None if horovod else same, notes
    if len(lines) > 1:
        return None, [*notes, *(f"on {host}: {line}" for host, line in zip(layout.hosts, lines))]
    return lines[0], notes


def _look_up_hosts(options: _Options, job: _Job) -> None:
    """Replace a variable that is assigned in the job, or a file of hosts that can be read, by the hosts."""
    name = re.fullmatch(r'"?\$\{?(\w+)\}?"?', options.hosts)
    if name and re.fullmatch(r"[\w.,:-]+", hosts := job.variables.get(name[1], "")):
        options.hosts = hosts
    text = job.surroundings.host_file(unquoted(options.host_file)) if options.host_file and not options.hosts else None
    entries = re.findall(r"^\s*([\w.-]+)(?:(?::|\s+(?:slots|max_slots)\s*=\s*)(\d+))?.*$", text or "", re.MULTILINE)
    if entries:
        options.hosts, options.host_file = ",".join(f"{host}:{slots or 1}" for host, slots in entries), ""


def _under_slurm(
    options: _Options, words: Sequence[Word], index: int, start: int, script: str, job: _Job
) -> str | None:
    """The line for a job of Slurm: a process for each task, or torchrun on each node; None if it is of one node."""
    count = _number(options.count)
    variable = re.search(r"\bSLURM_(NTASKS|NPROCS)\b", options.count)
    # What starts a container runs on every node.
    inner = next(
        (i for i, word in enumerate(words[:index]) if not ASSIGNMENT.match(word.text) and word.text not in OUTSIDE),
        index,
    )
    outer, container = _prefix(words[:inner], options.assignments), on_one_line(words[inner:index])
    container = f"{container} " if container else ""
    if variable or (count is not None and count == job.tasks and job.nodes > 1):
        return f"{outer}srun {container}{_with_drop_in(words[start:], job.surroundings)}"
    if job.nodes == 1 and not (options.host_file or "SLURM" in options.hosts or "SLURM" in options.count):
        return None
    each = str(count // job.nodes) if count and job.nodes > 1 and count % job.nodes == 0 else "PROCESSES"
    first = '"$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    return (
        f"{outer}srun --ntasks=$SLURM_NNODES --ntasks-per-node=1 {container}torchrun --nnodes $SLURM_NNODES "
        f'--nproc-per-node {options.per_node or each} --rdzv-backend c10d --rdzv-endpoint {first}:{PORT}" {script}'
    )


def _mpirun(options: _Options, program: Sequence[Word], job: _Job) -> str:
    """Open MPI's line with the same processes."""
    where = [
        *(["-np", options.count] if options.count else []),
        *(["-H", options.hosts] if options.hosts else []),
        *(["--hostfile", options.host_file] if options.host_file else []),
        *(f"-x {name}" for name in options.exported),
    ]
    return " ".join(["mpirun", *where, "--bind-to none --map-by slot", _with_drop_in(program, job.surroundings)])


def _with_drop_in(program: Sequence[Word], surroundings: Surroundings) -> str:
    """The program as it is written; if it imports Horovod, on the drop-in."""
    text = on_one_line(program)
    script, after = _script(program)
    if script is None or not surroundings.imports_horovod(script):
        return text
    rest = list(program[after:])
    return (
        f"{on_one_line(program[:after])} -m unidist.hvd {on_one_line(rest)}"
        if after
        else f"python -m unidist.hvd {text}"
    )


def _prefix(before: Sequence[Word], assignments: Sequence[str]) -> str:
    """What precedes torchrun: what preceded the launcher, and the variables that it set."""
    # After another command, or in quotes, they need env.
    plain = all(ASSIGNMENT.match(written) for written in [*(word.text for word in before), *assignments])
    env = ["env"] if assignments and not plain else []
    return "".join(f"{part} " for part in [*([on_one_line(before)] if before else []), *env, *assignments])


def _read_options(words: Sequence[Word], i: int) -> tuple[_Options, int]:
    """The launcher's options from word i on, and the index of the program."""
    options = _Options()
    while i < len(words):
        word = words[i]
        if word.is_redirection:
            raise _NoReplacement(f"the redirection {word.text} is among the options: move it to the end")
        if not word.value.startswith("-"):
            if not _holds_options(words, i):
                return options, i
            options.notes.append(f"check the options in {word.text}")
            i += 1
            continue
        flag, equals, value = word.text.partition("=")
        name = unquoted(flag).lstrip("-")
        i += 1
        if name not in WITH_VALUE | FLAGS:
            raise _NoReplacement(f"the option {word.text} is not known")
        values = [value] if equals else []
        if name in WITH_VALUE and not equals:
            # MPICH takes "-genv NAME value" and "-genv NAME=value".
            single = name not in TWO_VALUES or (name in EXPORT and i < len(words) and "=" in words[i].text)
            values = [word.text for word in words[i : i + (1 if single else 2)]]
            i += len(values)
            if not values:
                raise _NoReplacement(f"the option {flag} has no value")
        _apply_option(options, name, values, " ".join([word.text, *values] if not equals else [word.text]))
    raise _NoReplacement("it starts no program")


def _holds_options(words: Sequence[Word], i: int) -> bool:
    """Whether word i is a variable with options, as more options or Python follow it."""
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
        raise _NoReplacement(f"{written} starts several programs in one world")
    if name in ELASTIC:
        raise _NoReplacement(f"elastic ({written}): unidist run takes the same options, see docs/elastic.md")
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
        options.notes.append(f"dropped: {written}" + (f" ({hint})" if hint else ""))


def _export(options: _Options, name: str, values: Sequence[str]) -> None:
    value = values[0]
    if len(values) == 2:
        options.assignments.append(f"{value}={values[1]}")
    elif "=" in value:
        options.assignments.append(value)
    else:
        options.exported += value.split(",") if name.endswith("list") else [value]


# Processes over hosts.


class _Layout(NamedTuple):
    #: torchrun's options: one set for all hosts, or one for each.
    options: list[str]
    #: Empty if they are unknown.
    hosts: list[str]
    notes: list[str]


def _layout(options: _Options, horovod: bool, batch_nodes: int) -> _Layout:
    per_node, count = _number(options.per_node), _number(options.count)
    unknown = options.host_file or (options.hosts if _hides_hosts(options.hosts) else "")
    if unknown:
        return _template(f"the hosts are in {unknown}", "NODES", options.per_node or "PROCESSES")
    if options.hosts:
        return _over_hosts(options, horovod)
    if not horovod and batch_nodes > 1:
        processes = str(count // batch_nodes) if count and count % batch_nodes == 0 else "PROCESSES"
        return _template(f"the job has {batch_nodes} nodes", str(batch_nodes), options.per_node or processes)
    if options.per_node and not (count and per_node and count <= per_node):
        nodes = str(-(-count // per_node)) if count and per_node else "NODES"
        return _template(f"it starts {options.per_node} processes on each host", nodes, options.per_node)
    if not options.count:
        return _template("the number of processes is not in the command", "NODES", "PROCESSES")
    return _Layout([f"--standalone --nproc-per-node {options.count}"], ["localhost"], [])


def _template(why: str, nodes: str, processes: str) -> _Layout:
    return _Layout([_several(nodes, processes, "FIRSTHOST")], [], [why])


def _several(nodes: str, processes: str, first: str) -> str:
    return f"--nnodes {nodes} --nproc-per-node {processes} --rdzv-backend c10d --rdzv-endpoint {first}:{PORT}"


def _over_hosts(options: _Options, horovod: bool) -> _Layout:
    slots = _slots(options.hosts)
    processes_of, notes = _processes_on(options, slots, horovod)
    hosts = list(processes_of)
    if len(hosts) < len(slots):
        notes.append(f"hosts not needed for {options.count} processes: {', '.join(list(slots)[len(hosts) :])}")
    if len(hosts) == 1:
        where = [] if hosts[0] in LOCAL else [f"start it on {hosts[0]}"]
        return _Layout([f"--standalone --nproc-per-node {processes_of[hosts[0]]}"], hosts, [*where, *notes])
    notes.insert(
        0,
        f"start it once on each of {', '.join(hosts)} (ssh, pdsh, or srun --nodes={len(hosts)} --ntasks-per-node=1); "
        "rank 0 may be on any of them",
    )
    lines = [_several(str(len(hosts)), processes, hosts[0]) for processes in processes_of.values()]
    return _Layout(lines if len(set(lines)) > 1 else lines[:1], hosts, notes)


def _slots(hosts: str) -> dict[str, str]:
    """Each host's slots; without a number, one for each time that the host is named."""
    slots: dict[str, str] = {}
    for entry in unquoted(hosts).split(","):
        host, _, number = entry.strip().partition(":") if "$" not in entry else entry.strip().rpartition(":")
        before = _number(slots.get(host, "0"))
        here = _number(number or "1")
        slots[host] = number if before is None or here is None else str(before + here)
    return slots


def _processes_on(options: _Options, slots: dict[str, str], horovod: bool) -> tuple[dict[str, str], list[str]]:
    """Each host's number of processes: hosts are filled in order."""
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
        return slots, [f"-np {options.count} is assumed to be the number of all slots"] if given else []
    if count > total:
        if horovod or count % total:
            raise _NoReplacement(f"{count} processes on {total} slots")
        return {host: str(number * count // total) for host, number in numbers.items()}, []
    processes_of = {}
    for host, number in numbers.items():
        if count:
            processes_of[host] = str(min(number, count))
            count -= min(number, count)
    return processes_of, []


def _hides_hosts(hosts: str) -> bool:
    """Whether a list of hosts comes from a variable or a substitution."""
    return "$(" in hosts or "`" in hosts or any("$" in entry and ":" not in entry for entry in hosts.split(","))


def _number(written: str) -> int | None:
    value = unquoted(written)
    return int(value) if value.isascii() and value.isdigit() else None


# The program.


def _program(words: Sequence[Word], surroundings: Surroundings) -> tuple[str, list[str]]:
    """The program in torchrun's form, and notes."""
    if any(word.text == ":" for word in words):
        raise _NoReplacement("it starts several programs in one world")
    first = words[0]
    whole = f"--no-python {on_one_line(words)}"
    if not (first.name.endswith(".py") or PYTHON.fullmatch(first.name) or PYTHON_VARIABLE.fullmatch(first.text)):
        if VARIABLE.fullmatch(first.text):
            raise _NoReplacement(f"the program is in {first.text}: torchrun wants the script, without python")
        return whole, [f"every rank starts {first.text}; better, pass torchrun the Python script that it starts"]
    script, start = _script(words)
    if script is None or script == "-":
        raise _NoReplacement("Python reads its program from standard input: write it to a file")
    notes = [f"use the torchrun of {first.text}"] if start and re.search(r"[/$]", first.text) else []
    if start and words[start].text.startswith("-") and words[start].text not in ("-m", "-um"):
        option = words[start].text
        return whole, [f"because of Python's option {option}, torchrun starts the whole command on every rank"]
    imports_horovod = surroundings.imports_horovod(script)
    if imports_horovod is None:
        notes.append(f"-m unidist.hvd before {script} if it still imports horovod: it is not among these files")
    module = start > 0 and words[start].text in ("-m", "-um")
    program = f"-m {on_one_line(words[start + 1 :])}" if module else on_one_line(words[start:])
    return (f"-m unidist.hvd {program}" if imports_horovod else program), notes


def _script(words: Sequence[Word]) -> tuple[str | None, int]:
    """The script or module that a command starts, and the index of the first word after Python and its ``-u``."""
    if words[0].name.endswith(".py"):
        return words[0].value, 0
    start = next((i for i in range(1, len(words)) if words[i].text != "-u"), len(words))
    if start == len(words) or words[start].is_redirection:
        return next((word.value for word in words[start:] if not word.is_redirection), None), start
    script = words[start + 1 : start + 2] if words[start].text in ("-m", "-um") else words[start : start + 1]
    return next((word.value for word in script), None), start
