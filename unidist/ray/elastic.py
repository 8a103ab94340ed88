"""Elastic jobs on Ray: the driver of ``unidist run``, with Ray's nodes for hosts, and Ray in place of ssh."""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import cloudpickle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from unidist.errors import BackendError, LaunchError
from unidist.network.addresses import interface_names
from unidist.ray.worker import put, resources
from unidist.run.driver import Job
from unidist.run.elastic import Limits, OptionNames
from unidist.run.elastic_driver import Discovery, ElasticDriver
from unidist.run.hosts import HostSlots
from unidist.run.transport import Ssh

#: Of the actor that has the function and takes the results.
NAMESPACE = "unidist"
#: By these variables Ray knows its own processes; others that they start are not.
_OF_RAYS_PROCESSES = ("RAY_JOB_ID", "RAY_RAYLET_PID", "RAY_NODE_ID", "RAY_WORKER_ID")
#: How often callbacks are called.
_LOOK_S = 0.5


@dataclass
class ElasticSettings:
    """What ``ElasticRayExecutor.create_settings`` returns."""

    limits: Limits
    #: Seconds for a node to answer.
    timeout_s: float = 30
    #: The network interfaces that the ranks use; empty: those by which the nodes reach each other.
    nics: Sequence[str] = ()


@dataclass(frozen=True)
class ElasticWorkers:
    """The workers of an elastic job.

    On each node of the cluster there are as many as its CPUs and GPUs allow. Ray reserves these for them, so no others
    may use them for long.
    """

    settings: ElasticSettings
    #: CPUs and GPUs of each.
    resources: Mapping[str, float]
    #: Environment variables of theirs.
    env: dict[str, str] = field(default_factory=dict)

    def run(self, call: str, function: Callable[[], Any], callbacks: Sequence[Callable[[Any], Any]] = ()) -> list[Any]:
        """Return the results of the ranks of the last generation, in rank order.

        Args:
            call: for errors.
            function: what each rank runs.
            callbacks: called with what ranks give to ``ray_logger.log``.

        Raises:
            UnidistError: the function does not pickle.
            BackendError: the job has failed.
        """
        put(call, function)  # it says what does not pickle
        name = f"unidist-{uuid.uuid4()}"
        # Without the head, there is no cluster.
        head = next(node["NodeID"] for node in ray.nodes() if "node:__internal_head__" in node["Resources"])
        options = {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(head, soft=True)}
        exchange = ray.remote(Exchange).options(**options, name=name, namespace=NAMESPACE)
        held = exchange.remote(cloudpickle.dumps(function))
        # A process of its own, as the driver takes signals.
        driving = ray.remote(max_calls=1, max_retries=0)(_drive).options(**options).remote(self, name)
        try:
            ended = False
            while not ended:
                ended = bool(ray.wait([driving], timeout=_LOOK_S if callbacks else None)[0])
                for value in ray.get(held.logged.remote()):
                    for callback in callbacks:
                        callback(cloudpickle.loads(value))
            failure = ray.get(driving)
            results, error = ray.get(held.results.remote())
        except BaseException:
            with suppress(Exception):
                ray.cancel(driving)
            raise
        finally:
            ray.kill(held)
        if failure:
            raise BackendError(f"{failure}\n\n{error}".rstrip())
        return [cloudpickle.loads(results[rank]) for rank in sorted(results)]


class ElasticRayExecutor:
    """Run a function in as many workers of a Ray cluster as it has room for, while nodes come and go.

    The function trains with ``unidist.elastic`` or ``horovod.torch.elastic``. ``ray.init()`` comes before.

    Args:
        settings: of ``create_settings``.
        use_gpu: whether each worker has GPUs.
        cpus_per_slot: CPUs of each.
        gpus_per_slot: GPUs of each. Default: 1 with ``use_gpu``.
        env_vars: environment variables of the workers.
        override_discovery: the hosts are Ray's nodes.

    Raises:
        ValueError: GPUs without ``use_gpu``, or ``override_discovery=False``.
    """

    def __init__(
        self,
        settings: ElasticSettings,
        use_gpu: bool = False,
        cpus_per_slot: int = 1,
        gpus_per_slot: int | None = None,
        env_vars: Mapping[str, object] | None = None,
        override_discovery: bool = True,
    ) -> None:
        refuse_own_discovery("ElasticRayExecutor", override_discovery)
        env = {name: str(value) for name, value in (env_vars or {}).items()}
        if not isinstance(settings, ElasticSettings):
            raise TypeError(f"ElasticRayExecutor({settings!r}): pass what its own create_settings() returns.")
        self._workers = ElasticWorkers(settings, resources(cpus_per_slot, use_gpu, gpus_per_slot), env)

    @staticmethod
    def create_settings(
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: float = 600,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        nics: Sequence[str] | None = None,
        min_np: int | None = None,
        max_np: int | None = None,
        cooldown_range: tuple[float, float] | None = None,
        **others: Any,
    ) -> ElasticSettings:
        """Return settings of an ``ElasticRayExecutor``.

        Args:
            min_num_proc: workers with which training begins, and below which it does not go on.
            max_num_proc: the largest number of workers. Default: as many as the cluster has room for.
            reset_limit: how often workers may change. Default: any number.
            elastic_timeout: seconds to wait for ``min_num_proc`` workers.
            timeout_s: seconds for a node to answer.
            ssh_identity_file: of no effect, as Ray starts the workers.
            nics: names of the network interfaces that the ranks use. Default: those by which the nodes reach each
                other.
            min_np: the old name of ``min_num_proc``.
            max_np: the old name of ``max_num_proc``.
            cooldown_range: the shortest and the longest time in seconds that no worker is started on a node that
                has failed too often. Default: for ever.
            others: Horovod's other settings, of no effect, with a warning.
        """
        if unused := sorted({*others, *(["ssh_identity_file"] if ssh_identity_file else [])} - {"verbose"}):
            warnings.warn(f"create_settings: {', '.join(unused)}: of no effect here, leave it out", stacklevel=2)
        least, most = min_np or min_num_proc, max_np or max_num_proc
        wanted = limits(least, most, reset_limit, elastic_timeout, cooldown_range)
        return ElasticSettings(wanted, timeout_s, interface_names(nics))

    def start(self) -> None:
        """Do nothing: workers are started by ``run``."""

    def run(self, worker_fn: Callable[[], Any], callbacks: Sequence[Callable[..., Any]] | None = None) -> list[Any]:
        """Call ``worker_fn()`` in all workers, and wait for its end.

        Args:
            worker_fn: what each rank runs; anything that cloudpickle takes.
            callbacks: each is called, in this process, with each value that a rank gives to ``ray_logger.log``.

        Returns:
            The results of the ranks that have ended, in rank order.

        Raises:
            UnidistError: the function does not pickle.
            BackendError: too few workers are left, or a node does not answer; with the last failure.
            Exception: what a callback has raised; the job is ended.
        """
        return self._workers.run("run", worker_fn, callbacks or ())


def refuse_own_discovery(executor: str, override_discovery: bool) -> None:
    """Raise ``ValueError`` if hosts are to come from somewhere else than Ray."""
    if not override_discovery:
        raise ValueError(f"{executor}(override_discovery=False): the hosts are Ray's nodes; leave it out.")


def limits(
    least: int, most: int | None, reset_limit: int | None, timeout: float, cooldown: tuple[float, float] | None,
    option: str = "min_num_proc",
) -> Limits:  # fmt: skip
    """Return the limits of an elastic job.

    Args:
        option: what sets ``least``, for errors.

    Raises:
        ValueError: no range from 1 up.
    """
    if least < 1 or (most is not None and most < least):
        raise ValueError(f"from {least} to {most} workers is not a range from 1 up.")
    options = OptionNames(option, option, "elastic_timeout", "reset_limit")
    return Limits(least, most, reset_limit=reset_limit, timeout=timeout, cooldown=cooldown, options=options)


class Exchange:
    """The actor that has the function, and takes the results."""

    def __init__(self, function: bytes) -> None:
        self._function = function
        self._results: dict[int, bytes] = {}
        self._logged: list[bytes] = []
        self._error = ""

    def function(self) -> bytes:
        """Return what the ranks call, pickled."""
        return self._function

    def put(self, rank: int, result: bytes) -> None:
        """Take a rank's result, pickled."""
        self._results[rank] = result

    def log(self, value: bytes) -> None:
        """Take what a rank gives to ``ray_logger.log``, pickled."""
        self._logged.append(value)

    def logged(self) -> list[bytes]:
        """Return what has come since the last call."""
        values, self._logged = self._logged, []
        return values

    def fail(self, error: str) -> None:
        """Take the traceback of a rank."""
        self._error = error

    def results(self) -> tuple[dict[int, bytes], str]:
        """Return the results by rank, and the last traceback."""
        return self._results, self._error


def host_name(node: Mapping[str, Any]) -> str:
    """Return what a node is called: by its address, which virtual nodes share."""
    return f"{node['NodeManagerAddress']}-{node['NodeID'][:8]}"


def slots(node: Mapping[str, Any], resources: Mapping[str, float]) -> int:
    """Return how many workers of some CPUs and GPUs a node takes."""
    has = node["Resources"] if node["Alive"] else {}
    return min(int(has.get(name, 0) // count) for name, count in resources.items() if count)


class _Nodes(Discovery):
    def __init__(self, resources: Mapping[str, float]) -> None:
        super().__init__([])
        self._resources = resources

    async def find(self) -> list[HostSlots]:
        """Return the nodes of the cluster."""
        return [HostSlots(host_name(node), count) for node in ray.nodes() if (count := slots(node, self._resources))]


def _drive(workers: ElasticWorkers, exchange: str) -> str:
    """Run the job, from a task; why it has failed, or nothing."""
    address = ray.get_runtime_context().gcs_address
    settings = workers.settings
    without = [f"-u{name}" for name in _OF_RAYS_PROCESSES]
    resources = [str(workers.resources[name]) for name in ("CPU", "GPU")]
    path = os.pathsep.join(filter(None, [workers.env.get("PYTHONPATH", ""), *sys.path]))
    env = {name: text for name, text in os.environ.items() if name not in _OF_RAYS_PROCESSES}
    job = Job(
        command=[sys.executable, "-m", "unidist.hvd", "-m", "unidist.ray.elastic_rank", address, exchange],
        placements=(),
        env={**env, **workers.env, "PYTHONPATH": path},
        ssh=Ssh(instead=["env", *without, sys.executable, "-m", "unidist.ray.shell", address, *resources]),
        start_timeout=settings.timeout_s,
        start_timeout_option="create_settings(timeout_s=)",
        interfaces=settings.nics,
    )
    driver = ElasticDriver(job, settings.limits, _Nodes(workers.resources))
    try:
        status = asyncio.run(driver.run())
    except LaunchError as error:
        return str(error)
    return driver.failure[0] if status and driver.failure else ""
