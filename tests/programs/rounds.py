"""Rounds of init and shutdown; prints what is left after the first ones and after all, as JSON. The arguments: their
number, and a backend.
"""

import gc
import json
import os
import sys
import threading
import time

import torch

import unidist
from unidist.backends.base import Backend
from unidist.diagnosis.watch.watch import Watch

hook = sys.excepthook


def left() -> dict[str, object]:
    end = time.monotonic() + 10  # MPI's progress thread ends when nothing is pending
    while any(each.name == "unidist-mpi" for each in threading.enumerate()) and time.monotonic() < end:
        time.sleep(0.01)
    gc.collect()
    kinds = [type(each) for each in gc.get_objects()]
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": sorted(each.name for each in threading.enumerate()),
        "backends": sum(issubclass(kind, (Backend, Watch)) for kind in kinds),
        "hook": sys.excepthook is hook,
    }


counts = []
for number in range(int(sys.argv[1])):
    unidist.init(sys.argv[2], timeout=60)
    assert unidist.all_reduce(torch.ones(2)).tolist() == [2.0, 2.0]
    unidist.all_gather_object(number)
    unidist.shutdown()
    if number in (2, int(sys.argv[1]) - 1):
        counts.append(left())
print(json.dumps(counts))
