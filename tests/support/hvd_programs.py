"""Random programs of Horovod's calls, and what one rank computes with them.

As a program (``python -m tests.support.hvd_programs FILE DIRECTORY``) it is one rank: it runs the programs of ``FILE``
and writes its results to ``DIRECTORY``. Horovod or the drop-in, by the backend, see ``tests.hvd.api``.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

DTYPES = ["float32", "float64", "float16", "int32", "int64"]
KINDS = [
    "allreduce",
    "allreduce_",
    "grouped_allreduce",
    "allgather",
    "broadcast",
    "broadcast_",
    "alltoall",
    "reducescatter",
]


def operations(size: int) -> st.SearchStrategy[dict[str, Any]]:
    """One operation, as all ranks know it; ``set`` is an index into ``process_sets``."""
    return st.fixed_dictionaries(
        {
            "kind": st.sampled_from(KINDS),
            "dtype": st.sampled_from(DTYPES),
            "shape": st.lists(st.integers(0, 4), min_size=1, max_size=3),
            "op": st.sampled_from(["Average", "Sum", "Min", "Max", "Product"]),
            "prescale": st.sampled_from([1.0, 0.5, 2.0]),
            "postscale": st.sampled_from([1.0, 0.25]),
            "set": st.integers(0, len(process_sets(size)) - 1),
            "root": st.integers(0, size - 1),
            "uneven": st.booleans(),
        }
    )


def programs(size: int) -> st.SearchStrategy[list[Any]]:
    """Batches of operations that are under way at once, each rank beginning and waiting in an order of its own."""
    batch = st.tuples(st.lists(operations(size), min_size=1, max_size=8), st.integers(0, 10**6))
    return st.lists(batch, min_size=1, max_size=3)


def process_sets(size: int) -> list[list[int]]:
    """All ranks first."""
    return [list(range(size)), [0], [size - 1], [0, size - 1]][: 4 if size > 2 else 3]


def run(hvd: Any, programs: list[Any]) -> list[list[Any]]:
    """The results of each program on this rank."""
    sets = [hvd.global_process_set, *(hvd.add_process_set(ranks) for ranks in process_sets(hvd.size())[1:])]
    results = []
    for number, batches in enumerate(programs):
        found: list[Any] = []
        for turn, (batch, seed) in enumerate(batches):
            draw = random.Random(seed + hvd.rank())
            mine = [index for index, entry in enumerate(batch) if sets[entry["set"]].included()]
            draw.shuffle(mine)
            handles = {i: _start(hvd, batch[i], sets[batch[i]["set"]], f"{number}.{turn}.{i}", i) for i in mine}
            draw.shuffle(mine)
            got = {i: _plain(hvd.synchronize(handles[i])) for i in mine}
            found.append([got.get(index) for index in range(len(batch))])
        results.append(found)
    return results


def _start(hvd: Any, entry: dict[str, Any], process_set: Any, name: str, seed: int) -> int:
    kind, dtype = entry["kind"], getattr(torch, entry["dtype"])
    members, rank = process_set.ranks, hvd.rank()
    shape = list(entry["shape"])
    if kind == "allgather" and entry["uneven"]:
        shape[0] += rank
    splits = None
    if kind == "alltoall":
        splits = [(rank + other + seed) % 3 for other in members] if entry["uneven"] else [shape[0]] * len(members)
        shape[0] = sum(splits)
    draw = torch.Generator().manual_seed(seed * 100 + rank)
    tensor = torch.randint(-4, 5, shape, generator=draw).to(dtype)
    common = {"name": name, "process_set": process_set}
    factors = {"prescale_factor": entry["prescale"], "postscale_factor": entry["postscale"]}
    root = members[entry["root"] % len(members)]
    op = getattr(hvd, entry["op"])
    handle: int
    if kind in ("allreduce", "allreduce_"):
        call = hvd.allreduce_async if kind == "allreduce" else hvd.allreduce_async_
        handle = call(tensor, op=op, **common, **factors)
    elif kind == "grouped_allreduce":
        handle = hvd.grouped_allreduce_async([tensor, tensor + 1], op=op, **common, **factors)
    elif kind == "allgather":
        handle = hvd.allgather_async(tensor, **common)
    elif kind in ("broadcast", "broadcast_"):
        call = hvd.broadcast_async if kind == "broadcast" else hvd.broadcast_async_
        handle = call(tensor, root, **common)
    elif kind == "alltoall":
        handle = hvd.alltoall_async(tensor, torch.tensor(splits, dtype=torch.int32), **common)
    else:
        handle = hvd.reducescatter_async(
            tensor, op=hvd.Sum if entry["op"] == "Sum" else hvd.Average, **common, **factors
        )
    return handle


def _plain(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return [str(result.dtype), list(result.shape), result.double().reshape(-1).tolist()]
    return [_plain(part) for part in result]


if __name__ == "__main__":
    from tests.hvd.api import hvd

    hvd.init()
    results = run(hvd, json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2], f"{hvd.rank()}.json").write_text(json.dumps(results))
    hvd.barrier()
    hvd.shutdown()
