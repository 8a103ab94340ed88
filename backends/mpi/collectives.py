"""Collective operations as MPI calls, on flat contiguous CPU tensors of any dtype and size.

Each function starts its operation and returns the requests that are still to be waited for. Small tensors use
nonblocking calls, which the caller can poll; the others blocking calls, which take half the time on large tensors (Open
MPI 4.1: 25 against 55 ms for 64 MB). All ranks must choose the same kind of call, so the size decides, and nothing
else. Large tensors go in chunks: MPI's counts end at 2**31, and reductions take half the time in chunks that fit into
the caches (48 MB in 8.7 instead of 19 ms on 2 ranks, in 21 instead of 57 ms on 3).
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

#: Up to this size a nonblocking call is as fast as a blocking one.
_SMALL_BYTES = 16 * 1024
#: Chunk sizes of reductions, and of calls that only copy.
_REDUCE_CHUNK_BYTES = 4 * 2**20
_COPY_CHUNK_BYTES = 2**30

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
#: MPI does not reduce these: they are sent as they are and reduced in float32.
_HALF_PRECISION = (torch.float16, torch.bfloat16)

_ARITHMETIC = {"sum": MPI.SUM, "avg": MPI.SUM, "product": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}
_BITWISE = {"band": MPI.BAND, "bor": MPI.BOR, "bxor": MPI.BXOR}
_LOGICAL = {
    "sum": MPI.LOR, "max": MPI.LOR, "bor": MPI.LOR, "product": MPI.LAND, "min": MPI.LAND, "band": MPI.LAND,
    "bxor": MPI.LXOR,
}  # fmt: skip
_ROW_REDUCTIONS: dict[Reduction, Callable[[Tensor], Tensor]] = {
    "sum": lambda rows: rows.sum(0),
    "avg": lambda rows: rows.mean(0),
    "product": lambda rows: rows.prod(0),
    "min": lambda rows: rows.amin(0),
    "max": lambda rows: rows.amax(0),
}


def is_small(*tensors: Tensor) -> bool:
    """Return whether an operation on these tensors uses nonblocking calls."""
    nbytes = 0
    for tensor in tensors:
        if tensor.dtype in _HALF_PRECISION:
            return False
        nbytes += tensor.nbytes
    return nbytes <= _SMALL_BYTES


def check_supported(dtype: torch.dtype, op: Reduction) -> None:
    """Raise ``ValueError`` where ``op`` is not defined for ``dtype``."""
    if dtype in _HALF_PRECISION and op in _ROW_REDUCTIONS:
        return
    # torch itself cannot divide the wide unsigned integers.
    undivided = op == "avg" and dtype in (torch.uint16, torch.uint32, torch.uint64)
    if dtype in _HALF_PRECISION or undivided or _native_types(dtype, op) is None:
        raise ValueError(f"{op} of {dtype} is not defined: use another operation, or convert the tensor.")


# ------------------------------------------------------------------------------------------ reductions
def all_reduce(comm: MPI.Comm, tensor: Tensor, op: Reduction) -> Requests:
    """Reduce over the ranks, in place; for ``avg``, ``divide`` the result."""
    if tensor.dtype in _HALF_PRECISION:
        _all_reduce_half_precision(comm, tensor, op)
        return []
    kind, mpi_op = _mpi_types(tensor.dtype, op)
    if is_small(tensor):
        return [comm.Iallreduce(MPI.IN_PLACE, _buffer_spec(tensor, kind), mpi_op)]
    for part in _chunks(tensor, _REDUCE_CHUNK_BYTES):
        comm.Allreduce(MPI.IN_PLACE, _buffer_spec(part, kind), mpi_op)
    return []


def reduce(comm: MPI.Comm, tensor: Tensor, dst: int, op: Reduction) -> Requests:
    """Reduce over the ranks, in place on ``dst``; the others' tensors stay as they are."""
    mine = comm.rank == dst
    if tensor.dtype in _HALF_PRECISION:
        rows = tensor.new_empty(comm.size, tensor.numel()) if mine else None
        MPI.Request.Waitall(gather(comm, None if rows is None else list(rows), tensor, dst))
        if rows is not None:
            tensor.copy_(_reduce_rows(rows, op))
        return []
    kind, mpi_op = _mpi_types(tensor.dtype, op)
    if is_small(tensor):
        spec = _buffer_spec(tensor, kind)
        return [comm.Ireduce(MPI.IN_PLACE if mine else spec, spec if mine else None, mpi_op, dst)]
    # Not in place: MPICH 4.0's MPI_Reduce reads from the address MPI_IN_PLACE when it goes through shared memory.
    result = tensor.new_empty(min(tensor.numel(), _REDUCE_CHUNK_BYTES // tensor.element_size())) if mine else None
    for part in _chunks(tensor, _REDUCE_CHUNK_BYTES):
        out = None if result is None else result[: part.numel()]
        comm.Reduce(_buffer_spec(part, kind), None if out is None else _buffer_spec(out, kind), mpi_op, dst)
        if out is not None:
            part.copy_(out)
    return []


def reduce_scatter(comm: MPI.Comm, output: Tensor, tensor: Tensor, counts: list[int], op: Reduction) -> Requests:
    """Reduce the i-th block of all ranks, of ``counts[i]`` elements, on rank i."""
    blocks = torch.split(tensor, counts)
    if output.dtype in _HALF_PRECISION:
        rows = output.new_empty(comm.size, output.numel())
        MPI.Request.Waitall(exchange(comm, blocks, list(rows)))
        output.copy_(_reduce_rows(rows, op))
        return []
    kind, mpi_op = _mpi_types(output.dtype, op)
    if tensor.nbytes <= _COPY_CHUNK_BYTES:
        arguments = (_buffer_spec(tensor, kind), _buffer_spec(output, kind), counts, mpi_op)
        if is_small(tensor):
            return [comm.Ireduce_scatter(*arguments)]
        comm.Reduce_scatter(*arguments)
        return []
    for dst, block in enumerate(blocks):
        mine = comm.rank == dst
        for part, result in zip(
            _chunks(block, _REDUCE_CHUNK_BYTES), _chunks(output if mine else block, _REDUCE_CHUNK_BYTES)
        ):
            comm.Reduce(_buffer_spec(part, kind), _buffer_spec(result, kind) if mine else None, mpi_op, dst)
    return []


def divide(tensor: Tensor, size: int) -> None:
    """Complete ``avg`` after MPI's sum; integers are truncated towards 0."""
    if tensor.dtype in _HALF_PRECISION:
        return
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.div_(size)
    else:
        tensor.copy_(torch.div(tensor, size, rounding_mode="trunc"))


# ------------------------------------------------------------------------------------------ copies
def broadcast(comm: MPI.Comm, tensor: Tensor, src: int) -> Requests:
    """Overwrite with the tensor of ``src``."""
    if is_small(tensor):
        return [comm.Ibcast(_buffer_spec(tensor), src)]
    for part in _chunks(tensor, _COPY_CHUNK_BYTES):
        comm.Bcast(_buffer_spec(part), src)
    return []


def all_gather(comm: MPI.Comm, output: Tensor, tensor: Tensor) -> Requests:
    """Concatenate every rank's tensor, all of one size."""
    if is_small(output):
        return [comm.Iallgather(_buffer_spec(tensor), _buffer_spec(output, blocks=comm.size))]
    if output.nbytes <= _COPY_CHUNK_BYTES:
        comm.Allgather(_buffer_spec(tensor), _buffer_spec(output, blocks=comm.size))
        return []
    return exchange(comm, [tensor] * comm.size, list(output.view(comm.size, -1)))


def gather(comm: MPI.Comm, outputs: Sequence[Tensor] | None, tensor: Tensor, dst: int) -> Requests:
    """Gather every rank's tensor on ``dst``."""
    return exchange(comm, _for_rank_only(dst, comm, tensor), outputs)


def scatter(comm: MPI.Comm, output: Tensor, tensors: Sequence[Tensor] | None, src: int) -> Requests:
    """Send the i-th tensor of ``src`` to rank i."""
    return exchange(comm, tensors, _for_rank_only(src, comm, output))


def exchange(
    comm: MPI.Comm, sends: Sequence[Tensor | None] | None, receives: Sequence[Tensor | None] | None
) -> Requests:
    """Send the i-th tensor to rank i, and receive one from it; no message where it is None or empty."""
    sends, receives = sends or [None] * comm.size, receives or [None] * comm.size
    rank = comm.rank
    requests: Requests = []
    # Each rank begins with its neighbours, so that they do not all send to the same one.
    for step in range(1, comm.size):
        incoming = receives[(rank - step) % comm.size]
        if incoming is not None and incoming.nbytes:
            requests.append(receive(comm, incoming, (rank - step) % comm.size, 0))
    for step in range(1, comm.size):
        outgoing = sends[(rank + step) % comm.size]
        if outgoing is not None and outgoing.nbytes:
            requests.append(send(comm, outgoing, (rank + step) % comm.size, 0))
    own, out = sends[rank], receives[rank]
    if own is not None and out is not None:
        out.copy_(own)
    return requests


def send(comm: MPI.Comm, tensor: Tensor, dst: int, tag: int) -> MPI.Request:
    """Send one message."""
    with _message(tensor) as spec:
        return comm.Isend(spec, dst, tag)


def receive(comm: MPI.Comm, tensor: Tensor, src: int, tag: int) -> MPI.Request:
    """Receive the message of ``send`` for a tensor of the same size."""
    with _message(tensor) as spec:
        return comm.Irecv(spec, src, tag)


# ---------------------------------------------------------------------------------------------
def _buffer_spec(tensor: Tensor, kind: MPI.Datatype = MPI.BYTE, blocks: int = 1) -> list[Any]:
    count = tensor.nbytes if kind is MPI.BYTE else tensor.numel()
    return [MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), count // blocks, kind]


def _chunks(tensor: Tensor, nbytes: int) -> Sequence[Tensor]:
    return [tensor] if tensor.nbytes <= nbytes else torch.split(tensor, nbytes // tensor.element_size())


@contextmanager
def _message(tensor: Tensor) -> Iterator[list[Any]]:
    """Yield what MPI sends of a message: a large one must not be split, as another could match between the parts, but
    may be one item of a large datatype.
    """
    if tensor.nbytes <= _COPY_CHUNK_BYTES:
        yield _buffer_spec(tensor)
        return
    blocks, rest = divmod(tensor.nbytes, 2**20)
    block = MPI.BYTE.Create_contiguous(2**20)
    whole = MPI.Datatype.Create_struct([blocks, rest], [0, blocks * 2**20], [block, MPI.BYTE]).Commit()
    yield [MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), 1, whole]
    # MPI itself keeps them until the message is sent.
    whole.Free()
    block.Free()


def _for_rank_only(peer: int, comm: MPI.Comm, tensor: Tensor) -> list[Tensor | None]:
    return [tensor if rank == peer else None for rank in range(comm.size)]


def _native_types(dtype: torch.dtype, op: Reduction) -> tuple[MPI.Datatype, MPI.Op] | None:
    if dtype in _FLOATS and op in _ARITHMETIC:
        return _FLOATS[dtype], _ARITHMETIC[op]
    if dtype in _INTEGERS:
        return _INTEGERS[dtype], _ARITHMETIC.get(op) or _BITWISE[op]
    if dtype is torch.bool and op in _LOGICAL:
        return MPI.C_BOOL, _LOGICAL[op]
    if dtype in _COMPLEX and op in ("sum", "avg", "product"):
        return _COMPLEX[dtype], _ARITHMETIC[op]
    return None


def _mpi_types(dtype: torch.dtype, op: Reduction) -> tuple[MPI.Datatype, MPI.Op]:
    found = _native_types(dtype, op)
    assert found is not None, "check_supported() has been called"
    return found


def _all_reduce_half_precision(comm: MPI.Comm, tensor: Tensor, op: Reduction) -> None:
    """Reduce each rank's part of all tensors on that rank: as many bytes as a ring allreduce, and one rounding."""
    parts = list(tensor.tensor_split(comm.size))
    mine = parts[comm.rank]
    rows = mine.new_empty(comm.size, mine.numel())
    MPI.Request.Waitall(exchange(comm, parts, list(rows)))
    mine.copy_(_reduce_rows(rows, op))
    MPI.Request.Waitall(exchange(comm, [mine] * comm.size, parts))


def _reduce_rows(rows: Tensor, op: Reduction) -> Tensor:
    return _ROW_REDUCTIONS[op](rows.float())
