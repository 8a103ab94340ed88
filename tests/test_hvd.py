"""``unidist.hvd`` beside Horovod itself: one suite, random programs and unmodified scripts on both."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import unidist.hvd
from docs import tables
from tests.support import hvd_programs, migrate_scripts
from tests.support.weights import distance
from tests.support.worlds import LEGACY, PROJECTS, PYTHON, ROOT, Result, load, run_suite, run_world, shown
from unidist import horovod_names
from unidist.hvd.execution import scale_
from unidist.hvd.names import directory

#: Launcher and backend: Horovod on Gloo and on MPI, the drop-in on gloo and on MPI.
HOROVOD = [("horovodrun", "horovod"), ("openmpi", "horovod")]
DROP_IN = [("torchrun", "gloo"), ("openmpi", "mpi")]
DYNAMIC = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1", "HOROVOD_TIMELINE": "DYNAMIC"}


# One rank and three show all that two show; a second controller and a second backend are shown at two.
SUITES = [(*how, size) for how in (HOROVOD[0], DROP_IN[0]) for size in (1, 3)]
SUITES += [(*how, 2) for how in (HOROVOD[1], DROP_IN[1])]


@pytest.mark.parametrize(("launcher", "backend", "size"), SUITES)
def test_one_suite_for_both(launcher: str, backend: str, size: int, tmp_path: Path) -> None:
    line = run_suite("hvd", launcher, size, backend, tmp_path, DYNAMIC)
    shown.setdefault("Horovod and the drop-in: one suite", []).append(line)


def drawn(strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
    """``count`` draws of hypothesis, the same in every run."""
    found: list[Any] = []

    @seed(1)
    @settings(max_examples=count, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found[:count]


def test_random_programs(tmp_path: Path) -> None:
    """The same results to the last rounding, whatever the order in which each rank begins and waits."""
    size, count, trainings = 3, 120, 60
    programs = drawn(hvd_programs.programs(size), count)
    assert len(programs) == count
    (tmp_path / "programs.json").write_text(json.dumps(programs))
    results = {}
    for launcher, backend in [HOROVOD[0], *DROP_IN]:
        directory = tmp_path / f"{backend} {launcher}"
        directory.mkdir()
        argv = ["-m", "tests.support.hvd_programs", str(tmp_path / "programs.json"), str(trainings), str(directory)]
        result = run_world(launcher, size, argv, backend=backend, env=DYNAMIC, timeout=300)
        assert result.returncode == 0, result.output
        results[backend] = [json.loads((directory / f"{rank}.json").read_text()) for rank in range(size)]
    operations, far = 0, 0.0
    for backend in ("gloo", "mpi"):
        for rank in range(size):
            ours, horovods = results[backend][rank], results["horovod"][rank]
            for number, (mine, theirs) in enumerate(zip(ours["programs"], horovods["programs"])):
                which = f"program {number} on rank {rank}, {backend}"
                operations += same(mine, theirs, which, programs[number])
            apart = [*map(migrate_scripts.distance, ours["trainings"], horovods["trainings"])]
            assert len(apart) == trainings
            assert max(apart) < 1e-5, f"training {apart.index(max(apart))} on rank {rank}, {backend}: {apart}"
            far = max(far, *apart)
    assert operations > 4 * count
    shown.setdefault("random programs", []).append(
        f"{len(programs)} programs at {size} ranks: {operations} results equal those of Horovod; {trainings} random "
        f"uses of an optimizer: gradients and weights {far:.0e} from Horovod's"
    )


def same(mine: list[Any], theirs: list[Any], which: str, program: Any) -> int:
    """How many results were compared."""
    count = 0
    for batch, (ours, others) in enumerate(zip(mine, theirs)):
        assert len(ours) == len(others)
        for index, (a, b) in enumerate(zip(ours, others)):
            what = f"{which}: {program[batch][0][index]}: {a} instead of {b}"
            assert (a is None) == (b is None), what
            if a is not None:
                count += 1
                _same_tensor(a, b, what)
    return count


def _same_tensor(a: Any, b: Any, what: str) -> None:
    if not isinstance(a[0], str):  # several tensors
        assert len(a) == len(b), what
        for x, y in zip(a, b):
            _same_tensor(x, y, what)
        return
    assert a[:2] == b[:2], what
    exact = {"torch.float16": 2e-3, "torch.float32": 1e-6, "torch.float64": 1e-6}.get(a[0], 0.0)
    assert a[2] == pytest.approx(b[2], rel=exact, abs=exact), what


#: Horovod counts unnamed operations: where ranks make different numbers of calls comes last.
@pytest.mark.parametrize(("launcher", "backend"), DROP_IN)
def test_unmodified_scripts(launcher: str, backend: str, legacy_under_horovod: Path, tmp_path: Path) -> None:
    """The same weights under Horovod and, with no line changed, on the drop-in."""
    argv = ["-m", "unidist.hvd", "tests/programs/run_legacy.py", str(tmp_path), *map(str, [*PROJECTS, *LEGACY])]
    result = run_world(launcher, 2, argv, backend=backend)
    assert result.returncode == 0, result.output
    for name in [*(path.parent.name for path in PROJECTS), *(path.stem for path in LEGACY)]:
        far = distance(legacy_under_horovod / f"{name}.pt", tmp_path / f"{name}.pt")
        line = f"{name:32} on {backend}: {far:.0e}"
        shown.setdefault("unmodified scripts: distance of the weights to those under Horovod", []).append(line)
        assert far < 1e-6, line


@pytest.fixture(scope="module")
def digits_under_horovod(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of examples/digits_horovod.py after two epochs under Horovod."""
    path = tmp_path_factory.mktemp("digits") / "horovod.pt"
    argv = ["examples/digits_horovod.py", "--epochs", "2", "--save", str(path)]
    result = run_world("horovodrun", 2, argv, backend="horovod")
    assert result.returncode == 0 and "epoch 2/2" in result.output, result.output
    return path


@pytest.mark.parametrize(
    ("launcher", "backend", "argv", "path"),
    [
        ("torchrun", "gloo", ["examples/digits_horovod.py"], ""),
        ("openmpi", "mpi", ["-m", "digits_horovod"], f"{ROOT}:{ROOT / 'examples'}"),
    ],
    ids=["file", "module"],
)
def test_the_raw_example_unmodified(
    launcher: str,
    backend: str,
    argv: list[str],
    path: str,
    digits_under_horovod: Path,
    tmp_path: Path,
) -> None:
    """digits_horovod.py, as a file and as a module, beside Horovod."""
    saved = tmp_path / "digits.pt"
    argv = ["-m", "unidist.hvd", *argv, "--epochs", "2", "--save", str(saved)]
    result = run_world(launcher, 2, argv, backend=backend, env={"PYTHONPATH": path} if path else {})
    assert result.returncode == 0 and "epoch 2/2" in result.output, result.output
    weights = torch.load(saved)
    for key, value in torch.load(digits_under_horovod).items():
        assert torch.allclose(weights[key], value, atol=1e-6), key


def drop_in(code: str, ranks: int = 1, launcher: str = "torchrun", **env: str) -> Result:
    """Run lines as a script of a user's, on the drop-in."""
    with tempfile.TemporaryDirectory() as directory:  # from which it imports
        script = Path(directory, "script.py")
        script.write_text(textwrap.dedent(code))
        return run_world(launcher, ranks, ["-m", "unidist.hvd", str(script)], backend="gloo", env=env)


@pytest.mark.unit
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
def test_averages_of_whole_numbers_are_exact_on_any_number_of_ranks(dtype: torch.dtype) -> None:
    for size in range(1, 200):  # the product of 49 and 1 / 49 is below 1
        sums = torch.tensor([size, 0, size - 1], dtype=dtype)
        assert scale_(sums, 1.0, size).tolist() == [1, 0, 0], size
    assert scale_(torch.tensor([2**62, -7]), 1.0, 2).tolist() == [2**61, -3]
    assert scale_(torch.tensor([98, -98]), 0.5, 49).tolist() == [1, -1]


def test_horovods_launcher_is_unidist_run() -> None:
    command = [PYTHON, "-m", "horovod.runner.launch", "-np", "2", "--dry-run", "a.py"]
    result = subprocess.run(command, env={**os.environ, "PYTHONPATH": directory()}, capture_output=True, text=True)
    assert result.returncode == 0 and "a.py" in result.stdout and "rank" in result.stdout, result


def test_every_way_to_import() -> None:
    result = drop_in(
        """
        import sys, importlib, os
        import horovod, torch
        import horovod.torch as one
        from horovod import torch as two
        three = importlib.import_module("horovod.torch")
        from horovod.torch.mpi_ops import rank
        from horovod.torch.compression import Compression
        from horovod.torch.functions import broadcast_object
        from horovod.torch.optimizer import DistributedOptimizer
        from horovod.torch.sync_batch_norm import SyncBatchNorm
        import horovod.torch.elastic
        from horovod.common.util import split_list, num_rank_is_power_2
        from horovod.common.exceptions import HorovodInternalError
        from horovod.common.process_sets import ProcessSet
        from horovod.common.basics import HorovodBasics
        from horovod.common.util import _cache, get_average_backwards_compatibility_fun
        from horovod.torch.mpi_ops import _basics
        from horovod.torch.optimizer import _DistributedOptimizer
        from horovod.runner.util.threads import in_thread
        import horovod.runner
        from horovod.runner.launch import run_commandline
        from horovod import run
        import unidist.hvd
        assert one is two is three is unidist.hvd and horovod.__version__ == "0.28.1"
        assert rank is one.rank and one.Compression is Compression and one.ProcessSet is ProcessSet
        assert horovod.torch.optimizer.DistributedOptimizer is DistributedOptimizer is one.DistributedOptimizer
        assert one.HorovodInternalError is HorovodInternalError and horovod.run is run
        assert split_list([1, 2, 3], 2) == [[1, 2], [3]] and num_rank_is_power_2(4) and not num_rank_is_power_2(3)
        try:
            _basics.rank()
        except ValueError as error:
            assert "Horovod has not been initialized; use hvd.init()." in str(error)
        else:
            raise SystemExit("a rank before init()")
        assert isinstance(_basics, HorovodBasics) and HorovodBasics(one.__file__, "mpi_lib_v2").Sum == one.Sum
        assert get_average_backwards_compatibility_fun(_basics)(None, False) == one.Sum
        calls = []
        twice = _cache(lambda x: calls.append(x) or 2 * x)
        assert twice(3) == twice(3) == 6 and calls == [3] and horovod.runner.run is run
        in_thread(calls.append, (4,)).join()
        in_thread(lambda: 1 / 0, silent=True).join()
        assert calls == [3, 4]
        for missing in ("horovod.tensorflow", "horovod.torch.nothing"):
            try:
                importlib.import_module(missing)
            except ModuleNotFoundError as error:
                assert missing in str(error)
            else:
                raise SystemExit(missing)
        from horovod.common.elastic import ObjectState, State, run_fn
        from horovod.torch.elastic import ElasticSampler, TorchState
        from horovod.torch.elastic.sampler import ElasticSampler as same_sampler
        from horovod.torch.elastic.state import TorchState as same_state
        assert TorchState is same_state is one.elastic.TorchState and ElasticSampler is same_sampler
        assert issubclass(ObjectState, object) and one.elastic.run and run_fn
        assert {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")} == {
            "HOROVOD_RANK": "0", "HOROVOD_SIZE": "1", "HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "1",
            "HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "1",
        }
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
        one.init()
        wrapped = one.DistributedOptimizer(optimizer, named_parameters=[("w", optimizer.param_groups[0]["params"][0])])
        # How Lightning tells a wrapped optimizer, and how copies of Horovod's functions do.
        assert "horovod" in str(wrapped.__class__) and "horovod" not in str(optimizer.__class__)
        assert wrapped.__module__ == DistributedOptimizer.__module__ and isinstance(wrapped, _DistributedOptimizer)
        assert list(wrapped._parameter_names.values()) == ["w"]
        print("ALL FOUND", one.size(), sys.argv[1:], __name__)
        """
    )
    assert result.returncode == 0 and "ALL FOUND 1 [] __main__" in result.output, result.output


def test_only_the_runner_takes_horovods_name() -> None:
    code = "import unidist.hvd, sys; assert not any(name.split('.')[0] == 'horovod' for name in sys.modules)"
    assert run_world("python", 1, ["-c", code]).returncode == 0
    code = "import horovod; from unidist.hvd import alias; alias.install()"
    refused = run_world("python", 1, ["-c", code])
    assert refused.returncode != 0 and "before that" in refused.output
    # Where the drop-in's directory is on PYTHONPATH, every program finds it, and what that starts.
    code = (
        "import horovod.torch.optimizer as one, horovod, subprocess, sys\n"
        "assert one.__name__ == 'unidist.hvd.optimizer' and horovod.__version__ == '0.28.1'\n"
        "subprocess.run([sys.executable, '-c', 'from horovod.torch import mpi_ops; print(mpi_ops)'], check=True)\n"
    )
    found = run_world("python", 1, ["-c", code], env={"PYTHONPATH": f"{unidist.hvd.names.directory()}:{ROOT}"})
    assert found.returncode == 0 and "<module 'unidist.hvd.mpi_ops'" in found.output, found.output
    for argv in ([], ["nothing.py"]):
        done = run_world("python", 1, ["-m", "unidist.hvd", *argv])
        assert done.returncode != 0 and "usage: python -m unidist.hvd" in done.output


def test_without_a_launcher_and_without_horovod() -> None:
    """A world of one process; Horovod's own import would fail."""
    code = (
        "import sys; sys.modules['horovod'] = None\n"
        "import torch, unidist.hvd as hvd\n"
        "hvd.init(); print('ALONE', hvd.size(), hvd.allreduce_(torch.ones(1)).item(), hvd.join())"
    )
    result = run_world("python", 1, ["-c", code])
    assert result.returncode == 0 and "ALONE 1 1.0 0" in result.output, result.output


def test_under_the_alias_horovod_is_refused_as_the_backend() -> None:
    argv = ["-m", "unidist.hvd", "tests/legacy/plain.py", "unused"]
    result = run_world("python", 1, argv, backend="horovod")
    assert result.returncode != 0 and "in this process `horovod` means the drop-in" in result.output


@pytest.mark.parametrize(("launcher", "backend"), [("torchrun", "gloo"), ("openmpi", "mpi"), ("horovodrun", "horovod")])
def test_in_the_world_of_unidist_init(launcher: str, backend: str) -> None:
    """Without ``hvd.init()``, mixed with unidist's own calls, on every backend."""
    result = run_world(launcher, 2, ["tests/programs/hvd_in_unidist.py"], backend=backend)
    assert result.returncode == 0 and result.output.count("MIXED") == 2, result.output


@pytest.mark.parametrize("end", ["raise SystemExit(3)", "raise ValueError('broken')", "import os; os._exit(3)"])
def test_a_rank_that_fails_takes_the_others_along(end: str) -> None:
    result = drop_in(
        f"""
        import os, signal, torch, horovod.torch as hvd
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun would end rank 0 before it has said anything
        hvd.init()
        hvd.allreduce(torch.ones(1))
        if hvd.rank() == 1:
            {end}
        try:
            hvd.allreduce(torch.ones(1), name="after")
        except hvd.HorovodInternalError as error:
            os.write(1, ("TOLD: %s\\n" % error).encode())
            raise
        """,
        ranks=2,
    )
    assert result.returncode != 0 and result.seconds < 30 * load(), result.output
    message = re.search(r"TOLD: allreduce.after: rank 1 (\(host \S+\) is gone|has shut down)", result.output)
    assert message or "ValueError: broken" in result.output, result.output


def test_a_rank_that_leaves_is_told_to_those_who_have_joined() -> None:
    result = drop_in(
        """
        import os, torch, horovod.torch as hvd
        hvd.init()
        hvd.allreduce(torch.ones(1))
        if hvd.rank() == 0:
            try:
                hvd.join()
            except hvd.HorovodInternalError as error:
                os.write(1, f"TOLD: {error}".encode())
        """,
        ranks=2,
    )
    assert result.returncode == 0 and re.search(
        r"TOLD: join: rank 1 (\(host \S+\) is gone|has shut down)", result.output
    ), result.output


@pytest.mark.parametrize(("launcher", "backend"), DROP_IN)
def test_an_optimizer_in_a_second_session(launcher: str, backend: str, tmp_path: Path) -> None:
    script = tmp_path / "again.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch, horovod.torch as hvd
            hvd.init()
            model = torch.nn.Linear(2, 1)
            hvd.broadcast_parameters(model.state_dict(), 0)
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
            def train(steps):
                for _ in range(steps):
                    optimizer.zero_grad()
                    model(torch.ones(1, 2) * (hvd.rank() + 1)).sum().backward()
                    optimizer.step()
            train(2)
            hvd.shutdown()
            hvd.init()
            train(3 + hvd.rank())
            hvd.join()
            print("DONE", flush=True)
            """
        )
    )
    result = run_world(launcher, 2, ["-m", "unidist.hvd", str(script)], backend=backend)
    assert result.returncode == 0 and result.output.count("DONE") == 2, result.output


def test_operations_that_nobody_waits_for_at_the_end() -> None:
    code = """
        import torch, horovod.torch as hvd
        hvd.init()
        handles = [hvd.allreduce_async_(torch.ones(10**6), name=str(i)) for i in range(20)]
        hvd.barrier()  # all ranks have submitted all of them, and leave
        """
    for _ in range(2):
        result = drop_in(code, ranks=2)
        assert result.returncode == 0, result.output


def test_a_message_that_cannot_be_read_ends_the_session_on_all_ranks() -> None:
    result = drop_in(
        """
        import os, torch, horovod.torch as hvd
        from unidist.network.connection import frame
        from unidist.hvd.session import current_session
        hvd.init()
        hvd.allreduce(torch.ones(1))
        if hvd.rank() == 1:
            current_session()._control._connections[0].send(frame(b"\\xff"))
        try:
            while True:
                hvd.allreduce(torch.ones(1), name="after")
        except hvd.HorovodInternalError as error:
            os.write(1, ("TOLD: %s\\n" % error).encode())
        """,
        ranks=3,
    )
    why = r"TOLD: allreduce.after: rank 1 \(host \S+\) has sent a message that cannot be read: ValueError"
    assert len(re.findall(why.replace("ValueError", ""), result.output)) >= 2, result.output


def test_stalls_are_reported_with_names_and_ranks() -> None:
    result = drop_in(
        """
        import logging, os, time, torch, horovod.torch as hvd
        logging.basicConfig(level=logging.WARNING)
        hvd.init()
        if hvd.rank() != 2:
            try:
                hvd.allreduce(torch.ones(1), name="lonely")
            except hvd.HorovodInternalError as error:
                os.write(1, f"TOLD: {error}\\n".encode())
        else:
            time.sleep(6)
        """,
        ranks=3,
        HOROVOD_STALL_CHECK_TIME_SECONDS="1",
        HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="3",
    )
    assert (
        "stalled: allreduce.lonely has waited" in result.output and "for ranks 2; ranks 0, 1 are ready" in result.output
    ), result.output
    # 3 s; on a busy machine the coordinator looks later.
    told = re.findall(
        r"TOLD: allreduce.lonely: ranks 2 did not submit allreduce.lonely within ([3-5]) s, which ranks 0, 1 did",
        result.output,
    )
    assert len(told) == 2, result.output


def test_timeline(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    result = drop_in(
        """
        import os, torch, horovod.torch as hvd
        hvd.init()
        hvd.allreduce(torch.ones(1), name="metric")
        model = torch.nn.Linear(2, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        hvd.stop_timeline()
        hvd.start_timeline(os.environ["SECOND"], mark_cycles=True)
        hvd.broadcast(torch.ones(1), 0, name="later")
        hvd.shutdown()
        """,
        ranks=2,
        HOROVOD_TIMELINE=str(path),
        SECOND=str(tmp_path / "second.json"),
    )
    assert result.returncode == 0, result.output
    events = json.loads(path.read_text())
    rows = {event["args"]["name"]: event["pid"] for event in events if event["ph"] == "M"}
    of_metric = [event for event in events if event["pid"] == rows["allreduce.metric"] and event["ph"] != "M"]
    assert [event["ph"] for event in of_metric] == ["B", "E", "B", "E"]
    assert [event["name"] for event in of_metric if event["ph"] == "B"] == ["NEGOTIATE_ALLREDUCE", "ALLREDUCE"]
    assert [event["ts"] for event in of_metric] == sorted(event["ts"] for event in of_metric)
    assert "DistributedOptimizer.0.0.bucket.0" in rows
    second = json.loads((tmp_path / "second.json").read_text())
    assert {"NEGOTIATE_BROADCAST", "BROADCAST", "CYCLE_START"} <= {event.get("name") for event in second}


@pytest.mark.parametrize("as_module", [False, True], ids=["file", "module"])
def test_run(as_module: bool, tmp_path: Path) -> None:
    """Its processes import the script, and find the drop-in there."""
    code = """
        import os
        if __package__:
            from .part import THREE
            assert THREE == 3
        import horovod, torch
        import horovod.torch as hvd

        def work(base, power=1):
            try:
                hvd.rank()
            except ValueError as error:
                assert "use hvd.init()" in str(error)
            else:
                raise AssertionError("a rank before init()")
            hvd.init()
            assert hvd.__name__ == "unidist.hvd" and os.environ["HOROVOD_RANK"] == str(hvd.rank())
            return hvd.allreduce(torch.tensor([float(base + hvd.rank())]), op=hvd.Sum).item() ** power

        if __name__ == "__main__":
            print("RAN", horovod.run(work, args=(10,), kwargs={"power": 2}, np=2))
            try:
                horovod.run(work, hosts="elsewhere:2", np=2)
            except NotImplementedError as error:
                print("REFUSED", error)
        """
    (tmp_path / "package").mkdir()
    (tmp_path / "package/part.py").write_text("THREE = 3")
    path = tmp_path / "package/work.py"
    path.write_text(textwrap.dedent(code))
    argv = ["-m", "package.work"] if as_module else [str(path)]
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}"} if as_module else {}
    result = run_world("python", 1, ["-m", "unidist.hvd", *argv], backend="gloo", env=env)
    assert "RAN [441.0, 441.0]" in result.output and "REFUSED run(hosts='elsewhere:2')" in result.output, result.output


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_loader_workers_find_the_drop_in(method: str) -> None:
    result = drop_in(
        f"""
        import torch
        import horovod.torch as hvd

        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 6
            def __getitem__(self, index):
                import horovod.torch as mine
                return mine.__name__ == "unidist.hvd" and mine.Sum == 1

        if __name__ == "__main__":
            hvd.init()
            loader = torch.utils.data.DataLoader(Data(), 2, num_workers=2, multiprocessing_context="{method}")
            assert all(bool(batch.all()) for batch in loader)
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
            print("LOADED", flush=True)
        """,
        ranks=2,
    )
    assert result.returncode == 0 and result.output.count("LOADED") == 2, result.output


def test_init_again_after_shutdown() -> None:
    result = drop_in(
        """
        import torch, horovod.torch as hvd
        for turn in range(3):
            hvd.init(process_sets=[hvd.ProcessSet([0])])
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
            assert len(hvd.global_process_set.ranks) == 2
            hvd.shutdown()
            assert not hvd.is_initialized()
        print("THRICE")
        """,
        ranks=2,
    )
    assert result.returncode == 0 and result.output.count("THRICE") == 2, result.output


@pytest.mark.unit
def test_the_suite_calls_every_public_name() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "tests/hvd").glob("*.py"))
    missing = [name for name in unidist.hvd.__all__ if not re.search(rf"hvd\.{name}\b", sources)]
    # Some are asked for by a name in a list.
    assert not [name for name in missing if f'"{name}"' not in sources], missing


def test_every_public_name_and_signature() -> None:
    """Names, parameters and defaults are Horovod's, and each name is on the page of names."""
    code = (
        "import json; from tests.support import hvd_names as names; "
        "print('METHODS', json.dumps(names.compare_methods())); print('NAMES', json.dumps(names.compare()))"
    )
    result = run_world("python", 1, ["-W", "ignore", "-c", code])
    assert result.returncode == 0, result.output
    rows = json.loads(result.output.split("NAMES ")[1].splitlines()[0])
    methods = json.loads(result.output.split("METHODS ")[1].splitlines()[0])
    wrong = [row for row in [*rows, *methods] if row[1] not in ("same", "more", "other")]
    assert not wrong, wrong
    page = tables.hvd_names()
    assert not [
        name for name, verdict, why in rows if verdict == "same" and why != "module" and f"| `{name}` |" not in page
    ]


@pytest.mark.unit
def test_processes_that_are_started_find_the_drop_in_before_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/with/horovod")
    monkeypatch.setattr(sys, "path", ["", "/with/horovod", directory()])
    horovod_names.export_directory()
    assert sys.path == ["", directory(), "/with/horovod"]
    assert os.environ["PYTHONPATH"] == os.pathsep.join([directory(), "/with/horovod"])
