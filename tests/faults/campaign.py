"""Draws faults, runs a world for each, and says what became of the survivors.

python -m tests.faults.campaign -n 200 --seed 1
python -m tests.faults.campaign --seed 1 --case 17 --verbose

Of cases in which something is wrong it prints what the ranks have printed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.support import hosts as machines
from tests.support import slurm
from tests.support.worlds import ROOT, commands, environment, free_port, load, with_torch

RANKS = 3
#: Seconds of UNIDIST_TIMEOUT, and how much later a survivor must have ended where each process has a core.
TIMEOUT, GRACE = 10, 15
#: Seconds of UNIDIST_STALL_S.
STALL = 5
#: Within which a fault must happen where each process has a core.
START = 90
#: Those after which a rank does nothing any more, what it raises or runs into, calls that the other ranks do not make,
#: and its network.
GONE = ("SIGKILL", "SIGSTOP", "SIGTERM", "os._exit")
OWN = ("exception", "exit 0", "no memory", "full disk", "closed pipe")
CALLS = ("other shape", "other operation", "other order")
LINKS = ("link down", "firewall")
KINDS = (*GONE, *OWN, *CALLS, *LINKS)
#: How a rank ended that raised nothing.
ENDED = "ended by its launcher"
MOMENTS = ("init", "forward", "backward", "collective", "save", "end")
#: By what computes. In ``env`` no launcher ends a survivor: each must end by itself.
LAUNCHERS = {
    "drop-in": ("torchrun c10d", "horovodrun", "openmpi", "unidist-run", "spawn", "env"),
    "gloo": ("torchrun c10d", "horovodrun", "openmpi", "mpich", "unidist-run", "spawn", "slurm", "env"),
    "mpi": ("openmpi", "mpich"),
    "horovod": ("horovodrun", "openmpi", "unidist-run", "slurm", "env"),
}
#: As ``env``, each rank on a host of its own.
HOSTS = "hosts"
#: What an error must tell besides the rank.
CALL = re.compile(
    r"\b(init|backward|step|synchronize|barrier|save_checkpoint|broadcast\w*|all_?reduce\w*|all_?gather\w*"
    r"|forward|DistributedOptimizer|first call of the group)\b"
)
LINE = re.compile(r"\btrain\.py:\d")
RANK = re.compile(r"\branks? (\d+(?:(?:, (?:and )?| and | to |-)\d+)*)")


@dataclass(frozen=True)
class Case:
    number: int
    kind: str
    moment: str
    victim: int
    engine: str
    launcher: str
    step: int
    #: Of the data loader.
    workers: int
    seed: int

    @property
    def watched(self) -> list[int]:
        """The ranks that must end."""
        return [rank for rank in range(RANKS) if rank != self.victim or self.kind not in GONE]

    @property
    def grace(self) -> float:
        """Twice as much without a network, and where PyTorch waits for a data loader's worker, which imports it."""
        return GRACE * load() * (2 if self.kind in LINKS or (self.launcher == "spawn" and self.workers) else 1)


@dataclass(frozen=True)
class Error:
    """What a rank has raised for the fault of another one."""

    rank: int
    kind: str
    text: str
    #: After the fault.
    seconds: float

    def ranks(self) -> set[int]:
        """Those that it names."""
        text = re.sub(r"^(\[rank\d+\]: )?rank \d+ of \d+ \(\w+\): ", "", self.text)
        return {int(number) for match in RANK.finditer(text) for number in re.findall(r"\d+", match[1])}

    def names(self, victim: int) -> bool:
        """Whether it names the victim, or the victim names another one."""
        return bool(self.ranks() - {victim}) if self.rank == victim else victim in self.ranks()

    def tells(self, victim: int) -> list[bool]:
        """Whether it tells the rank, the call, the line."""
        return [self.names(victim), bool(CALL.search(self.text)), bool(LINE.search(self.text))]


@dataclass
class Outcome:
    case: Case
    #: By rank: how each survivor ended, and after how many seconds; "hung" where it did not.
    survivors: dict[int, tuple[str, float]] = field(default_factory=dict)
    #: What survivors raised.
    errors: list[Error] = field(default_factory=list)
    #: Where those that hang were.
    stacks: list[str] = field(default_factory=list)
    #: Processes that a launcher which has ended left.
    orphans: int = 0
    #: Whether a launcher is still there when all ranks have ended; those of others are not ours.
    launcher_hangs: bool = False
    #: What has ended with status 0 though a rank has not come to its end.
    wrong_status: str = ""
    #: Checkpoints and timelines that do not load.
    broken: list[str] = field(default_factory=list)
    #: Why there is no outcome.
    invalid: str = ""
    #: What the world printed.
    output: str = ""

    @property
    def left_to_mpirun(self) -> bool:
        """Whether survivors wait in MPI_Finalize, and say so, for a rank that has stopped after its last collective."""
        case = self.case
        return (case.kind, case.moment) == ("SIGSTOP", "end") and case.launcher in ("openmpi", "mpich") and self._hang

    @property
    def hung(self) -> bool:
        ours = self.launcher_hangs and self.case.launcher in ("unidist-run", "env", HOSTS)
        return (self._hang or ours) and not self.left_to_mpirun

    @property
    def _hang(self) -> bool:
        return any(how == "hung" for how, _ in self.survivors.values())

    @property
    def named(self) -> bool | None:
        """Whether an error names the victim; None where nobody raised one before the launcher began to end ranks."""
        if any(error.names(self.case.victim) for error in self.errors):
            return True
        began = min((seconds for how, seconds in self.survivors.values() if how == ENDED), default=math.inf)
        # A rank that was ended may have been the store's server, or all that another one saw go.
        return False if any(error.seconds < began for error in self.errors) else None

    @property
    def misnamed(self) -> bool:
        """Whether the errors name ranks, and only others."""
        return self.named is False and any(error.ranks() - {error.rank} for error in self.errors)

    @property
    def bad(self) -> bool:
        return bool(
            self.invalid or self.hung or self.orphans or self.broken or self.wrong_status or self.named is False
        )


def draw(numbers: Sequence[int], seed: int) -> list[Case]:
    """The cases of these numbers. 84 in a row have every kind at every moment."""
    cases = []
    for number in numbers:
        dice = random.Random(f"{seed} {number}")
        kind, moment = KINDS[number % len(KINDS)], MOMENTS[sum(divmod(number, len(KINDS))) % len(MOMENTS)]
        victim = 0 if kind == "full disk" else dice.choice((0, dice.randrange(1, RANKS)))
        engine = dice.choice([name for name in LAUNCHERS if kind not in LINKS or "env" in LAUNCHERS[name]])
        launcher = HOSTS if kind in LINKS else dice.choice(LAUNCHERS[engine])
        rest = (dice.randrange(1, 5), dice.randrange(2), dice.randrange(10**6))
        cases.append(Case(number, kind, moment, victim, engine, launcher, *rest))
    return cases


def run(case: Case, env: Mapping[str, str]) -> Outcome:
    """One world, from its start to the end of its last process; its launcher has these variables."""
    outcome = Outcome(case)
    with tempfile.TemporaryDirectory(prefix="unidist-fault-") as name:
        directory = Path(name)
        with ExitStack() as stack:
            hosts = stack.enter_context(machines.hosts(RANKS)) if case.launcher == HOSTS else []
            launchers: list[subprocess.Popen[bytes]] = []
            stack.callback(_kill_all, directory, launchers)
            launchers += _start(case, directory, hosts, env)
            _watch(outcome, directory, launchers, lambda: _cut(case, hosts, stack))
        outcome.output = (directory / "output").read_text(errors="replace")
        outcome.broken = list(_broken_files(directory))
    return outcome


def _cut(case: Case, hosts: Sequence[str], stack: ExitStack) -> None:
    if case.kind == "link down":
        machines.set_link(hosts[case.victim], "down")
    elif case.kind == "firewall":
        stack.enter_context(machines.firewall(hosts[case.victim], 1))


def _broken_files(directory: Path) -> Iterator[str]:
    for path in (*directory.glob("step-*.pt"), *directory.glob("timeline*.json")):
        try:
            if path.suffix == ".pt":
                torch.load(path, weights_only=True)
            elif text := path.read_text().rstrip():
                json.loads(text if text.endswith("]") else text + "]")  # as viewers do
        except Exception as error:
            yield f"{path.name}: {error}"


def _start(
    case: Case, directory: Path, hosts: Sequence[str], env: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    plan = {
        **env,
        "UNIDIST_TIMEOUT": str(TIMEOUT), "UNIDIST_BACKEND": "gloo", "UNIDIST_STALL_S": str(STALL),
        "FAULT": json.dumps(asdict(case)), "FAULT_DIRECTORY": str(directory),
        "HOROVOD_TIMELINE": str(directory / "timeline.json"),
    }  # fmt: skip
    argv = [*["-m", "unidist.hvd"] * (case.engine == "drop-in"), str(ROOT / "tests/faults/train.py")]
    if case.launcher in ("env", HOSTS):
        address = "10.77.0.1" if hosts else "127.0.0.1"
        shared = {"MASTER_ADDR": address, "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS)}
        if hosts:
            shared |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        starts = [
            (
                [*(machines.on(hosts[rank], machines.NAME) if hosts else []), sys.executable, *argv],
                {**shared, "RANK": str(rank)},
            )
            for rank in range(RANKS)
        ]
    else:
        starts = [(command, {}) for command in commands(case.launcher, RANKS, argv)]
    if not hosts:  # a copy of the server is on this host
        plan |= with_torch()
    with open(directory / "output", "ab") as output:
        for command, more in starts:
            yield subprocess.Popen(
                command, cwd=ROOT, env=environment(case.launcher, {**plan, **more}), stdin=subprocess.DEVNULL,
                stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip


def _watch(
    outcome: Outcome, directory: Path, launchers: Sequence[subprocess.Popen[bytes]], cut: Callable[[], None]
) -> None:
    case, begin, first = outcome.case, time.time(), True
    while True:
        time.sleep(0.05)
        for launcher in launchers:
            launcher.poll()
        logs = {rank: _log(directory, rank) for rank in range(RANKS)}
        struck = next((line["time"] for line in logs[case.victim] if line["event"] == "fault"), None)
        if struck is None:
            if time.time() - begin > START * load() or all(launcher.returncode is not None for launcher in launchers):
                outcome.invalid = f"the fault did not happen: {[lines[-1] for lines in logs.values() if lines]}"
                return
            continue
        if first:
            cut()
            first = False
        late = time.time() - struck > TIMEOUT + case.grace
        for rank in case.watched:
            lines = logs[rank]
            # One that has not begun when the launcher ends has nothing to end.
            if rank in outcome.survivors or not (lines or late):
                continue
            pid = next((line["pid"] for line in lines if line["event"] == "start"), None)
            if pid is None or not _runs(pid):
                lines = _log(directory, rank)
                last = lines[-1] if lines else {"event": "never began"}
                how = {"start": ENDED, "fault": "ended"}.get(last["event"], last["event"])
                if how == "raised":
                    how = last["error"]
                    if rank != case.victim or case.kind not in OWN:
                        outcome.errors.append(Error(rank, last["error"], last["text"], last["time"] - struck))
                outcome.survivors[rank] = (how, time.time() - struck)
            elif late:
                outcome.survivors[rank] = ("hung", time.time() - struck)
                outcome.stacks.append(_stack(directory, rank, pid))
        if len(outcome.survivors) == len(case.watched):
            break
    if not outcome.hung:
        _watch_launchers(outcome, directory, launchers)


def _watch_launchers(outcome: Outcome, directory: Path, launchers: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait for their end, unless the victim has stopped; they must leave nothing."""
    case = outcome.case
    for launcher in launchers:
        with suppress(subprocess.TimeoutExpired):
            launcher.wait(2 if case.kind == "SIGSTOP" else GRACE * load())
    done = [(_log(directory, rank) or [{"event": ""}])[-1]["event"] == "done" for rank in range(RANKS)]
    done[case.victim] |= (case.kind, case.moment) == ("exit 0", "end")
    outcome.launcher_hangs = case.kind != "SIGSTOP" and any(launcher.returncode is None for launcher in launchers)
    if len(launchers) == RANKS:
        wrong = [rank for rank, launcher in enumerate(launchers) if launcher.returncode == 0 and not done[rank]]
        wrong = [rank for rank in wrong if (rank, case.kind) != (case.victim, "exit 0")]
        outcome.wrong_status = ", ".join(f"rank {rank}" for rank in wrong)
        return
    if launchers[0].returncode == 0 and not all(done):
        outcome.wrong_status = case.launcher
    if launchers[0].returncode is not None:
        # Workers of a data loader look every 5 s; in spawned ranks they import torch first.
        end = time.monotonic() + (60 if case.launcher == "spawn" else 8)
        while (left := len(_processes(directory))) and time.monotonic() < end:
            time.sleep(0.1)
        outcome.orphans = left


def _log(directory: Path, rank: int) -> list[dict[str, Any]]:
    path = directory / f"rank-{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _stack(directory: Path, rank: int, pid: int) -> str:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR2)
    time.sleep(0.3)
    return f"rank {rank} hangs in\n" + (directory / f"stack-{rank}").read_text()


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def _processes(directory: Path) -> list[int]:
    """All that run with the environment of a world, or with a file of its directory."""
    mark, found = f"FAULT_DIRECTORY={directory}".encode(), []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            ours = mark in (path / "environ").read_bytes().split(b"\0") or any(
                map(_in(directory), (path / "fd").iterdir())
            )
            if ours and int(path.name) != os.getpid() and _runs(int(path.name)):
                found.append(int(path.name))
    return found


def _in(directory: Path) -> Callable[[Path], bool]:
    def is_in(link: Path) -> bool:
        with suppress(OSError):
            return os.readlink(link).startswith(f"{directory}/")
        return False

    return is_in


def _kill_all(directory: Path, launchers: Sequence[subprocess.Popen[bytes]]) -> None:
    while left := _processes(directory):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for launcher in launchers:
            launcher.poll()
        time.sleep(0.05)
    for launcher in launchers:
        launcher.wait()


def run_all(cases: Sequence[Case], jobs: int) -> Iterator[Outcome]:
    """In the order of the cases; so many worlds at a time. A world that ends before its fault is started once more."""

    def attempt(case: Case) -> Outcome:
        outcome = run(case, env)
        return run(case, env) if outcome.invalid else outcome

    with_torch()
    with ExitStack() as stack:
        env = {}
        if any(case.launcher == "slurm" for case in cases):
            env = stack.enter_context(slurm.slurm(Path(stack.enter_context(tempfile.TemporaryDirectory()))))
        yield from stack.enter_context(ThreadPoolExecutor(jobs)).map(attempt, cases)


def possible(cases: Sequence[Case]) -> Iterator[Case]:
    """Those that need nothing that this machine lacks; what they need is printed."""
    lacks = {"links and firewalls": machines.missing(), "Slurm": slurm.missing()}
    for what, why in lacks.items():
        if why:
            print(f"without {what}: {why}")
    for case in cases:
        if not lacks.get("links and firewalls" if case.launcher == HOSTS else case.launcher.capitalize()):
            yield case


def line(outcome: Outcome) -> str:
    """One outcome in one line."""
    case = outcome.case
    ends = ", ".join(f"{rank}: {how} {seconds:.1f} s" for rank, (how, seconds) in sorted(outcome.survivors.items()))
    marks = [
        "HUNG" * outcome.hung, "LEFT TO MPIRUN" * outcome.left_to_mpirun, "LAUNCHER" * outcome.launcher_hangs,
        f"{outcome.orphans} ORPHANS" * bool(outcome.orphans),
        f"STATUS 0 of {outcome.wrong_status}" * bool(outcome.wrong_status),
        f"BROKEN {outcome.broken}" * bool(outcome.broken), "MISNAMED" * outcome.misnamed,
        "NOT NAMED" * (outcome.named is False and not outcome.misnamed),
        outcome.invalid and f"INVALID {outcome.invalid}",
    ]  # fmt: skip
    where = f"{case.engine} under {case.launcher}"
    what = f"{case.number}. {case.kind} at {case.moment} of rank {case.victim}, {where}, {case.workers} workers"
    return f"{what:75} {ends} {' '.join(filter(None, marks))}".rstrip()


def summary(outcomes: Sequence[Outcome]) -> list[str]:
    """Counts by kind and moment, engine and launcher."""
    launchers = [*dict.fromkeys(name for names in LAUNCHERS.values() for name in names), HOSTS]
    lines = [
        *_table(outcomes, "moment", MOMENTS), *_table(outcomes, "engine", list(LAUNCHERS)),
        *_table(outcomes, "launcher", launchers),
    ]  # fmt: skip
    ends = Counter(how for each in outcomes for how, _ in each.survivors.values())
    ours = [each for each in outcomes if not each.left_to_mpirun]
    slowest = max((seconds for each in ours for _, seconds in each.survivors.values()), default=0.0)
    told = [error.tells(each.case.victim) for each in outcomes for error in each.errors]
    parts = ", ".join(f"{sum(column)} {name}" for name, column in zip(("rank", "call", "line"), zip(*told)))
    asked = [each.named for each in outcomes if each.named is not None]
    lines += [
        f"{len(outcomes)} cases; ranks: " + ", ".join(f"{count} {how}" for how, count in ends.most_common()),
        f"slowest {slowest:.1f} s; hung in {sum(each.hung for each in outcomes)} cases, and in "
        f"{sum(each.left_to_mpirun for each in outcomes)} more that are left to mpirun; status 0 wrongly in "
        f"{sum(bool(each.wrong_status) for each in outcomes)}; the victim named in "
        f"{sum(asked)} of {len(asked)} in which a survivor raised before the launcher ended another, only others in "
        f"{sum(each.misnamed for each in outcomes)}; orphans in "
        f"{sum(bool(each.orphans) for each in outcomes)}, broken files in "
        f"{sum(bool(each.broken) for each in outcomes)}, launchers that hang in "
        f"{sum(each.launcher_hangs for each in outcomes)}, invalid {sum(bool(each.invalid) for each in outcomes)}",
        f"{len(told)} errors of survivors: {sum(map(all, told))} tell rank, call and line ({parts})",
    ]
    return lines


def _table(outcomes: Sequence[Outcome], column: str, columns: Sequence[str]) -> list[str]:
    """The outcomes that are not bad of how many, by kind and another attribute of their cases."""
    lines = [f"{'':16}" + "".join(f"{name:>14}" for name in columns)]
    for kind in KINDS:
        cells = []
        for name in columns:
            here = [each for each in outcomes if (each.case.kind, getattr(each.case, column)) == (kind, name)]
            cells.append(f"{sum(not each.bad for each in here)}/{len(here)}")
        lines.append(f"{kind:16}" + "".join(f"{cell:>14}" for cell in cells))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=30, help="number of cases")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--case", type=int, nargs="*", help="only those of these numbers")
    parser.add_argument("--jobs", type=int, default=2, help="worlds at a time")
    parser.add_argument("--only", default="", help="a word in the lines of the cases that are run: SIGSTOP, init, env")
    parser.add_argument("--verbose", action="store_true", help="print what survivors raised")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # after the worlds that run are killed
    cases = draw(options.case or range(options.n), options.seed)
    cases = [case for case in cases if options.only in line(Outcome(case))]
    cases = list(possible(cases))
    print(f"{len(cases)} cases, seed {options.seed}, at {RANKS} ranks, UNIDIST_TIMEOUT={TIMEOUT}", flush=True)
    outcomes = []
    for outcome in run_all(cases, options.jobs):
        outcomes.append(outcome)
        print(line(outcome), flush=True)
        if outcome.bad:
            output = re.sub(r"^frame #.*\n", "", outcome.output, flags=re.MULTILINE)  # of C++
            print(textwrap.indent(output[-6000:], "    | "), flush=True)
        untold = [error for error in outcome.errors if not all(error.tells(outcome.case.victim))]
        errors = outcome.errors if outcome.bad or options.verbose else untold
        for text in (*(f"{error.rank}: {error.kind}: {error.text}" for error in errors), *outcome.stacks):
            print(textwrap.indent(text, "    "), flush=True)
    print("", *summary(outcomes), sep="\n")
    sys.exit(any(outcome.bad for outcome in outcomes))


if __name__ == "__main__":
    main()
