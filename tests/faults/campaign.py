"""Draws faults, runs a world for each, and says what became of the survivors.

python -m tests.faults.campaign -n 200 --seed 1
"""

from __future__ import annotations

import argparse
import json
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.support.worlds import ROOT, commands, environment, free_port

RANKS = 3
#: Seconds of UNIDIST_TIMEOUT, and how much later a survivor must have ended.
TIMEOUT, GRACE = 10, 15
#: Seconds of UNIDIST_STALL_S.
STALL = 5
#: For a start on a busy machine.
START = 90
KINDS = ("SIGKILL", "SIGSTOP", "SIGTERM", "exception", "os._exit")
MOMENTS = ("init", "forward", "backward", "collective", "save", "end")
#: By what computes. In ``env`` no launcher ends a survivor: each must end by itself.
LAUNCHERS = {
    "drop-in": ("torchrun c10d", "horovodrun", "openmpi", "unidist-run", "env"),
    "gloo": ("torchrun c10d", "horovodrun", "openmpi", "unidist-run", "env"),
    "mpi": ("openmpi",),
    "horovod": ("horovodrun", "openmpi", "unidist-run", "env"),
}


@dataclass(frozen=True)
class Case:
    kind: str
    moment: str
    victim: int
    engine: str
    launcher: str
    step: int
    #: Of the data loader.
    workers: int
    seed: int


@dataclass
class Outcome:
    case: Case
    #: By rank: how each survivor ended, and after how many seconds; "hung" where it did not.
    survivors: dict[int, tuple[str, float]] = field(default_factory=dict)
    #: What survivors raised.
    errors: list[str] = field(default_factory=list)
    #: Where those that hang were.
    stacks: list[str] = field(default_factory=list)
    #: Processes that a launcher which has ended left.
    orphans: int = 0
    #: Checkpoints and timelines that do not load.
    broken: list[str] = field(default_factory=list)
    #: Why there is no outcome.
    invalid: str = ""

    @property
    def left_to_mpirun(self) -> bool:
        """Whether survivors wait in MPI_Finalize for a rank that has stopped after its last collective: not ours."""
        case = self.case
        return (case.kind, case.moment, case.launcher) == ("SIGSTOP", "end", "openmpi") and self._hang

    @property
    def hung(self) -> bool:
        return self._hang and not self.left_to_mpirun

    @property
    def _hang(self) -> bool:
        return any(how == "hung" for how, _ in self.survivors.values())

    @property
    def named(self) -> bool | None:
        """Whether an error names the victim; None where nobody had to raise one."""
        errors = [error for error in self.errors if error.startswith(("HorovodInternalError", "CollectiveError"))]
        if self.case.moment in ("init", "end") or not errors:
            return None
        return any(re.search(rf"rank {self.case.victim}\b", error) for error in errors)

    @property
    def bad(self) -> bool:
        return bool(self.invalid or self.hung or self.orphans or self.broken or self.named is False)


def draw(count: int, seed: int) -> list[Case]:
    """Each 30 in a row have every kind at every moment; the engines take turns."""
    dice = random.Random(seed)
    cases = []
    for i in range(count):
        victim = dice.choice((0, dice.randrange(1, RANKS)))
        engine = list(LAUNCHERS)[(i + i // len(LAUNCHERS)) % len(LAUNCHERS)]
        launcher = dice.choice(LAUNCHERS[engine])
        rest = (dice.randrange(1, 5), dice.randrange(2), dice.randrange(10**6))
        cases.append(Case(KINDS[i % len(KINDS)], MOMENTS[i % len(MOMENTS)], victim, engine, launcher, *rest))
    return cases


def run(case: Case) -> Outcome:
    """One world, from its start to the end of its last process."""
    outcome = Outcome(case)
    with tempfile.TemporaryDirectory(prefix="unidist-fault-") as name:
        directory = Path(name)
        launchers = list(_start(case, directory))
        try:
            _watch(outcome, directory, launchers)
        finally:
            _kill_all(directory, launchers)
        output = (directory / "output").read_text(errors="replace")
        outcome.broken = list(_broken_files(directory))
    if outcome.invalid:
        outcome.invalid += f"\n{output[-1500:]}"
    return outcome


def _broken_files(directory: Path) -> Iterator[str]:
    for path in (*directory.glob("step-*.pt"), *directory.glob("timeline*.json")):
        try:
            if path.suffix == ".pt":
                torch.load(path, weights_only=True)
            elif text := path.read_text().rstrip():
                json.loads(text if text.endswith("]") else text + "]")  # as viewers do
        except Exception as error:
            yield f"{path.name}: {error}"


def _start(case: Case, directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    plan = {
        "UNIDIST_TIMEOUT": str(TIMEOUT), "UNIDIST_BACKEND": "gloo", "UNIDIST_STALL_S": str(STALL),
        "FAULT": json.dumps(asdict(case)), "FAULT_DIRECTORY": str(directory),
        "HOROVOD_TIMELINE": str(directory / "timeline.json"),
    }  # fmt: skip
    argv = [*["-m", "unidist.hvd"] * (case.engine == "drop-in"), str(ROOT / "tests/faults/train.py")]
    if case.launcher == "env":
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS)}
        starts = [([sys.executable, *argv], {**master, "RANK": str(rank)}) for rank in range(RANKS)]
    else:
        starts = [(command, {}) for command in commands(case.launcher, RANKS, argv)]
    with open(directory / "output", "ab") as output:
        for command, more in starts:
            env = environment(case.launcher, {**plan, **more})
            yield subprocess.Popen(
                command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip


def _watch(outcome: Outcome, directory: Path, launchers: Sequence[subprocess.Popen[bytes]]) -> None:
    case, begin = outcome.case, time.time()
    while True:
        time.sleep(0.05)
        for launcher in launchers:
            launcher.poll()
        logs = {rank: _log(directory, rank) for rank in range(RANKS)}
        struck = next((line["time"] for line in logs[case.victim] if line["event"] == "fault"), None)
        if struck is None:
            if time.time() - begin > START or all(launcher.returncode is not None for launcher in launchers):
                outcome.invalid = f"the fault did not happen: {[lines[-1] for lines in logs.values() if lines]}"
                return
            continue
        late = time.time() - struck > TIMEOUT + GRACE
        for rank, lines in logs.items():
            # One that has not begun when the launcher ends has nothing to end.
            if rank == case.victim or rank in outcome.survivors or not (lines or late):
                continue
            pid = next((line["pid"] for line in lines if line["event"] == "start"), None)
            if pid is None or not _runs(pid):
                lines = _log(directory, rank)
                last = lines[-1] if lines else {"event": "never began"}
                how = {"start": "ended by its launcher"}.get(last["event"], last["event"])
                if how == "raised":
                    how = last["error"]
                    outcome.errors.append(f"{last['error']}: {last['text']}")
                outcome.survivors[rank] = (how, time.time() - struck)
            elif late:
                outcome.survivors[rank] = ("hung", time.time() - struck)
                outcome.stacks.append(_stack(directory, rank, pid))
        if len(outcome.survivors) == RANKS - 1:
            break
    if case.launcher == "env":
        return
    # Where the launcher ends by itself, it must leave nothing; workers of a data loader look every 5 s.
    with suppress(subprocess.TimeoutExpired):
        launchers[0].wait(2)
        end = time.monotonic() + 8
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
    """All that run with the environment of a world."""
    mark, found = f"FAULT_DIRECTORY={directory}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in path.read_bytes().split(b"\0") and _runs(int(path.parent.name)):
                found.append(int(path.parent.name))
    return found


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
        outcome = run(case)
        return run(case) if outcome.invalid else outcome

    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(attempt, cases)


def line(outcome: Outcome) -> str:
    """One outcome in one line."""
    case = outcome.case
    ends = ", ".join(f"{rank}: {how} {seconds:.1f} s" for rank, (how, seconds) in sorted(outcome.survivors.items()))
    marks = [
        "HUNG" * outcome.hung, "LEFT TO MPIRUN" * outcome.left_to_mpirun,
        f"{outcome.orphans} ORPHANS" * bool(outcome.orphans),
        f"BROKEN {outcome.broken}" * bool(outcome.broken), "NOT NAMED" * (outcome.named is False),
        outcome.invalid and f"INVALID {outcome.invalid}",
    ]  # fmt: skip
    where = f"{case.engine} under {case.launcher}"
    what = f"{case.kind} at {case.moment} of rank {case.victim}, {where}, {case.workers} workers"
    return f"{what:75} {ends} {' '.join(filter(None, marks))}".rstrip()


def summary(outcomes: Sequence[Outcome]) -> list[str]:
    """Counts by kind and moment, and by engine and kind."""
    lines = _table(outcomes, "kind", KINDS, "moment", MOMENTS) + _table(
        outcomes, "engine", list(LAUNCHERS), "kind", KINDS
    )
    ends = Counter(how for each in outcomes for how, _ in each.survivors.values())
    ours = [each for each in outcomes if not each.left_to_mpirun]
    slowest = max((seconds for each in ours for _, seconds in each.survivors.values()), default=0.0)
    asked = [each.named for each in outcomes if each.named is not None]
    lines += [
        f"{len(outcomes)} cases; survivors: " + ", ".join(f"{count} {how}" for how, count in ends.most_common()),
        f"slowest survivor {slowest:.1f} s; hung in {sum(each.hung for each in outcomes)} cases, and in "
        f"{sum(each.left_to_mpirun for each in outcomes)} more that are left to mpirun; the victim named in "
        f"{sum(asked)} of {len(asked)} in which a survivor raised; orphans in "
        f"{sum(bool(each.orphans) for each in outcomes)}, broken files in "
        f"{sum(bool(each.broken) for each in outcomes)}, invalid {sum(bool(each.invalid) for each in outcomes)}",
    ]
    return lines


def _table(
    outcomes: Sequence[Outcome], row: str, rows: Sequence[str], column: str, columns: Sequence[str]
) -> list[str]:
    """The outcomes that are not bad of how many, by two attributes of their cases."""
    lines = [f"{'':12}" + "".join(f"{name:>12}" for name in columns)]
    for name in rows:
        cells = []
        for other in columns:
            here = [each for each in outcomes if (getattr(each.case, row), getattr(each.case, column)) == (name, other)]
            cells.append(f"{sum(not each.bad for each in here)}/{len(here)}")
        lines.append(f"{name:12}" + "".join(f"{cell:>12}" for cell in cells))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=30, help="number of cases")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--jobs", type=int, default=2, help="worlds at a time")
    parser.add_argument("--only", default="", help="a word in the lines of the cases that are run: SIGSTOP, init, env")
    parser.add_argument("--verbose", action="store_true", help="print what survivors raised")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # after the worlds that run are killed
    print(f"{options.n} cases, seed {options.seed}, at {RANKS} ranks, UNIDIST_TIMEOUT={TIMEOUT}", flush=True)
    cases = [case for case in draw(options.n, options.seed) if options.only in line(Outcome(case))]
    outcomes = []
    for outcome in run_all(cases, options.jobs):
        outcomes.append(outcome)
        print(line(outcome), flush=True)
        if outcome.bad or options.verbose:
            for text in (*outcome.errors, *outcome.stacks):
                print(textwrap.indent(text, "    "), flush=True)
    print("", *summary(outcomes), sep="\n")
    sys.exit(any(outcome.bad for outcome in outcomes))


if __name__ == "__main__":
    main()
