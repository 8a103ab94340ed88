"""``python -m unidist.compare DIRECTORY SCRIPT ARGS...``: run and record one rank of a side."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from unidist.compare.recorder import Recorder
from unidist.launch import scripts
from unidist.launch.topology import detect
from unidist.seed import set_seed


def main(argv: list[str]) -> None:
    """Run the script as ``__main__``, and write its records into the directory."""
    parser = argparse.ArgumentParser("python -m unidist.compare", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="exit after this many optimizer steps")
    parser.add_argument("--drop-in", action="store_true", help="run the script on unidist.hvd")
    parser.add_argument("--undo-idle", action="store_true", help="undo steps without backward pass and gradients")
    parser.add_argument("directory", type=Path)
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    with suppress(ImportError):
        import_module("numpy")  # set_seed() seeds it only if it is loaded, and the script would load it later
    set_seed(options.seed)
    with Recorder(options.directory, detect(os.environ).rank, options.steps, options.undo_idle):
        run([options.script, *options.args], options.drop_in)


def run(program: list[str], drop_in: bool) -> None:
    """Run a script as ``python`` would, or as ``python -m unidist.hvd`` would."""
    if drop_in:
        from unidist.hvd.__main__ import main as with_the_drop_in

        with_the_drop_in(program)
    else:
        scripts.run(program, "usage: python -m unidist.compare DIRECTORY SCRIPT [ARGUMENT ...]")


if __name__ == "__main__":
    main(sys.argv[1:])
