"""Horovod's operations.

Every rank of the process set calls an operation. Several may be pending at once, and ranks may submit them in different
orders, since they are matched by name; operations without a name are matched by the order of such calls. ``op`` is one
of ``Average``, ``Sum``, ``Min``, ``Max``, ``Product`` and ``Adasum``; averages of integers are computed in double
precision and truncated towards 0. Tensors are dense and contiguous, on the CPU or a GPU.

All operations raise

* ``ValueError`` for what this rank itself can see: a tensor that is not supported, a pending operation of the same
  name, a rank that is not in the process set, Horovod not initialized;
* ``HorovodInternalError``, from ``synchronize`` on every rank, when the ranks do not agree in operation, dtype, shape,
  ``op``, root, factors or device, when a rank is lost, or when the backend fails.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from unidist.hvd import basics
from unidist.hvd.basics import *  # noqa: F403 - scripts import them from here, too
from unidist.hvd.basics import Adasum, Average, Max, Min, Product, Sum, rank
from unidist.hvd.basics import is_homogeneous as is_homogeneous
from unidist.hvd.common.basics import HorovodBasics
from unidist.hvd.common.util import get_average_backwards_compatibility_fun
from unidist.hvd.compression import Compression, Compressor
from unidist.hvd.errors import HorovodInternalError
from unidist.hvd.messages import Name, Signature
from unidist.hvd.operation import Operation
from unidist.hvd.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from unidist.hvd.session import ProcessSetGroups, Session, current_session

__all__ = [
    "Compression", "HorovodInternalError", "ProcessSet", "add_process_set", "allgather", "allgather_async",
    "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall", "alltoall_async", "barrier",
    "broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "global_process_set", "grouped_allgather",
    "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async",
    "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async",
    "join", "poll", "reducescatter", "reducescatter_async",
    "remove_process_set", "sparse_allreduce_async", "synchronize",
]  # fmt: skip
__all__ += basics.__all__

_OPS = {Average: "average", Sum: "sum", Adasum: "adasum", Min: "min", Max: "max", Product: "product"}
_REDUCED = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64}
_TYPES = {dtype: str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
#: Signatures that are cached.
_MAX_SIGNATURES = 4096
#: Up to so many ranks, and bytes of all of them, a tensor is sent with the request, and reduced by rank 0.
_MAX_VALUE_RANKS, _MAX_VALUE_BYTES = 64, 4096
CompressorClass = type[Compressor]
_basics = HorovodBasics()
#: The reduction that ``op`` and the deprecated ``average`` stand for.
handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(_basics)


# ------------------------------------------------------------------------------------ allreduce
def allreduce(
    tensor: Tensor,
    average: Any = None,
    name: str | None = None,
    compression: CompressorClass = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce the ranks' tensors element by element; differentiable.

    Args:
        tensor: the same shape and dtype on every rank; stays as it is.
        average: deprecated: true for ``Average``, false for ``Sum``; a name passed in its position counts as true.
        name: by which the ranks' calls are matched.
        compression: applied to what is sent.
        op: default ``Average``.
        prescale_factor, postscale_factor: factors before and after the reduction.
        process_set: the ranks that take part.

    Returns:
        A new tensor. Its gradient is reduced in the same way.
    """
    compressed, ctx = compression.compress(tensor)
    how = (op, prescale_factor, postscale_factor, process_set)

    def run(sent: Tensor) -> Tensor:
        handle = _submit_allreduce([sent], [torch.empty_like(sent)], average, name, *how, _first, True)
        result: Tensor = current_session().wait(handle)
        return result

    def transpose(grads: list[Tensor]) -> list[Tensor]:
        return [allreduce(grads[0], average, None, Compression.none, *how)]

    return compression.decompress(_differentiable(run, transpose, compressed), ctx)


def allreduce_async(
    tensor: Tensor,
    average: Any = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin ``allreduce``; return a handle for ``poll`` and ``synchronize``."""
    return _submit_allreduce(
        [tensor], [torch.empty_like(tensor)], average, name, op, prescale_factor, postscale_factor, process_set, _first
    )


def allreduce_(
    tensor: Tensor,
    average: Any = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce in place, as ``allreduce``, without gradients; return ``tensor``."""
    session = current_session()
    handle = _submit_allreduce(
        [tensor], [tensor], average, name, op, prescale_factor, postscale_factor, process_set, _first, True
    )
    result: Tensor = session.wait(handle)
    return result


def allreduce_async_(
    tensor: Tensor,
    average: Any = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin ``allreduce_``; return a handle for ``poll`` and ``synchronize``."""
    return _submit_allreduce(
        [tensor], [tensor], average, name, op, prescale_factor, postscale_factor, process_set, _first
    )


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: Any = None,
    name: str | None = None,
    compression: CompressorClass = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce several tensors in one operation, as ``allreduce``; return a list of new ones. Differentiable."""
    compressed, ctxs = zip(*(compression.compress(tensor) for tensor in tensors))
    how = (op, prescale_factor, postscale_factor, process_set)
    reduced = _differentiable(
        lambda *sent: synchronize(grouped_allreduce_async(sent, average, name, *how)),
        lambda grads: grouped_allreduce(grads, average, None, Compression.none, *how),
        *compressed,
    )
    return [compression.decompress(tensor, ctx) for tensor, ctx in zip(reduced, ctxs)]


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: Any = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin ``grouped_allreduce``; return a handle for ``poll`` and ``synchronize``."""
    outputs = [torch.empty_like(tensor) for tensor in tensors]
    return _submit_allreduce(tensors, outputs, average, name, op, prescale_factor, postscale_factor, process_set, tuple)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: Any = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:
    """Reduce several tensors in place, as ``grouped_allreduce``, without gradients; return them."""
    session = current_session()
    handle = _submit_allreduce(
        tensors, tensors, average, name, op, prescale_factor, postscale_factor, process_set, tuple, True
    )
    result: tuple[Tensor, ...] = session.wait(handle)
    return result


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: Any = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin ``grouped_allreduce_``; return a handle for ``poll`` and ``synchronize``."""
    return _submit_allreduce(tensors, tensors, average, name, op, prescale_factor, postscale_factor, process_set, tuple)


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Begin to reduce sparse (COO) tensors, in which every rank may have other rows.

    Args:
        tensor: the same shape and dtype on every rank.
        name: by which the ranks' calls are matched.
        op: ``Average``; with any other the values are added up.
        process_set: the ranks that take part.

    Returns:
        A function that waits for the result: a sparse tensor, not coalesced.
    """
    indices = allgather_async(tensor._indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(tensor._values(), f"{name}.values", process_set)

    def finish() -> Tensor:
        gathered = synchronize(values)
        if op == Average:
            gathered = gathered / process_set.size()
        return torch.sparse_coo_tensor(synchronize(indices).t(), gathered, tensor.shape, check_invariants=False)

    return finish


# ------------------------------------------------------------------------------------ allgather
def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Concatenate the ranks' tensors along dim 0, whose sizes may differ; differentiable.

    Returns:
        A new tensor. The gradient of a rank's part is averaged over the ranks.
    """
    rows = list(tensor.shape[:1])
    result: Tensor = _differentiable(
        lambda sent: synchronize(allgather_async(sent, name, process_set)),
        lambda grads: _own_parts(grads, rows, process_set),
        tensor,
    )
    return result


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Begin ``allgather``; return a handle for ``poll`` and ``synchronize``."""
    return _submit_allgather([tensor], name, process_set, _first)


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Gather several tensors in one operation, as ``allgather``; return a tuple of new ones. Differentiable."""
    rows = [tensor.shape[0] for tensor in tensors]
    return _differentiable(
        lambda *sent: synchronize(grouped_allgather_async(sent, name, process_set)),
        lambda grads: _own_parts(grads, rows, process_set),
        *tensors,
    )


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin ``grouped_allgather``; return a handle for ``poll`` and ``synchronize``."""
    return _submit_allgather(tensors, name, process_set, tuple)


# ------------------------------------------------------------------------------------ broadcast
def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Give every rank the tensor of global rank ``root_rank``; differentiable.

    Returns:
        A new tensor. Gradients flow, averaged over the ranks, to the root.
    """

    def transpose(grads: list[Tensor]) -> list[Tensor]:
        averaged = allreduce(grads[0], process_set=process_set)
        return [averaged if rank() == root_rank else averaged.zero_()]

    result: Tensor = _differentiable(
        lambda sent: synchronize(broadcast_async(sent, root_rank, name, process_set)), transpose, tensor
    )
    return result


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin ``broadcast``; return a handle for ``poll`` and ``synchronize``."""
    return _submit_broadcast(tensor, torch.empty_like(tensor), root_rank, name, process_set)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Broadcast in place, as ``broadcast``, without gradients; return ``tensor``."""
    session = current_session()
    result: Tensor = session.wait(_submit_broadcast(tensor, tensor, root_rank, name, process_set, True))
    return result


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin ``broadcast_``; return a handle for ``poll`` and ``synchronize``."""
    return _submit_broadcast(tensor, tensor, root_rank, name, process_set)


# ------------------------------------------------------------------------------------ alltoall
def alltoall(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send rows of ``tensor`` to each rank, and receive some from each; differentiable.

    Args:
        tensor: the rows for the first rank, then those for the second, ...
        splits: number of rows for each rank, a list or an int32 tensor; None: equal parts.
        name: by which the ranks' calls are matched.
        process_set: the ranks that take part.

    Returns:
        A new tensor of the received rows, in rank order; with ``splits`` a pair of it and the number of rows received
        from each rank, an int32 tensor.
    """
    shape = tensor.shape
    counts: list[Tensor] = []

    def run(sent: Tensor) -> Any:
        received, found = synchronize(alltoall_async(sent, splits, name, process_set))
        counts.append(found)
        return received

    def transpose(grads: list[Tensor]) -> list[Tensor]:
        back = alltoall(grads[0], counts[0].cpu(), None, process_set)[0]
        if len(back) < shape[0]:  # rows that went to nobody
            back = torch.cat([back, back.new_zeros(shape[0] - len(back), *shape[1:])])
        return [back]

    result = _differentiable(run, transpose, tensor)
    return result if splits is None else (result, counts[0])


def alltoall_async(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin ``alltoall``; ``synchronize`` returns the pair, also without ``splits``."""
    session, set_id = _member(process_set, "alltoall")
    _check_tensor(tensor, None)
    if tensor.dim() == 0:
        raise ValueError("alltoall takes tensors of at least one dimension.")
    members = len(session.process_sets[set_id].ranks)
    rows = tensor.shape[0]
    if splits is None or (isinstance(splits, Tensor) and splits.numel() == 0):
        if rows % members:
            raise ValueError(f"{rows} rows cannot be split into {members} equal parts: pass splits=.")
        counts = [rows // members] * members
    else:
        if isinstance(splits, Tensor) and splits.dtype != torch.int32:
            raise ValueError(
                f"splits are {splits.dtype}, where alltoall takes 32-bit integers: pass splits.int() or a list."
            )
        counts = [int(count) for count in splits]
    if len(counts) != members or min(counts) < 0 or sum(counts) > rows:
        raise ValueError(f"splits={counts} must be {members} counts, none negative, of at most {rows} rows in all.")

    def to_result(result: tuple[Tensor, list[int]]) -> tuple[Tensor, Tensor]:
        device = splits.device if isinstance(splits, Tensor) else None
        return result[0], torch.tensor(result[1], dtype=torch.int32, device=device)

    signature = Signature("alltoall", (_TYPES[tensor.dtype],), ((-1, *tensor.shape[1:]),), device=tensor.device.type)
    full_name, inputs = _name(session, "alltoall", name, set_id), [tensor.detach()]
    return session.submit(Operation(full_name, signature, inputs, None, b"", set_id, to_result, splits=tuple(counts)))


# ------------------------------------------------------------------------------------ reducescatter
def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: CompressorClass = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce the ranks' tensors and leave one part of the result, along dim 0, on each rank; differentiable.

    Args:
        tensor: the same shape and dtype on every rank, at least one dimension; where dim 0 has no equal parts, the
            first ranks get one row more.
        name: by which the ranks' calls are matched.
        compression: applied to what is sent.
        op: ``Average`` or ``Sum``.
        process_set: the ranks that take part.
        prescale_factor, postscale_factor: factors before and after the reduction.
    """
    compressed, ctx = compression.compress(tensor)
    factor = _scatter_factor(op, process_set, prescale_factor, postscale_factor)
    part = _differentiable(
        lambda sent: synchronize(reducescatter_async(sent, name, op, process_set, prescale_factor, postscale_factor)),
        lambda grads: [allgather(grads[0] * factor, None, process_set)],
        compressed,
    )
    return compression.decompress(part, ctx)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin ``reducescatter``; return a handle for ``poll`` and ``synchronize``."""
    return _submit_reducescatter([tensor], name, op, process_set, prescale_factor, postscale_factor, _first)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: CompressorClass = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reduce and scatter several tensors in one operation; return a list of new ones. Differentiable."""
    compressed, ctxs = zip(*(compression.compress(tensor) for tensor in tensors))
    how = (name, op, process_set, prescale_factor, postscale_factor)
    factor = _scatter_factor(op, process_set, prescale_factor, postscale_factor)
    parts = _differentiable(
        lambda *sent: synchronize(grouped_reducescatter_async(sent, *how)),
        lambda grads: grouped_allgather([grad * factor for grad in grads], None, process_set),
        *compressed,
    )
    return [compression.decompress(part, ctx) for part, ctx in zip(parts, ctxs)]


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin ``grouped_reducescatter``; return a handle for ``poll`` and ``synchronize``."""
    return _submit_reducescatter(tensors, name, op, process_set, prescale_factor, postscale_factor, tuple)


# ------------------------------------------------------------------------------------ waiting
def poll(handle: int) -> bool:
    """Return whether ``synchronize`` would return at once. Raises ``ValueError`` for a handle that was synchronized."""
    return current_session().poll(handle)


def synchronize(handle: int) -> Any:
    """Wait for an operation and return its result; None for a handle that has been synchronized."""
    return current_session().wait(handle)


def join(device: int = -1) -> int:
    """Declare that this rank has no more data, and wait until all ranks have joined.

    Until then it takes part in the others' ``allreduce`` and in their optimizers' reductions with zeros, and counts in
    averages. Other operations raise on the ranks that call them.

    Args:
        device: of no effect.

    Returns:
        The rank that joined last.
    """
    return current_session().join()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the process set has made this call."""
    session, set_id = _member(process_set, "barrier")
    session.run(Operation(session.next_name(set_id), Signature("barrier"), set_id=set_id))


# ------------------------------------------------------------------------------------ submission
def _submit_allreduce(
    tensors: Sequence[Tensor],
    outputs: Sequence[Tensor],
    average: Any,
    name: str | None,
    op: int | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    to_result: Callable[[Any], Any],
    send_now: bool = False,
) -> int:
    op = handle_average_backwards_compatibility(op, average)
    session, set_id = _member(process_set, "allreduce")
    for tensor in tensors:
        _check_tensor(tensor, _REDUCED)
    reduction = _OPS.get(op)
    if reduction is None:
        raise HorovodInternalError(
            f"op={op!r} is not a reduction operation: use Average, Sum, Adasum, Min, Max or Product."
        )
    if reduction == "adasum":
        _check_adasum(session, set_id, tensors)
    signature = _allreduce_signature(session, reduction, prescale, postscale, tensors)
    kind = "allreduce" if to_result is _first else "grouped_allreduce"
    inputs = [tensor.data for tensor in tensors]
    operation = Operation(
        _name(session, kind, name, set_id),
        signature,
        inputs,
        inputs if outputs is tensors or outputs[0] is tensors[0] else outputs,
        _value(inputs, signature, session.process_sets[set_id]) if send_now else b"",
        set_id,
        result=to_result(outputs),
    )
    return session.submit(operation, send_now=send_now)


def _value(tensors: Sequence[Tensor], signature: Signature, group: ProcessSetGroups) -> bytes:
    """Return the numbers of a small tensor, which are sent with the request if the caller waits; else nothing."""
    first = tensors[0]
    if (
        len(tensors) > 1
        or signature.device != "cpu"
        or signature.op == "adasum"
        or len(group.ranks) > _MAX_VALUE_RANKS
        or first.nbytes * len(group.ranks) > _MAX_VALUE_BYTES
    ):
        return b""
    return ctypes.string_at(first.data_ptr(), first.nbytes)


def _allreduce_signature(
    session: Session, op: str, prescale: float, postscale: float, tensors: Sequence[Tensor]
) -> Signature:
    """Return the signature of an allreduce; the same object for equal ones."""
    prescale, postscale = float(prescale), float(postscale)
    key = (op, prescale, postscale, *[(tensor.dtype, tensor.shape, tensor.device.type) for tensor in tensors])
    signature = session.signatures.get(key)
    if signature is None:
        if len(session.signatures) >= _MAX_SIGNATURES:
            session.signatures.clear()
        signature = session.signatures[key] = Signature(
            "allreduce",
            tuple(_TYPES[tensor.dtype] for tensor in tensors),
            tuple(tuple(tensor.shape) for tensor in tensors),
            op,
            -1,
            prescale,
            postscale,
            tensors[0].device.type,
        )
    return signature


def _submit_allgather(
    tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet, to_result: Callable[[Any], Any]
) -> int:
    session, set_id = _member(process_set, "allgather")
    for tensor in tensors:
        _check_tensor(tensor, None)
        if tensor.dim() == 0:
            raise ValueError("allgather takes tensors of at least one dimension: pass tensor.reshape(1).")
    signature = Signature(
        "allgather",
        tuple(_TYPES[t.dtype] for t in tensors),
        tuple((-1, *t.shape[1:]) for t in tensors),
        device=tensors[0].device.type,
    )
    full_name = _name(session, "allgather" if to_result is _first else "grouped_allgather", name, set_id)
    inputs = [tensor.detach() for tensor in tensors]
    return session.submit(Operation(full_name, signature, inputs, None, b"", set_id, to_result))


def _submit_broadcast(
    tensor: Tensor, output: Tensor, root: int, name: str | None, process_set: ProcessSet, send_now: bool = False
) -> int:
    session, set_id = _member(process_set, "broadcast")
    _check_tensor(tensor, None)
    if root not in session.process_sets[set_id].ranks:
        raise ValueError(
            f"root rank {root} is not one of the ranks {list(session.process_sets[set_id].ranks)} of this process set."
        )
    signature = Signature(
        "broadcast", (_TYPES[tensor.dtype],), (tuple(tensor.shape),), "", root, device=tensor.device.type
    )
    operation = Operation(
        _name(session, "broadcast", name, set_id), signature, [tensor.data], [output.data], set_id=set_id, result=output
    )
    return session.submit(operation, send_now=send_now)


def _submit_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None,
    op: int,
    process_set: ProcessSet,
    prescale: float,
    postscale: float,
    to_result: Callable[[Any], Any],
) -> int:
    session, set_id = _member(process_set, "reducescatter")
    for tensor in tensors:
        _check_tensor(tensor, _REDUCED)
        if tensor.dim() == 0:
            raise ValueError("reducescatter takes tensors of at least one dimension.")
    if op not in (Average, Sum):
        raise HorovodInternalError(f"reducescatter takes op=Average or Sum, not {op!r}.")
    signature = Signature(
        "reducescatter",
        tuple(_TYPES[t.dtype] for t in tensors),
        tuple(tuple(t.shape) for t in tensors),
        _OPS[op],
        -1,
        float(prescale),
        float(postscale),
        tensors[0].device.type,
    )
    full_name = _name(session, "reducescatter" if to_result is _first else "grouped_reducescatter", name, set_id)
    return session.submit(Operation(full_name, signature, [t.detach() for t in tensors], None, b"", set_id, to_result))


def _first(results: Sequence[Any]) -> Any:
    return results[0]


def _name(session: Session, kind: str, name: str | None, set_id: int) -> Name:
    return session.next_name(set_id) if name is None else f"{kind}.{name}"


def _member(process_set: ProcessSet, call: str) -> tuple[Session, int]:
    try:
        session = current_session()
    except ValueError as error:
        raise HorovodInternalError(str(error)) from None
    set_id = process_set.process_set_id
    group = session.process_sets.get(set_id)  # type: ignore[arg-type]
    if set_id is None or group is None:
        raise ValueError(f"{call}: {process_set} is not registered: call add_process_set with it, on every rank.")
    if session.topology.rank not in group.ranks:
        raise ValueError(
            f"{call}: rank {session.topology.rank} is not a member of the provided process set {process_set}."
        )
    return session, set_id


def _check_tensor(tensor: Tensor, dtypes: set[torch.dtype] | None) -> None:
    if tensor.layout != torch.strided or (dtypes is not None and tensor.dtype not in dtypes):
        raise ValueError(f"Tensor type {tensor.type()} is not supported.")
    if not tensor.is_contiguous():
        raise ValueError("Tensor is required to be contiguous.")


def _check_adasum(session: Session, set_id: int, tensors: Sequence[Tensor]) -> None:
    if set_id != 0:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    if session.topology.world_size.bit_count() != 1:
        raise NotImplementedError(f"Adasum reduces ranks in pairs: {session.topology.world_size} is not a power of 2.")
    if any(not tensor.dtype.is_floating_point for tensor in tensors):
        raise ValueError("Adasum takes floating point tensors.")


# ------------------------------------------------------------------------------------ gradients
class _Differentiable(torch.autograd.Function):
    """A linear operation: ``run`` forward, its transpose, of contiguous gradients, backward."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], transpose: Callable[[list[Tensor]], Any], *tensors: Tensor) -> Any:
        ctx.transpose = transpose
        return run(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (None, None, *ctx.transpose([grad.contiguous() for grad in grads]))


def _differentiable(run: Callable[..., Any], transpose: Callable[[list[Tensor]], Any], *tensors: Tensor) -> Any:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _Differentiable.apply(run, transpose, *tensors)  # type: ignore[no-untyped-call]
    return run(*tensors)


def _own_parts(grads: Sequence[Tensor], rows: Sequence[int], process_set: ProcessSet) -> list[Tensor]:
    """Return this rank's rows of gradients averaged over the ranks."""
    averaged = grouped_allreduce([grad.contiguous() for grad in grads], process_set=process_set)
    counts = allgather(torch.tensor([list(rows)]), process_set=process_set)
    me = process_set.rank()
    return [grad.narrow(0, int(counts[:me, i].sum()), count) for i, (grad, count) in enumerate(zip(averaged, rows))]


def _scatter_factor(op: int, process_set: ProcessSet, pre: float, post: float) -> float:
    return pre * post * (process_set.size() or 1 if op == Sum else 1)
