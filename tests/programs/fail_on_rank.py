"""Train until one rank fails: ``fail_on_rank.py RANK raise|raise without output|exit|leave|sleep [STEP]``.

Before it sleeps, save to a slow disk.
"""

import os
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from torch import nn

import unidist

unidist.init()
rank, how = int(sys.argv[1]), sys.argv[2]
last = int(sys.argv[3]) if len(sys.argv) > 3 else 5
if how == "sleep":
    sync, read = os.fsync, Path.read_bytes

    def slow_sync(file: int) -> None:
        time.sleep(2.5)  # of the file, and of its directory
        sync(file)

    def slow_read(path: Path) -> bytes:
        time.sleep(5)
        return read(path)

    os.fsync, Path.read_bytes = slow_sync, slow_read  # type: ignore[assignment,method-assign]
    with tempfile.TemporaryDirectory() as directory:
        unidist.save_checkpoint(Path(directory, "slow.pt"), step=1)
        assert unidist.load_checkpoint(Path(directory, "slow.pt")) == {"step": 1}
    print("the disk was slow", flush=True)
pids = unidist.all_gather_object(os.getpid()) if how == "leave" else []
model = unidist.wrap_model(nn.Linear(4, 1))
for step in range(100_000):
    if step == last and unidist.rank() == rank:
        print(f"fails at {time.time()}", flush=True)
        if "without output" in how:  # nobody reads it any more
            reader, writer = os.pipe()
            os.close(reader)
            sys.stdout = open(writer, "w")  # noqa: SIM115
            print("unread")
        if how == "exit":
            sys.exit(3)
        if how == "leave":
            sys.exit()
        if how == "sleep":
            time.sleep(600)
        raise RuntimeError(f"rank {rank} fails on purpose")
    if step == last and how == "leave":
        with suppress(psutil.NoSuchProcess):
            while psutil.Process(pids[rank]).status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)
    model(torch.ones(2, 4)).sum().backward()
print("trained to the end")
