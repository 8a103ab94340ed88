"""One elastic job over three hosts (network namespaces), to which so many things happen. As root.

python -m tests.faults.elastic_events -n 500 --seed 1

Workers are killed and raise, hosts leave and come back, and links go down and up. At the end: how long it took until
the others went on, whether each sample of each epoch was in one committed step, and what a worker that was there all
the time and `unidist run` hold.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.support import hosts as machines
from tests.support.worlds import PYTHON, ROOT, environment

#: Of an epoch, in tests/programs/elastic_events.py.
SAMPLES = 96
#: All but the one whose worker stays.
CHANGING = (0, 2)
EVENTS = ("kill", "raise", "leave", "flap", "link down")
#: For the next generation, and for the end.
LIMIT_S = 60.0


class Soak:
    """The job, and what has happened to it."""

    def __init__(self, hosts: Sequence[str], directory: Path, seed: int) -> None:
        self.hosts, self.directory, self.dice = hosts, directory, random.Random(seed)
        self.present = dict.fromkeys(range(len(hosts)), True)
        self.events: list[tuple[str, float]] = []
        self.lines: list[str] = []
        #: The last one, its workers, and how many events made none.
        self.generation, self.size, self.without = 0, 0, 0
        self._discover()
        options = ["-np", "3", "--min-np", "1", "--max-np", "3", "--host-discovery-script", f"cat {directory}/hosts"]
        options += ["--blacklist-cooldown-range", "1", "1"]
        argv = [PYTHON, "-m", "unidist", "run", *options, PYTHON, "tests/programs/elastic_events.py", str(directory)]
        self.driver = machines.start(hosts[0], argv, environment("python", {}), str(ROOT), machines.NAMES[0])
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.driver.stdout is not None
        for line in self.driver.stdout:
            self.lines.append(line)
            if found := re.search(r"generation (\d+): (\d+) workers", line):
                self.generation, self.size = int(found[1]), int(found[2])

    def _discover(self) -> None:
        part = self.directory / "part"
        part.write_text("".join(f"{machines.NAMES[host]}:1\n" for host, there in self.present.items() if there))
        part.replace(self.directory / "hosts")

    def notes(self, event: str) -> list[dict[str, Any]]:
        """What the workers have written, in order of time."""
        lines = [line for file in self.directory.glob(f"{event}-*") for line in file.read_text().splitlines()]
        return sorted(map(json.loads, lines), key=lambda each: float(each["time"]))

    def worker(self, host: int) -> int | None:
        """The process of the worker that trains on a host."""
        entered = [each for each in self.notes("enter") if each["host"] == machines.NAMES[host]]
        return int(entered[-1]["pid"]) if entered and psutil.pid_exists(entered[-1]["pid"]) else None

    def wait_for_generation(self, after: int) -> None:
        """Until there is a later one; an event that hits a worker which leaves anyhow makes none."""
        end = time.monotonic() + LIMIT_S / 2
        while self.generation <= after and time.monotonic() < end:
            assert self.driver.poll() is None, "".join(self.lines[-60:])
            time.sleep(0.05)
        self.without += self.generation <= after

    def happen(self) -> None:
        """One event, or two where a host comes back."""
        host = self.dice.choice(CHANGING)
        if not self.present[host]:
            self._change(host, "come")
            return
        pid, kind = self.worker(host), self.dice.choices(EVENTS, (4, 4, 3, 6, 1))[0]
        if pid is None:  # it starts
            return
        if kind == "link down":
            if not self.present[2] or self.worker(2) is None:  # `unidist run` is on host 0
                return
            host = 2
            self._begin("link down")
            before = self.generation
            machines.set_link(self.hosts[host], "down")
            self.wait_for_generation(before)
            before = self.generation
            machines.set_link(self.hosts[host], "up")
            self._begin("link up")
            self.wait_for_generation(before)
        elif kind == "leave":
            self._change(host, "leave")
        elif kind == "flap":  # whether or not its worker has been told to leave when it comes back
            self._change(host, "leave, and back at once", wait=False)
            time.sleep(self.dice.uniform(0.1, 3.0))
            self._change(host, "come back at once", wait=False)
        else:
            self._begin(kind)
            before = self.generation
            if kind == "raise":
                (self.directory / f"raise.{pid}").touch()
            else:
                os.kill(pid, signal.SIGKILL)
            self.wait_for_generation(before)

    def _change(self, host: int, kind: str, wait: bool = True) -> None:
        self._begin(kind)
        before = self.generation
        self.present[host] = kind.startswith("come")
        self._discover()
        if wait:
            self.wait_for_generation(before)

    def _begin(self, kind: str) -> None:
        self.events.append((kind, time.time()))

    def held(self) -> dict[str, int]:
        """What `unidist run` holds."""
        process = psutil.Process(self.driver.pid)
        return {"files": process.num_fds(), "threads": process.num_threads(), "memory": process.memory_info().rss}


def lost(found: Sequence[dict[str, Any]]) -> list[str]:
    """Epochs in which not every sample was in exactly one committed step: the last step repeats some."""
    wrong = []
    steps: dict[int, dict[int, list[dict[str, Any]]]] = {}
    for each in found:
        steps.setdefault(each["epoch"], {}).setdefault(each["step"], []).append(each)
    for epoch in sorted(steps)[:-1]:
        count: Counter[int] = Counter()
        size = 0
        for same in steps[epoch].values():
            # A step that was lost was made again by a later generation.
            last = max(each["generation"] for each in same)
            ours = [each for each in same if each["generation"] == last]
            size = ours[0]["size"]
            if sorted(each["rank"] for each in ours) != list(range(size)):
                ranks = [each["rank"] for each in ours]
                wrong.append(f"epoch {epoch}: step {ours[0]['step']} was committed by ranks {ranks} of {size}")
            for each in ours:
                count.update(each["ids"])
        if count.keys() != set(range(SAMPLES)) or count.total() - SAMPLES >= size:
            wrong.append(f"epoch {epoch}: {SAMPLES - len(count)} samples lost, {count.total() - len(count)} repeated")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=500, help="number of events")
    parser.add_argument("--minutes", type=float, default=1000.0, help="end after these, with fewer events")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    if why := machines.missing_ssh():
        sys.exit(why)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    with tempfile.TemporaryDirectory() as name, machines.ssh_hosts(3, Path(name)) as hosts:
        directory = Path(name) / "job"
        directory.mkdir()
        soak = Soak(hosts, directory, options.seed)
        try:
            soak.wait_for_generation(0)
            run(soak, options.n, 60 * options.minutes)
        finally:
            soak.driver.kill()
            for host in hosts:
                for pid in machines.processes(host, "elastic_events.py"):
                    os.kill(pid, signal.SIGKILL)


def run(soak: Soak, events: int, seconds: float) -> None:
    """Let the events happen; print what became of the job."""
    begin, first = time.monotonic(), {}
    told = 0
    while len(soak.events) < events and time.monotonic() - begin < seconds:
        time.sleep(soak.dice.uniform(0.1, 0.5))
        soak.happen()
        done = len(soak.events)
        if not first and done >= 20:
            first = soak.held()
        if done >= told + 20:
            told = done
            passed = time.monotonic() - begin
            print(f"{done} events, generation {soak.generation}, {passed:.0f} s, {soak.held()}", flush=True)
    last = soak.held()
    soak.present = dict.fromkeys(soak.present, True)
    soak._discover()
    end = time.monotonic() + LIMIT_S
    while soak.size < 3 and time.monotonic() < end:
        time.sleep(0.1)
    print(f"at the end {soak.size} workers train, after {soak.without} events there was no new generation")
    time.sleep(1)
    (soak.directory / "end").touch()
    status = soak.driver.wait(LIMIT_S)
    committed, entered = soak.notes("committed"), soak.notes("enter")
    wrong = lost(committed)
    stayed = [each for each in entered if each["host"] == machines.NAMES[1]]
    kinds = Counter(kind for kind, _ in soak.events)
    print(
        f"{len(soak.events)} events ({', '.join(f'{count} {kind}' for kind, count in kinds.items())}) in "
        f"{time.monotonic() - begin:.0f} s: {soak.generation} generations, {max(each['step'] for each in committed)} "
        f"steps, {max(each['epoch'] for each in committed)} epochs; status {status}"
    )
    begins: dict[int, float] = {}
    for each in committed:
        begins.setdefault(each["generation"], each["time"])
    for kind in kinds:
        delays = [
            min((time for time in begins.values() if time > at), default=at) - at
            for which, at in soak.events
            if which == kind
        ]
        print(
            f"  {kind}: next generation after {statistics.median(delays):.1f} s (median), {max(delays):.1f} s (longest)"
        )
    print(f"samples: {'; '.join(wrong) or 'none lost, none repeated'}")
    print(f"workers on host {machines.NAMES[1]}: {len({each['pid'] for each in stayed})}")
    for what in ("files", "threads", "memory"):
        row = [each[what] for each in stayed]
        early, late = statistics.median(row[10:30] or row), statistics.median(row[-20:])
        print(
            f"  {what} of that worker: {early:.0f} in generations 10 to 30, {late:.0f} in the last 20; unidist run: "
            f"{first.get(what, 0)}, {last[what]}"
        )
    sys.exit(bool(wrong) or status != 0 or soak.size < 3)


if __name__ == "__main__":
    main()
