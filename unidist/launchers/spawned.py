"""``python -m unidist.launchers.spawned N [-m MODULE | SCRIPT] ARGS...``: run a program in N spawned processes."""

from __future__ import annotations

import runpy
import sys

import unidist


def run(program: list[str]) -> None:
    """Run a script or module as ``python`` would."""
    if program[0] == "-m":
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    unidist.spawn(run, int(sys.argv[1]), args=(sys.argv[2:],))
