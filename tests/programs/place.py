"""Print every rank's place in the world as JSON: ``place.py [INIT OPTIONS AS JSON] | place.py SCRIPT.py ARGS...``.

With a script, that runs first, as it stands, and the world is the one that it started. Also prints the ports at which
other hosts reach the rendezvous.
"""

import json
import os
import runpy
import socket
import sys
from contextlib import suppress

import torch

import unidist
from unidist import context
from unidist.backends import rendezvous

NAMES = ("rank", "world_size", "local_rank", "local_size", "node_rank", "num_nodes", "backend_name")
arguments = sys.argv[1:]
if arguments and arguments[0].endswith(".py"):
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")
else:
    options = json.loads(arguments[0]) if arguments else {}
    if "rank_from" in options:
        options["rank"] = int(os.environ[options.pop("rank_from")])
    unidist.init(**options)
total = unidist.all_reduce(torch.tensor(unidist.rank())).item()
place = {name: getattr(unidist, name)() for name in NAMES}
places = unidist.all_gather_object({**place, "launcher": context.current().topology.launcher, "sum": total})
if unidist.is_main():
    print("PLACES", json.dumps(places), flush=True)
    for store in rendezvous._stores.values():
        port = getattr(store, "port", None) or os.environ.get("MASTER_PORT", 0)
        with suppress(OSError):  # an address of this host, but not the one of the others here
            socket.create_connection(("127.0.0.2", int(port)), 5).close()
            print("OPEN TO OTHER HOSTS:", port, flush=True)
unidist.shutdown()
