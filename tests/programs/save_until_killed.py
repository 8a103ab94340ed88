"""Saves checkpoints in forked processes, each killed at a random moment, and looks at what is left.

python tests/programs/save_until_killed.py DIRECTORY TIMES
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

import unidist

SIZE = 500_000  # numbers: a save takes some milliseconds


def save_for_ever(directory: Path, step: int) -> None:
    while True:
        step += 1
        unidist.save_checkpoint(
            directory / f"step-{step}.pt", keep_last=2, weights=torch.full((SIZE,), float(step)), step=step
        )


def last_step(directory: Path) -> int:
    latest = unidist.latest_checkpoint(directory)
    return int(latest.stem.removeprefix("step-")) if latest else 0


def main() -> None:
    directory, times = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    unidist.init("single")
    dice = random.Random(0)
    step, amid, loaded = 0, 0, 0
    for _ in range(times):
        begin = time.monotonic()
        child = os.fork()
        if child == 0:
            save_for_ever(directory, step)
        while last_step(directory) == step:  # not for a file of a given name: the child deletes all but its last two
            time.sleep(0.001)
        time.sleep(dice.uniform(0, 2 * (time.monotonic() - begin)))  # up to two saves, however long one takes here
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        amid += any(directory.glob(".*.unfinished"))
        latest = unidist.latest_checkpoint(directory)
        assert latest is not None
        found = unidist.load_checkpoint(latest)
        assert found["step"] > step and latest.name == f"step-{found['step']}.pt"
        assert torch.equal(found["weights"], torch.full((SIZE,), float(found["step"])))
        step = found["step"]
        loaded += 1
    left = len(list(directory.glob("step-*.pt")))
    print(
        f"killed {times} times, {amid} of them amid a file; {loaded} times a whole checkpoint was there; "
        f"{step} saved, {left} kept"
    )


if __name__ == "__main__":
    main()
