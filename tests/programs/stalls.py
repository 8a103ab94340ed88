"""Ranks that keep the others waiting, one way after another: stalls.py HOW LAST [FILE].

HOW is ``unidist`` or ``hvd``; LAST is what ends the world. With a file, a user asks meanwhile, until the file is there.
"""

import os
import signal
import subprocess
import sys
import time

import torch

import unidist
import unidist.hvd as hvd
from unidist.context import current

HOW, LAST, *ASKED = sys.argv[1:]
#: Of the reports, and how long a rank keeps the others waiting: a report comes up to a second later, and asks for up to
#: another one.
STALL_S = float(os.environ["UNIDIST_STALL_S"])
LATE_S = STALL_S + 2.4


class SlowSamples(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        if unidist.rank() == 2 and index == 1:
            time.sleep(LATE_S)  # a slow disk
        return torch.ones(1)


def reduce(name, *shape):
    if HOW == "hvd":
        hvd.allreduce(torch.ones(shape), name=name)
    else:
        unidist.all_reduce(torch.ones(shape))


def endless_loop():
    end = time.monotonic() + LATE_S
    while time.monotonic() < end or (ASKED and not os.path.exists(ASKED[0])):
        pass


def ask(pid):
    """What a user would do meanwhile, in a shell of this host."""
    time.sleep(STALL_S)
    shown = subprocess.run(
        [sys.executable, "-m", "unidist", "where", "--stacks", str(pid)], capture_output=True, text=True
    )
    os.write(1, f"WHERE\n{shown.stdout}{shown.stderr}END\n".encode())
    os.kill(pid, signal.SIGUSR1)
    time.sleep(1)
    open(ASKED[0], "w").close()


def last():
    current().calls[None] = 1000  # as in a long training: the next calls are not compared
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun would end the others before they have said anything
    if LAST == "swapped":
        calls = (unidist.barrier, lambda: reduce("swapped", 4))
        for call in calls if unidist.rank() else calls[::-1]:
            call()
    elif LAST == "shape":
        reduce("shape", 4 + unidist.rank())
    elif LAST == "rank 0 only":
        if unidist.rank() == 0:
            reduce("only", 4)
        unidist.barrier()
    elif LAST == "backward":
        model = unidist.wrap_model(torch.nn.Linear(10, 10))
        for step in range(3):
            if unidist.rank() == 1 and step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            model(torch.ones(3, 10)).sum().backward()
    elif unidist.rank() == 1:
        os.kill(os.getpid(), getattr(signal, LAST))
    reduce("last", 5)


if __name__ == "__main__":
    hvd.init() if HOW == "hvd" else unidist.init()
    os.write(1, f"rank {unidist.rank()} is {os.getpid()}\n".encode())
    reduce("first", 3)
    if unidist.rank() == 1:
        endless_loop()
    if ASKED and unidist.rank() == 2 and os.fork() == 0:
        ask(os.getppid())
        os._exit(0)
    reduce("loop", 1000)
    for batch in torch.utils.data.DataLoader(SlowSamples()):
        reduce("loaded", *batch.shape)
    last()
