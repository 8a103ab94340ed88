"""The contract suite on every backend: one launch per world."""

from pathlib import Path

import pytest

from tests.support.worlds import BESIDE, run_suite, shown

#: One rank and three show all that two show. mpi shares its backend with gloo, and has a suite of its own for one rank
#: and for three. Of Horovod two ranks show all; on MPI it has the same calls, which test_parity.py and test_matrix.py
#: make.
WORLDS = [
    ("python", "single", 1),
    ("torchrun", "gloo", 1),
    ("torchrun", "gloo", 3),
    ("horovodrun", "horovod", 2),
    ("openmpi", "mpi", 2),
]
#: Beside torch's default process group, as the drop-in begins. A second MPI library is shown at two ranks.
#: Of the suite, what has to do with process groups, and with MPI. The rest uses the same calls.
GROUPS, CALLS = ["test_wrap_model.py", "test_replicate.py", "test_join.py"], ["test_collectives.py", "test_world.py"]
BESIDE_WORLDS = [("torchrun", "gloo", 3, CALLS + GROUPS), ("mpich", "mpi", 2, CALLS)]


@pytest.mark.parametrize(("launcher", "backend", "size"), WORLDS)
def test_contract(launcher: str, backend: str, size: int, tmp_path: Path) -> None:
    shown.setdefault("contract suite", []).append(run_suite("contract", launcher, size, backend, tmp_path))


@pytest.mark.parametrize(("launcher", "backend", "size", "files"), BESIDE_WORLDS)
def test_contract_beside_the_default_group(
    launcher: str, backend: str, size: int, files: list[str], tmp_path: Path
) -> None:
    env = {BESIDE: "1", "UNIDIST_TIMEOUT": "60"}
    line = run_suite("contract", launcher, size, backend, tmp_path, env, files)
    shown.setdefault("contract suite", []).append(f"{line}, beside the default group")
