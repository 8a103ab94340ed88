"""Stands for the script in processes that multiprocessing spawns from it: they find the drop-in too."""

from __future__ import annotations

import os
import runpy

from unidist import knobs
from unidist.hvd import alias

alias.install()
globals().update(runpy.run_path(os.environ[knobs.HVD_SCRIPT], run_name="__mp_main__"))
