"""What needs a GPU: ``make test-gpu``. nccl at as many ranks as there are GPUs; gloo and mpi at 2 ranks that share
one.
"""

import os
import subprocess
from pathlib import Path

import pytest
import torch

from tests.support.parity import CASES
from tests.support.worlds import ROOT, environment, missing, run_suite, run_world, shown
from tests.test_hvd import DYNAMIC
from tests.test_parity import BETWEEN_BACKENDS, distance
from unidist.launchers.table import command_line

if not torch.cuda.is_available():
    pytest.skip("these tests need a GPU: make test-gpu", allow_module_level=True)

GPUS = torch.cuda.device_count()
#: CUBLAS_WORKSPACE_CONFIG makes matrix products deterministic, for comparisons.
ON_CUDA = {"UNIDIST_TEST_DEVICE": "cuda", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
WORLDS = [("torchrun", "nccl", GPUS), ("torchrun", "gloo", 2), ("openmpi", "mpi", 2)]


def _check(launcher: str) -> None:
    assert "CUDA_LAUNCH_BLOCKING" not in os.environ, "it would hide missing waits between streams"
    if why := missing(launcher):
        pytest.skip(why)


@pytest.mark.parametrize(("launcher", "backend", "size"), WORLDS)
def test_cuda_tensors(launcher: str, backend: str, size: int, tmp_path: Path) -> None:
    """Collectives, streams and training, all on CUDA tensors."""
    _check(launcher)
    line = run_suite("gpu", launcher, size, backend, tmp_path, ON_CUDA)
    shown.setdefault(f"GPU suite, {GPUS} GPUs", []).append(line)


@pytest.mark.parametrize("suite", ["contract", "hvd"])
def test_suites_on_nccl(suite: str, tmp_path: Path) -> None:
    """The suites of every backend: their CPU tensors go through gloo, beside NCCL."""
    line = run_suite(suite, "torchrun", GPUS, "nccl", tmp_path, DYNAMIC)
    shown.setdefault(f"GPU suite, {GPUS} GPUs", []).append(f"{suite}: {line}")


def test_parity(tmp_path: Path) -> None:
    """The final weights of every way to train, on CUDA, beside one process on one GPU."""
    single = tmp_path / "single.pt"
    weights = {}
    size = max(size for size in (1, 2, 3) if size <= GPUS)
    worlds = [("python", "single", 1), ("torchrun", "nccl", size), ("torchrun", "gloo", 2), ("openmpi", "mpi", 2)]
    for launcher, backend, ranks in worlds:
        if why := missing(launcher):
            shown.setdefault("parity on CUDA", []).append(f"{backend}: skipped, {why}")
            continue
        path = single if backend == "single" else tmp_path / f"{backend}.pt"
        argv = ["-m", "tests.support.parity", str(path)]
        argv = ["-m", "mpi4py", *argv] if backend == "mpi" else argv
        result = run_world(launcher, ranks, argv, backend=backend, env=ON_CUDA, timeout=600)
        assert result.returncode == 0, result.output
        weights[backend] = torch.load(path, map_location="cpu")
    for name in CASES:
        reference = "gloo" if name in BETWEEN_BACKENDS else "single"
        for backend in weights.keys() - {reference, "single"}:
            if name in BETWEEN_BACKENDS and backend == "nccl" and size != 2:
                continue  # each rank normalises its own part: another number of ranks, other weights
            far = distance(weights[backend][name], weights[reference][name])
            shown.setdefault("parity on CUDA", []).append(f"{name:47} {backend:5} {far:.0e}")
            assert far <= 1e-5, (name, backend, far)


def test_digits() -> None:
    result = run_world("torchrun", GPUS, ["examples/digits.py", "--epochs", "2"], backend="nccl")
    assert result.returncode == 0 and "epoch 2/2" in result.output, result.output


def test_bench_of_steps() -> None:
    """unidist's step beside raw DDP's; the figures are printed, not judged."""
    command = command_line("torchrun", GPUS, ["-m", "unidist", "bench", "step", "--quick"])
    env = {**environment("torchrun", {"UNIDIST_BACKEND": "nccl"}), "COLUMNS": "160"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    shown.setdefault("bench step on nccl", []).extend(done.stdout.splitlines())
