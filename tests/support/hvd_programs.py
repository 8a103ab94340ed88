"""Random programs of Horovod's calls, and what one rank computes with them.

As a program (``python -m tests.support.hvd_programs FILE TRAININGS DIRECTORY``) it is one rank: it runs the programs of
``FILE`` and a number of trainings, and writes its results to ``DIRECTORY``. Horovod or the drop-in, by the backend, see
``tests.hvd.api``.
"""

from __future__ import annotations

import json
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

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


# ------------------------------------------------------------------------------------ optimizers
OPTIMIZERS = [
    ("SGD", {}), ("SGD", {"momentum": 0.9}), ("SGD", {"momentum": 0.9, "nesterov": True}), ("Adam", {}), ("AdamW", {}),
    ("RMSprop", {}), ("Adagrad", {}),
]  # fmt: skip
#: What happens between steps, or instead of one.
EVENTS = [
    "step", "step", "step", "synchronize", "clip", "scale", "freeze", "unfreeze", "lr", "zeros", "none", "state",
    "one rank", "all ranks", "no backward", "group", "schedule", "add", "broadcast",
]  # fmt: skip


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.extra = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, extra: bool) -> torch.Tensor:
        y = self.b(torch.tanh(self.a(x)))
        return y + self.extra(x) if extra else y  # type: ignore[no-any-return]


def train(hvd: Any, seed: int) -> list[Any]:
    """A random use of ``DistributedOptimizer``: gradients and weights after each event; and the error that ended it."""
    draw, data = random.Random(seed), torch.Generator().manual_seed(100 * seed + hvd.rank())
    torch.manual_seed(seed)
    model = Model()
    if draw.random() < 0.3:
        draw.choice([model.a, model.extra]).requires_grad_(False)
    name, options = draw.choice(OPTIMIZERS)
    optimizer = getattr(torch.optim, name)(model.parameters(), 0.05, weight_decay=draw.choice([0, 0.1]), **options)
    op, passes = draw.choice([hvd.Average, hvd.Average, hvd.Sum]), draw.choice([1, 1, 2, 3])
    groups = draw.choice([None, None, None, 2, [list(model.b.parameters())]])
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=draw.choice([None, list(model.named_parameters())]),
        backward_passes_per_step=passes,
        op=op,
        gradient_predivide_factor=draw.choice([1.0, 2.0]) if op == hvd.Average else 1.0,
        groups=groups,
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    found: list[Any] = []
    try:
        for _ in range(draw.randint(3, 12)):
            event, layer = draw.choice(EVENTS), draw.choice([model.a, model.b])
            if event == "one rank" and groups is not None:  # with which Horovod waits for ever
                event = "all ranks"
            _happen(hvd, event, model, layer, optimizer, schedule, draw.random())
            if event in ("freeze", "unfreeze", "state", "group", "broadcast", "no backward"):
                continue
            for _ in range(passes):
                x, y = torch.randn(3, 4, generator=data), torch.randint(0, 3, (3,), generator=data)
                extra = event == "all ranks" or (event == "one rank" and hvd.rank() == 0)
                F.cross_entropy(model(x, extra), y).backward()
            if event in ("synchronize", "clip", "scale"):
                optimizer.synchronize()
                if event == "clip":
                    nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                elif event == "scale":
                    for param in layer.parameters():
                        param.grad.mul_(0.5)
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
            found.append([_plain(param.grad) for param in model.parameters() if param.grad is not None])
            found.append([_plain(param.detach()) for param in model.parameters()])
    except Exception as error:
        found.append(type(error).__name__)
    return found


def _happen(hvd: Any, event: str, model: Model, layer: nn.Linear, optimizer: Any, schedule: Any, number: float) -> None:
    if event in ("freeze", "unfreeze"):
        layer.requires_grad_(event == "unfreeze")
    elif event == "state":
        optimizer.load_state_dict(optimizer.state_dict())
    elif event == "group":
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    elif event == "broadcast":
        hvd.broadcast_optimizer_state(optimizer, 0)
    elif event == "zeros":
        model.zero_grad(set_to_none=False)
    elif event == "none":
        for param in layer.parameters():
            param.grad = None
    elif event != "add":  # to the gradients of the step before
        optimizer.zero_grad()
    if event == "no backward":
        optimizer.step()
    elif event == "lr":
        for group in optimizer.param_groups:
            group["lr"] = 0.01 + 0.1 * number
    elif event == "schedule":
        schedule.step()


if __name__ == "__main__":
    from tests.hvd.api import hvd

    warnings.simplefilter("ignore")
    hvd.init()
    programs = json.loads(Path(sys.argv[1]).read_text())
    results = {"programs": run(hvd, programs), "trainings": [train(hvd, seed) for seed in range(int(sys.argv[2]))]}
    Path(sys.argv[3], f"{hvd.rank()}.json").write_text(json.dumps(results))
    hvd.barrier()
    hvd.shutdown()
