"""``RayExecutor``: a group of Ray's actors that are the ranks of one world."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from unidist.errors import BackendError, UnidistError
from unidist.network.addresses import interface_names
from unidist.ray.elastic import ElasticSettings, ElasticWorkers, limits, refuse_own_discovery
from unidist.ray.worker import BaseHorovodWorker, put, resources
from unidist.run.hosts import rank_order, worker_variables

#: Seconds that the other ranks have for their end when one has failed, and all at ``shutdown``.
_GRACE_S = 5.0


@dataclass
class RaySettings:
    """What ``create_settings`` returns."""

    #: Seconds for the workers to start, beside those for their places: a node that has not yet read torch is slow.
    timeout_s: float = 30
    #: Seconds for Ray to find places for them.
    placement_group_timeout_s: float = 100
    #: The network interfaces that the ranks use; empty: those by which the nodes reach each other.
    nics: Sequence[str] = ()


class RayExecutor:
    """Run functions in workers of a Ray cluster, which are the ranks of one world. ``ray.init()`` comes before.

    In a worker ``unidist.init()`` joins the world, and ``import horovod.torch`` finds the drop-in, so that functions
    that were written for ``horovod.ray`` run as they are. The ranks of a node are together, in the order of nodes in
    which Ray has started them.

    Args:
        settings: of ``create_settings``, or any object with such attributes. Default: its defaults.
        num_workers: number of workers, wherever Ray has room.
        num_hosts: in place of ``num_workers``: number of nodes, each with ``num_workers_per_host`` workers.
        num_workers_per_host: with ``num_hosts``.
        cpus_per_worker: CPUs that Ray reserves for each.
        use_gpu: whether each has GPUs. All GPUs of a node's workers are visible to each of them, and
            ``unidist.device()`` is the one of its local rank.
        gpus_per_worker: GPUs that Ray reserves for each. Default: 1 with ``use_gpu``.
        use_current_placement_group: whether workers are started in the placement group in which this process is, if
            it is in one.
        min_workers: in place of ``num_workers``: the job is elastic, of at least as many workers, and the function
            trains with ``unidist.elastic`` or ``horovod.torch.elastic``; see ``ElasticRayExecutor``. ``run`` and
            ``execute`` start the workers, and end them.
        max_workers, reset_limit, cooldown_range, elastic_timeout: as for ``ElasticRayExecutor.create_settings``.
        override_discovery: the hosts are Ray's nodes.

    Raises:
        ValueError: arguments that contradict each other, or have no sense.
    """

    def __init__(
        self,
        settings: Any = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int | None = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: tuple[float, float] | None = None,
        elastic_timeout: float = 600,
        override_discovery: bool = True,
    ) -> None:
        if [num_workers, num_hosts, min_workers].count(None) != 2:
            raise ValueError(
                f"RayExecutor(num_workers={num_workers}, num_hosts={num_hosts}, min_workers={min_workers}) takes one "
                "of the three: num_workers, num_hosts with num_workers_per_host, or min_workers of an elastic job."
            )
        if min_workers is None and max_workers is not None:
            raise ValueError(f"RayExecutor(max_workers={max_workers}) is for elastic jobs: pass min_workers, too.")
        refuse_own_discovery("RayExecutor", override_discovery)
        per_host = num_workers_per_host if num_hosts is not None else 1
        numbers = {"num_workers": num_workers, "num_hosts": num_hosts, "num_workers_per_host": per_host}
        for name, number in numbers.items():
            if (number is None and name == "num_workers_per_host") or (number is not None and number < 1):
                raise ValueError(f"RayExecutor({name}={number}) is not a number from 1 up.")
        if isinstance(settings, ElasticSettings):
            raise TypeError(f"RayExecutor({settings!r}): pass what its own create_settings() returns.")
        self.settings = RaySettings() if settings is None else settings
        self.num_workers = num_workers if num_workers is not None else (num_hosts or 0) * (per_host or 0)
        self.num_hosts = num_hosts
        self.resources = resources(cpus_per_worker, use_gpu, gpus_per_worker)
        self.use_current_placement_group = use_current_placement_group
        self._elastic: ElasticWorkers | None = None
        if min_workers is not None:
            wanted = limits(min_workers, max_workers, reset_limit, elastic_timeout, cooldown_range, "min_workers")
            elastic = ElasticSettings(wanted, self.settings.timeout_s, interface_names(self.settings.nics))
            self._elastic = ElasticWorkers(elastic, self.resources)
        self._make: Callable[[], Any] = partial(_make, None, (), {})
        self.workers: list[Any] = []
        self._own_group: Any = None
        #: Why the workers have been ended.
        self._ended = ""

    @staticmethod
    def create_settings(
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100,
        nics: Sequence[str] | None = None,
    ) -> RaySettings:
        """Return settings of a ``RayExecutor``.

        Args:
            timeout_s: seconds for the workers to start, in addition to those for their places.
            ssh_identity_file: of no effect, with a warning: Ray starts the workers, not ssh.
            ssh_str: likewise.
            placement_group_timeout_s: seconds for Ray to find places for them.
            nics: names of the network interfaces that the ranks use. Default: those by which the nodes reach each
                other.
        """
        if ssh_identity_file or ssh_str:
            text = "create_settings: Ray starts the workers, so ssh's key is not used: leave it out"
            warnings.warn(text, stacklevel=2)
        return RaySettings(timeout_s, placement_group_timeout_s, interface_names(nics))

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, object] | None = None,
    ) -> None:
        """Start the workers, and in each an object of a class of yours.

        Args:
            executable_cls: the class; ``execute`` passes its object to functions. Default: None, and they get None.
            executable_args: its arguments.
            executable_kwargs: likewise.
            extra_env_vars: environment variables of the workers.

        Raises:
            TimeoutError: Ray has no room for the workers, or did not start them in time.
            UnidistError: the class or its arguments do not pickle.
        """
        self.shutdown()
        extra = {name: str(value) for name, value in (extra_env_vars or {}).items()}
        self._make = partial(_make, executable_cls, tuple(executable_args or ()), dict(executable_kwargs or {}))
        if self._elastic is not None:
            self._elastic = replace(self._elastic, env=extra)
            return
        self._reserve()
        actor = ray.remote(BaseHorovodWorker)
        self.workers = [actor.options(**self._options(number)).remote() for number in range(self.num_workers)]
        seconds = self.settings.timeout_s + self.settings.placement_group_timeout_s
        try:
            locations = ray.get([worker.locate.remote() for worker in self.workers], timeout=seconds)
        except GetTimeoutError:
            self.shutdown()
            raise TimeoutError(
                f"RayExecutor.start: Ray did not start {self.num_workers} workers of {self._needs()} each within "
                f"{seconds:g} s. Is the placement group large enough? create_settings(timeout_s=) is for slow starts."
            ) from None
        order = rank_order([location.node for location in locations])
        self.workers, locations = [self.workers[i] for i in order], [locations[i] for i in order]
        port = ray.get(self.workers[0].serve.remote())
        if self.settings.nics:
            named = ",".join(interface_names(self.settings.nics))
            extra = {"GLOO_SOCKET_IFNAME": named, "NCCL_SOCKET_IFNAME": named, **extra}
        self._names = [
            f"rank {rank} of {self.num_workers} on node {location.address} ({location.node[:8]})"
            for rank, location in enumerate(locations)
        ]
        store = (locations[0].address, port)
        ranks = worker_variables([each.node for each in locations], [each.gpus for each in locations], store)
        own = zip(self.workers, ranks, self._names)
        ray.get([worker.join.remote({**env, **extra}, name) for worker, env, name in own])
        try:
            made = put("start", self._make)
            self._results([worker.start_executable.remote(made) for worker in self.workers])
        except BaseException:
            self.shutdown()
            raise

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[..., Any]] | None = None,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` in all workers, and wait for the results, which are in rank order.

        Args:
            fn: what each rank runs; anything that cloudpickle takes.
            args: its arguments.
            kwargs: likewise.
            callbacks: each is called with each value that a rank gives to ``ray_logger.log``, if the job is elastic;
                otherwise of no effect, as with Horovod.

        Raises:
            UnidistError: the function or its arguments do not pickle, or the workers have been ended.
            BackendError: the process of a worker has ended.
            Exception: what the first rank raised that failed, with rank and node in its text. The others get 5 s to
                end; then all workers are ended, and ``start`` is needed.
            KeyboardInterrupt: likewise, at once.
        """
        return self._run("run", partial(_call, fn, tuple(args or ()), dict(kwargs or {})), callbacks)

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """As ``run``, without waiting: a reference for ``ray.get`` of each rank's result, in rank order."""
        refs = self._submit("run_remote", partial(_call, fn, tuple(args or ()), dict(kwargs or {})))
        threading.Thread(target=self._watch, args=(refs,), name="unidist-ray", daemon=True).start()
        return refs

    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[..., Any]] | None = None) -> list[Any]:
        """Call ``fn(object)`` in all workers, with the object that ``start`` has made there; otherwise as ``run``."""
        return self._run("execute", fn, callbacks)

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call ``fn(object)`` in rank 0's worker alone; its result. A collective call would wait for the others."""
        return self._results(self._submit("execute_single", fn, ranks=1))[0]

    def shutdown(self) -> None:
        """End the workers, and give their places back."""
        workers, self.workers, self._ended = self.workers, [], ""
        self._end(workers)
        if self._own_group is not None:
            remove_placement_group(self._own_group)
            self._own_group = None

    # ---------------------------------------------------------------------------------------------
    def _reserve(self) -> None:
        """Have Ray set the workers' places aside, unless this process is in a placement group that has them."""
        self._group = ray.util.get_current_placement_group() if self.use_current_placement_group else None
        if self._group is not None:
            return
        per_bundle = self.num_workers // self.num_hosts if self.num_hosts else 1
        bundle = {name: number * per_bundle for name, number in self.resources.items() if number}
        bundles = [bundle] * (self.num_workers // per_bundle)
        self._group = placement_group(bundles, strategy="STRICT_SPREAD" if self.num_hosts else "PACK")
        self._own_group = self._group
        seconds = self.settings.placement_group_timeout_s
        if not self._group.wait(seconds):
            self.shutdown()
            where = f"{self.num_hosts} nodes" if self.num_hosts else "any nodes"
            raise TimeoutError(
                f"RayExecutor.start: Ray found no room for {self.num_workers} workers of {self._needs()} each on "
                f"{where} within {seconds:g} s. The cluster has {_shown(ray.cluster_resources())}, of which "
                f"{_shown(ray.available_resources()) or 'nothing'} are free: start fewer workers, add nodes, or wait "
                "longer by create_settings(placement_group_timeout_s=)."
            )

    def _needs(self) -> str:
        return _shown(self.resources)

    def _options(self, number: int) -> dict[str, Any]:
        """Return how Ray starts a worker."""
        per_bundle = self.num_workers // self.num_hosts if self.num_hosts else 1
        bundle = number // per_bundle if self._own_group is not None else -1
        return {
            "num_cpus": self.resources["CPU"],
            "num_gpus": self.resources["GPU"],
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, bundle),
        }

    def _run(self, call: str, fn: Callable[[Any], Any], callbacks: Sequence[Callable[[Any], Any]] | None) -> list[Any]:
        if self._elastic is not None:
            return self._elastic.run(call, partial(_call_with, self._make, fn), callbacks or ())
        return self._results(self._submit(call, fn))

    def _submit(self, call: str, fn: Callable[[Any], Any], ranks: int | None = None) -> list[Any]:
        if self._elastic is not None:
            raise UnidistError(f"RayExecutor.{call} needs a fixed number of workers: pass num_workers, or call run().")
        if not self.workers:
            why = self._ended or "there are no workers"
            raise UnidistError(f"RayExecutor.{call}: {why}. Call start() first.")
        function = put(call, fn)
        return [worker.execute.remote(function) for worker in self.workers[:ranks]]

    def _results(self, refs: Sequence[Any]) -> list[Any]:
        """Return the results in rank order, or raise the first failure; workers that do not end are ended."""
        try:
            return self._waited(refs)
        except KeyboardInterrupt:  # they would go on
            self._end_all("the workers have been ended, as a call was interrupted")
            raise

    def _waited(self, refs: Sequence[Any]) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, Exception] = {}
        pending, end = list(refs), float("inf")
        while pending and (left := end - time.monotonic()) > 0:
            ready, pending = ray.wait(pending, timeout=None if left == float("inf") else left)
            for ref in ready:
                rank = refs.index(ref)
                try:
                    results[rank] = ray.get(ref)
                except Exception as error:
                    failures[rank] = error
                    end = min(end, time.monotonic() + _GRACE_S)
        if not failures:
            return [results[rank] for rank in range(len(refs))]
        # The connections of others break when a process ends, which they may notice before Ray does.
        ended = [rank for rank, error in failures.items() if isinstance(error, RayActorError)]
        first = ended[0] if ended else next(iter(failures))
        if ended or pending:
            self._end_all(f"the workers have been ended, as {self._names[first]} had failed")
        if ended:
            raise BackendError(
                f"{self._names[first]}: its process has ended, and the others were ended with it: {failures[first]}"
            ) from failures[first]
        raise failures[first]

    def _watch(self, refs: Sequence[Any]) -> None:
        """End all ranks when one fails; who waits for the references gets the error."""
        with suppress(Exception):
            self._results(refs)

    def _end_all(self, why: str) -> None:
        """Kill the workers; later calls say why."""
        workers, self.workers, self._ended = self.workers, [], why
        self._end(workers, kill=True)

    def _end(self, workers: Sequence[Any], *, kill: bool = False) -> None:
        if not kill:
            ends = [worker.__ray_terminate__.remote() for worker in workers]
            if ends:
                ray.wait(ends, num_returns=len(ends), timeout=_GRACE_S)
        for worker in workers:
            ray.kill(worker)


def _make(cls: Callable[..., Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return None if cls is None else cls(*args, **kwargs)


def _call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], executable: object) -> Any:
    return fn(*args, **kwargs)


def _shown(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{number:g} {name}" for name, number in resources.items() if number and name in ("CPU", "GPU"))


def _call_with(make: Callable[[], Any], fn: Callable[[Any], Any]) -> Any:
    return fn(make())
