"""Stands for the script in processes that multiprocessing spawns from it: they find the drop-in too."""

from __future__ import annotations

import os
import runpy

from unidist import knobs
from unidist.hvd import alias

alias.install()
_script = os.environ[knobs.HVD_SCRIPT]
if not _script.startswith("-m "):
    _names = runpy.run_path(_script, run_name="__mp_main__")
elif _script.endswith(".__main__"):  # multiprocessing leaves these out
    _names = {}
else:
    _names = runpy.run_module(_script.removeprefix("-m "), run_name="__mp_main__")
# The processes that they spawn come here too.
_names.pop("__spec__", None)
globals().update(_names)
