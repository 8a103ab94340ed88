"""What the tests of `unidist run` have ranks do; needs no torch. The first argument says what."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

rank = os.environ["RANK"]
what = sys.argv[1]
if what == "lines":
    for i in range(200):
        print(f"line {i} of {rank} " + "x" * 50)
        print(f"error {i} of {rank}", file=sys.stderr)
    for i in range(3):
        print(f"\r{i} %", end="")
    print("\n\nno end", end="")
    sys.stdout.flush()
    os.write(1, b"\xff\xfe\n")
elif what == "fail":
    if rank == "1":
        time.sleep(0.3)
        print("reason: out of luck", flush=True)
        if sys.argv[2].startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, sys.argv[2]))
        sys.exit(int(sys.argv[2]))
    time.sleep(60)
elif what == "command lines":
    found = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline") if os.access(file, os.R_OK)]
    print("seen in", sum(os.environ["SECRET"].encode() in text for text in found))
elif what == "environment":
    names = sys.argv[2].split(",")
    print(*(f"{name}={os.environ.get(name)}" for name in names), "cwd", Path.cwd())
elif what == "save":
    # As a training that saves when it is preempted: takes so many seconds, and ends with a status.

    def save(*_: object) -> None:
        time.sleep(float(sys.argv[2]))
        print("saved", flush=True)
        sys.exit(int(sys.argv[3]) if rank == "1" else 0)

    signal.signal(signal.SIGTERM, save)
    print("up", flush=True)
    while True:
        time.sleep(0.1)
elif what == "wait":
    # Deaf to polite signals, but for the rank that is named, with a child in the same process group.
    if sys.argv[3:] != [rank]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    subprocess.Popen(["sleep", sys.argv[2]])
    print("up", flush=True)
    time.sleep(float(sys.argv[2]))
