"""``python -m unidist.launchers.spawned N [-m MODULE | SCRIPT] ARGS...``: run a program in N spawned processes."""

from __future__ import annotations

import os
import sys

import unidist
from unidist.launch import scripts


def run(program: list[str]) -> None:
    """Run a script or module as ``python`` would."""
    scripts.run(program, "")


def exported() -> dict[str, str]:
    """Return the settings of this process that the ranks take, wherever they run."""
    return {name: text for name, text in os.environ.items() if name.startswith(("UNIDIST_", "HOROVOD_"))}


if __name__ == "__main__":
    unidist.spawn(run, int(sys.argv[1]), args=(sys.argv[2:],))
