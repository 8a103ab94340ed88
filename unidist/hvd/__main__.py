"""``python -m unidist.hvd [-m] script args``: run a script whose ``horovod`` is this package.

Under a launcher: ``torchrun --nproc-per-node 2 -m unidist.hvd train.py``.
"""

from __future__ import annotations

import sys

from unidist.horovod_names import export_directory
from unidist.hvd import alias
from unidist.launch.scripts import run

USAGE = "usage: python -m unidist.hvd [-m] SCRIPT [ARGUMENT ...]"


def main(argv: list[str]) -> None:
    """Run what the arguments name as ``__main__``."""
    if argv[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return
    alias.install()
    export_directory()
    run(argv, USAGE)


if __name__ == "__main__":
    main(sys.argv[1:])
