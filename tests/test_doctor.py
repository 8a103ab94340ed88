"""``unidist doctor``."""

import json
import shutil
import subprocess
from itertools import product
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from docs import tables
from tests.support.worlds import PYTHON, ROOT, environment, mpich_for_mpi4py, run_world, shown, with_torch
from tests.test_topology import HOROVODRUN_MPI
from unidist.cli import checkup, main
from unidist.cli.doctor import attempt, reason
from unidist.launch.topology import LAUNCHERS
from unidist.launchers.table import BACKENDS, COMMANDS, known_launchers


def doctor(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [PYTHON, "-m", "unidist", "doctor", *argv]
    whole = environment("python", {"COLUMNS": "80", **with_torch(), **env})
    return subprocess.run(command, cwd=ROOT, env=whole, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("columns", ["80", "120"])
def test_one_screen(columns: str) -> None:
    done = doctor(COLUMNS=columns)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= int(columns)
    for subject in (
        "torch",
        "Horovod",
        "MPI",
        "mpi4py",
        "GPU",
        "launchers",
        "launched by",
        "network",
        "ports",
        "cores",
    ):
        assert any(line.strip().startswith(subject) for line in lines), subject
    assert "0.28.1 for torch 2." in done.stdout and "gloo, mpi" in done.stdout


def test_run(tmp_path: Path) -> None:
    """Every launcher with every backend, on a machine that has no MPI and no Slurm."""
    for name in ("env", "sh"):  # horovodrun starts the ranks through them
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    done = doctor("--run", "--json", PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    pairs = json.loads(done.stdout)["pairs"]
    assert [(pair["launcher"], pair["backend"]) for pair in pairs] == list(product(COMMANDS, BACKENDS))
    for pair in pairs:
        command = COMMANDS[pair["launcher"]]
        shown.setdefault("doctor --run, without MPI and Slurm", []).append(
            f"{pair['launcher']:18} {pair['backend']:8} {pair['state']:5} {pair['text']}"
        )
        expected = "none"
        if pair["backend"] == "mpi" and not command.mpi:
            assert "needs its own launchers: horovodrun-mpi, openmpi, mpich" in pair["text"], pair
        elif pair["backend"] == "horovod" and command.drop_in:
            assert "horovod is the drop-in there" in pair["text"], pair
        elif command.programs:
            assert f"{command.programs[-1]} is not on PATH" in pair["text"], pair
        elif pair["backend"] == "nccl" and torch.cuda.device_count() < 2:
            assert pair["text"] == f"2 ranks on nccl need 2 GPUs, {torch.cuda.device_count()} are visible"
        else:
            expected = "ok"
        assert pair["state"] == expected, pair


def test_need_sets_the_exit_status(srun_env: dict[str, str]) -> None:
    needed = [("horovod", "openmpi"), ("mpi", "mpich"), ("gloo", "slurm")]
    options = [option for backend, launcher in needed for option in ("--need", f"{backend}@{launcher}")]
    done = doctor(*options, "--json", LD_LIBRARY_PATH=str(mpich_for_mpi4py()), **srun_env)
    assert done.returncode == 0, done.stdout
    pairs = json.loads(done.stdout)["pairs"]
    assert [(pair["backend"], pair["launcher"], pair["state"]) for pair in pairs] == [(*pair, "ok") for pair in needed]
    broken = doctor("--need", "gloo", GLOO_SOCKET_IFNAME="nosuch0", COLUMNS="200")
    assert broken.returncode == 1 and "GLOO_SOCKET_IFNAME=nosuch0, but no such interface is up" in broken.stdout
    if torch.cuda.device_count() < 2:
        none = doctor("--need", "nccl", COLUMNS="200")
        assert none.returncode == 1 and "nccl need 2 GPUs" in none.stdout


@pytest.mark.unit
def test_names_are_checked() -> None:
    for pair, message in (
        ("gloo@ssh", "'ssh' is not a launcher: use one of torchrun, spawn (unidist.spawn), unidist-run"),
        ("gloo@mpirun", "'mpirun' is not a launcher: use one of"),
        ("tcp", "'tcp' is not a backend: use one of gloo, nccl, mpi, horovod"),
    ):
        result = CliRunner().invoke(main, ["doctor", "--need", pair])
        assert result.exit_code == 2 and message in " ".join(result.output.split()), result.output
    assert {"openmpi (mpirun)", "mpich (mpiexec)", "slurm (srun)"} <= set(known_launchers().split(", "))


def test_a_world_without_a_library_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's MPICH as it comes: mpi4py's wheel does not find its library."""
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    finding = attempt("mpich", "horovod")
    assert finding.state == "error" and "libmpi.so.12" in finding.text, finding


def test_under_a_launcher_it_tells_what_a_rank_sees() -> None:
    result = run_world("openmpi", 1, ["-m", "unidist", "doctor", "--json"])
    report = json.loads(result.output[result.output.index("{") : result.output.rindex("}") + 1])
    texts = [finding["text"] for finding in report["findings"] if finding["subject"] == "launched by"]
    assert texts[0].startswith("openmpi: rank 0 of 1 (OMPI_COMM_WORLD_RANK=0")


CHECKS = {
    "launched by": checkup.here, "backend": checkup.here, "timeout": checkup.here,
    "network": checkup.network, "ports": checkup.network, "cores": checkup.limits,
}  # fmt: skip


def found(env: dict[str, str], subject: str) -> list[tuple[str, str, str]]:
    return [(f.state, f.text, f.remedy) for f in CHECKS[subject](env) if f.subject == subject]


SRUN = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "29500",
}  # fmt: skip


@pytest.mark.unit
@pytest.mark.parametrize(
    ("env", "state", "text"),
    [
        ({}, "ok", "no launcher"),
        ({"RANK": "abc", "WORLD_SIZE": "2"}, "error", "RANK='abc'"),
        (TORCHRUN, "ok", "torchrun: rank 1 of 2 (RANK=1 WORLD_SIZE=2)"),
        ({**TORCHRUN, "LOCAL_RANK": "0"}, "warning", "--virtual-local-rank"),
        ({**TORCHRUN, "OMPI_COMM_WORLD_RANK": "0"}, "ok", "variables of openmpi are set too"),
        (
            HOROVODRUN_MPI,
            "ok",
            "horovodrun-mpi: rank 1 of 6 (OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=6 OMPI_MCA_pml=ob1",
        ),
        ({"SLURM_JOB_ID": "7"}, "warning", "one process"),
    ],
)
def test_where_this_process_stands(env: dict[str, str], state: str, text: str) -> None:
    assert any(s == state and text in t for s, t, _ in found(env, "launched by")), found(env, "launched by")


@pytest.mark.unit
@pytest.mark.parametrize(
    ("env", "subject", "state", "text"),
    [
        ({"UNIDIST_BACKEND": "nonsense"}, "backend", "error", "UNIDIST_BACKEND=nonsense is unknown"),
        ({"UNIDIST_BACKEND": "horovod"}, "backend", "error", "needs a launcher"),
        ({"UNIDIST_TIMEOUT": "soon"}, "timeout", "error", "UNIDIST_TIMEOUT='soon'"),
        ({"OMP_NUM_THREADS": "abc"}, "cores", "warning", "not a number"),
        ({"OMP_NUM_THREADS": "4096"}, "cores", "warning", "not a number from 1 to"),
        ({"NCCL_SOCKET_IFNAME": "=lo"}, "network", "ok", "NCCL_SOCKET_IFNAME==lo"),
        ({"NCCL_SOCKET_IFNAME": "nosuch,mlx"}, "network", "error", "no such interface"),
        ({"MASTER_PORT": "0"}, "ports", "error", "MASTER_PORT=0 is not a TCP port"),
        ({**SRUN, "SLURM_STEP_RESV_PORTS": "12001-12003"}, "ports", "ok", "12001 (of this launch) is"),
        ({**SRUN, "MASTER_PORT": "12004"}, "ports", "ok", "12004 (of this launch) is"),
        ({**TORCHRUN, "SLURM_JOB_ID": "7"}, "launched by", "ok", "torchrun: rank 1 of 2"),
    ],
)
def test_settings(env: dict[str, str], subject: str, state: str, text: str) -> None:
    assert any(s == state and text in t for s, t, _ in found(env, subject)), found(env, subject)
    assert not any("one process" in t for _, t, _ in found(env, "launched by")) or "RANK" not in env


@pytest.mark.unit
def test_warnings() -> None:
    assert found({}, "cores")[0][0] == "warning" and "OMP_NUM_THREADS is not set" in found({}, "cores")[0][1]
    assert found({"OMP_NUM_THREADS": "1"}, "cores")[0][0] == "ok"
    assert found({"MASTER_PORT": "http"}, "ports") == [
        ("error", "MASTER_PORT=http is not a TCP port", "use a free one from 1024 to 65535")
    ]


def test_a_horovod_for_another_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "built_for_torch", lambda: "2.0.1")
    (finding,) = checkup.horovod()
    assert finding.state == "warning" and "built for torch 2.0.1" in finding.text
    assert finding.remedy == "unidist build-horovod --install"


@pytest.mark.unit
def test_a_launcher_has_one_name() -> None:
    """A world is started by the name that its ranks detect."""
    assert COMMANDS.keys() <= {launcher.name for launcher in LAUNCHERS}
    assert all(f"| `{name}` | `{command.typed}` |" in tables.launchers() for name, command in COMMANDS.items())


@pytest.mark.unit
def test_reason_is_the_line_that_helps() -> None:
    trace = '[rank0]: Traceback\n[rank0]:   File "x"\n[rank0]: OSError: first\n'
    assert reason(trace + "unidist.errors.BackendError: do this\nW0 noise") == "BackendError: do this"
    assert reason("[1,0]<stderr>:ImportError: no") == "ImportError: no"
    assert reason("srun: error: nothing there") == "srun: error: nothing there"
    assert reason("") == ""
