"""gloo, nccl and mpi, through torch.distributed."""

from __future__ import annotations

import os
import re
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from itertools import count
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unidist.backends import reachability, rendezvous
from unidist.backends.base import Backend, Group, Op, Start, Wait
from unidist.backends.device import default_device
from unidist.backends.mpi import launch as mpi
from unidist.backends.mpi import watch as mpi_watch
from unidist.backends.process_groups import GlooSockets, LazyProcessGroup, ProcessGroups, abort
from unidist.backends.rendezvous import Rendezvous
from unidist.diagnosis.operations import OperationRecord
from unidist.diagnosis.watch import flight_recorder
from unidist.errors import BackendError, CollectiveError, UnidistError
from unidist.launch.topology import Launch, Topology
from unidist.network import open_files
from unidist.network.addresses import interface_of

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
# torch 2.13 renamed them.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


#: gloo's messages when another rank has ended or does not respond.
LOST_RANK = re.compile(r"gloo/transport|Connection (closed|reset) by peer|Timed out waiting \d+ms")

#: Modules that call gloo.
_CALLING = ("torch.distributed", "torch.autograd", "torch.nn.parallel.distributed", "unidist.gradients.ddp")


class TorchBackend(Backend):
    """A backend of torch.distributed: on its default process group, or on groups beside it."""

    def __init__(self, name: str, world: Rendezvous, device: torch.device, start: Start, owned: bool = False) -> None:
        super().__init__(name, world.topology, device)
        #: Whether the default group is used, and whether it was made here.
        self._default = start.default_group
        self._owned = owned
        if name != "gloo":
            # NCCL is combined with gloo for CPU tensors.
            self.device_types = frozenset({"cpu", "cuda"})
        library = _library(name, start)
        self.process_groups = ProcessGroups(library, world, start.timeout, device)
        self._start_timeout = start.start_timeout
        self._world: dict[str, LazyProcessGroup | None] = dict.fromkeys(
            ("cpu", "cuda"), None if self._default else self._make_group(self.ranks(None))
        )
        if self._default and name == "nccl" and "gloo" not in dist.get_backend_config():
            # A user's own NCCL group takes no CPU tensors.
            self._world["cpu"] = self._make_group(self.ranks(None))
        self._rendezvous = world
        self._exchanges = count()
        self._started_ns = time.time_ns()
        #: Whether torch records the operations.
        self._recorded = name in ("gloo", "nccl") and flight_recorder.is_available()
        if self._recorded or (name == "mpi" and library != "mpi"):
            self.recent = None

    @classmethod
    def start(cls, name: str, start: Start) -> TorchBackend:
        _check_available(name)
        library = _library(name, start)
        world = _world_of_default_group(start) if dist.is_initialized() else rendezvous.join(start)
        device = _device(name, start, world.topology)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if name != "mpi" and not dist.is_initialized():
            reachability.require(world, start.start_timeout)
        sockets = GlooSockets()
        if start.default_group:
            with sockets.opened_inside():
                _make_default_group(name, library, world, device, start)
        backend = cls(name, world, device, start, owned=start.default_group)
        backend.process_groups.sockets.add(sockets)
        return backend

    @classmethod
    def adopt(cls, start: Start) -> TorchBackend | None:
        if not start.default_group or not dist.is_available() or not dist.is_initialized():
            return None
        libraries = dist.get_backend_config()
        name = next((name for name in ("nccl", "mpi") if name in libraries), "gloo")
        world = _world_of_default_group(start)
        return cls(name, world, _device(name, start, world.topology), start)

    def explained(self, error: BaseException, trace: TracebackType | None) -> BaseException | None:
        # In an excepthook, because DDP's backward pass calls no code of this package: a communication hook in Python
        # would cost up to 5 % of a step.
        if self.topology.world_size == 1 or not _is_lost_rank(error, trace):
            return None
        inside = _modules(trace)
        call = "forward" if "unidist.gradients.ddp" in inside else "a call of torch.distributed"
        call = "backward" if "torch.autograd" in inside else call
        explained = self.failure(call, error)
        explained.__cause__ = error
        return explained

    def follows(self, error: BaseException, trace: TracebackType | None) -> bool:
        return _is_lost_rank(error, trace) or super().follows(error, trace)

    def operations(self) -> list[OperationRecord]:
        # The library knows nothing of a group's first call until all members have come.
        first = [
            OperationRecord(
                "the first call", ranks=() if len(ranks) == self.topology.world_size else ranks, seconds=age
            )
            for ranks, age in self.process_groups.waits()
        ]
        if self._recorded:
            records = flight_recorder.operations(self._groups_by_name(), self._started_ns)
            return first + self.as_called(records)
        return first + (super().operations() if self.recent is not None else self.as_called(mpi_watch.operations()))

    def _groups_by_name(self) -> dict[str, tuple[int, ...]]:
        """Return the ranks of torch's process groups, those that the script made too; empty for all ranks."""
        names = dict(self.process_groups.ranks_by_name)
        for group, name in list(dist.distributed_c10d._world.pg_names.items()):
            with suppress(Exception):  # it is being destroyed
                names[name] = tuple(dist.get_process_group_ranks(group))
        return {name: () if len(ranks) == self.topology.world_size else ranks for name, ranks in names.items()}

    def shutdown(self) -> None:
        self.quiesce()
        self.process_groups.close()
        if self._owned and dist.is_initialized():
            # A rank that leaves after an error leaves a group that is broken already.
            with suppress(Exception):
                dist.destroy_process_group()

    def abort(self) -> None:
        """See ``Backend``; calls in a default group that the script made are not freed."""
        self.process_groups.abort()
        if self._owned and dist.is_initialized():
            threading.Thread(target=abort, args=[dist.group.WORLD], name="unidist-abort-default", daemon=True).start()

    def world_size(self) -> int:
        return dist.get_world_size() if self._default else self.topology.world_size

    def exchange(self, value: str, timeout: float | None = None) -> list[str]:
        key = f"exchange/{next(self._exchanges)}"
        limit = self._start_timeout if timeout is None else timedelta(seconds=timeout)
        return self._rendezvous.exchange(key, value, limit)

    def new_group(self, ranks: tuple[int, ...]) -> Group:
        return Group(ranks, self._make_group(ranks))

    def drop_group(self, group: Group) -> None:
        if group.handle is not None:
            self.process_groups.drop(group.handle)

    def all_reduce(self, tensor: Tensor, op: Op, group: Group | None = None) -> None:
        with self.errors_of("all_reduce", tensor, group):
            dist.all_reduce(tensor, _OPS["sum" if op == "mean" else op], self._handle(group, tensor.device.type))
            if op == "mean":
                tensor.div_(len(self.ranks(group)))

    def start_all_reduce(self, tensor: Tensor, op: Op, group: Group | None = None, *, call: str = "all_reduce") -> Wait:
        span = self.began(call, tensor, group)
        with self.errors_of(call, tensor, group, span, waits=False):
            handle = self._handle(group, tensor.device.type)
            work = dist.all_reduce(tensor, _OPS["sum" if op == "mean" else op], handle, async_op=True)

        def wait() -> None:
            with self.errors_of(call, tensor, group, span):
                work.wait()
            if op == "mean":
                tensor.div_(len(self.ranks(group)))

        return wait

    def broadcast(self, tensor: Tensor, src: int, group: Group | None = None) -> None:
        with self.errors_of("broadcast", tensor, group):
            handle = self._handle(group, tensor.device.type)
            dist.broadcast(tensor, group=handle, group_src=self.ranks(group).index(src))

    def start_broadcast(self, tensor: Tensor, src: int, group: Group | None = None) -> Wait:
        span = self.began("broadcast", tensor, group)
        with self.errors_of("broadcast", tensor, group, span, waits=False):
            handle = self._handle(group, tensor.device.type)
            work = dist.broadcast(tensor, group=handle, group_src=self.ranks(group).index(src), async_op=True)

        def wait() -> None:
            with self.errors_of("broadcast", tensor, group, span):
                work.wait()

        return wait

    def all_gather(self, tensor: Tensor, sizes: Sequence[int], group: Group | None = None) -> Tensor:
        longest = max(sizes)
        result = tensor.new_empty(len(sizes) * longest)
        if longest == 0:
            return result
        if tensor.numel() < longest:
            tensor = torch.cat([tensor, tensor.new_zeros(longest - tensor.numel())])
        with self.errors_of("all_gather", tensor, group):
            _all_gather(result, tensor, self._handle(group, tensor.device.type))
        if min(sizes) == longest:
            return result
        return torch.cat([row[:size] for row, size in zip(result.view(len(sizes), longest), sizes)])

    def all_to_all(
        self, tensor: Tensor, send: Sequence[int], receive: Sequence[int], group: Group | None = None
    ) -> Tensor:
        result = tensor.new_empty(sum(receive))
        with self.errors_of("all_to_all", tensor, group):
            dist.all_to_all_single(result, tensor, list(receive), list(send), self._handle(group, tensor.device.type))
        return result

    def reduce_scatter(self, tensor: Tensor, op: Op, group: Group | None = None) -> Tensor:
        ranks = self.ranks(group)
        size = len(ranks)
        if op not in ("sum", "mean") and tensor.device.type == "cpu" and self.name != "mpi":
            # gloo of torch 2.6 sums, whatever the operation.
            self.all_reduce(tensor, op, group)
            return tensor.chunk(size)[ranks.index(self.topology.rank)].clone()
        result = tensor.new_empty(tensor.numel() // size)
        with self.errors_of("reduce_scatter", tensor, group):
            _reduce_scatter(
                result, tensor, _OPS["sum" if op == "mean" else op], self._handle(group, tensor.device.type)
            )
        return result.div_(size) if op == "mean" else result

    def process_group(self, group: Group | None, device_type: str) -> Any:
        return self._handle(group, device_type) or dist.group.WORLD

    def _make_group(self, ranks: tuple[int, ...]) -> LazyProcessGroup | None:
        return self.process_groups.new_group(ranks) if self.topology.rank in ranks else None

    def _handle(self, group: Group | None, device_type: str) -> Any:
        """Return torch's process group; None for its default one."""
        if self.process_groups.ended:
            raise CollectiveError(f"rank {self.topology.rank}: the process groups were {self.process_groups.ended}.")
        found: LazyProcessGroup | None = group.handle if group else self._world[device_type]
        return None if found is None else found.get()


def _is_lost_rank(error: BaseException, trace: TracebackType | None) -> bool:
    """Return whether an error is one of gloo that this package has not converted."""
    if not isinstance(error, RuntimeError) or isinstance(error, UnidistError) or not LOST_RANK.search(str(error)):
        return False
    return any(module.startswith(_CALLING) for module in _modules(trace))


def _modules(trace: TracebackType | None) -> set[str]:
    return {str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(trace)}


def _device(name: str, start: Start, topology: Topology) -> torch.device:
    wanted = torch.device("cpu") if name != "nccl" and start.device is None else start.device
    return default_device(wanted, topology.local_rank)


def _library(name: str, start: Start) -> str:
    """Return torch's name of the library: of ``mpi`` it is ``mpi`` where torch was built with MPI, else that of the
    process group over mpi4py.
    """
    if name != "mpi" or dist.is_mpi_available():
        return name
    mpi.world(start.launch, start.timeout)  # loads the launcher's library
    from unidist.backends.mpi import process_group

    process_group.register()
    return process_group.NAME


def _make_default_group(name: str, library: str, world: Rendezvous, device: torch.device, start: Start) -> None:
    rank, size = world.topology.rank, world.topology.world_size
    # A PyTorch that was built with MPI takes rank and world size from it.
    arguments: Any = {} if library == "mpi" else {"store": world.store, "rank": rank, "world_size": size}
    if name == "nccl":
        library = "cpu:gloo,cuda:nccl"
        arguments["device_id"] = device  # else NCCL guesses it by the rank
    try:
        with nullcontext() if name == "mpi" else _gloo_interface(world.address):
            dist.init_process_group(library, timeout=start.timeout, **arguments)
    except Exception as error:
        hint = " Is every rank running, and can the hosts reach each other?"
        if open_files.EXHAUSTED in str(error):
            hint = open_files.advice(size)
        raise BackendError(f"rank {rank} of {size}: {name} did not start: {error}.{hint}") from error


def _world_of_default_group(start: Start) -> Rendezvous:
    """Return a rendezvous in the default group and its store. Collective."""
    launch = start.launch
    if (launch.rank, launch.world_size) != (dist.get_rank(), dist.get_world_size()):
        launch = Launch(launch.launcher, dist.get_rank(), dist.get_world_size())
    rows: list[Any] = [None] * launch.world_size
    dist.all_gather_object(rows, rendezvous.own_row(launch))
    store = dist.PrefixStore(f"unidist/beside/{start.attempt}", dist.distributed_c10d._get_default_store())
    return rendezvous.world_of(store, launch, rows)


@contextmanager
def _gloo_interface(address: str) -> Iterator[None]:
    """Inside, gloo's own devices listen on an address of this interface; else they look the host's name up."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = interface_of(address)
    try:
        yield
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


def _check_available(name: str) -> None:
    if not dist.is_available():
        raise BackendError("this torch was built without torch.distributed: install another build.")
    if name == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
        missing = "this torch was built without NCCL" if not dist.is_nccl_available() else "no CUDA device is visible"
        raise BackendError(
            f"backend 'nccl' cannot run: {missing}. Use backend 'gloo', or a CUDA build of torch on a GPU host."
        )
