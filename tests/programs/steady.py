"""Calls of unidist, of the drop-in or of Horovod until a file is there; each result is checked. The first argument is
the file, the second what to call: a backend, or hvd.
"""

import sys
import time
from pathlib import Path

import torch

import unidist

stop, what = Path(sys.argv[1]), sys.argv[2]
if what == "hvd":
    import unidist.hvd as hvd

    hvd.init()
    rank, size, reduce = hvd.rank(), hvd.size(), lambda x: hvd.allreduce(x, op=hvd.Sum)
else:
    unidist.init(what, timeout=60)
    rank, size, reduce = unidist.rank(), unidist.world_size(), lambda x: unidist.all_reduce(x, "sum")
print("up", flush=True)
steps = 0
is_over = torch.zeros(1)
while not is_over.item():
    for length in (3, 10_000):
        assert torch.equal(reduce(torch.full((length,), rank + 1.0)), torch.full((length,), size * (size + 1) / 2))
    is_over = reduce(torch.tensor([float(stop.exists())]))
    steps += 1
    time.sleep(0.01)
print(f"steps {steps}", flush=True)
unidist.hvd.shutdown() if what == "hvd" else unidist.shutdown()
