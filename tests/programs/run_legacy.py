"""Run scripts one after another in this world: ``run_legacy.py DIRECTORY SCRIPT ...``.

Each saves its weights in DIRECTORY, under its name; a ``train.py`` under that of its directory, which is a project.
"""

import runpy
import sys
from pathlib import Path

directory, *scripts = sys.argv[1:]
for script in map(Path, scripts):
    name = script.parent.name if script.name == "train.py" else script.stem
    sys.argv = [str(script), f"{directory}/{name}.pt"]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
    sys.path.remove(str(script.parent))
    for module, loaded in list(sys.modules.items()):  # the next project has modules of the same names
        if Path(getattr(loaded, "__file__", None) or "/").parent == script.parent:
            del sys.modules[module]
