"""A worker of an elastic run without tensors, for the tests of `unidist run`: it needs no torch.

In each generation it makes checks until a file tells it what to do: ``end``, or a fault of this worker. The first
argument is the directory of the files.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from unidist.errors import CollectiveError
from unidist.launch import membership

DIRECTORY = Path(sys.argv[1])
WHAT = sys.argv[2] if len(sys.argv) > 2 else ""
#: Those that replace the first two fail as long as a file is there.
REPLACES = int(os.environ["UNIDIST_ELASTIC"].split()[2]) > 1
if WHAT == "fail at the start" or (REPLACES and (DIRECTORY / "broken").exists()):
    sys.exit(3)
member = membership.current()
assert member is not None
if WHAT == "end when held":
    take_message, oldest = member._take_message, member.number == 0

    def end_when_held(message: dict[str, Any]) -> None:
        if "hold" in message and oldest:
            while not (DIRECTORY / "held").exists():
                time.sleep(0.01)
            print("is held", flush=True)
            os._exit(0)
        take_message(message)
        if "hold" in message:
            (DIRECTORY / "held").touch()

    member._take_message = end_when_held  # type: ignore[method-assign]


def take(name: str) -> bool:
    """Whether there is such a file, which is removed."""
    try:
        (DIRECTORY / name).unlink()
    except FileNotFoundError:
        return False
    return True


while True:
    member.take()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    place = {name: os.environ[name] for name in names}
    print(json.dumps({"generation": member.generation, "members": member.members, **place}), flush=True)
    checks = 0
    try:
        while True:
            time.sleep(0.01)
            checks += 1
            if (DIRECTORY / "end").exists():
                sys.exit(0)
            if take(f"kill.{member.number}"):
                os.kill(os.getpid(), signal.SIGKILL)
            if take(f"exit.{member.number}") or WHAT == "fail in training":
                sys.exit(5)
            if take(f"hang.{member.number}"):
                print("hangs", flush=True)
                time.sleep(1000)
            if take(f"slow.{member.number}"):
                time.sleep(0.5)
            if member.check():
                print(f"interrupted at {checks}", flush=True)
                break
    except CollectiveError as error:
        print(f"lost: {error}", flush=True)
        member.ask(str(error))
