"""``python -m unidist``: the command line."""

from unidist.cli import main

if __name__ == "__main__":
    main(prog_name="unidist")
