"""``init()`` of the drop-in, or of unidist on Horovod, in which one rank stops, as by SIGSTOP, before a call:
``stopped_start.py CALL RANK``.
"""

import importlib
import os
import signal
import sys
import time
from typing import Any

import unidist
import unidist.hvd as hvd
from unidist.launch.topology import detect

where, victim = sys.argv[1], int(sys.argv[2])
rank = detect(os.environ).rank
module_name, name = where.rsplit(".", 1)
module = importlib.import_module(module_name)
call = getattr(module, name)


def stop(*arguments: Any, **more: Any) -> Any:
    if rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    return call(*arguments, **more)


setattr(module, name, stop)
begin = time.monotonic()
try:
    if module_name == "horovod.torch":
        unidist.init("horovod")
    else:
        hvd.init()
except BaseException as error:
    print(f"rank {rank} raised {type(error).__name__} after {time.monotonic() - begin:.1f} s: {error}", flush=True)
    raise SystemExit(1) from None
print(f"rank {rank} has begun", flush=True)
