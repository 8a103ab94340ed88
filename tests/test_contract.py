"""The contract suite on every engine, at 1, 2 and 3 ranks: one launch per world."""

from pathlib import Path

import pytest
import torch

from tests.worlds import run_suite, shown

ENGINES = [
    ("torchrun", "gloo"),
    ("horovodrun --gloo", "horovod"),
    ("mpirun", "horovod"),
    ("mpirun", "mpi"),
    ("mpiexec (MPICH)", "mpi"),
]
WORLDS = [("python", "single", 1), *((launcher, backend, size) for size in (1, 2, 3) for launcher, backend in ENGINES)]
for again in (("mpiexec (MPICH)", "mpi", 1), ("mpirun", "horovod", 1)):  # one rank calls nobody, in any library
    WORLDS.remove(again)
WORLDS += [("torchrun", "nccl", size) for size in (1, 2)]


@pytest.mark.parametrize(("launcher", "backend", "size"), WORLDS)
def test_contract(launcher: str, backend: str, size: int, tmp_path: Path) -> None:
    gpus = torch.cuda.device_count()
    if backend == "nccl" and gpus < size:
        pytest.skip(f"nccl at {size} ranks needs {size} GPUs, {gpus} are visible")
    shown.setdefault("contract suite", []).append(run_suite("contract", launcher, size, backend, tmp_path))
