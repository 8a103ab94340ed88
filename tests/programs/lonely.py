"""Start a backend the wrong way, so that each process is alone, and then unidist: ``lonely.py horovod|torch``."""

import os
import sys

import unidist

if sys.argv[1] == "horovod":
    import horovod.torch as hvd

    hvd.init()
else:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
os.environ.pop("UNIDIST_BACKEND", None)
unidist.init()
print("went on in a lonely world")
