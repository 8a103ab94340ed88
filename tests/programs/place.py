"""Print this rank's place as JSON, after a collective call, and the ports at which other hosts find the meeting point."""

import json
import os
import socket
import sys
from contextlib import suppress

import torch

import unidist
from unidist.backends import rendezvous

options = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
if "rank_from" in options:
    options["rank"] = int(os.environ[options.pop("rank_from")])
unidist.init(**options)
total = unidist.all_reduce(torch.tensor(unidist.rank())).item()
place = {
    name: getattr(unidist, name)()
    for name in ("rank", "world_size", "local_rank", "local_size", "node_rank", "num_nodes", "backend_name")
}
places = unidist.all_gather_object({**place, "sum": total})
if unidist.is_main():
    print("PLACES", json.dumps(places), flush=True)
    for store in rendezvous._stores.values():
        port = getattr(store, "port", None) or os.environ.get("MASTER_PORT", 0)
        with suppress(OSError):  # an address of this host, but not the one of the others here
            socket.create_connection(("127.0.0.2", int(port)), 5).close()
            print("OPEN TO OTHER HOSTS:", port, flush=True)
unidist.shutdown()
