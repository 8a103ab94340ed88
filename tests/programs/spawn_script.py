"""Run a script in N spawned processes: ``spawn_script.py N SCRIPT ARGS...``."""

import runpy
import sys

import unidist


def run(script: str, args: list[str]) -> None:
    sys.argv = [script, *args]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    unidist.spawn(run, int(sys.argv[1]), args=(sys.argv[2], sys.argv[3:]))
