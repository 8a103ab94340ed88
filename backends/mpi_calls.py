"""Collective operations as MPI calls, on flat contiguous CPU tensors of any dtype and size.

Each function starts its operation and returns the requests that are still to be waited for. What is ``small`` starts
by a nonblocking call, so that its caller may look once whether it is done already; the rest runs in blocking calls, which take
half the time on large tensors (Open MPI 4.1: 25 against 55 ms for 64 MB). Ranks must choose the same kind of
call, so the size decides, and nothing else. Larger tensors go in pieces: MPI's counts end at 2**31, and sums are made twice as
fast in pieces that fit into the caches (48 MB in 8.7 instead of 19 ms on 2 ranks, in 21 instead of 57 ms on 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from mpi4py import MPI
from torch import Tensor

Requests = list[MPI.Request]
Reduction = Literal["sum", "avg", "product", "min", "max", "band", "bor", "bxor"]

#: Up to here a nonblocking call is as fast as a blocking one.
_SMALL = 16 * 1024
#: Pieces of what is combined, and of what is moved.
_COMBINED = 4 * 2**20
_MOVED = 2**30

_INTEGERS = {
    torch.uint8: MPI.UINT8_T,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
}
_FLOATS = {torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE}
_COMPLEX = {torch.complex64: MPI.C_FLOAT_COMPLEX, torch.complex128: MPI.C_DOUBLE_COMPLEX}
#: MPI does not compute in these: they travel as they are and are combined in float32.
_HALVES = (torch.float16, torch.bfloat16)

_ARITHMETIC = {"sum": MPI.SUM, "avg": MPI.SUM, "product": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}
_BITWISE = {"band": MPI.BAND, "bor": MPI.BOR, "bxor": MPI.BXOR}
_LOGICAL = {
    "sum": MPI.LOR, "max": MPI.LOR, "bor": MPI.LOR, "product": MPI.LAND, "min": MPI.LAND, "band": MPI.LAND, "bxor": MPI.LXOR
}  # fmt: skip
_WIDE: dict[Reduction, Callable[[Tensor], Tensor]] = {
    "sum": lambda rows: rows.sum(0),
    "avg": lambda rows: rows.mean(0),
    "product": lambda rows: rows.prod(0),
    "min": lambda rows: rows.amin(0),
    "max": lambda rows: rows.amax(0),
}


def small(*tensors: Tensor) -> bool:
    """Whether an operation that moves so much starts by nonblocking calls."""
    return sum(tensor.nbytes for tensor in tensors) <= _SMALL and all(t.dtype not in _HALVES for t in tensors)


def check(dtype: torch.dtype, op: Reduction) -> None:
    """Raise where ``op`` has no meaning for ``dtype``."""
    if dtype in _HALVES and op in _WIDE:
        return
    # torch itself cannot divide the wide unsigned integers.
    undivided = op == "avg" and dtype in (torch.uint16, torch.uint32, torch.uint64)
    if dtype in _HALVES or undivided or _native(dtype, op) is None:
        raise ValueError(f"{op} of {dtype} is not defined: use another operation, or convert the tensor.")


# ------------------------------------------------------------------------------------------ combining numbers
def all_reduce(comm: MPI.Comm, tensor: Tensor, op: Reduction) -> Requests:
    """Combine over the ranks, in place; ``avg`` is completed by ``average``."""
    if tensor.dtype in _HALVES:
        _all_reduce_halves(comm, tensor, op)
        return []
    kind, mpi_op = _known(tensor.dtype, op)
    if small(tensor):
        return [comm.Iallreduce(MPI.IN_PLACE, _spec(tensor, kind), mpi_op)]
    for part in _parts(tensor, _COMBINED):
        comm.Allreduce(MPI.IN_PLACE, _spec(part, kind), mpi_op)
    return []


def reduce(comm: MPI.Comm, tensor: Tensor, dst: int, op: Reduction) -> Requests:
    """Combine over the ranks, in place on ``dst``; the others' tensors stay as they are."""
    mine = comm.rank == dst
    if tensor.dtype in _HALVES:
        rows = tensor.new_empty(comm.size, tensor.numel()) if mine else None
        MPI.Request.Waitall(gather(comm, None if rows is None else list(rows), tensor, dst))
        if rows is not None:
            tensor.copy_(_combined(rows, op))
        return []
    kind, mpi_op = _known(tensor.dtype, op)
    if small(tensor):
        spec = _spec(tensor, kind)
        return [comm.Ireduce(MPI.IN_PLACE if mine else spec, spec if mine else None, mpi_op, dst)]
    # Not in place: MPICH 4.0's MPI_Reduce reads from the address MPI_IN_PLACE when it goes through shared memory.
    result = tensor.new_empty(min(tensor.numel(), _COMBINED // tensor.element_size())) if mine else None
    for part in _parts(tensor, _COMBINED):
        place = None if result is None else result[: part.numel()]
        comm.Reduce(_spec(part, kind), None if place is None else _spec(place, kind), mpi_op, dst)
        if place is not None:
            part.copy_(place)
    return []


def reduce_scatter(comm: MPI.Comm, output: Tensor, tensor: Tensor, counts: list[int], op: Reduction) -> Requests:
    """Combine the i-th block of all ranks on rank i, where it has ``counts[i]`` elements."""
    blocks = torch.split(tensor, counts)
    if output.dtype in _HALVES:
        rows = output.new_empty(comm.size, output.numel())
        MPI.Request.Waitall(exchange(comm, blocks, list(rows)))
        output.copy_(_combined(rows, op))
        return []
    kind, mpi_op = _known(output.dtype, op)
    if tensor.nbytes <= _MOVED:
        arguments = (_spec(tensor, kind), _spec(output, kind), counts, mpi_op)
        if small(tensor):
            return [comm.Ireduce_scatter(*arguments)]
        comm.Reduce_scatter(*arguments)
        return []
    for dst, block in enumerate(blocks):
        mine = comm.rank == dst
        for part, result in zip(_parts(block, _COMBINED), _parts(output if mine else block, _COMBINED)):
            comm.Reduce(_spec(part, kind), _spec(result, kind) if mine else None, mpi_op, dst)
    return []


def average(tensor: Tensor, size: int) -> None:
    """What ``avg`` lacks after a sum by MPI; integers are cut off towards 0."""
    if tensor.dtype in _HALVES:
        return
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.div_(size)
    else:
        tensor.copy_(torch.div(tensor, size, rounding_mode="trunc"))


# ------------------------------------------------------------------------------------------ moving bytes
def broadcast(comm: MPI.Comm, tensor: Tensor, src: int) -> Requests:
    """Overwrite with the tensor of ``src``."""
    if small(tensor):
        return [comm.Ibcast(_spec(tensor), src)]
    for part in _parts(tensor, _MOVED):
        comm.Bcast(_spec(part), src)
    return []


def all_gather(comm: MPI.Comm, output: Tensor, tensor: Tensor) -> Requests:
    """Every rank's tensor, of one size, after one another."""
    if small(output):
        return [comm.Iallgather(_spec(tensor), _spec(output, blocks=comm.size))]
    if output.nbytes <= _MOVED:
        comm.Allgather(_spec(tensor), _spec(output, blocks=comm.size))
        return []
    return exchange(comm, [tensor] * comm.size, list(output.view(comm.size, -1)))


def gather(comm: MPI.Comm, outputs: Sequence[Tensor] | None, tensor: Tensor, dst: int) -> Requests:
    """Every rank's tensor on ``dst``."""
    return exchange(comm, _only(dst, comm, tensor), outputs)


def scatter(comm: MPI.Comm, output: Tensor, tensors: Sequence[Tensor] | None, src: int) -> Requests:
    """The i-th tensor of ``src`` on rank i."""
    return exchange(comm, tensors, _only(src, comm, output))


def exchange(
    comm: MPI.Comm, sends: Sequence[Tensor | None] | None, receives: Sequence[Tensor | None] | None
) -> Requests:
    """Send the i-th tensor to rank i, and receive one from it; None, or nothing in it: no message."""
    sends, receives = sends or [None] * comm.size, receives or [None] * comm.size
    rank = comm.rank
    requests: Requests = []
    # Each rank begins with its neighbours, so that they do not all turn to the same one.
    for step in range(1, comm.size):
        incoming = receives[(rank - step) % comm.size]
        if incoming is not None and incoming.nbytes:
            requests.append(receive(comm, incoming, (rank - step) % comm.size, 0))
    for step in range(1, comm.size):
        outgoing = sends[(rank + step) % comm.size]
        if outgoing is not None and outgoing.nbytes:
            requests.append(send(comm, outgoing, (rank + step) % comm.size, 0))
    own, place = sends[rank], receives[rank]
    if own is not None and place is not None:
        place.copy_(own)
    return requests


def send(comm: MPI.Comm, tensor: Tensor, dst: int, tag: int) -> MPI.Request:
    """One message."""
    with _message(tensor) as spec:
        return comm.Isend(spec, dst, tag)


def receive(comm: MPI.Comm, tensor: Tensor, src: int, tag: int) -> MPI.Request:
    """The message of ``send`` for a tensor of the same size."""
    with _message(tensor) as spec:
        return comm.Irecv(spec, src, tag)


# ---------------------------------------------------------------------------------------------
def _spec(tensor: Tensor, kind: MPI.Datatype = MPI.BYTE, blocks: int = 1) -> list[Any]:
    count = tensor.nbytes if kind is MPI.BYTE else tensor.numel()
    return [MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), count // blocks, kind]


def _parts(tensor: Tensor, nbytes: int) -> Sequence[Tensor]:
    return [tensor] if tensor.nbytes <= nbytes else torch.split(tensor, nbytes // tensor.element_size())


@contextmanager
def _message(tensor: Tensor) -> Iterator[list[Any]]:
    """A large message must not come in pieces (another could come between them), but may be one item of a large datatype."""
    if tensor.nbytes <= _MOVED:
        yield _spec(tensor)
        return
    blocks, rest = divmod(tensor.nbytes, 2**20)
    block = MPI.BYTE.Create_contiguous(2**20)
    whole = MPI.Datatype.Create_struct([blocks, rest], [0, blocks * 2**20], [block, MPI.BYTE]).Commit()
    yield [MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), 1, whole]
    # MPI keeps them until the message has gone.
    whole.Free()
    block.Free()


def _only(peer: int, comm: MPI.Comm, tensor: Tensor) -> list[Tensor | None]:
    return [tensor if rank == peer else None for rank in range(comm.size)]


def _native(dtype: torch.dtype, op: Reduction) -> tuple[MPI.Datatype, MPI.Op] | None:
    if dtype in _FLOATS and op in _ARITHMETIC:
        return _FLOATS[dtype], _ARITHMETIC[op]
    if dtype in _INTEGERS:
        return _INTEGERS[dtype], _ARITHMETIC.get(op) or _BITWISE[op]
    if dtype is torch.bool and op in _LOGICAL:
        return MPI.C_BOOL, _LOGICAL[op]
    if dtype in _COMPLEX and op in ("sum", "avg", "product"):
        return _COMPLEX[dtype], _ARITHMETIC[op]
    return None


def _known(dtype: torch.dtype, op: Reduction) -> tuple[MPI.Datatype, MPI.Op]:
    found = _native(dtype, op)
    assert found is not None, "check() comes first"
    return found


def _all_reduce_halves(comm: MPI.Comm, tensor: Tensor, op: Reduction) -> None:
    """Each rank combines its part of all ranks' tensors: as many bytes as a ring moves, and no rounding on the way."""
    parts = list(tensor.tensor_split(comm.size))
    mine = parts[comm.rank]
    rows = mine.new_empty(comm.size, mine.numel())
    MPI.Request.Waitall(exchange(comm, parts, list(rows)))
    mine.copy_(_combined(rows, op))
    MPI.Request.Waitall(exchange(comm, [mine] * comm.size, parts))


def _combined(rows: Tensor, op: Reduction) -> Tensor:
    return _WIDE[op](rows.float())
