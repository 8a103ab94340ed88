"""The drop-in for ``horovod.torch`` beside Horovod itself, in worlds of their own that take turns.

As a program (``python -m benchmarks.hvd unidist.hvd|horovod.torch TURNS``) it is one rank of such a world. Not both
in one world: each has threads that poll for work.
"""

from __future__ import annotations

import importlib
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import OURS, Case
from benchmarks.models import WORKLOADS, Workload
from benchmarks.step import training_step
from unidist.launchers.table import unavailable
from unidist.launchers.world import run_world

#: Launcher and backend of the drop-in, and the launcher of the Horovod beside it.
LAUNCHERS_OF = {"gloo": ("torchrun", "horovodrun"), "mpi": ("openmpi", "openmpi")}
#: Operations under way at once.
MANY = 1000


def cases(rounds: int, quick: bool, ranks: Sequence[int], backends: Collection[str]) -> Iterator[Case]:
    """Yield a training step of each model, a blocking allreduce of 4 bytes, and many named ones in random order."""
    size = ranks[0] if ranks else 2
    for backend, (launcher, horovods) in LAUNCHERS_OF.items():
        if backend not in backends or unavailable(launcher, backend, size) or unavailable(horovods, "horovod", size):
            continue
        contenders = {OURS: (launcher, "unidist.hvd"), "hvd": (horovods, "horovod.torch")}
        samples: dict[str, dict[str, list[float]]] = {}
        for turn in range(rounds):
            for name in random.Random(turn).sample(list(contenders), 2):
                for row, seconds in _world(*contenders[name], backend, size, 5 if quick else 15).items():
                    samples.setdefault(row, {}).setdefault(name, []).append(seconds)
        for row, figures in samples.items():
            yield Case("hvd", f"{backend} under {launcher}, hvd under {horovods}", row, figures)


def _world(launcher: str, module: str, backend: str, ranks: int, turns: int) -> dict[str, float]:
    result = run_world(launcher, backend, ranks, ["-m", "benchmarks.hvd", module, str(turns)], timeout=600)
    found = [line.split("HVD ")[1] for line in result.output.splitlines() if "HVD " in line]
    if result.returncode or not found:
        raise RuntimeError(f"{module} under {launcher} failed:\n{result.output}")
    figures: dict[str, float] = json.loads(found[0])
    return figures


def _rank(module: str, turns: int) -> None:
    hvd: Any = importlib.import_module(module)
    hvd.init()
    figures = {}
    for name, call in _calls(hvd):
        seconds = []
        for turn in range(turns + 3):
            hvd.barrier()
            start = time.perf_counter()
            call()
            if turn >= 3:
                seconds.append(time.perf_counter() - start)
        figures[name] = statistics.median(seconds)
    figures["allreduce 4 B"] /= 100
    if hvd.rank() == 0:
        # One write, so that the ranks' lines stay whole.
        sys.stdout.write(f"HVD {json.dumps(figures)}\n")
        sys.stdout.flush()
    hvd.barrier()
    hvd.shutdown()


def _calls(hvd: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    for name, workload in WORKLOADS.items():
        yield name, _step(hvd, workload)
    tensor = torch.zeros(1)

    def blocking() -> None:
        for _ in range(100):
            hvd.allreduce(tensor, name="bench", op=hvd.Sum)

    yield "allreduce 4 B", blocking
    tensors = [torch.zeros(4) for _ in range(MANY)]
    order = list(range(MANY))
    draw = random.Random(hvd.rank())

    def named() -> None:
        draw.shuffle(order)
        handles = [hvd.allreduce_async_(tensors[i], name=f"bench.{i}", op=hvd.Sum) for i in order]
        for handle in handles:
            hvd.synchronize(handle)

    yield f"{MANY} named allreduces", named


def _step(hvd: Any, workload: Workload) -> Callable[[], object]:
    torch.manual_seed(0)
    model = workload.make()
    plain = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    return training_step(model, optimizer, Tensor.backward, *workload.batch())


if __name__ == "__main__":
    _rank(sys.argv[1], int(sys.argv[2]))
