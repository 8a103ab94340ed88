"""The contract suite on every backend whose ranks are processes: one launch per world.

``pytest tests/contract`` runs it on single and on threads.
"""

from pathlib import Path

import pytest

from tests.support.worlds import BESIDE, run_suite, shown

#: mpi shares its backend with gloo, and has a suite of its own for one rank and for three. Of Horovod two ranks show
#: all; on MPI it has the same calls, which test_parity.py and test_matrix.py make.
WORLDS = [("torchrun", "gloo", 3), ("horovodrun", "horovod", 2), ("openmpi", "mpi", 2)]
#: Of the suite, what has to do with process groups, and with MPI. The rest uses the same calls.
GROUPS, CALLS = ["test_wrap_model.py", "test_replicate.py", "test_join.py"], ["test_collectives.py", "test_world.py"]
#: One rank; and beside torch's default process group, as the drop-in begins, which shows a second MPI library, too.
VARIANTS = [
    ("torchrun", "gloo", 1, CALLS + GROUPS, ""),
    ("torchrun", "gloo", 3, CALLS + GROUPS, "1"),
    ("mpich", "mpi", 2, CALLS, "1"),
]


@pytest.mark.parametrize(("launcher", "backend", "size"), WORLDS)
def test_contract(launcher: str, backend: str, size: int, tmp_path: Path) -> None:
    shown.setdefault("contract suite", []).append(run_suite("contract", launcher, size, backend, tmp_path))


@pytest.mark.variant
@pytest.mark.parametrize(("launcher", "backend", "size", "files", "beside"), VARIANTS)
def test_variants(launcher: str, backend: str, size: int, files: list[str], beside: str, tmp_path: Path) -> None:
    env = {BESIDE: beside, "UNIDIST_TIMEOUT": "60"}
    line = run_suite("contract", launcher, size, backend, tmp_path, env, files)
    shown.setdefault("contract suite", []).append(line + ", beside the default group" * bool(beside))
