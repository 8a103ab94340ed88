"""Where each rank stands, by Horovod's calls: ``uneven_hosts.py horovod.torch | unidist.hvd``."""

import importlib
import sys

import torch

import unidist

hvd = importlib.import_module(sys.argv[1])
hvd.init()
unidist.init(backend="horovod" if sys.argv[1] == "horovod.torch" else "auto")
place = [hvd.rank(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]
place += [unidist.node_rank(), unidist.num_nodes()]
rows = hvd.allgather(torch.tensor([place]), name="places")
if hvd.rank() == 0:
    print("PLACES", rows.tolist(), flush=True)
