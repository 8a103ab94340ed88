"""Run scripts of torch.distributed, and then migrated ones, in this world: ``run_ddp.py DIRECTORY SCRIPT ...``.

Each saves its weights in DIRECTORY, as with ``run_legacy.py``, and migrated ones in DIRECTORY/migrated. The others
share one process group: a process that makes one after another may hang in gloo (pytorch issue 117762).
"""

import os
import runpy
import sys
import time
from pathlib import Path

import torch.distributed as dist

directory, *scripts = sys.argv[1:]
init, destroy = dist.init_process_group, dist.destroy_process_group
if "RANK" in os.environ:
    dist.init_process_group("gloo")
dist.init_process_group = dist.destroy_process_group = lambda *args, **kwargs: None
for script in map(Path, scripts):
    name = script.parent.name if script.name == "train.py" else script.stem
    migrated = "import unidist" in "".join(path.read_text() for path in script.parent.glob("*.py"))
    if migrated and dist.init_process_group is not init:
        dist.init_process_group, dist.destroy_process_group = init, destroy
        if dist.is_initialized():
            dist.barrier()
            time.sleep(0.1)  # as in examples/digits_ddp.py
            dist.destroy_process_group()
    sys.argv = [str(script), f"{directory}/{'migrated/' * migrated}{name}.pt"]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
    if migrated:
        import unidist

        unidist.shutdown()
    sys.path.remove(str(script.parent))
    for module, loaded in list(sys.modules.items()):  # the next project has modules of the same names
        if Path(getattr(loaded, "__file__", None) or "/").parent == script.parent:
            del sys.modules[module]
