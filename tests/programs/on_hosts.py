"""A world over several hosts: ``on_hosts.py default | hvd``."""

import json
import sys

import torch

import unidist
import unidist.hvd as hvd
from unidist.network.addresses import listen_address, this_host

how = sys.argv[1]
if how == "default":
    unidist.init()
else:
    hvd.init()
    assert hvd.allreduce(torch.ones(3000), op=hvd.Sum)[0] == hvd.size()
assert unidist.all_reduce(torch.ones(3)).tolist() == [unidist.world_size()] * 3
hosts = unidist.all_gather_object(this_host())
place = unidist.local_rank(), unidist.local_size(), unidist.node_rank(), unidist.num_nodes()
print("SLOT", json.dumps([*place, listen_address(this_host(), hosts)]), flush=True)
unidist.shutdown()
