"""Run the scripts of tests/legacy one after another in this world: ``run_legacy.py DIRECTORY SCRIPT ...``."""

import runpy
import sys
from pathlib import Path

directory, *scripts = sys.argv[1:]
for script in scripts:
    sys.argv = [script, f"{directory}/{Path(script).stem}.pt"]
    runpy.run_path(script, run_name="__main__")
