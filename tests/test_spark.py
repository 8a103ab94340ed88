"""``unidist.spark`` on real Spark: ``local[4]``, and a cluster of two executors on this host."""

import inspect
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.programs.spark_train import train
from tests.support import documents
from tests.support.hosts import command_lines
from tests.support.worlds import ROOT, environment, load, run_world
from unidist.errors import UnidistError

if not find_spec("pyspark"):
    pytest.skip("pyspark is not installed: pip install pyspark", allow_module_level=True)
if not shutil.which("java"):
    pytest.skip("java is not on PATH: apt-get install default-jre-headless", allow_module_level=True)

import unidist.spark
from unidist.spark.sparkdl import HorovodRunner

# What pyspark itself does: sockets of py4j, and pandas 3.
pytestmark = [
    pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning"),
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    from pyspark.sql import SparkSession

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("OMP_NUM_THREADS", "1")
        builder = SparkSession.builder.master("local[4]").config("spark.ui.enabled", False)
        session = builder.config("spark.ui.showConsoleProgress", False).getOrCreate()
        yield session
        session.stop()


def no_rank_is_left() -> None:
    end = time.monotonic() + 15 * load()
    while left := command_lines(r"(^| )unidist\.spark\.rank( |$)"):
        assert time.monotonic() < end, left
        time.sleep(0.1)


# ------------------------------------------------------------------------------------ what ranks get
@pytest.mark.parametrize("ranks", [2, 4])
def test_trains_as_under_torchrun(spark: Any, ranks: int, tmp_path: Path) -> None:
    argv = ["-m", "unidist.hvd", "tests/programs/spark_train.py", str(tmp_path / "weights")]
    result = run_world("torchrun", ranks, argv)
    assert result.returncode == 0, result.output
    under_torchrun = torch.load(tmp_path / "weights")
    found = unidist.spark.run(train, (10,), num_proc=ranks)
    assert [rank for rank, _ in found] == list(range(ranks))
    for _, weights in found:
        for name, expected in under_torchrun.items():
            assert float((weights[name] - expected).abs().max()) < 1e-5


def test_the_world_the_environment_and_the_output(spark: Any) -> None:
    secret = threading.get_native_id()  # of a closure

    def look(word: str, *, name: str) -> tuple[Any, ...]:
        import horovod.torch as hvd

        import unidist

        unidist.init()
        hvd.init()
        print(word, unidist.rank())
        print("to stderr", file=sys.stderr)
        place = unidist.rank(), unidist.local_rank(), unidist.local_size(), unidist.node_rank(), unidist.num_nodes()
        return secret, os.environ[name], os.environ["HOROVOD_RANK"], hvd.size(), place

    stdout, stderr = io.StringIO(), io.StringIO()
    found = unidist.spark.run(
        look, ("ready",), {"name": "MINE"}, 2, env={"MINE": "yes"}, stdout=stdout, stderr=stderr,
        prefix_output_with_timestamp=False,
    )  # fmt: skip
    assert found == [(secret, "yes", str(rank), 2, (rank, rank, 2, 0, 1)) for rank in range(2)]
    assert sorted(stdout.getvalue().splitlines()) == ["[0]<stdout>:ready 0", "[1]<stdout>:ready 1"]
    assert {"[0]<stderr>:to stderr", "[1]<stderr>:to stderr"} <= set(stderr.getvalue().splitlines())


# ------------------------------------------------------------------------------------ failures
def fail(how: str) -> None:
    import signal

    import horovod.torch as hvd

    hvd.init()
    if hvd.rank() == 1:
        if how == "raise":
            raise ValueError("no luck")
        print("why", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.allreduce(torch.ones(1))
    time.sleep(600)


@pytest.mark.parametrize(
    "how, expected",
    [
        ("raise", "(?s)rank 1 of 2 .* failed first:.*in fail\n.*ValueError: no luck"),
        ("kill", "(?s)rank 1 .* by SIGKILL. .*why$"),
    ],
)
def test_a_rank_that_fails_ends_the_others_and_is_named(spark: Any, how: str, expected: str) -> None:
    with pytest.raises(UnidistError, match=expected):
        unidist.spark.run(fail, (how,), num_proc=2, verbose=0)
    no_rank_is_left()


def test_what_cannot_be_sent_is_named(spark: Any) -> None:
    lock = threading.Lock()

    def locked() -> bool:
        return lock.locked()

    with pytest.raises(UnidistError, match=r"cannot send the function .*locked to the executors: .*lock"):
        unidist.spark.run(locked, num_proc=2)
    with pytest.raises(UnidistError, match="cannot send argument 1 of lock to"):
        unidist.spark.run(train, (1, lock), num_proc=2)
    with pytest.raises(UnidistError, match="cannot send argument other= of lock to"):
        unidist.spark.run(train, kwargs={"other": lock}, num_proc=2)


def test_another_python(spark: Any) -> None:
    options: Any = {"env": {"ONE": 1}, "executable": "/no/python"}
    with pytest.raises(UnidistError, match="failed first: /no/python cannot be started: No such file"):
        unidist.spark.run(train, (1,), num_proc=2, **options)


def test_a_stream_that_cannot_be_written(spark: Any) -> None:
    closed = io.StringIO()
    closed.close()
    with pytest.raises(UnidistError, match=r"what the ranks print cannot be written .* closed file"):
        unidist.spark.run(announce, ("hello",), num_proc=2, stdout=closed)
    no_rank_is_left()


def test_too_few_slots(spark: Any) -> None:
    start = time.monotonic()
    with pytest.raises(UnidistError, match=r"num_proc=5\) needs 5 slots at once, and the cluster .* has 4: pass"):
        unidist.spark.run(train, (1,), num_proc=5)
    with pytest.raises(ValueError, match=r"num_proc=0.* is not a number of processes from 1 up"):
        unidist.spark.run(train, (1,), num_proc=0)
    with pytest.raises(ValueError, match="from 0 to 2 processes is not a range"):
        unidist.spark.run_elastic(train, (1,), num_proc=2, min_num_proc=0)
    assert time.monotonic() - start < 30 * load()  # and not the time in which slots may come


def test_no_session() -> None:
    code = "import unidist.spark; unidist.spark.run(print)"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "found no SparkContext in this process" in done.stderr


def test_slots_that_others_have(spark: Any, tmp_path: Path) -> None:
    """The tasks do not start in time, or a signal ends the driver meanwhile."""

    def work(number: int) -> None:
        (tmp_path / f"{number}").touch()
        while not (tmp_path / "end").exists():
            time.sleep(0.1)

    def end_when_submitted() -> None:
        while len(status.getActiveJobsIds()) < 2:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGUSR1)

    status = spark.sparkContext.statusTracker()
    others = threading.Thread(target=lambda: spark.sparkContext.range(4, numSlices=4).foreach(work))
    others.start()
    handler = signal.signal(signal.SIGUSR1, lambda *_: sys.exit("ended by a signal"))
    try:
        while len(list(tmp_path.iterdir())) < 4:
            time.sleep(0.1)
        for seconds in (0, 1):  # before the job is submitted, and after
            with pytest.raises(UnidistError, match=f"Spark has not started the 2 tasks within {seconds} s"):
                unidist.spark.run(train, (1,), num_proc=2, start_timeout=seconds)
        threading.Thread(target=end_when_submitted).start()
        spark.sparkContext.setJobGroup("training", "of the caller")
        with pytest.raises(SystemExit, match="ended by a signal"):
            unidist.spark.run(train, (1,), num_proc=2)
        assert len(status.getJobIdsForGroup("training")) == 1
    finally:
        spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)
        signal.signal(signal.SIGUSR1, handler)
        (tmp_path / "end").touch()
        others.join()


# ------------------------------------------------------------------------------------ Databricks
def announce(word: str) -> tuple[int, str]:
    import horovod.torch as hvd
    from sparkdl.horovod import log_to_driver

    hvd.init()
    print("not for the driver")
    log_to_driver(f"{word} from {hvd.rank()}")
    return hvd.size(), word


def test_horovod_runner(spark: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert HorovodRunner(np=2).run(announce, word="hello") == (2, "hello")
    output = capfd.readouterr().out
    assert logged(output) == {"hello from 0", "hello from 1"} and "not for the driver" not in output


def test_horovod_runner_without_spark(tmp_path: Path) -> None:
    """In a process of its own, which takes Horovod's name for the drop-in."""
    script = f"import sparkdl\n{inspect.getsource(announce)}\nif __name__ == '__main__':\n"
    (tmp_path / "script.py").write_text(
        script + "    print(sparkdl.HorovodRunner(np=-2).run(announce, word='hello'))\n"
    )
    env = environment("python", {"PYTHONPATH": str(ROOT)})
    command = [sys.executable, "-m", "unidist.hvd", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "(2, 'hello')" in done.stdout, done.stdout + done.stderr
    assert logged(done.stdout) == {"hello from 0", "hello from 1"} and "not for the driver" in done.stdout


def logged(output: str) -> set[str]:
    return set(re.findall(r"\[log_to_driver\] (hello from \d)", output))


@pytest.mark.unit
def test_the_runner_refuses_other_verbosities() -> None:
    with pytest.raises(ValueError, match="driver_log_verbosity='some'"):
        HorovodRunner(np=2, driver_log_verbosity="some")


def test_by_horovods_names(tmp_path: Path) -> None:
    """And Databricks' own sparkdl has precedence."""
    code = (
        "import horovod.spark, sparkdl.horovod; print(horovod.spark.run.__module__, sparkdl.HorovodRunner.__module__)"
    )
    alias = str(ROOT / "unidist/hvd/as_horovod")
    python = [sys.executable, "-W", "ignore", "-c"]
    env = environment("python", {"PYTHONPATH": os.pathsep.join([alias, str(ROOT), str(tmp_path)])})
    assert (
        subprocess.check_output([*python, code], env=env, text=True) == "unidist.spark.runner unidist.spark.sparkdl\n"
    )
    (tmp_path / "sparkdl.py").write_text("HERE = 'theirs'\n")
    for imports in ("sparkdl", "horovod.torch, sparkdl"):
        assert subprocess.check_output([*python, f"import {imports}; print(sparkdl.HERE)"], env=env) == b"theirs\n"


# ------------------------------------------------------------------------------------ elastic
def train_elastic(directory: str, kill_at: int, always: bool = False) -> tuple[int, int, float, int]:
    """Rank, steps, weight, and the size of a buffer that makes commits larger than a message."""
    import signal

    import horovod.torch as hvd

    hvd.init()
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    model.register_buffer("large", torch.zeros(6_000_000))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)

    @hvd.elastic.run
    def run(state: Any) -> tuple[int, int, float, int]:
        while state.step < 6:
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            state.step += 1
            model.large += 1
            if state.step % 2 == 0:
                state.commit()
            # A step after the commit, which is lost.
            mark = Path(directory) / "killed"
            if hvd.rank() == hvd.size() - 1 and state.step == kill_at and (always or not mark.exists()):
                mark.write_text(str(state.step))
                os.kill(os.getpid(), signal.SIGKILL)
        assert model.large[0] == state.step
        return hvd.rank(), state.step, model.weight.item(), hvd.size()

    return run(state)  # type: ignore[no-any-return]


def test_elastic(spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = unidist.spark.run_elastic(train_elastic, (str(tmp_path), 5), num_proc=2, verbose=0)
    assert found == [(rank, 6, -6.0, 2) for rank in range(2)]
    assert (tmp_path / "killed").exists()
    (said,) = [each.message for each in caplog.records if "begins again, from the last commit" in each.message]
    assert "rank 1 of 2" in said and "was killed by SIGKILL" in said
    no_rank_is_left()


def test_elastic_gives_up(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit, and where there is no progress."""
    with pytest.raises(UnidistError, match=r"rank 0 of 1 .*was killed by SIGKILL"):
        unidist.spark.run_elastic(train_elastic, (str(tmp_path), 3, True), num_proc=1, reset_limit=0, verbose=0)
    with pytest.raises(UnidistError, match=r"run_elastic\(min_num_proc=5\) needs 5 slots at once.* had 4"):
        unidist.spark.run_elastic(train_elastic, (str(tmp_path), 3), min_num_proc=5, max_num_proc=6)
    with pytest.raises(UnidistError, match=r"run_elastic\(min_num_proc=5\) needs 5 slots at once.* had 4"):
        unidist.spark.run_elastic(train_elastic, (str(tmp_path), 3), num_proc=5)
    with pytest.raises(ValueError, match="from 3 to 2 processes"):
        unidist.spark.run_elastic(train_elastic, min_np=3, max_np=2)
    monkeypatch.setenv("HOROVOD_ELASTIC_TIMEOUT", "long")
    with pytest.raises(UnidistError, match="HOROVOD_ELASTIC_TIMEOUT='long' is not a number of seconds"):
        unidist.spark.run_elastic(train_elastic, (str(tmp_path), 3))


# ------------------------------------------------------------------------------------ the page
def run_program(first_line: str, directory: Path, *options: str) -> str:
    program = next(each.text for each in documents.programs() if each.text.startswith(first_line))
    (directory / "train.py").write_text(program)
    env = environment("python", {"PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable})
    command = [sys.executable, *options, "train.py"]
    done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_program_of_horovods_users(tmp_path: Path) -> None:
    assert "[(0, 2), (1, 2)]" in run_program("import horovod.spark", tmp_path, "-m", "unidist.hvd")


def test_the_complete_program(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pip install pyarrow")
    output = run_program("import pyarrow.dataset", tmp_path)
    assert "[0]<stdout>:epoch 19: loss" in output and "y = 3.0 x + 1.0" in output


# ------------------------------------------------------------------------------------ a cluster
def test_a_cluster_of_two_executors(tmp_path: Path) -> None:
    """A task that is lost is named, and Spark does not repeat the stage."""
    pyspark = find_spec("pyspark")
    assert pyspark is not None and pyspark.origin is not None
    env = {"SPARK_HOME": str(Path(pyspark.origin).parent), "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "tests/programs/spark_cluster.py", str(tmp_path)], cwd=ROOT, capture_output=True, text=True,
        timeout=240, env=environment("python", env),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "PLACES [(0, 0, 2, 0, 1), (1, 1, 2, 0, 1)]" in done.stdout
    (seen, also) = re.findall(r"GPUS (\d+,\d+)", done.stdout)
    assert seen == also  # each executor's, in the order of the local ranks
    assert sorted(re.findall(r"OWN (.*)", done.stdout)) == ["['0']", "['1']"]
    assert re.search("LOST rank 1 of 2 .* failed first: its task, or the executor, ended without a word", done.stdout)
    assert len([path for path in tmp_path.iterdir() if path.name.isdigit()]) == 2
    (elastic,) = re.findall(r"ELASTIC (.*)", done.stdout)
    assert elastic in ("[(0, 5.0)]", "[(0, 5.0), (1, 5.0)]") and (tmp_path / "lost").exists()
