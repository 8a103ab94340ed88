"""Peak memory of training, in a world of its own for each contender.

As a program (``python -m benchmarks.memory CONTENDER PASSES``) it is one rank of such a world.
"""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import psutil
import torch
from torch import nn

import unidist
from benchmarks.measure import OURS, Case
from unidist.launchers.table import unavailable
from unidist.launchers.world import run_world

#: Launcher, backend, and what is beside ``wrap_model``: the raw libraries' wrappers, and our other ones.
CONTENDERS = {
    "gloo": ("torchrun", ["DDP", "DDP bucket view", "replicate", "drop-in"]),
    "horovod": ("horovodrun", ["hvd", "replicate"]),
}
WIDTH, LAYERS = 2048, 12


def cases(rounds: int, quick: bool, ranks: Sequence[int], backends: Collection[str]) -> Iterator[Case]:
    """Yield the growth of a rank's resident memory while it trains a model of 192 MiB with momentum, with one backward
    pass a step and with two.
    """
    size = ranks[0] if ranks else 2
    for passes in (1,) if quick else (1, 2):
        ddp: list[float] = []
        for backend, (launcher, raw) in CONTENDERS.items():
            if backend not in backends or unavailable(launcher, backend, size):
                continue
            samples = {
                name: [_peak(launcher, backend, name, size, passes) for _ in range(1 if quick else rounds)]
                for name in [OURS, *raw[: 1 if quick else None]]
            }
            if ddp := samples.get("DDP", ddp):
                samples["DDP"] = ddp
            name = f"{backend} under {launcher}" + f", {passes} passes" * (passes > 1)
            yield Case("memory", "worlds of its own", name, samples, unit="B")


def _peak(launcher: str, backend: str, contender: str, ranks: int, passes: int) -> float:
    program = ["-m", "benchmarks.memory", contender, f"{passes}"]
    result = run_world(launcher, backend, ranks, program, timeout=300)
    found = [float(text) for text in re.findall(r"PEAK (\d+)", result.output)]
    if result.returncode or not found:
        raise RuntimeError(f"{contender} on {backend} under {launcher} failed:\n{result.output}")
    return max(found)


def _rank(contender: str, passes: int) -> None:
    unidist.init()
    unidist.all_reduce(torch.zeros(1))  # what the backend needs for itself is not counted
    before = psutil.Process().memory_info().rss
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    wrapped: nn.Module = model
    no_sync: Callable[[], AbstractContextManager[None]] = nullcontext
    if contender == OURS:
        wrapped = unidist.wrap_model(model)
        no_sync = partial(unidist.no_sync, wrapped)
    elif contender == "replicate":
        unidist.replicate(model)
        no_sync = partial(unidist.no_sync, model)
    elif contender in ("hvd", "drop-in"):
        if contender == "hvd":
            import horovod.torch as hvd
        else:
            from unidist import hvd
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=passes
        )
    else:
        view = contender == "DDP bucket view"
        wrapped = ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=view)
        no_sync = ddp.no_sync
    for _ in range(4):
        optimizer.zero_grad()
        for left in reversed(range(passes)):
            with no_sync() if left else nullcontext():
                wrapped(torch.ones(4, WIDTH)).sum().backward()
        optimizer.step()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    sys.stdout.write(f"PEAK {peak - before}\n")
    sys.stdout.flush()
    unidist.shutdown()


if __name__ == "__main__":
    _rank(sys.argv[1], int(sys.argv[2]))
