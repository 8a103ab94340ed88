"""Draws mishaps, lets each happen, and says what was lost, what hung, and what ran that must not.

python -m tests.faults.mishaps -n 300 --seed 1
"""

from __future__ import annotations

import argparse
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import unidist
from tests.faults.ports import hostile_to_ports
from tests.support.worlds import free_port
from unidist.checkpoint import files as checkpoint_files

#: Seconds in which a process must have ended that loads, or that saves once.
TIMEOUT = 60


class Case(NamedTuple):
    """A mishap of the table, and what decides the rest of it."""

    kind: str
    seed: str


# ------------------------------------------------------------------------------------ processes
def fork(action: Callable[[], Any], output: int) -> int:
    """Start a process that writes what ``action`` returns, or ``Exception``; the pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        try:
            found = action()
        except Exception as error:
            found = type(error)(str(error)) if isinstance(error, unidist.CheckpointError) else traceback.format_exc()
        os.write(output, pickle.dumps(found))
    finally:
        os._exit(0)


def done(action: Callable[[], Any]) -> Any:
    """What ``action`` returns in a process of its own; a ``CheckpointError`` is returned, too."""
    with tempfile.TemporaryFile() as output:
        pid = fork(action, output.fileno())
        end = time.monotonic() + TIMEOUT
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return "HUNG"
            time.sleep(0.002)
        output.seek(0)
        return pickle.load(output)


# ------------------------------------------------------------------------------------ what is saved
def begin(sharded: bool) -> None:
    """Begin the world of one rank."""
    torch.set_num_threads(1)
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    if sharded:
        os.environ.update(rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    unidist.init("gloo" if sharded else "single")


def model(numbers: int, step: float, sharded: bool) -> nn.Module:
    """A model of equal numbers."""
    made, weight = nn.Module(), torch.full((numbers,), float(step))
    if sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        weight = distribute_tensor(weight, init_device_mesh("cpu", (1,)), [Shard(0)])
    made.weight = nn.Parameter(weight)
    return made


def save(path: Path, numbers: int, step: int, sharded: bool, **options: Any) -> None:
    """Save one checkpoint in a world that has begun."""
    unidist.save_checkpoint(path, **options, model=model(numbers, step, sharded), step=step)


def saved(path: Path, numbers: int, step: int, sharded: bool) -> Any:
    """Save one in a world of its own; None, or the error."""

    def action() -> None:
        begin(sharded)
        save(path, numbers, step, sharded)

    return done(action)


def load(path: Path | None, numbers: int) -> int:
    """Load one in a world of its own; the step, if all is of that step."""
    begin(sharded=False)
    assert path is not None, "there is no checkpoint"
    target = model(numbers, -1, sharded=False)
    step: int = unidist.load_checkpoint(path, model=target)["step"]
    assert torch.equal(target.weight, torch.full((numbers,), float(step))), "a mixture of checkpoints"
    return step


def latest(directory: Path, numbers: int) -> int:
    """The step of the latest checkpoint."""
    begin(sharded=False)
    path = unidist.latest_checkpoint(directory, "run*")
    unidist.shutdown()
    return load(path, numbers)


def leftovers(directory: Path) -> list[str]:
    """What is neither a checkpoint nor was asked for."""
    return [path.name for path in directory.rglob(".*") if path.name != ".metadata"]


# ------------------------------------------------------------------------------------ mishaps
def killed(dice: random.Random, directory: Path, by: signal.Signals) -> Iterator[str]:
    """A process that saves ends at a random moment: what was saved is there, and the next save removes the rest."""
    sharded, series, numbers = dice.random() < 0.4, dice.random() < 0.5, dice.choice((1000, 100_000, 1_000_000))
    in_two_steps = dice.random() < 0.3  # as on a file system that cannot exchange names
    last = directory.parent / "last"
    last.write_text("0")

    def name(step: int) -> Path:
        return directory / (f"run-{step}" if series else "run")

    def save_for_ever() -> None:
        if in_two_steps:
            checkpoint_files._exchange = lambda one, other: False
        begin(sharded)
        for step in range(1, 10**6):
            save(name(step), numbers, step, sharded, keep_last=2 if series else None)
            last.write_text(str(step))

    pid = fork(save_for_ever, 2)
    end = time.monotonic() + TIMEOUT
    while last.read_text() in ("", "0") and time.monotonic() < end:
        time.sleep(0.001)
    assert time.monotonic() < end, "nothing was saved"
    time.sleep(dice.uniform(0, 0.1))
    os.kill(pid, by)
    os.waitpid(pid, 0)
    at_least = int(last.read_text() or 1)
    found = done(lambda: latest(directory, numbers))
    if not isinstance(found, int) or found < at_least:
        yield f"step {at_least} was saved, and {found} is there"
        return
    again = found + 1
    if why := saved(name(again), numbers, again, sharded):
        yield f"cannot save again: {why}"
    if left := leftovers(directory):
        yield f"left after the next save: {left}"
    if (found := done(lambda: latest(directory, numbers))) != again:
        yield f"step {again} was saved, and {found} is there"


def two(directory: Path, numbers: int, sharded: bool) -> Path:
    """The second of two checkpoints."""
    for step in (1, 2):
        assert (found := saved(directory / f"run-{step}", numbers, step, sharded)) is None, found
    return directory / "run-2"


def damaged(dice: random.Random, directory: Path, change: Callable[[random.Random, bytearray], None]) -> Iterator[str]:
    """A file of the latest checkpoint is changed: that is an error, or of no effect; the one before is whole."""
    numbers, sharded = dice.choice((10, 1000, 300_000)), dice.random() < 0.4
    one = two(directory, numbers, sharded)
    path = dice.choice(sorted(one.iterdir())) if sharded else one
    data = bytearray(path.read_bytes())
    change(dice, data)
    path.write_bytes(data)
    found = done(lambda: load(one, numbers))
    if found != 2 and not (isinstance(found, unidist.CheckpointError) and re.search(CLEAR, str(found))):
        yield f"{path.name} of {len(data)} bytes: {found}"
    if (before := done(lambda: load(directory / "run-1", numbers))) != 1:
        yield f"the one before: {before}"


#: What the errors of damaged files say.
CLEAR = "truncated|damaged|not a checkpoint|checksum|refuse"


def truncate(dice: random.Random, data: bytearray) -> None:
    """Cut off the end."""
    del data[dice.choice((0, dice.randrange(len(data)), len(data) - 1)) :]


def flip(dice: random.Random, data: bytearray) -> None:
    """Flip a bit, or several in a row."""
    at = dice.randrange(len(data))
    for place in range(at, min(at + dice.choice((1, 1, 1, 8)), len(data))):
        data[place] ^= 1 << dice.randrange(8)


class Hostile:
    """What makes a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return Path.touch, (self.canary,)


def hostile(dice: random.Random, directory: Path) -> Iterator[str]:
    """A file of a checkpoint is somebody else's pickle: it is refused, and does not run."""
    numbers, sharded = 1000, dice.random() < 0.7
    one, canary = two(directory, numbers, sharded), directory.parent / "canary"
    path = dice.choice(sorted(one.iterdir())) if sharded else one
    whole: Any = Hostile(canary)
    if dice.random() < 0.5:
        whole = {"model": whole, "step": 2}
    if path.name == ".metadata" or dice.random() < 0.3:
        if path.name == ".metadata" and dice.random() < 0.7:
            whole = hostile_index(dice, path, canary)
            rest = torch.load(one / "unidist.pt", weights_only=True)
            rest.pop("unidist_index")  # as if an older version had saved it
            torch.save(rest, one / "unidist.pt")
        path.write_bytes(pickle.dumps(whole))
    else:
        torch.save(whole, path, _use_new_zipfile_serialization=dice.random() < 0.7)
    found = done(lambda: load(one, numbers))
    if not isinstance(found, unidist.CheckpointError):
        yield f"{path.name}: {found}"
    if canary.exists():
        yield f"{path.name}: what it contains has run"


def hostile_index(dice: random.Random, path: Path, canary: Path) -> Any:
    """An index of torch.distributed.checkpoint that says other things than where tensors are."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    index = pickle.loads(path.read_bytes())
    kind = dice.choice(("bytes", "outside", "fifo", "attribute"))
    name = next(iter(index.state_dict_metadata))
    (info,) = index.storage_data.values()
    if kind == "bytes":  # torch unpickles these
        index.state_dict_metadata[name] = BytesStorageMetadata()
        data = path.parent / "bytes"
        torch.save(Hostile(canary), data)
        info.relative_path, info.offset, info.length = data.name, 0, data.stat().st_size
    elif kind == "outside":
        info.relative_path = dice.choice(("/dev/zero", "../run-1/__0_0.distcp", ".."))
    elif kind == "fifo":
        os.mkfifo(path.parent / "fifo")
        info.relative_path = "fifo"
    else:
        index.planner_data = Hostile(canary)
    return index


def out_of_order(dice: random.Random, directory: Path) -> Iterator[str]:
    """Older files with later times, as after a copy: the latest step is found and kept."""
    steps, keep = sorted(dice.sample(range(1, 2000), dice.randint(2, 6))), dice.randint(1, 3)

    def write() -> None:
        begin(sharded=False)
        for step in steps:
            save(directory / f"run2-step{step}.pt", 10, step, False, keep_last=keep)
            for other in directory.iterdir():
                times = dice.choice((10**9, time.time() + 10**6))
                os.utime(other, (times, times))

    if why := done(write):
        yield str(why)
    if (found := done(lambda: latest(directory, 10))) != steps[-1]:
        yield f"saved {steps}, and {found} is the latest"
    left = {path.name for path in directory.iterdir()}
    if left != {f"run2-step{step}.pt" for step in steps[-keep:]}:
        yield f"saved {steps}, and {sorted(left)} are left of {keep}"


@contextmanager
def small_disk(directory: Path, size: int) -> Iterator[None]:
    """A file system of so many bytes."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", directory], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", directory], check=True)


def full(dice: random.Random, directory: Path) -> Iterator[str]:
    """A disk with room for one checkpoint and a part of the next: the error has figures, and the first is whole."""
    sharded, numbers = dice.random() < 0.4, dice.choice((100_000, 500_000))
    with small_disk(directory, int(4 * numbers * dice.uniform(1.2, 1.9)) + 40_000):
        assert (found := saved(directory / "run", numbers, 1, sharded)) is None, found
        name = dice.choice(("run", "run-2"))
        found = saved(directory / name, numbers, 2, sharded)
        figures = re.search(r"have (\d+) bytes, and (\d+) were free", str(found))
        if not figures or not max(4 * numbers, int(figures[2])) <= int(figures[1]):
            yield f"the error says {found}"
        if (found := done(lambda: load(directory / "run", numbers))) != 1:
            yield f"step 1 was saved, and {found} is there"
        if left := leftovers(directory):
            yield f"left: {left}"


def in_the_way(dice: random.Random, directory: Path) -> Iterator[str]:
    """Something else has the checkpoint's name: it stays, and a load says what it is."""
    path, sharded = directory / "run", dice.random() < 0.3
    kind = dice.choice(("fifo", "socket", "directory", "device"))
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        os.mknod(path, 0o140644)
    elif kind == "directory":
        path.mkdir()
        (path / "precious").touch()
    else:
        os.mknod(path, 0o020666, os.makedev(1, 3))  # one of its own: those in /dev must outlive a bug
    before = path.stat()
    for found in (saved(path, 10, 1, sharded), done(lambda: load(path, 10))):
        if not isinstance(found, unidist.CheckpointError) or kind not in str(found).lower():
            yield f"{kind}: {found}"
    if (before.st_ino, before.st_mode) != (path.stat().st_ino, path.stat().st_mode) or leftovers(directory):
        yield f"{kind}: it was replaced, or something is left"


def attacked(dice: random.Random, directory: Path) -> Iterator[str]:
    """A job of ``unidist run`` goes on, whatever is sent to its ports."""
    if found := hostile_to_ports(dice, directory):
        yield found


#: By name: what happens in an empty directory. It yields what is wrong afterwards.
MISHAPS: dict[str, Callable[[random.Random, Path], Iterator[str]]] = {
    "SIGKILL in a save": lambda dice, directory: killed(dice, directory, signal.SIGKILL),
    "SIGTERM in a save": lambda dice, directory: killed(dice, directory, signal.SIGTERM),
    "a truncated file": lambda dice, directory: damaged(dice, directory, truncate),
    "flipped bits": lambda dice, directory: damaged(dice, directory, flip),
    "a hostile file": hostile,
    "times out of order": out_of_order,
    "a full disk": full,
    "something in the way": in_the_way,
    "hostile bytes on the ports": attacked,
}
#: Those that only root can make.
ROOTS = {"a full disk", "something in the way"}


def draw(count: int, seed: int) -> list[Case]:
    """The mishaps of the table in turn."""
    kinds = [kind for kind in MISHAPS if os.geteuid() == 0 or kind not in ROOTS]
    return [Case(kinds[i % len(kinds)], f"{seed}.{i}") for i in range(count)]


def run(case: Case) -> list[str]:
    """What is wrong after a mishap."""
    where = Path(tempfile.mkdtemp(prefix="unidist-mishap-"))
    directory = where / "checkpoints"
    directory.mkdir()
    try:
        return list(MISHAPS[case.kind](random.Random(case.seed), directory))
    except Exception:
        return [traceback.format_exc()]
    finally:
        with suppress(OSError):
            shutil.rmtree(where)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=30, help="number of cases")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", default="", help="a word in the names of the mishaps that happen")
    options = parser.parse_args()
    begun, bad = time.monotonic(), Counter[str]()
    cases = [case for case in draw(options.n, options.seed) if options.only in case.kind]
    for case in cases:
        for why in run(case):
            bad[case.kind] += 1
            print(f"{case.kind}, seed {case.seed}: {why}", flush=True)
    for kind, count in Counter(case.kind for case in cases).items():
        print(f"{kind:24} {count:5} times, {bad[kind]:3} bad")
    print(f"{len(cases)} mishaps, seed {options.seed}: {bad.total()} bad, {time.monotonic() - begun:.0f} s")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
