"""Horovod, under any launcher.

Under horovodrun, and under the mpirun of the MPI that Horovod was built for, Horovod starts itself. Elsewhere rank 0
runs the rendezvous server of horovodrun, whose address the ranks get through the launcher's own rendezvous.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unidist import settings
from unidist.backends import rendezvous
from unidist.backends.base import Backend, Group, Op, Start, Wait
from unidist.backends.device import default_device
from unidist.backends.mpi import launch as mpi
from unidist.backends.reductions import reduced
from unidist.errors import BackendError, UnidistError
from unidist.launch.topology import Launch, Slot, Topology, detect, locate
from unidist.network.addresses import host_id, interface_of
from unidist.network.rendezvous_server import RendezvousServer

with suppress(UnidistError):
    # Horovod makes the symbols of its MPI visible to all libraries that are loaded later, so mpi4py must be loaded
    # first. If it is missing and needed, the rendezvous raises the error.
    if (_launch := detect(os.environ)).launcher.rendezvous == "mpi":
        mpi.world(_launch, settings.timeout(os.environ))

try:
    import horovod.torch as hvd
except ImportError as error:
    raise BackendError(
        f"backend 'horovod' cannot be imported: {error}. Build it for this torch with 'unidist build-horovod "
        "--install'."
    ) from error

_OPS = {"sum": hvd.Sum, "mean": hvd.Average, "min": hvd.Min, "max": hvd.Max, "product": hvd.Product}
#: Of collectives, unless ``init`` has one: torch's. Horovod has none.
_TIMEOUT = timedelta(minutes=30)
#: Interval between two polls of an operation; a fraction of the shortest operation's time.
_POLL_S = 5e-5


class HorovodBackend(Backend):
    """Horovod's global process set, on its Gloo or MPI controller."""

    needs_launcher = True

    def __init__(
        self, topology: Topology, device: torch.device, timeout: timedelta | None, release: Callable[[], None] | None
    ) -> None:
        super().__init__("horovod", topology, device)
        #: The names of the operations that are not waited for yet, by their ranks; the same on each of these.
        self._pending = defaultdict[tuple[int, ...], set[str]](set)
        #: Seconds.
        self._timeout = self.lock_timeout = (timeout or _TIMEOUT).total_seconds()
        self._release = release
        if hvd.nccl_built():
            self.device_types = frozenset({"cpu", "cuda"})

    @classmethod
    def start(cls, name: str, start: Start) -> HorovodBackend:
        launch = start.launch
        variables = _Settings(_connect_timeout(start))
        variables.add(HOROVOD_DYNAMIC_PROCESS_SETS="1")
        server: RendezvousServer | None = None
        topology: Topology | None = None
        if _by_mpi(launch):
            variables.add(HOROVOD_CONTROLLER="mpi")
        elif not _by_horovodrun(start):
            server, topology = _serve(start, variables)
        try:
            with mpi.watchdog(_start_limit(start), "Horovod's start"):
                hvd.init()
        except Exception as error:
            variables.restore()
            raise BackendError(f"rank {launch.rank} of {launch.world_size}: Horovod did not start: {error}.") from error
        topology = topology or _topology(launch)

        def release() -> None:
            hvd.shutdown()
            variables.restore()
            if server is not None:
                server.stop()

        device = default_device(start.device, topology.local_rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return cls(topology, device, start.timeout, release)

    @classmethod
    def adopt(cls, start: Start) -> HorovodBackend | None:
        if not hvd.is_initialized():
            return None
        topology = _topology(start.launch)
        return cls(topology, default_device(start.device, topology.local_rank), start.timeout, None)

    def shutdown(self) -> None:
        if self._release is not None:
            self._release()
            return
        for group in self.groups.values():  # the user's Horovod goes on without them
            if group.handle is not hvd.global_process_set and len(group.ranks) < self.topology.world_size:
                with suppress(Exception):
                    hvd.remove_process_set(group.handle)

    def world_size(self) -> int:
        return int(hvd.size())

    def new_group(self, ranks: tuple[int, ...]) -> Group:
        if len(ranks) == self.topology.world_size:
            return Group(ranks, hvd.global_process_set)
        if self._release is None and os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS", "0") in ("", "0"):
            raise BackendError(
                "new_group needs Horovod's dynamic process sets, and this Horovod was started without them: set "
                "HOROVOD_DYNAMIC_PROCESS_SETS=1 before hvd.init(), or let unidist.init() start Horovod."
            )
        with self.errors_of("new_group"):
            return Group(ranks, hvd.add_process_set(list(ranks)))

    def wait(self, handle: Any) -> Any:
        """Return the result of an asynchronous call; Horovod's own ``synchronize`` would keep a core busy.

        Raises:
            TimeoutError: another rank has not made the call in time.
        """
        end = time.monotonic() + self._timeout
        while not hvd.poll(handle):
            if time.monotonic() > end:
                raise TimeoutError(f"another rank did not take part within {self._timeout:g} s")
            time.sleep(_POLL_S)
        return hvd.synchronize(handle)

    def start_all_reduce(self, tensor: Tensor, op: Op, group: Group | None = None, *, call: str = "all_reduce") -> Wait:
        # Horovod does not reduce bfloat16.
        sent = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
        finish = self._start(call, sent, group, partial(hvd.allreduce_async_, op=_OPS[op]), "start_all_reduce")

        def wait() -> None:
            finish()
            if sent is not tensor:
                tensor.copy_(sent)

        return wait

    def start_broadcast(self, tensor: Tensor, src: int, group: Group | None = None) -> Wait:
        return self._start("broadcast", tensor, group, partial(hvd.broadcast_async_, root_rank=src), "broadcast")

    def _start(self, call: str, tensor: Tensor, group: Group | None, start: Callable[..., Any], kind: str) -> Wait:
        """Start an operation of Horovod under a name that no pending operation of the group has."""
        names = self._pending[self.ranks(group)]
        base = _name(kind, group)
        name = next(name for name in (base, *(f"{base}.{i}" for i in range(len(names)))) if name not in names)
        span = self.began(call, tensor, group)
        with self.errors_of(call, tensor, group, span, waits=False):
            handle = start(tensor, name=name, process_set=_set(group))
        names.add(name)

        def wait() -> None:
            names.discard(name)
            with self.errors_of(call, tensor, group, span):
                self.wait(handle)

        return wait

    @torch.inference_mode(False)  # Horovod's own thread writes into a tensor that is made here
    def all_gather(self, tensor: Tensor, sizes: Sequence[int], group: Group | None = None) -> Tensor:
        if sum(sizes) == 0:
            return tensor.clone()
        with self.errors_of("all_gather", tensor, group):
            result: Tensor = self.wait(
                hvd.allgather_async(tensor, name=_name("all_gather", group), process_set=_set(group))
            )
        return result

    @torch.inference_mode(False)  # Horovod's own thread writes into a tensor that is made here
    def all_to_all(
        self, tensor: Tensor, send: Sequence[int], receive: Sequence[int], group: Group | None = None
    ) -> Tensor:
        splits = torch.tensor(send, dtype=torch.int32)
        with self.errors_of("all_to_all", tensor, group):
            handle = hvd.alltoall_async(tensor, splits, name=_name("all_to_all", group), process_set=_set(group))
            result: Tensor = self.wait(handle)[0]
        return result

    @torch.inference_mode(False)  # Horovod's own thread writes into a tensor that is made here
    def reduce_scatter(self, tensor: Tensor, op: Op, group: Group | None = None) -> Tensor:
        # With Gloo, one reducescatter of Horovod 0.28.1 makes all later operations of the world slow: a broadcast of
        # 4 MB takes 2.8 s in place of 2 ms.
        size = len(self.ranks(group))
        splits = torch.full((size,), tensor.numel() // size, dtype=torch.int32)
        with self.errors_of("reduce_scatter", tensor, group):
            handle = hvd.alltoall_async(tensor, splits, name=_name("reduce_scatter", group), process_set=_set(group))
            received: Tensor = self.wait(handle)[0]
        return reduced(received.chunk(size), op)


def _name(call: str, group: Group | None) -> str:
    # Horovod matches operations by name. The names that it counts itself differ when only some ranks take part in a
    # group's call; a repeated name is safe, because these calls wait for completion.
    return f"unidist.{call}" if group is None else f"unidist.{call}.{'_'.join(map(str, group.ranks))}"


def _set(group: Group | None) -> Any:
    return group.handle if group else hvd.global_process_set


# ------------------------------------------------------------------------------------ starting
class _Settings:
    """Environment variables for Horovod's core, restored at shutdown."""

    def __init__(self, given: dict[str, str]) -> None:
        self._before: dict[str, str | None] = {}
        # Variables that the user has set are kept.
        self.add(**{name: value for name, value in given.items() if name not in os.environ})

    def add(self, **variables: str) -> None:
        for name, value in variables.items():
            self._before.setdefault(name, os.environ.get(name))
            os.environ[name] = value

    def restore(self) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _connect_timeout(start: Start) -> dict[str, str]:
    if start.timeout is None:
        return {}
    return {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(max(1, round(start.timeout.total_seconds())))}


def _start_limit(start: Start) -> timedelta:
    """Return how long ``hvd.init()`` may take.

    Connections of MPI have no timeout. Those of Gloo have, and yet 1 of 100 starts in which a rank was stopped did not
    return.
    """
    connect = float(os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS") or 0)
    return 1.5 * max(start.start_timeout, timedelta(seconds=connect))


def _by_horovodrun(start: Start) -> bool:
    # Its server still has the addresses of the first init(), so a second one needs a server of its own.
    return start.launch.launcher.rendezvous == "horovod" and start.attempt == 0


def _by_mpi(launch: Launch) -> bool:
    """Return whether this launcher's MPI is the one that Horovod was built for, and Gloo was not asked for."""
    wanted = os.environ.get("HOROVOD_CONTROLLER", "mpi").lower()
    return bool(launch.launcher.mpi) and wanted == "mpi" and hvd.mpi_built() and _built_for() == launch.launcher.mpi


def _built_for() -> str:
    from horovod.torch import mpi_lib_v2

    text = ctypes.create_string_buffer(8192)
    ctypes.CDLL(mpi_lib_v2.__file__).MPI_Get_library_version(text, ctypes.byref(ctypes.c_int()))
    return "openmpi" if text.value.startswith((b"Open MPI", b"IBM Spectrum MPI")) else "mpich"


def _topology(launch: Launch) -> Topology:
    """Return the launcher's declaration where it fits Horovod's world; what is missing, Horovod knows. Collective."""
    if (launch.rank, launch.world_size) != (hvd.rank(), hvd.size()):
        launch = Launch(launch.launcher, hvd.rank(), hvd.size())
    if launch.local_rank is None or launch.local_size is None:
        launch = replace(launch, local_rank=hvd.local_rank(), local_size=hvd.local_size())
    mine = Slot(launch.host or host_id(), launch.local_rank, launch.node_rank)
    return locate(launch, hvd.allgather_object(mine, name="unidist.slots"))


def _serve(start: Start, variables: _Settings) -> tuple[RendezvousServer | None, Topology]:
    """Do what horovodrun does: serve a rendezvous from rank 0, and tell Horovod where it is. Collective."""
    launch = start.launch
    world = rendezvous.join(start)
    topology = world.topology
    server = RendezvousServer(world.address, launch.world_size) if launch.rank == 0 else None
    mine = f"{world.address}:{server.server_port}" if server else ""
    (served, *_) = world.exchange("rendezvous", mine, start.start_timeout)
    address, port = served.rsplit(":", 1)
    variables.add(
        HOROVOD_RANK=str(launch.rank),
        HOROVOD_SIZE=str(launch.world_size),
        HOROVOD_LOCAL_RANK=str(topology.local_rank),
        HOROVOD_LOCAL_SIZE=str(topology.local_size),
        HOROVOD_CROSS_RANK=str(topology.cross_rank),
        HOROVOD_CROSS_SIZE=str(topology.cross_size),
        # Horovod tells nodes apart by name; two hosts may have the same one, and two nodes may be on one host.
        HOROVOD_HOSTNAME=f"{world.hosts[launch.rank].name}-node{topology.node_rank}",
        HOROVOD_GLOO_RENDEZVOUS_ADDR=address,
        HOROVOD_GLOO_RENDEZVOUS_PORT=port,
        HOROVOD_GLOO_IFACE=interface_of(world.address),
        HOROVOD_CONTROLLER="gloo",
        HOROVOD_CPU_OPERATIONS="gloo",
    )
    return server, topology
