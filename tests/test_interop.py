"""Scripts of other libraries, unmodified, under every launcher: the world and the weights that torchrun gives them."""

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name

import pytest

from tests.support.weights import distance
from tests.support.worlds import PYTHON, ROOT, environment, run_world, shown

#: Scripts in tests/interop, with what they import. `make test` has the first four, `make test-interop` all.
SCRIPTS = {
    "ddp": "torch", "fsdp2": "torch", "accelerate": "accelerate", "fabric": "lightning_fabric",
    "trainer": "transformers", "deepspeed": "deepspeed",
}  # fmt: skip
LIBRARIES = [name for name, module in SCRIPTS.items() if find_spec(module)]
LAUNCHERS = ["horovodrun", "openmpi", "mpich", "slurm", "unidist-run", "ray", "spark"]
#: Those that set torchrun's variables themselves.
LIKE_TORCHRUN = ("unidist-run", "ray", "spark")


@pytest.fixture(scope="module")
def under_torchrun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("torchrun")
    train("torchrun", [], directory, {"ACCELERATE_USE_CPU": "true"})  # torchrun does not set it
    return directory


def train(launcher: str, options: list[str], directory: Path, env: dict[str, str]) -> None:
    first = LAUNCHERS.index(launcher) if launcher in LAUNCHERS else 0  # it meets at the exported port
    names = [*LIBRARIES[first:], *LIBRARIES[:first]]
    argv = [*options, "tests/interop/one_after_the_other.py", launcher, str(directory), *names]
    result = run_world(launcher, 2, argv, env={"PYTHONPATH": str(ROOT), **env})
    assert result.returncode == 0, result.output
    for name in LIBRARIES:
        assert sorted(re.findall(rf"WORLD {name} (\d+) (\d+)", result.output)) == [("0", "2"), ("1", "2")], name


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_scripts_of_other_libraries(
    launcher: str, under_torchrun: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    env = request.getfixturevalue("srun_env") if launcher == "slurm" else {}
    if launcher in LIKE_TORCHRUN:
        train(launcher, [], tmp_path, {"ACCELERATE_USE_CPU": "true"})
    else:
        train(launcher, ["-m", "unidist"], tmp_path, env)
    for name in LIBRARIES:
        far = [distance(under_torchrun / file, tmp_path / file) for file in (f"{name}.pt", f"{name}_unidist.pt")]
        assert max(far) < 1e-6, (name, far)
        line = f"{launcher:12} {name:12} {far[0]:.0e}, unidist inside {far[1]:.0e}"
        shown.setdefault("other libraries: distance of the weights to those under torchrun", []).append(line)


def test_init_exports_the_world() -> None:
    result = run_world("openmpi", 2, ["tests/interop/export_env.py"], env={"PYTHONPATH": str(ROOT)})
    assert result.returncode == 0 and result.output.count("EXPORTED") == 2, result.output
    warning = "accelerate finds its world by torchrun's variables, which openmpi does not set"
    assert result.output.count(warning) == 1, result.output  # by rank 0


@pytest.mark.parametrize("how", ["sys.exit(3)", "raise ValueError('on purpose')"])
def test_a_rank_that_fails_in_a_script_ends_the_job(how: str, tmp_path: Path) -> None:
    """MPI, which the ranks have met by, does not wait for it."""
    script = tmp_path / "fails.py"
    script.write_text(
        "import sys, time, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        f"if dist.get_rank() == 1:\n    {how}\n"
        "time.sleep(100)\n"
    )
    result = run_world("openmpi", 2, ["-m", "unidist", str(script)])
    assert result.returncode == (3 if "exit" in how else 1), result.output
    assert "exit" in how or "ValueError: on purpose" in result.output


def test_what_is_a_script_and_what_a_command(tmp_path: Path) -> None:
    code = "import os, sys; print('RAN', sys.argv, __name__, os.path.basename(sys.path[0]), 'RANK' in os.environ)"
    (tmp_path / "here").mkdir()
    for name in ("train", "bench", "here/train.py"):
        (tmp_path / name).write_text(code)
    env = environment("python", {"PYTHONPATH": str(ROOT)})
    for argv, status, said in [
        (["here/train.py", "--help"], 0, "RAN ['here/train.py', '--help'] __main__ here False"),
        (["train", "-m"], 0, f"RAN ['train', '-m'] __main__ {tmp_path.name} False"),
        (["-m", "here.train"], 0, f"train.py'] __main__ {tmp_path.name} False"),
        (["bench", "--help"], 0, "Usage: unidist bench"),  # a command wins
        (["trian"], 2, "'trian' is neither a file nor a command: run, "),
        (["-m", "trian"], 1, "there is no module 'trian'"),
    ]:
        command = [PYTHON, "-m", "unidist", *argv]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
        assert done.returncode == status and said in done.stdout + done.stderr, (argv, done)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the libraries
def test_the_names_of_the_page_are_those_of_the_libraries() -> None:
    libraries = [["accelerate", "accelerate.Accelerator"], ["ignite.distributed", "ignite.handlers"],
                 ["lightning_fabric", "lightning_fabric.Fabric"]]  # fmt: skip
    table = (ROOT / "docs/interop.md").read_text().split("| Accelerate | ignite.distributed")[1].split("\n\n")[0]
    for row in table.splitlines()[2:]:
        for cell, places in zip(row.split("|")[1:], libraries):
            for name in re.findall(r"`(?:accelerator\.|fabric\.|idist\.)?(\w+)", cell):
                assert name == "loss" or any(hasattr(resolve_name(place), name) for place in places), name


@pytest.mark.skipif(not find_spec("ray"), reason="Ray is not installed: pip install 'ray[default,train]'")
def test_inside_ray_train() -> None:
    env = {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local"}  # and not the cluster of another test
    result = run_world("python", 1, ["tests/interop/in_ray_train.py"], env=env, timeout=300)
    assert result.returncode == 0 and "FITTED" in result.output, result.output
