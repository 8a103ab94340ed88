"""The contract suite on every engine, at 1, 2 and 3 ranks: one launch per world."""

from pathlib import Path

import pytest
import torch

from tests.support.worlds import run_suite, shown

ENGINES = [
    ("torchrun", "gloo"),
    ("horovodrun", "horovod"),
    ("openmpi", "horovod"),
    ("openmpi", "mpi"),
    ("mpich", "mpi"),
]
WORLDS = [("python", "single", 1), *((launcher, backend, size) for size in (1, 2, 3) for launcher, backend in ENGINES)]
for launcher, backend in (("mpich", "mpi"), ("openmpi", "horovod")):
    # One rank calls nobody, and three ranks show nothing of a library that the other has not.
    WORLDS = [world for world in WORLDS if world not in ((launcher, backend, 1), (launcher, backend, 3))]
WORLDS += [("torchrun", "nccl", size) for size in (1, 2)]


@pytest.mark.parametrize(("launcher", "backend", "size"), WORLDS)
def test_contract(launcher: str, backend: str, size: int, tmp_path: Path) -> None:
    gpus = torch.cuda.device_count()
    if backend == "nccl" and gpus < size:
        pytest.skip(f"nccl at {size} ranks needs {size} GPUs, {gpus} are visible")
    shown.setdefault("contract suite", []).append(run_suite("contract", launcher, size, backend, tmp_path))
