"""Print this rank's place as JSON, after a collective call."""

import json
import sys

import torch

import unidist

options = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
if "rank_from" in options:
    import os

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
unidist.shutdown()
