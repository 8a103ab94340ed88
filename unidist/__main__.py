"""``python -m unidist COMMAND``, and ``python -m unidist SCRIPT``: a script, with torchrun's variables."""

import os
import sys


def main(argv: list[str]) -> None:
    """Run a command by its name; ``-m``, a name that ends in .py, and that of a file are a script."""
    name = argv[0] if argv else ""
    if name == "-m" or name.endswith(".py") or os.sep in name:
        return run_script(argv)
    from unidist.cli import HELP
    from unidist.cli import main as command_line

    if not name or name.startswith("-") or name in HELP:
        command_line(argv, prog_name="unidist")
    elif os.path.isfile(name):
        run_script(argv)
    else:
        print(f"unidist: {name!r} is neither a file nor a command: {', '.join(HELP)}", file=sys.stderr)
        sys.exit(2)


def run_script(argv: list[str]) -> None:
    from unidist.torchrun_env import run

    run(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
