"""``python -m unidist.cli``."""

from unidist.cli import main

main()
