"""``unidist.ray``: Horovod's functions on Ray's actors, on two nodes of Ray on this host."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.worlds import PYTHON, ROOT, environment, run_world
from unidist.errors import BackendError, UnidistError
from unidist.launch.topology import detect

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray[default]' cloudpickle")
from ray.cluster_utils import Cluster  # noqa: E402
from ray.exceptions import RayTaskError  # noqa: E402
from ray.util.placement_group import placement_group, remove_placement_group  # noqa: E402
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: E402

from tests.support.ray_start import start_cluster, start_ray  # noqa: E402
from unidist.ray import ElasticRayExecutor, RayExecutor, ray_logger  # noqa: E402
from unidist.run.elastic import Elastic  # noqa: E402
from unidist.run.hosts import HostSlots  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


# ------------------------------------------------------------------------------------ without Ray's processes
@pytest.mark.unit
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "takes one of the three"),
        ({"num_workers": 2, "num_hosts": 1}, "takes one of the three"),
        ({"num_workers": 0}, "num_workers=0"),
        ({"num_hosts": 2, "num_workers_per_host": None}, "num_workers_per_host=None"),
        ({"num_workers": 1, "gpus_per_worker": 1}, "1 GPUs each with use_gpu=False"),
        ({"num_workers": 1, "use_gpu": True, "gpus_per_worker": 0}, "0 GPUs each with use_gpu=True"),
        ({"num_workers": 1, "cpus_per_worker": 0}, "0 CPUs each with use_gpu=False"),
        ({"num_workers": 1, "max_workers": 2}, r"max_workers=2\) is for elastic jobs: pass min_workers"),
        ({"min_workers": 1, "override_discovery": False}, r"RayExecutor\(override_discovery=False\)"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        RayExecutor(**arguments)


@pytest.mark.unit
def test_no_gpus() -> None:
    assert RayExecutor(num_workers=1, gpus_per_worker=0).resources == {"CPU": 1, "GPU": 0}


@pytest.mark.unit
def test_errors_of_elastic_jobs_name_the_arguments() -> None:
    """Those of ``unidist run`` name its options."""
    settings = ElasticRayExecutor.create_settings(min_num_proc=2, elastic_timeout=10)
    elastic = Elastic(settings.limits)
    elastic.set_hosts([HostSlots("a", 1)])
    for worker in elastic.start(now=0):
        elastic.ask(worker.number, now=0, failed=False)
    assert elastic.form(now=0) is None
    said = str(elastic.why_over(now=11))
    assert "2 workers are needed (min_num_proc)" in said and "elastic_timeout is how long" in said


@pytest.mark.unit
def test_a_discovery_of_ones_own() -> None:
    """As Horovod's documentation has it, a setting takes it."""
    settings = ElasticRayExecutor.create_settings()
    settings.discovery = "mine"  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="the hosts are Ray's nodes"):
        ElasticRayExecutor(settings, override_discovery=False)


@pytest.mark.unit
def test_settings() -> None:
    assert RayExecutor.create_settings(nics="eth0").nics == ("eth0",)
    with pytest.raises(TypeError, match="its own create_settings"):
        ElasticRayExecutor(RayExecutor.create_settings())  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="not ssh|ssh's key is not used"):
        RayExecutor.create_settings(ssh_identity_file="key.pem")


# ------------------------------------------------------------------------------------ on a cluster
@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes with two CPUs each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        nodes = start_cluster()
        start_ray(partial(nodes.add_node, num_cpus=2))
        ray.init(address=nodes.address, log_to_driver=False)
        yield nodes
        ray.shutdown()
        nodes.shutdown()


@pytest.fixture(scope="module")
def executor(cluster: Cluster) -> Iterator[RayExecutor]:
    started = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=2)
    started.start(executable_cls=Counter, executable_args=[10], extra_env_vars={"OWN": 1})
    yield started
    started.shutdown()


class Counter:
    def __init__(self, start: int) -> None:
        self.count = start

    def add(self) -> int:
        self.count += 1
        return self.count


def train(save: str = "") -> dict[str, torch.Tensor]:
    """As it was written for Horovod."""
    import horovod.torch as hvd

    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    data = torch.randn(20, hvd.size(), 4)
    for step in range(20):
        optimizer.zero_grad()
        model(data[step, hvd.rank()]).square().sum().backward()
        optimizer.step()
    if save and hvd.rank() == 0:
        torch.save(model.state_dict(), save)
    return dict(model.state_dict())


def where() -> tuple[Any, ...]:
    import unidist

    unidist.init()
    found = (unidist.rank(), unidist.local_rank(), unidist.local_size(), unidist.node_rank(), unidist.num_nodes())
    return found, detect(os.environ).launcher.name, unidist.all_reduce(torch.ones(1)).item()


def test_every_call(executor: RayExecutor) -> None:
    assert executor.run(lambda a, b: (a, b, os.environ["OWN"]), [1], {"b": 2}) == [(1, 2, "1")] * 2
    assert ray.get(executor.run_remote(lambda: int(os.environ["RANK"]))) == [0, 1]
    # What a worker starts finds the drop-in, too, where Horovod is installed.
    code = "import horovod.torch as hvd; print(hvd.__name__)"
    inside = executor.run(lambda: subprocess.check_output([PYTHON, "-c", code], text=True))
    assert inside == ["unidist.hvd\n"] * 2
    assert executor.execute(lambda counter: counter.add()) == [11, 11]
    assert executor.execute_single(lambda counter: counter.add()) == 12
    assert executor.execute(lambda counter: counter.add()) == [13, 12]


def test_weights_are_those_under_torchrun(executor: RayExecutor, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"from tests.test_ray import train\ntrain({str(tmp_path / 'weights.pt')!r})\n")
    result = run_world("torchrun", 2, ["-m", "unidist.hvd", str(script)], env={"PYTHONPATH": str(ROOT)})
    assert result.returncode == 0, result.output
    expected = torch.load(tmp_path / "weights.pt")
    for weights in executor.run(train):
        assert all(torch.allclose(weights[name], expected[name], atol=1e-5, rtol=0) for name in expected)


def test_many_runs_and_a_large_result(executor: RayExecutor) -> None:
    assert [executor.run(where)[1][0][0] for _ in range(20)] == [1] * 20
    assert [len(each) for each in executor.run(lambda: bytes(100_000_000))] == [100_000_000] * 2


def test_a_function_that_does_not_pickle(executor: RayExecutor) -> None:
    lock = threading.Lock()

    def hold() -> object:
        return lock

    with pytest.raises(UnidistError, match=r"RayExecutor.run\(.*hold\).* lock \(lock\) does not pickle"):
        executor.run(hold)
    assert executor.run(lambda: 1) == [1, 1]


def failing(how: Callable[[], None]) -> None:
    import unidist

    unidist.init()
    if unidist.rank() == 1:
        how()
    unidist.barrier()  # rank 0 would wait for ever


def raise_error() -> None:
    raise ValueError("on purpose")


def kill() -> None:
    os.kill(os.getpid(), 9)


def test_a_rank_that_fails_does_not_leave_the_others_waiting(executor: RayExecutor) -> None:
    with pytest.raises(ValueError, match=r"(?s)rank 1 of 2 on node .*ValueError: on purpose") as raised:
        executor.run(failing, [raise_error])
    assert isinstance(raised.value, RayTaskError)
    with pytest.raises(UnidistError, match=r"ended, as rank 1 of 2 on node .* had failed. Call start\(\) first"):
        executor.run(where)
    executor.start()
    with pytest.raises(BackendError, match=r"rank 1 of 2 on node .*: its process has ended"):
        executor.run(failing, [kill])
    executor.start()
    threading.Timer(3, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        executor.run(time.sleep, [100])
    with pytest.raises(UnidistError, match="as a call was interrupted"):
        executor.run(where)
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'start'"):
        executor.start(executable_cls=Counter)
    with pytest.raises(UnidistError, match="there are no workers"):
        executor.execute(where)
    executor.start()
    refs = executor.run_remote(failing, [kill])
    for ref in refs:
        with pytest.raises(Exception, match=r"actor|rank 0"):
            ray.get(ref, timeout=240)
    executor.shutdown()


@pytest.mark.parametrize("how", [{"num_workers": 4}, {"num_hosts": 2, "num_workers_per_host": 1}])
def test_two_nodes(how: dict[str, int], executor: RayExecutor) -> None:
    executor.shutdown()
    other = RayExecutor(**how)  # type: ignore[arg-type]
    other.start()
    found = other.run(where)
    other.shutdown()
    each = other.num_workers // 2
    expected = [(rank, rank % each, each, rank // each, 2) for rank in range(2 * each)]
    assert found == [(place, "ray", 2.0 * each) for place in expected]


def test_in_a_placement_group_that_exists(executor: RayExecutor) -> None:
    executor.shutdown()

    def work() -> list[Any]:
        inner = RayExecutor(num_workers=2)
        inner.start()
        own = inner._own_group is not None
        found = inner.run(lambda: int(os.environ["RANK"]))
        inner.shutdown()
        return [own, *found]

    group = placement_group([{"CPU": 1}] * 2)
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    task = ray.remote(num_cpus=0)(work).options(scheduling_strategy=strategy)
    assert ray.get(task.remote()) == [False, 0, 1]
    remove_placement_group(group)


def test_nothing_is_logged_without_a_job() -> None:
    with pytest.warns(UserWarning, match="ray_logger.log has no effect"):
        ray_logger.log({})


def test_no_room(executor: RayExecutor) -> None:
    other = RayExecutor(RayExecutor.create_settings(placement_group_timeout_s=1), num_workers=9)
    with pytest.raises(TimeoutError, match=r"no room for 9 workers of 1 CPU each .* The cluster has 4 CPU"):
        other.start()
    with pytest.raises(UnidistError, match="there are no workers"):
        other.run(where)


def train_elastic(directory: str, steps: int) -> tuple[int, float, list[int]]:
    """A rank, its steps, and the sizes of the world; each step of rank 0's is written to a file."""
    import horovod.torch as hvd
    from horovod.ray import ray_logger

    hvd.init()
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0, sizes=[])

    def is_enough() -> bool:  # as rank 0 finds: it may come between the looks of two ranks
        return hvd.broadcast_object((Path(directory) / "enough").exists(), 0)  # type: ignore[no-any-return]

    @hvd.elastic.run
    def run(state: Any) -> tuple[int, float, list[int]]:
        while state.step < steps or not is_enough():
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            state.step += 1
            state.sizes = [*state.sizes, hvd.size()]
            if hvd.rank() == 0:
                (Path(directory) / "size").write_text(f"{hvd.size()} {os.getpid()}")
                ray_logger.log({"step": state.step, "of": hvd.size()})
            time.sleep(0.1)
            state.commit()
        assert model.weight.item() == -state.step
        return hvd.rank(), state.step, state.sizes

    return run(state)  # type: ignore[no-any-return]


def test_elastic(cluster: Cluster, executor: RayExecutor, tmp_path: Path) -> None:
    """A node comes, a worker is killed, and a node is lost, while it trains."""
    executor.shutdown()
    settings = ElasticRayExecutor.create_settings(min_num_proc=2, timeout_s=120)
    elastic = ElasticRayExecutor(settings, cpus_per_slot=2)
    elastic.start()
    results: list[Any] = []
    logged: list[dict[str, int]] = []
    train = partial(train_elastic, str(tmp_path), 9)
    running = threading.Thread(target=lambda: results.extend(elastic.run(train, callbacks=[logged.append])))
    running.start()

    def train_with(size: int, without: str = "") -> str:
        """Rank 0's process, once there are so many ranks."""
        end = time.monotonic() + 150
        while time.monotonic() < end:
            with suppress(OSError, ValueError):
                found, process = (tmp_path / "size").read_text().split()
                if int(found) == size and process != without:
                    return process
            time.sleep(0.1)
        raise AssertionError(f"there were never {size} ranks, but {(tmp_path / 'size').read_text()}")

    first = train_with(2)
    third = cluster.add_node(num_cpus=2)
    assert train_with(3) == first
    os.kill(int(first), signal.SIGKILL)
    train_with(3, without=first)
    cluster.remove_node(third, allow_graceful=False)
    train_with(2)
    (tmp_path / "enough").touch()
    running.join(timeout=240)
    assert [rank for rank, _, _ in results] == [0, 1]
    assert len({steps for _, steps, _ in results}) == 1
    assert set(results[0][2]) == {2, 3}
    assert logged[-1] == {"step": results[0][1], "of": 2} and {each["of"] for each in logged} == {2, 3}


def test_elastic_with_an_object_and_a_failure(executor: RayExecutor) -> None:
    executor.shutdown()
    elastic = RayExecutor(min_workers=1, max_workers=1, reset_limit=0)
    elastic.start(executable_cls=Counter, executable_args=[10], extra_env_vars={"OWN": 1})
    assert elastic.execute(lambda counter: (counter.add(), os.environ["OWN"])) == [(11, "1")]
    with pytest.raises(BackendError, match=r"(?s)worker 0 .*ended with status 1.*ValueError: on purpose"):
        elastic.run(raise_error)
    with pytest.raises(UnidistError, match=r"RayExecutor.run_remote needs a fixed number of workers"):
        elastic.run_remote(where)


def test_by_horovods_names() -> None:
    code = (
        "from horovod.ray import ElasticRayExecutor, RayExecutor, BaseHorovodWorker\n"
        "from horovod.ray.runner import RayExecutor as same\n"
        "from horovod.ray.worker import BaseHorovodWorker as worker\n"
        "assert same is RayExecutor and worker is BaseHorovodWorker\n"
        "worker().update_env_vars({'TEST': 3})\nassert worker().env_vars()['TEST'] == '3'\n"
        "print(RayExecutor.__module__)"
    )
    directory = ROOT / "unidist/hvd/as_horovod"
    env = environment("python", {"PYTHONPATH": f"{directory}{os.pathsep}{ROOT}"})
    done = subprocess.run([PYTHON, "-c", code], env=env, capture_output=True, text=True, timeout=240)
    assert done.stdout == "unidist.ray.runner\n", done.stderr


def test_a_program_beside_another_cluster(cluster: Cluster, tmp_path: Path) -> None:
    """Without RAY_ADDRESS it has a Ray of its own."""
    (tmp_path / "size.py").write_text("import unidist\nunidist.init()\nprint('SIZE', unidist.world_size())\n")
    argv = ["-m", "unidist.ray", "1", str(tmp_path / "size.py")]
    result = run_world("python", 1, argv, env={"PYTHONPATH": str(ROOT)})
    assert result.returncode == 0 and "SIZE 1" in result.output, result.output


def test_through_a_client() -> None:
    result = run_world("python", 1, ["tests/programs/ray_client.py"], env={"PYTHONPATH": str(ROOT)}, timeout=300)
    assert result.returncode == 0 and "DONE" in result.output, result.output
