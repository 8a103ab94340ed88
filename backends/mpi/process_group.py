"""A process group of torch.distributed over mpi4py, for builds of PyTorch without MPI.

``register`` registers it with torch under the name ``mpi4py``. Each method prepares the buffers of one call and submits
it to the group's channel.
"""

from __future__ import annotations

import time
import uuid
import zlib
from collections.abc import Sequence
from datetime import timedelta
from itertools import chain
from types import FunctionType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from unidist.backends.mpi import collectives
from unidist.backends.mpi.call import Call, describe
from unidist.backends.mpi.channel import Channel
from unidist.backends.mpi.collectives import Reduction, Requests
from unidist.backends.mpi.progress import Message
from unidist.backends.mpi.work import Work
from unidist.errors import BackendError

NAME = "mpi4py"

_NAMES: tuple[Reduction, ...] = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
#: By hash: a ReduceOp of an options object equals torch's constant, but not the other way round.
_OPS = {hash(getattr(dist.ReduceOp, name.upper())): name for name in _NAMES}
# Its overloads take single tensors too; the methods here have the one form that torch.distributed calls.
_ProcessGroup: Any = dist.ProcessGroup


class MpiProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group on one MPI communicator. Methods have the names and arguments with which torch.distributed
    calls them.
    """

    def __init__(self, comm: MPI.Comm, store: dist.Store, timeout: timedelta, ranks: Sequence[int], name: str) -> None:
        super().__init__(comm.rank, comm.size)
        self._comm = comm
        self._store = store
        self._channel = Channel(comm, store, timeout, ranks, NAME, name)
        self._barriers = 0

    # -------------------------------------------------------------------------------- reductions
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Start an all_reduce, in place."""
        (tensor,) = tensors
        op = _reduction(opts, tensor)
        call = Call("all_reduce", tensors, tensors, opts)
        if tensor.is_sparse:
            return self._all_reduce_sparse(call, tensor, op)
        flat = call.write_buffer(tensor)
        self._divide(call, flat, op)
        return self._channel.submit(call, lambda: collectives.all_reduce(self._comm, flat, op))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Start an all_reduce of several tensors of one dtype and device."""
        op = _reduction(opts, tensors[0])
        call = Call("all_reduce", tensors, tensors, opts)
        flats = [call.write_buffer(tensor) for tensor in tensors]
        whole = torch.cat(flats)
        self._divide(call, whole, op)
        call.before_copy_back(
            lambda: [flat.copy_(part) for flat, part in zip(flats, torch.split(whole, [f.numel() for f in flats]))]
        )
        return self._channel.submit(call, lambda: collectives.all_reduce(self._comm, whole, op))

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """Start a reduce, in place on the root."""
        (tensor,), root = tensors, opts.rootRank
        op = _reduction(opts, tensor)
        call = Call("reduce", tensors, tensors, opts)
        flat = call.write_buffer(tensor) if root == self.rank() else call.read_buffer(tensor)
        if root == self.rank():
            self._divide(call, flat, op)
        return self._channel.submit(call, lambda: collectives.reduce(self._comm, flat, root, op))

    def reduce_scatter(
        self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        """Start a reduce_scatter of a list; sizes may differ from rank to rank."""
        (output,), (tensors,) = output_tensors, input_tensors
        self._check_list(tensors)
        whole = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        return self._reduce_scatter([output], [whole], [[tensor.numel() for tensor in tensors]], opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        """Start a reduce_scatter of one tensor, in equal parts."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], tensors: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Start several reduce_scatters of one tensor each."""
        size = self.size()
        for output, tensor in zip(outputs, tensors):
            if tensor.numel() != output.numel() * size or output.dtype != tensor.dtype:
                _error(f"reduce_scatter of {describe(tensor)} over {size} ranks does not fit into {describe(output)}")
        return self._reduce_scatter(outputs, tensors, [[output.numel()] * size for output in outputs], opts)

    # -------------------------------------------------------------------------------- copies
    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Start a broadcast, in place."""
        (tensor,) = tensors
        root = 0 if opts is None else opts.rootRank
        call = Call("broadcast", tensors, tensors, opts)
        flat = call.write_buffer(tensor)
        return self._channel.submit(call, lambda: collectives.broadcast(self._comm, flat, root))

    def allgather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Start an all_gather into a list; sizes may differ from rank to rank."""
        (outputs,), (tensor,) = output_tensors, input_tensors
        self._check_list(outputs)
        call = Call("all_gather", [tensor], outputs, opts)
        flat = call.read_buffer(tensor)
        outs = [call.write_buffer(output) for output in outputs]
        if collectives.is_small(*outs) and all(out.numel() == flat.numel() for out in outs):
            rows = flat.new_empty(self.size(), flat.numel())
            call.before_copy_back(lambda: [out.copy_(row) for out, row in zip(outs, rows)])
            return self._channel.submit(call, lambda: collectives.all_gather(self._comm, rows, flat))
        return self._channel.submit(call, lambda: collectives.exchange(self._comm, [flat] * self.size(), outs))

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Start several all_gathers: ``output_lists[i][j]`` is the j-th tensor of rank i."""
        self._check_list(output_lists)
        call = Call("all_gather", input_list, list(chain.from_iterable(output_lists)), opts)
        flats = [call.read_buffer(tensor) for tensor in input_list]
        outs = [[call.write_buffer(output) for output in outputs] for outputs in output_lists]

        def start() -> Requests:
            sets = ((flat, [row[j] for row in outs]) for j, flat in enumerate(flats))
            return _all(collectives.exchange(self._comm, [flat] * self.size(), column) for flat, column in sets)

        return self._channel.submit(call, start)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        """Start an all_gather into one tensor."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Start several all_gathers into one tensor each."""
        for output, tensor in zip(outputs, tensors):
            if output.numel() != tensor.numel() * self.size() or output.dtype != tensor.dtype:
                _error(
                    f"all_gather of {describe(tensor)} from {self.size()} ranks does not fit into {describe(output)}"
                )
        call = Call("all_gather", tensors, outputs, opts)
        outs = [call.write_buffer(output) for output in outputs]
        flats = [call.separate_read_buffer(tensor, out) for tensor, out in zip(tensors, outs)]
        return self._channel.submit(
            call, lambda: _all(collectives.all_gather(self._comm, out, flat) for out, flat in zip(outs, flats))
        )

    def gather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any) -> dist.Work:
        """Start a gather on the root."""
        (tensor,), root = input_tensors, opts.rootRank
        outputs = output_tensors[0] if root == self.rank() else []
        call = Call("gather", [tensor], outputs, opts)
        if root == self.rank():
            self._check_list(outputs)
        flat = call.read_buffer(tensor)
        outs = [call.write_buffer(output) for output in outputs]
        return self._channel.submit(call, lambda: collectives.gather(self._comm, outs or None, flat, root))

    def scatter(self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any) -> dist.Work:
        """Start a scatter from the root."""
        (output,), root = output_tensors, opts.rootRank
        tensors = input_tensors[0] if root == self.rank() else []
        call = Call("scatter", tensors, output_tensors, opts)
        if root == self.rank():
            self._check_list(tensors)
        out = call.write_buffer(output)
        flats = [call.read_buffer(tensor) for tensor in tensors]
        return self._channel.submit(call, lambda: collectives.scatter(self._comm, out, flats or None, root))

    def alltoall(self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Start an all_to_all of lists."""
        self._check_list(output_tensors)
        self._check_list(input_tensors)
        call = Call("all_to_all", input_tensors, output_tensors, opts)
        outs = [call.write_buffer(output) for output in output_tensors]
        flats = [call.separate_read_buffer(tensor, *outs) for tensor in input_tensors]
        return self._channel.submit(call, lambda: collectives.exchange(self._comm, flats, outs))

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
    ) -> dist.Work:
        """Start an all_to_all of one tensor's parts along dim 0; no sizes: equal parts."""
        call = Call("all_to_all", [tensor], [output], opts)
        out = call.write_buffer(output)
        flat = call.separate_read_buffer(tensor, out)
        receives = torch.split(out, self._split_sizes(output, output_split_sizes))
        sends = torch.split(flat, self._split_sizes(tensor, input_split_sizes))
        return self._channel.submit(call, lambda: collectives.exchange(self._comm, sends, receives))

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> dist.Work:
        """Send a tensor to a rank of the group."""
        call = Call("send", tensors, tensors)
        flat = call.read_buffer(tensors[0])
        return self._channel.post(call, dst, lambda: collectives.send(self._channel.p2p_comm, flat, dst, tag))

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> dist.Work:
        """Receive a tensor of the same size from a rank of the group."""
        return self._receive("recv", tensors, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        """Receive a tensor from any rank."""
        return self._receive("recvAnySource", tensors, MPI.ANY_SOURCE, tag)

    # torch 2.13 renamed these.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -------------------------------------------------------------------------------- barriers
    def barrier(self, opts: Any = None) -> dist.Work:
        """Start a barrier, which is done once every rank has called it."""
        return self._channel.submit(Call("barrier", [], [], opts), lambda: [self._comm.Ibarrier()])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks, and name the ranks that did not call it. It uses the store, not MPI.

        Args:
            timeout: how long rank 0 waits for the others. Default: the group's.
            wait_all_ranks: name all missing ranks, not only the first.

        Raises:
            DistBackendError: on rank 0, with the missing ranks; on the others, if rank 0 does not answer.
        """
        seconds = self._channel.timeout if timeout is None else timeout.total_seconds()
        self._barriers += 1
        key = f"monitored/{self._barriers}"
        if self.rank() != 0:
            self._store.set(f"{key}/{self.rank()}", "")
            if not self._wait_for_key(f"{key}/0", seconds):
                self._timed_out(seconds, "rank 0 did not end it")
            return
        end = time.monotonic() + seconds
        missing = []
        for rank in range(1, self.size()):
            if not self._wait_for_key(f"{key}/{rank}", end - time.monotonic()):
                missing.append(str(rank))
                if not wait_all_ranks:
                    break
        if missing:
            self._timed_out(seconds, f"rank{'s' * (len(missing) > 1)} {', '.join(missing)} did not come")
        self._store.set(f"{key}/0", "")

    # -------------------------------------------------------------------------------- the group itself
    def getBackendName(self) -> str:
        """Return the name that torch knows it by."""
        return NAME

    def setGroupName(self, name: str) -> None:
        """Keep the name, which torch keeps in a backend: this group has none."""
        self._name = name

    def getGroupName(self) -> str:
        """Return the name under which torch has registered the group."""
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        try:
            dist.get_process_group_ranks(self)
        except KeyError:
            # torch 2.14 attaches its flight recorder to a new group that names devices, and needs a backend in C++ for
            # it.
            return []
        return [torch.device("cpu"), torch.device("cuda")] if torch.cuda.is_available() else [torch.device("cpu")]

    def get_backend(self, device: torch.device) -> MpiProcessGroup:
        """Return the group itself, which is its own backend on every device."""
        return self

    _get_backend = get_backend

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of operations submitted from now on."""
        self._channel.timeout = timeout.total_seconds()

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self._channel.collectives.sequence

    def _start_coalescing(self, device: torch.device) -> None:
        self._channel.start_coalescing()

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        return self._channel.end_coalescing()

    def shutdown(self) -> None:
        """Wait for pending operations, and free the communicators."""
        self._channel.close()

    def abort(self) -> None:
        """Fail pending operations, and end the job."""
        self._channel.abort()

    # ---------------------------------------------------------------------------------------------
    def _receive(self, name: str, tensors: list[Tensor], src: int, tag: int) -> dist.Work:
        call = Call(name, tensors, tensors)
        out = call.write_buffer(tensors[0])
        return self._channel.post(call, src, lambda: collectives.receive(self._channel.p2p_comm, out, src, tag))

    def _reduce_scatter(
        self, outputs: list[Tensor], tensors: list[Tensor], sizes: list[list[int]], opts: Any
    ) -> dist.Work:
        op = _reduction(opts, outputs[0])
        call = Call("reduce_scatter", tensors, outputs, opts)
        outs = [call.write_buffer(output) for output in outputs]
        flats = [call.separate_read_buffer(tensor, out) for tensor, out in zip(tensors, outs)]
        for out in outs:
            self._divide(call, out, op)

        def start() -> Requests:
            sets = zip(outs, flats, sizes)
            return _all(collectives.reduce_scatter(self._comm, out, flat, counts, op) for out, flat, counts in sets)

        return self._channel.submit(call, start)

    def _all_reduce_sparse(self, call: Call, tensor: Tensor, op: Reduction) -> dist.Work:
        """Gather every rank's entries, and add them up."""
        if op not in ("sum", "avg"):
            _error(f"all_reduce of sparse tensors with {op}: use sum")
        size = self.size()
        own = tensor.detach().coalesce().cpu()
        indices, values = own.indices().contiguous(), own.values().contiguous()
        result: list[Tensor] = []

        def start() -> Requests:
            counts = torch.empty(size, dtype=torch.int64)
            MPI.Request.Waitall(collectives.all_gather(self._comm, counts, torch.tensor([values.shape[0]])))
            all_indices = [indices.new_empty(indices.shape[0], int(n)) for n in counts]
            all_values = [values.new_empty(int(n), *values.shape[1:]) for n in counts]
            for mine, outs in ((indices, all_indices), (values, all_values)):
                MPI.Request.Waitall(collectives.exchange(self._comm, [mine] * size, outs))
            entries = torch.cat(all_indices, 1), torch.cat(all_values)
            whole = torch.sparse_coo_tensor(*entries, own.shape, check_invariants=False).coalesce()
            result.append(whole.div_(size) if op == "avg" else whole)
            return []

        call.may_be_nonblocking = False
        # Not into its detached self, which has indices and values of its own.
        call.before_copy_back(lambda: tensor.copy_(result[0]))
        return self._channel.submit(call, start)

    def _divide(self, call: Call, flat: Tensor, op: Reduction) -> None:
        if op == "avg":
            call.before_copy_back(lambda: collectives.divide(flat, self.size()))

    def _check_list(self, tensors: Sequence[object]) -> None:
        if len(tensors) != self.size():
            _error(f"a list of {len(tensors)} tensors was passed, but the group has {self.size()} ranks")

    def _split_sizes(self, tensor: Tensor, sizes: Sequence[int]) -> list[int]:
        """Elements for each rank."""
        rows = tensor.shape[0] if tensor.dim() else 0
        if not sizes and rows % self.size():
            _error(f"dim 0 of {describe(tensor)} cannot be split equally among {self.size()} ranks")
        sizes = sizes or [rows // self.size()] * self.size()
        if len(sizes) != self.size() or sum(sizes) != rows:
            _error(f"split sizes {list(sizes)} do not fit dim 0 of {describe(tensor)} and {self.size()} ranks")
        return [size * (tensor.numel() // rows if rows else 0) for size in sizes]

    def _wait_for_key(self, key: str, seconds: float) -> bool:
        try:
            self._store.wait([key], timedelta(seconds=max(0.001, seconds)))
        except dist.DistStoreError:
            return False
        return True

    def _timed_out(self, seconds: float, what: str) -> NoReturn:
        # gloo's message, which scripts search for.
        raise dist.DistBackendError(
            f"{self._channel.label}: Rank {self.rank()} timed out in monitoredBarrier after {seconds:g} s: {what}."
        )


def register() -> None:
    """Register the backend with torch.

    Raises:
        BackendError: the MPI library does not allow calls from several threads, or PyTorch is older than 2.7.
    """
    if torch.__version__ < "2.7":  # its DDP loses the futures of a process group written in Python
        raise BackendError(
            f"backend 'mpi' needs PyTorch 2.7 or newer, and this is {torch.__version__}: upgrade it, or use backend "
            "'gloo'."
        )
    given = MPI.Query_thread()
    if given < MPI.THREAD_MULTIPLE:
        levels = {MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled", MPI.THREAD_SERIALIZED: "serialized"}
        raise BackendError(
            f"backend 'mpi' needs an MPI with thread level 'multiple', and this one gave {levels.get(given, given)!r}: "
            "leave mpi4py.rc.thread_level and MPICH_THREADLEVEL_DEFAULT as they are, or use an MPI library built for "
            "it."
        )
    if NAME not in dist.Backend.backend_list:
        for kind in (MpiProcessGroup, Work, Message):
            _leave_uncompiled(kind)
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _leave_uncompiled(kind: type) -> None:
    """Disable torch.compile for a class's methods: DDP calls them from C++ inside compiled programs."""
    for name, member in list(vars(kind).items()):
        if isinstance(member, FunctionType) and name != "__init__":
            setattr(kind, name, torch.compiler.disable(member))  # type: ignore[no-untyped-call]


def _create(options: Any, _: object) -> MpiProcessGroup:
    rank, size, store = options.group_rank, options.group_size, options.store
    ranks = list(options.global_ranks_in_group) or list(range(size))
    # torch's ranks need not be those of MPI_COMM_WORLD.
    keys = [f"mpi/{i}" for i in range(size)]
    store.set(keys[rank], str(MPI.COMM_WORLD.rank))
    try:
        members = [int(text) for text in store.multi_get(keys)]
    except dist.DistStoreError as error:
        absent = [str(ranks[i]) for i, key in enumerate(keys) if not store.check([key])]
        raise BackendError(
            f"rank {ranks[rank]} (mpi): a group of ranks {', '.join(map(str, ranks))} was not created: ranks "
            f"{', '.join(absent)} did not call new_group in time."
        ) from error
    if len(set(members)) < size:
        raise BackendError(
            f"the group has {size} ranks, but MPI started only {len(set(members))}: start all ranks with one mpirun."
        )
    world = MPI.COMM_WORLD.Get_group()
    group = world.Incl(members)
    comm = MPI.COMM_WORLD.Create_group(group, zlib.crc32(str(options.group_id).encode()) % 2**15)
    group.Free()
    world.Free()
    # The store may have been used by an earlier group of this name.
    session = comm.bcast(uuid.uuid4().hex if rank == 0 else None)
    return MpiProcessGroup(comm, dist.PrefixStore(session, store), options.timeout, ranks, str(options.group_id))


def _reduction(opts: Any, tensor: Tensor) -> Reduction:
    op = "sum" if opts is None else _OPS.get(hash(opts.reduceOp))
    if op is None:
        _error(f"the operation is not among {', '.join(_NAMES)}")
    collectives.check_supported(tensor.dtype, op)
    return op


def _all(requests: Any) -> Requests:
    return list(chain.from_iterable(requests))


def _error(what: str) -> NoReturn:
    raise ValueError(f"mpi: {what}.")
