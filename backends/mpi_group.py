"""A process group of torch.distributed over mpi4py, for builds of PyTorch without MPI.

Importing this module registers it with torch under the name ``mpi4py``. It serves CPU tensors; CUDA tensors go through pinned
memory, unless the MPI library says that it takes them as they are.
"""

from __future__ import annotations

import ctypes
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from itertools import chain
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from unidist.backends import mpi_calls as calls
from unidist.backends import mpi_watch
from unidist.backends.mpi_calls import Reduction, Requests
from unidist.backends.mpi_progress import Collectives, Message, Messages, Work
from unidist.errors import BackendError

NAME = "mpi4py"

_NAMES: tuple[Reduction, ...] = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
#: By hash: an operation in an options object equals torch's constant, but not the other way round.
_OPS = {hash(getattr(dist.ReduceOp, name.upper())): name for name in _NAMES}
Finish = Callable[[], object]


# Its overloads take single tensors too; these members have the one form that torch.distributed calls.
_ProcessGroup: Any = dist.ProcessGroup


class MpiProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """Some ranks, and a pair of communicators of their own. torch.distributed calls its members."""

    def __init__(self, comm: MPI.Comm, store: dist.Store, timeout: timedelta, ranks: Sequence[int]) -> None:
        super().__init__(comm.rank, comm.size)
        self.timeout = timeout.total_seconds()
        world = MPI.COMM_WORLD
        self.place = f"rank {ranks[comm.rank]} of {world.size} (mpi)"
        if comm.size < world.size:
            self.place += f", group of {', '.join(map(str, ranks))}"
        self._comm = comm
        # A user's tags must not meet our own messages.
        self._mail = comm.Dup()
        self._store = store
        self._collectives = Collectives(self)
        self._messages = Messages(self)
        self._attendance = mpi_watch.Attendance(store, comm.rank, ranks)
        self._broken: Exception | None = None
        self._closed = False
        #: Works since _start_coalescing.
        self._together: list[dist.Work] | None = None
        self._barriers = 0
        mpi_watch.watch(self)

    # -------------------------------------------------------------------------------- collectives
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """all_reduce, in place."""
        (tensor,) = tensors
        op = _reduction(opts, tensor)
        if tensor.is_sparse:
            return self._all_reduce_sparse(tensor, op, opts)
        flat, back = _flat(tensor)
        return self._submit(
            "all_reduce",
            tensors,
            tensors,
            [flat],
            lambda: calls.all_reduce(self._comm, flat, op),
            opts,
            [*self._averaged(flat, op), *back],
        )

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """all_reduce of several tensors of one dtype and device."""
        op = _reduction(opts, tensors[0])
        whole, _ = _flat(torch.cat([tensor.detach().reshape(-1) for tensor in tensors]))

        def spread() -> None:
            for tensor, part in zip(tensors, torch.split(whole, [tensor.numel() for tensor in tensors])):
                tensor.detach().copy_(part.view_as(tensor))

        finish = [*self._averaged(whole, op), spread]
        return self._submit(
            "all_reduce", tensors, tensors, [whole], lambda: calls.all_reduce(self._comm, whole, op), opts, finish
        )

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """reduce, in place on the root."""
        (tensor,) = tensors
        op, root = _reduction(opts, tensor), opts.rootRank
        flat, back = _flat(tensor)
        finish = [*self._averaged(flat, op), *back] if root == self.rank() else []
        return self._submit(
            "reduce", tensors, tensors, [flat], lambda: calls.reduce(self._comm, flat, root, op), opts, finish
        )

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """broadcast, in place."""
        (tensor,) = tensors
        root = 0 if opts is None else opts.rootRank
        flat, back = _flat(tensor)
        return self._submit(
            "broadcast", tensors, tensors, [flat], lambda: calls.broadcast(self._comm, flat, root), opts, back
        )

    def allgather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """all_gather into a list; sizes may differ from rank to rank."""
        (outputs,), (tensor,) = output_tensors, input_tensors
        self._one_each(outputs)
        flat, _ = _flat(tensor)
        if all(output.numel() == tensor.numel() for output in outputs) and calls.small(*outputs):
            rows = flat.new_empty(self.size(), flat.numel())
            finish = [lambda: _copy(outputs, rows)]
            return self._submit(
                "all_gather",
                [tensor],
                outputs,
                [flat, rows],
                lambda: calls.all_gather(self._comm, rows, flat),
                opts,
                finish,
            )
        places, back = _flats(outputs)
        return self._submit(
            "all_gather",
            [tensor],
            outputs,
            [flat, *places],
            lambda: calls.exchange(self._comm, [flat] * self.size(), places),
            opts,
            back,
        )

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        """all_gather into one tensor."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Several all_gathers into one tensor each."""
        for output, tensor in zip(outputs, tensors):
            if output.numel() != tensor.numel() * self.size() or output.dtype != tensor.dtype:
                _refuse(f"all_gather of {_named(tensor)} from {self.size()} ranks does not fit into {_named(output)}")
        places, back = _flats(outputs)
        flats = [_apart(_flat(tensor)[0], place) for tensor, place in zip(tensors, places)]

        def start() -> Requests:
            return [r for place, flat in zip(places, flats) for r in calls.all_gather(self._comm, place, flat)]

        return self._submit("all_gather", tensors, outputs, places, start, opts, back)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Several all_gathers: ``output_lists[i][j]`` is the j-th tensor of rank i."""
        self._one_each(output_lists)
        flats = [_flat(tensor)[0] for tensor in input_list]
        rows, backs = zip(*(_flats(outputs) for outputs in output_lists))

        def start() -> Requests:
            return [
                request
                for j, flat in enumerate(flats)
                for request in calls.exchange(self._comm, [flat] * self.size(), [row[j] for row in rows])
            ]

        outputs, tensors = _joined(output_lists), [*flats, *_joined(rows)]
        return self._submit(
            "all_gather", input_list, outputs, tensors, start, opts, [step for back in backs for step in back]
        )

    def gather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any) -> dist.Work:
        """gather on the root."""
        (tensor,), root = input_tensors, opts.rootRank
        flat, _ = _flat(tensor)
        places: list[Tensor] | None = None
        back: list[Finish] = []
        if root == self.rank():
            (outputs,) = output_tensors
            self._one_each(outputs)
            places, back = _flats(outputs)
        return self._submit(
            "gather", [tensor], _joined(output_tensors), [flat, *(places or [])],
            lambda: calls.gather(self._comm, places, flat, root), opts, back,
        )  # fmt: skip

    def scatter(self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any) -> dist.Work:
        """scatter from the root."""
        (output,), root = output_tensors, opts.rootRank
        place, back = _flat(output)
        flats: list[Tensor] | None = None
        if root == self.rank():
            (tensors,) = input_tensors
            self._one_each(tensors)
            flats = [_flat(tensor)[0] for tensor in tensors]
        return self._submit(
            "scatter", _joined(input_tensors), output_tensors, [place, *(flats or [])],
            lambda: calls.scatter(self._comm, place, flats, root), opts, back,
        )  # fmt: skip

    def reduce_scatter(
        self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        """reduce_scatter of a list; sizes may differ from rank to rank."""
        (output,), (tensors,) = output_tensors, input_tensors
        self._one_each(tensors)
        whole = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        return self._reduce_scatter([output], [whole], [[tensor.numel() for tensor in tensors]], opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        """reduce_scatter of one tensor, in equal parts."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], tensors: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Several reduce_scatters of one tensor each."""
        for output, tensor in zip(outputs, tensors):
            if tensor.numel() != output.numel() * self.size() or output.dtype != tensor.dtype:
                _refuse(
                    f"reduce_scatter of {_named(tensor)} over {self.size()} ranks does not fit into {_named(output)}"
                )
        return self._reduce_scatter(outputs, tensors, [[output.numel()] * self.size() for output in outputs], opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
    ) -> dist.Work:
        """all_to_all of one tensor's parts along dim 0; no sizes: equal parts."""
        place, back = _flat(output)
        flat = _apart(_flat(tensor)[0], place)
        receives = torch.split(place, self._split(output, output_split_sizes))
        sends = torch.split(flat, self._split(tensor, input_split_sizes))
        return self._submit(
            "all_to_all",
            [tensor],
            [output],
            [place, flat],
            lambda: calls.exchange(self._comm, sends, receives),
            opts,
            back,
        )

    alltoall_base = all_to_all_single

    def alltoall(self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """all_to_all of lists."""
        self._one_each(output_tensors)
        self._one_each(input_tensors)
        places, back = _flats(output_tensors)
        flats = [_flat(tensor)[0] for tensor in input_tensors]
        return self._submit(
            "all_to_all",
            input_tensors,
            output_tensors,
            [*places, *flats],
            lambda: calls.exchange(self._comm, flats, places),
            opts,
            back,
        )

    def barrier(self, opts: Any = None) -> dist.Work:
        """Done once every rank has come."""
        return self._submit("barrier", [], [], [torch.empty(0)], lambda: [self._comm.Ibarrier()], opts, [])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names who has not come. It goes through the store, beside MPI.

        Args:
            timeout: how long rank 0 waits for the others. Default: the group's.
            wait_all_ranks: name all that are missing, not the first.

        Raises:
            DistBackendError: on rank 0, with the ranks that did not come; on the others, if rank 0 does not answer.
        """
        seconds = self.timeout if timeout is None else timeout.total_seconds()
        self._barriers += 1
        key = f"monitored/{self._barriers}"
        if self.rank() != 0:
            self._store.set(f"{key}/{self.rank()}", "")
            self._await(f"{key}/0", seconds, "rank 0 did not end it")
            return
        missing = []
        end = time.monotonic() + seconds
        for rank in range(1, self.size()):
            try:
                self._await(f"{key}/{rank}", end - time.monotonic(), f"rank {rank} has not come")
            except dist.DistBackendError:
                if not wait_all_ranks:
                    raise
                missing.append(rank)
        if missing:
            raise dist.DistBackendError(
                f"{self.place}: Rank 0 timed out in monitoredBarrier after {seconds:g} s: ranks {', '.join(map(str, missing))} have not come."
            )
        self._store.set(f"{key}/0", "")

    # -------------------------------------------------------------------------------- messages
    def send(self, tensors: list[Tensor], dst: int, tag: int) -> dist.Work:
        """Send a tensor to a rank of the group."""
        (tensor,) = tensors
        flat, _ = _flat(tensor)
        return self._post("send", tensor, flat, lambda: calls.send(self._mail, flat, dst, tag), [])

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> dist.Work:
        """Receive a tensor of the same size from a rank of the group."""
        return self._receive("recv", tensors, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        """Receive a tensor from whoever sends first."""
        return self._receive("recvAnySource", tensors, MPI.ANY_SOURCE, tag)

    # -------------------------------------------------------------------------------- the group itself
    def getBackendName(self) -> str:  # torch's name
        """The name that torch knows it by."""
        return NAME

    def setGroupName(self, name: str) -> None:
        """torch keeps it in a backend, and this group has none."""
        self._name = name

    def getGroupName(self) -> str:
        """By which torch finds the group again."""
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), torch.device("cuda")] if torch.cuda.is_available() else [torch.device("cpu")]

    def set_timeout(self, timeout: timedelta) -> None:
        """Of the operations that come."""
        self.timeout = timeout.total_seconds()

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self._collectives.sequence

    def _start_coalescing(self, device: torch.device) -> None:
        self._together = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        works, self._together = self._together or [], None
        return _Together(works)

    def shutdown(self) -> None:
        """Wait for what is under way, and free the communicators."""
        if self._closed:
            return
        for work in list(self._collectives.pending):
            with suppress(Exception):  # whoever submitted it can ask for its error
                work.wait()
        self.leave()
        self._closed = True
        if self._broken is None:
            self._collectives.close()
            self._messages.close()
            self._mail.Free()
            self._comm.Free()

    def abort(self) -> None:
        """End what is under way with an error; the group is of no use afterwards."""
        if not self._closed and self._broken is None:
            self._break("was aborted")

    # -------------------------------------------------------------------------------- for the threads
    def check(self) -> None:
        """Raise if the group is closed or broken."""
        if self._broken is not None:
            raise dist.DistBackendError(f"{self.place}: an earlier operation has failed ({self._broken})")
        if self._closed:
            raise dist.DistBackendError(f"{self.place}: this process group was destroyed.")

    def leave(self) -> None:
        """Tell the other ranks that this one goes."""
        if not self._closed and self.size() > 1:
            self._attendance.leave()

    def overdue(self, work: Work) -> None:
        """Break the group: ``work`` did not end within its timeout."""
        self._attendance.tell(_where(work))
        self._break(
            f"ran into its timeout of {work.timeout:g} s: {self._attendance.account(_where(work))}. Did a rank fail, or make another call?",
            work,
        )

    def look(self) -> None:
        """Deal with what is late, or will never end."""
        if self._broken is not None or self._closed:
            return
        for work in [*list(self._collectives.pending)[:1], *list(self._messages.pending)]:
            age = time.monotonic() - work.since
            if age > work.timeout:
                self.overdue(work)
            elif age > mpi_watch.LATE_S:
                self._attendance.tell(_where(work))
                gone = self._attendance.gone()
                if gone and age > 2 * mpi_watch.LATE_S:
                    self._break(f"cannot end: rank {gone[0]} has left. Look for its error.", work)

    # ---------------------------------------------------------------------------------------------
    def _submit(
        self,
        name: str,
        inputs: Sequence[Tensor],
        outputs: list[Tensor],
        moved: Sequence[Tensor],
        start: Callable[[], Requests],
        opts: Any,
        finish: Sequence[Finish],
    ) -> dist.Work:
        """Queue a collective: ``start`` begins it on the tensors that are ``moved``, ``finish`` completes ``outputs``."""
        work = Work(self, name, outputs, _in_turn(finish))
        if opts is not None and opts.timeout > timedelta(0):
            work.timeout = opts.timeout.total_seconds()
        if torch.autograd._profiler_enabled():
            work.record = torch.autograd._record_function_with_args_enter(f"{NAME}:{name}", *inputs)
        at_once = self._together is None and opts is not None and not getattr(opts, "asyncOp", True)
        self._collectives.submit(work, start, small=calls.small(*moved), at_once=at_once)
        if self._together is not None:
            self._together.append(work)
        return work

    def _receive(self, name: str, tensors: list[Tensor], src: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        place, back = _flat(tensor)
        return self._post(name, tensor, place, lambda: calls.receive(self._mail, place, src, tag), back)

    def _post(
        self, name: str, tensor: Tensor, flat: Tensor, start: Callable[[], MPI.Request], finish: Sequence[Finish]
    ) -> dist.Work:
        message = Message(self._messages, self, name, flat, _in_turn(finish))
        if torch.autograd._profiler_enabled():
            message.record = torch.autograd._record_function_with_args_enter(f"{NAME}:{name}", tensor)
        self._messages.post(message, start)
        if self._together is not None:
            self._together.append(message)
        return message

    def _reduce_scatter(
        self, outputs: list[Tensor], tensors: list[Tensor], sizes: list[list[int]], opts: Any
    ) -> dist.Work:
        op = _reduction(opts, outputs[0])
        places, back = _flats(outputs)
        flats = [_apart(_flat(tensor)[0], place) for tensor, place in zip(tensors, places)]

        def start() -> Requests:
            return [
                request
                for place, flat, counts in zip(places, flats, sizes)
                for request in calls.reduce_scatter(self._comm, place, torch.split(flat, counts), op)
            ]

        averaged = [step for place in places for step in self._averaged(place, op)]
        return self._submit("reduce_scatter", tensors, outputs, flats, start, opts, [*averaged, *back])

    def _all_reduce_sparse(self, tensor: Tensor, op: Reduction, opts: Any) -> dist.Work:
        """Every rank's entries, added up."""
        if op not in ("sum", "avg"):
            _refuse(f"all_reduce of sparse tensors with {op}: use sum")
        own = tensor.detach().coalesce().cpu()
        result: list[Tensor] = []

        def start() -> Requests:
            counts = torch.empty(self.size(), dtype=torch.int64)
            MPI.Request.Waitall(calls.all_gather(self._comm, counts, torch.tensor([own._nnz()])))
            indices = [own.indices().new_empty(own.indices().shape[0], int(n)) for n in counts]
            values = [own.values().new_empty(int(n), *own.values().shape[1:]) for n in counts]
            for mine, places in ((own.indices().contiguous(), indices), (own.values().contiguous(), values)):
                MPI.Request.Waitall(calls.exchange(self._comm, [mine] * self.size(), places))
            whole = torch.sparse_coo_tensor(
                torch.cat(indices, 1), torch.cat(values), own.shape, check_invariants=False
            ).coalesce()
            result.append(whole.div_(self.size()) if op == "avg" else whole)
            return []

        # Not its detached self: that has indices and values of its own.
        work = Work(self, "all_reduce", [tensor], lambda: tensor.copy_(result[0]))
        return self._collectives.submit(work, start, small=False, at_once=False)

    def _averaged(self, flat: Tensor, op: Reduction) -> list[Finish]:
        return [lambda: calls.average(flat, self.size())] if op == "avg" else []

    def _one_each(self, tensors: Sequence[object]) -> None:
        if len(tensors) != self.size():
            _refuse(f"a list of {len(tensors)} tensors was given, where the group has {self.size()} ranks")

    def _split(self, tensor: Tensor, sizes: Sequence[int]) -> list[int]:
        """Elements for each rank."""
        rows = tensor.shape[0] if tensor.dim() else 0
        if not sizes and rows % self.size():
            _refuse(f"dim 0 of {_named(tensor)} cannot be split equally among {self.size()} ranks")
        sizes = sizes or [rows // self.size()] * self.size()
        if len(sizes) != self.size() or sum(sizes) != rows:
            _refuse(f"split sizes {list(sizes)} do not fit dim 0 of {_named(tensor)} and {self.size()} ranks")
        return [size * (tensor.numel() // rows if rows else 0) for size in sizes]

    def _await(self, key: str, seconds: float, otherwise: str) -> None:
        try:
            self._store.wait([key], timedelta(seconds=max(0.001, seconds)))
        except RuntimeError as error:
            raise dist.DistBackendError(
                f"{self.place}: Rank {self.rank()} timed out in monitoredBarrier after {seconds:g} s: {otherwise}."
            ) from error

    def _break(self, reason: str, work: Work | None = None) -> None:
        """End all that is under way, and soon the job: the threads may be in calls that never return."""
        ended = [*self._collectives.pending, *self._messages.pending]
        error = dist.DistBackendError(f"{work or self.place} {reason}")
        self._broken = self._broken or error
        mpi_watch.end_job_soon(error)
        for pending in ended:
            pending.end(error)


class _Together(dist.Work):
    """Several operations, as one."""

    def __init__(self, works: list[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return all(work.wait(timeout) for work in self._works)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> Any:
        return torch.futures.collect_all([work.get_future() for work in self._works])


# ------------------------------------------------------------------------------------------ making groups
def register() -> None:
    """Make the backend known to torch.

    Raises:
        BackendError: the MPI library does not let several threads call it.
    """
    given = MPI.Query_thread()
    if given < MPI.THREAD_MULTIPLE:
        names = {MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled", MPI.THREAD_SERIALIZED: "serialized"}
        raise BackendError(
            f"backend 'mpi' needs an MPI with thread level 'multiple', and got {names.get(given, given)!r}: use a library built for "
            "it, and leave mpi4py.rc.thread_level as it is."
        )
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, _: object) -> MpiProcessGroup:
    rank, size = options.group_rank, options.group_size
    ranks = list(options.global_ranks_in_group) or list(range(size))
    # torch may count the ranks as it likes.
    options.store.set(f"mpi/{rank}", str(MPI.COMM_WORLD.rank))
    members = [int(text) for text in options.store.multi_get([f"mpi/{i}" for i in range(size)])]
    if len(set(members)) < size:
        raise BackendError(
            f"{size} ranks have met, but MPI_COMM_WORLD has {MPI.COMM_WORLD.size}: start them with one mpirun."
        )
    world = MPI.COMM_WORLD.Get_group()
    group = world.Incl(members)
    comm = MPI.COMM_WORLD.Create_group(group, zlib.crc32(str(options.group_id).encode()) % 2**15)
    group.Free()
    world.Free()
    return MpiProcessGroup(comm, options.store, options.timeout, ranks)


# ------------------------------------------------------------------------------------------ tensors
def _flat(tensor: Tensor) -> tuple[Tensor, list[Finish]]:
    """A flat tensor that MPI can reach, and how to bring its end state back: the tensor itself, or a copy of it."""
    tensor = tensor.detach()
    on_cpu = tensor.device.type == "cpu"
    if (on_cpu or _takes_cuda()) and tensor.is_contiguous() and not tensor.is_conj():
        if not on_cpu:
            torch.cuda.current_stream(tensor.device).synchronize()
        return tensor.view(-1), [] if on_cpu else [lambda: torch.cuda.synchronize(tensor.device)]
    flat = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=not on_cpu).copy_(tensor).view(-1)

    def back() -> None:
        tensor.copy_(flat.view(tensor.shape))
        if not on_cpu:
            torch.cuda.synchronize(tensor.device)

    return flat, [back]


def _flats(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Finish]]:
    pairs = [_flat(tensor) for tensor in tensors]
    return [flat for flat, _ in pairs], [step for _, back in pairs for step in back]


def _joined(lists: Iterable[Sequence[Tensor]]) -> list[Tensor]:
    return list(chain.from_iterable(lists))


def _apart(flat: Tensor, place: Tensor) -> Tensor:
    """MPI does not read where it writes: a tensor that shares memory with the result is copied."""
    return flat.clone() if flat.untyped_storage().data_ptr() == place.untyped_storage().data_ptr() else flat


def _copy(outputs: Sequence[Tensor], rows: Tensor) -> None:
    for output, row in zip(outputs, rows):
        output.detach().copy_(row.view_as(output))


@cache
def _takes_cuda() -> bool:
    """Whether the MPI library says that it takes CUDA tensors."""
    for name in ("MPIX_Query_cuda_support",):
        with suppress(AttributeError, OSError):
            return bool(getattr(ctypes.CDLL(None), name)())
    return False


def _in_turn(steps: Sequence[Finish]) -> Callable[[], None] | None:
    if not steps:
        return None

    def finish() -> None:
        for step in steps:
            step()

    return finish


def _reduction(opts: Any, tensor: Tensor) -> Reduction:
    if opts is None:
        return "sum"
    op = _OPS.get(hash(opts.reduceOp))
    if op is None:
        _refuse(f"the operation is not among {', '.join(_NAMES)}")
    calls.check(tensor.dtype, op)
    return op


def _where(work: Work) -> str:
    return f"{work.name}, {'message' if isinstance(work, Message) else 'operation'} {work.sequence}"


def _named(tensor: Tensor) -> str:
    return f"a {str(tensor.dtype).removeprefix('torch.')} tensor of shape {list(tensor.shape)}"


def _refuse(what: str) -> NoReturn:
    raise ValueError(f"mpi: {what}.")
