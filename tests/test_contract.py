"""The contract suite on every engine, at 1, 2 and 3 ranks: one launch per world."""

import json
from pathlib import Path

import pytest
import torch

from tests.worlds import IN_WORLD, run_world, shown

ENGINES = [
    ("torchrun", "gloo"), ("horovodrun --gloo", "horovod"), ("mpirun", "horovod"), ("mpirun", "mpi"), ("mpiexec (MPICH)", "mpi")
]  # fmt: skip
WORLDS = [("python", "single", 1), *((launcher, backend, size) for size in (1, 2, 3) for launcher, backend in ENGINES)]
WORLDS += [("torchrun", "nccl", size) for size in (1, 2)]


@pytest.mark.parametrize(("launcher", "backend", "size"), WORLDS)
def test_contract(launcher: str, backend: str, size: int, tmp_path: Path) -> None:
    gpus = torch.cuda.device_count()
    if backend == "nccl" and gpus < size:
        pytest.skip(f"nccl at {size} ranks needs {size} GPUs, {gpus} are visible")
    suite = ["-m", "pytest", "tests/contract", "-q", "--color=no", "-p", "no:cacheprovider"]
    # An MPI rank that fails must take the others with it.
    argv = ["-m", "mpi4py", *suite] if launcher in ("mpirun", "mpiexec (MPICH)") else suite
    result = run_world(launcher, size, argv, backend=backend, env={IN_WORLD: str(tmp_path)}, timeout=300)
    assert result.returncode == 0, result.output
    verdicts = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size)]
    assert all(verdict == verdicts[0] for verdict in verdicts) and verdicts[0]["passed"] > 100, verdicts
    counts = ", ".join(f"{count} {outcome}" for outcome, count in verdicts[0].items())
    line = f"{backend:8} {launcher:18} {size} ranks: {counts} on each, {result.seconds:.0f} s"
    shown.setdefault("contract suite", []).append(line)
