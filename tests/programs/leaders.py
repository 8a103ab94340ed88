"""The drop-in over several hosts, until one rank is killed or stops: ``leaders.py SIGKILL|SIGSTOP RANK``."""

import os
import random
import signal
import sys

import torch

import unidist.hvd as hvd
from unidist.hvd.session import current_session

kind, victim = sys.argv[1], int(sys.argv[2])
hvd.init()
rank, size = hvd.rank(), hvd.size()
draw = random.Random(rank)
some = [other for other in range(size) if other % 3 != 1]
process_set = hvd.add_process_set(some)
for step in range(12):
    names = [f"gradient.{i}" for i in range(30)]
    draw.shuffle(names)
    handles = [hvd.allreduce_async(torch.full((3000,), float(step)), name=name, op=hvd.Sum) for name in names]
    if rank in some:
        result = hvd.allreduce(torch.ones(3000), name="some", op=hvd.Sum, process_set=process_set)
        assert result[0].item() == len(some)
    if rank % 2:  # some wait at once, others do not
        total = hvd.allreduce(torch.ones(1), name="mixed", op=hvd.Sum)
    else:
        total = hvd.synchronize(hvd.allreduce_async(torch.ones(1), name="mixed", op=hvd.Sum))
    assert total.item() == size
    assert hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Max).item() == size - 1
    for handle in handles:
        assert hvd.synchronize(handle)[-1].item() == step * size
for turn in range(2):  # ranks that run out of data at different steps
    for _ in range((rank + turn) % size):
        hvd.allreduce(torch.ones(2000), name="uneven", op=hvd.Sum)
    hvd.join()
hvd.remove_process_set(process_set)
hvd.barrier()
print("TRAINED", len(current_session()._control._connections), flush=True)
if rank == victim:
    os.kill(os.getpid(), signal.Signals[kind])
try:
    while True:
        hvd.allreduce(torch.ones(3000), name="after")
except hvd.HorovodInternalError as error:
    print("RAISED", error, flush=True)
