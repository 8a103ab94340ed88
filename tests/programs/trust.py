"""What a rank opens to others, as JSON: the addresses on which it listens, and the values of the store that have the
job's secret in them. The first argument is another version of unidist that rank 1 takes itself for.
"""

import json
import sys

import psutil

import unidist
from unidist.backends import rendezvous
from unidist.context import current
from unidist.launch.topology import detect

if sys.argv[1:] and detect({**__import__("os").environ}).rank == 1:
    unidist.__version__ = sys.argv[1]

import unidist.hvd as hvd

unidist.init("gloo", timeout=60)
hvd.init()
hvd.allreduce(__import__("torch").ones(2))
secret = current().secret
assert len(secret) == 32 and unidist.all_gather_object(secret) == [secret] * unidist.world_size()
(store,) = rendezvous._stores.values()
while hasattr(store, "underlying_store"):
    store = store.underlying_store
values = {key: store.get(key) for key in store.list_keys()}
listening = [each.laddr.ip for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN]
leaking = [key for key, value in values.items() if secret in value or secret.hex().encode() in value]
unidist.barrier()
print(json.dumps({"keys": len(values), "listening": sorted(set(listening)), "leaking": leaking}))
hvd.shutdown()
unidist.shutdown()
