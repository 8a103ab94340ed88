"""Collective calls with the same semantics on every backend.

Backends differ in the dtypes that they support, in whether they change their arguments, and in the shapes that they
allow. Here results are new tensors with the dtype, device and (0-d) shape of the input; bool, complex, half precision,
empty and non-contiguous tensors work; CPU tensors work with NCCL; reductions are computed in at least 32 bits.

Every function is collective: each rank of ``group`` must call it, in the same order. ``group`` is
what ``new_group`` returned, or None for the world. On an input that requires grad, ``all_reduce``,
``all_gather``, ``broadcast``, ``all_to_all`` and ``reduce_scatter`` carry gradients: ``backward()``
is then collective too, and the input must require grad on every rank of the group or on none.
"""

from __future__ import annotations

import cmath
import ctypes
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from numbers import Number
from operator import index
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, get_args, runtime_checkable

import torch
from torch import Tensor

from unidist.backends.base import Backend, Group, Op
from unidist.backends.reductions import WIDER
from unidist.collectives.consistency import compare, compare_gathered, compare_received, described, digest
from unidist.context import current, is_main, local_rank
from unidist.diagnosis.operations import format_ranks
from unidist.errors import CollectiveError
from unidist.gradients.buckets import split_into_buckets
from unidist.tree import is_lazy_view, map_leaves, walk

T = TypeVar("T")
TensorOrBool = TypeVar("TensorOrBool", Tensor, bool)
#: Bytes of a payload that is sent along with its size, in one all_gather: at first, and at most.
_INLINE_BYTES, _LARGEST_INLINE_BYTES = 256, 2**16
#: At the end of a broadcast's message.
_HEADER_BYTES = 16
#: MiB of small tensors that are broadcast together.
_BUCKET_MB = 64
ReduceOp = Literal["sum", "mean", "min", "max", "product", "and", "or"]
_REDUCE_OPS = get_args(ReduceOp)


@runtime_checkable
class Mesh(Protocol):
    """What is used of a ``torch.distributed.device_mesh.DeviceMesh``."""

    @property
    def ndim(self) -> int: ...

    @property
    def mesh(self) -> Tensor: ...


def all_reduce(tensor: TensorOrBool, op: ReduceOp = "sum", group: Group | None = None) -> TensorOrBool:
    """Reduce the ranks' tensors element by element. Collective.

    Args:
        tensor: the same shape and dtype on every rank; or a Python bool, for which a bool is returned.
        op: ``sum``, ``mean`` (floating and complex), ``min``, ``max``, ``product``; ``and`` or ``or`` on bool.
            Integer sums wrap around as in torch. Half precision is reduced in float32 and rounded once.
        group: the ranks that take part.

    Returns:
        A new tensor, equal on every rank. ``sum`` and ``mean`` carry gradients.

    Raises:
        TypeError: the dtype has no such ``op``.
        ValueError: unknown ``op``, or one without a gradient on a tensor that requires grad.
    """
    if isinstance(tensor, bool) or type(tensor).__name__.startswith("bool"):  # NumPy's, too
        return bool(all_reduce(torch.tensor(bool(tensor)), op, group))  # type: ignore[return-value]
    backend = member(group)
    compare(backend, group, "all_reduce", tensor, op)
    _check_op(tensor, op)
    return _apply(tensor, lambda data: _reduced(backend, data, op, group), lambda grad: all_reduce(grad, op, group))


def _reduced(backend: Backend, tensor: Tensor, op: ReduceOp, group: Group | None) -> Tensor:
    sent = _widened(backend, tensor, op)
    if sent.numel():
        backend.all_reduce(sent if sent.dim() == 1 else sent.view(-1), _backend_op(op), group)
    return _narrowed(sent, tensor, op)


def all_reduce_(tensor: Tensor, op: ReduceOp = "sum", group: Group | None = None) -> Tensor:
    """Reduce in place, as ``all_reduce``: nothing is allocated where the backend takes the tensor as it is. Collective.

    It does so for contiguous float32, float64, int32 and int64 on a device of the backend; of floats, not ``min`` and
    ``max``. Others are reduced in a copy.

    Args:
        tensor: overwritten; the same shape and dtype on every rank. Without a gradient: pass ``tensor.detach()``.
        op: as for ``all_reduce``.
        group: the ranks that take part.

    Returns:
        The tensor itself.

    Raises:
        TypeError: the dtype has no such ``op``.
        ValueError: unknown ``op``, or the tensor requires grad.
    """
    backend = member(group)
    if isinstance(tensor, bool):
        raise TypeError("all_reduce_ of a bool, which cannot be changed in place: use all_reduce, which returns one.")
    if isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError("all_reduce_ of a tensor that requires grad: pass tensor.detach(), or use all_reduce.")
    compare(backend, group, "all_reduce", tensor, op)
    _check_op(tensor, op)
    data = tensor.detach()
    is_ordered = data.dtype.is_floating_point and op in ("min", "max")
    if data.dtype not in backend.reducible or is_ordered or not _is_flat(backend, data):
        data.copy_(_reduced(backend, data, op, group))
    elif data.numel():
        backend.all_reduce(data.view(-1), _backend_op(op), group)
    return tensor


def all_gather(tensor: T, group: Group | None = None, *, pad: float | None = None) -> T:
    """Concatenate the ranks' tensors along dim 0, in rank order. Collective.

    Args:
        tensor: any dtype. The first dimension may differ between ranks (0 included), the others may not, without
            ``pad``. A 0-d tensor counts as one row. Or nested dicts, lists and tuples of tensors.
        group: the ranks that take part.
        pad: fills the ends of dimensions that differ between ranks, such as the lengths of generated sequences; the
            same on every rank.

    Returns:
        A new tensor of shape ``(sum of first dims, *tensor.shape[1:])``, equal on every rank; or the same structure of
        them.

    Raises:
        MismatchError: on every rank, when structures, dtypes, numbers of dimensions, ``pad`` or, without it, trailing
            dimensions differ.
        TypeError: ``pad`` is no number.
        ValueError: the dtype of a tensor with dimensions to pad does not have ``pad``.
    """

    def gather(leaf: Tensor) -> Tensor:
        return _all_gather(leaf if pad is None else _padded(leaf, pad, group), group)

    return _map_tensors("all_gather", gather, tensor, group)


def _map_tensors(call: str, fn: Callable[[Tensor], Tensor], tree: T, group: Group | None) -> T:
    """Call a collective for a tensor, or for each of a structure that must be the same on every rank."""
    if isinstance(tree, (dict, list, tuple)):
        keys = ", ".join("".join(f"[{key!r}]" for key in path) for path, _ in walk(tree))
        compare(member(group), group, call, option=f"a structure of {keys or 'nothing'}", always=True)
    mapped: T = map_leaves(fn, tree)
    return mapped


def _padded(tensor: Tensor, value: float, group: Group | None) -> Tensor:
    """Pad a tensor's ends to the largest size of each dimension but the first over all ranks. Collective."""
    _check_dense(tensor)
    sizes = torch.tensor(tensor.shape[1:], dtype=torch.int64).unsqueeze(0)
    rows, gathered = _gather(member(group), group, "all_gather", sizes, tensor, value)
    _check_pad(tensor, value)
    ends = (_from_bytes(gathered, sizes, sum(rows)).amax(0) - sizes[0]).tolist()
    # Not F.pad, whose value is a float.
    widths = [width for end in reversed(ends) for width in (0, end)]
    return torch.constant_pad_nd(tensor, widths, value) if any(ends) else tensor


def _check_pad(tensor: Tensor, pad: float) -> None:
    dtype = tensor.dtype
    if not isinstance(pad, Number):
        raise TypeError(f"all_gather(pad={pad!r}): pass a number that {dtype} has.")
    with suppress(RuntimeError):  # of torch, on overflow
        filled = torch.full((), pad, dtype=dtype, device="cpu").item()
        rounds = dtype.is_floating_point or dtype.is_complex
        if filled == pad or (rounds and cmath.isfinite(filled) == cmath.isfinite(pad)):
            return
    if tensor.dim() > 1:  # in others nothing is padded
        raise ValueError(f"all_gather(pad={pad!r}): {dtype} has no such value: pass another, or convert the tensor.")


def _all_gather(tensor: Tensor, group: Group | None) -> Tensor:
    backend = member(group)
    _check_dense(tensor)
    rows, gathered = _gather(backend, group, "all_gather", tensor.detach(), tensor)
    me = backend.ranks(group).index(backend.topology.rank)

    def run(data: Tensor) -> Tensor:
        return _from_bytes(gathered, data, sum(rows))

    def transpose(grad: Tensor) -> Tensor:
        mine = all_reduce(grad, "sum", group).narrow(0, sum(rows[:me]), rows[me])
        return mine.reshape(tensor.shape)

    return _apply(tensor, run, transpose)


def broadcast(tensor: T, src: int = 0, group: Group | None = None) -> T:
    """Give every rank the tensor of rank ``src``. Collective.

    Args:
        tensor: the same shape and dtype on every rank; the values of ``src`` are used. Or nested dicts, lists and
            tuples of tensors.
        src: a global rank of the group.
        group: the ranks that take part.

    Returns:
        A new tensor, equal on every rank, or the same structure of them. Gradients flow, summed, to rank ``src``.
    """
    return _map_tensors("broadcast", lambda leaf: _broadcast(leaf, src, group), tensor, group)


def _broadcast(tensor: Tensor, src: int, group: Group | None) -> Tensor:
    backend = member(group)
    compare(backend, group, "broadcast", tensor, f"from rank {src}")
    _check_src(backend, src, group)
    _check_dense(tensor)
    text, header = _header(tensor.dtype, tensor.shape, src)

    def run(data: Tensor) -> Tensor:
        device = transport_device(backend, data)
        if backend.topology.rank == src:
            sent = torch.cat([_to_bytes(backend, data), header.to(device)])
            backend.broadcast(sent, src, group)
        else:
            sent = torch.empty(data.nbytes + _HEADER_BYTES, dtype=torch.uint8, device=device)
            end = sent[-_HEADER_BYTES:].zero_()  # where a shorter message does not reach
            backend.broadcast(sent, src, group)
            compare_received(backend, header, end.cpu(), src, text)
        received = sent[:-_HEADER_BYTES].view(data.dtype)
        return (received if data.dim() == 1 else received.view(data.shape)).to(data.device)

    def transpose(grad: Tensor) -> Tensor:
        total = all_reduce(grad, "sum", group)
        # Zeros that hang on the sum: a second backward pass is as collective as the first, on every rank.
        return total if backend.topology.rank == src else total.masked_fill(torch.ones_like(total, dtype=torch.bool), 0)

    return _apply(tensor, run, transpose)


@lru_cache(maxsize=1024)
def _header(dtype: torch.dtype, shape: torch.Size, src: int) -> tuple[str, Tensor]:
    """Return a broadcast as errors name it, and 16 bytes that tell it from others."""
    text = described("broadcast", torch.empty(shape, dtype=dtype, device="meta"), f"from rank {src}")
    return text, torch.tensor([digest(text), 0]).view(torch.uint8)


def broadcast_(tensor: Tensor, src: int = 0, group: Group | None = None) -> Tensor:
    """Broadcast in place, as ``broadcast``. Collective.

    Args:
        tensor: overwritten, unless this is rank ``src``; the same shape and dtype on every rank. Without a gradient.
        src: a global rank of the group.
        group: the ranks that take part.

    Returns:
        The tensor itself.
    """
    broadcast_tensors_([tensor], src, group)
    return tensor


def broadcast_tensors_(tensors: Sequence[Tensor], src: int = 0, group: Group | None = None) -> None:
    """Overwrite tensors with those of rank ``src``: one broadcast per dtype, device and bucket. Collective.

    Args:
        tensors: dense, of the same shapes and dtypes on every rank.
        src: a global rank of the group.
        group: the ranks that take part.
    """
    backend = member(group)
    shapes = ", ".join(described("", tensor) for tensor in tensors)
    compare(backend, group, f"broadcast_tensors_ from rank {src}{shapes}", always=True)
    _check_src(backend, src, group)
    for tensor in tensors:
        _check_dense(tensor)
    for same in split_into_buckets((t for t in tensors if t.numel()), _BUCKET_MB):
        in_place = len(same) == 1 and _is_flat(backend, same[0])
        parts = [tensor.detach().reshape(-1) for tensor in same]
        flat = parts[0] if in_place else torch.cat(parts)
        sent = flat.to(transport_device(backend, flat))
        backend.broadcast(sent.view(torch.uint8), src, group)
        if backend.topology.rank != src and not in_place:
            sizes = [tensor.numel() for tensor in same]
            received = torch.split(sent.to(flat.device), sizes)
            parts = [part.view(tensor.shape) for part, tensor in zip(received, same)]
            if any(map(is_lazy_view, same)):
                for tensor, part in zip(same, parts):
                    tensor.detach().copy_(part)
            else:
                torch._foreach_copy_([tensor.detach() for tensor in same], parts)


def all_to_all(tensor: Tensor, splits: Sequence[int] | None = None, group: Group | None = None) -> Tensor:
    """Send rows of ``tensor`` to each rank and receive rows from each. Collective.

    Args:
        tensor: the rows for the group's first rank, then those for its second, ... The first dimension
            may differ between ranks, the others and the dtype may not.
        splits: number of rows for each rank of the group, in rank order (default: equal parts).
        group: the ranks that take part.

    Returns:
        A new tensor: the rows that the group's first rank sent to this rank, then those of its second, ...

    Raises:
        ValueError: ``splits`` does not fit the tensor or the group.
        MismatchError: on every rank, when dtypes or trailing dimensions differ.
    """
    backend = member(group)
    _check_dense(tensor)
    ranks = backend.ranks(group)
    send = _splits(tensor, splits, len(ranks))
    me = ranks.index(backend.topology.rank)
    counts = _gather(backend, group, "all_to_all", torch.tensor(send), tensor)[1]
    receive = counts.view(torch.int64)[me :: len(ranks)].tolist()

    def run(data: Tensor) -> Tensor:
        row = _row_bytes(data)
        flat = backend.all_to_all(_to_bytes(backend, data), [n * row for n in send], [n * row for n in receive], group)
        return _from_bytes(flat, data, sum(receive))

    return _apply(tensor, run, lambda grad: all_to_all(grad, receive, group))


def reduce_scatter(tensor: Tensor, op: ReduceOp = "sum", group: Group | None = None) -> Tensor:
    """Reduce the ranks' tensors and leave one part of the result on each rank. Collective.

    Args:
        tensor: the same shape and dtype on every rank; dim 0 a multiple of the group's size.
        op: as for ``all_reduce``.
        group: the ranks that take part.

    Returns:
        A new tensor of shape ``(tensor.shape[0] // size, *tensor.shape[1:])``: the i-th part on the i-th rank.

    Raises:
        ValueError: dim 0 is not a multiple of the group's size.
    """
    backend = member(group)
    compare(backend, group, "reduce_scatter", tensor, op, always=True)  # first, so that all ranks raise
    _check_op(tensor, op)
    size = len(backend.ranks(group))
    if tensor.dim() == 0 or tensor.shape[0] % size:
        raise ValueError(
            f"reduce_scatter over {size} ranks cannot split shape {tuple(tensor.shape)} along dim 0: pad it to a "
            f"multiple of {size} rows."
        )

    def run(data: Tensor) -> Tensor:
        sent = _widened(backend, data, op)
        part = sent.new_empty((sent.shape[0] // size, *sent.shape[1:]))
        if sent.numel():
            part = backend.reduce_scatter(sent.view(-1), _backend_op(op), group).view(part.shape)
        return _narrowed(part, data, op)

    def transpose(grad: Tensor) -> Tensor:
        whole = all_gather(grad, group)
        return whole / size if op == "mean" else whole

    return _apply(tensor, run, transpose)


def all_gather_object(obj: T, group: Group | None = None) -> list[T]:
    """Return every rank's object, in rank order; any object that can be pickled. Collective.

    Raises:
        CollectiveError: another rank's object cannot be pickled; there, pickle's own error is raised.
    """
    backend = member(group)
    data, error = _pickled_or_error(obj)
    sizes, flat = _gather(backend, group, "all_gather_object", data)
    found = [unpickled(part) for part in torch.split(flat, sizes)]
    _raise_if_unpicklable(backend, "all_gather_object", dict(zip(backend.ranks(group), found)), error)
    return found


def broadcast_object(obj: T, src: int = 0, group: Group | None = None) -> T:
    """Return the object of global rank ``src`` on every rank; any object that can be pickled. Collective.

    The other ranks' ``obj`` is ignored.

    Raises:
        CollectiveError: the object cannot be pickled; on rank ``src`` pickle's own error is raised.
    """
    backend = member(group)
    is_src = backend.topology.rank == src
    data, error = _pickled_or_error(obj) if is_src else (torch.empty(0, dtype=torch.uint8), None)
    text = described("broadcast_object", None, f"from rank {src}")
    sizes, payloads = _exchange(backend, group, text, text, data.numel(), data)
    _check_src(backend, src, group)
    size = max(sizes)
    if size <= payloads.shape[1]:
        data = payloads[backend.ranks(group).index(src), :size]
    else:
        data = data if is_src else torch.empty(size, dtype=torch.uint8)
        backend.broadcast(data, src, group)
    found: T = obj if is_src else unpickled(data)
    _raise_if_unpicklable(backend, "broadcast_object", {src: found}, error)
    return found


def barrier(group: Group | None = None) -> None:
    """Wait until every rank of the group has made this call. Collective."""
    backend = member(group)
    compare(backend, group, "barrier")
    backend.barrier(group)


@contextmanager
def first_rank(local: bool = False) -> Iterator[None]:
    """Let rank 0 go through a ``with`` block first, and then the others, as for a download into a cache. Collective. ::

        with unidist.first_rank():
            data = load_dataset("imdb")  # downloaded by rank 0, and read by the others

    The others wait for at most the timeout of ``init``. The block must make no collective calls.

    Args:
        local: each node's rank 0 goes first, for a cache that nodes do not share.

    Raises:
        CollectiveError: on every rank, when a first rank has failed: which, and with what. There, its own exception is
            raised.
    """
    is_first = not local_rank() if local else is_main()
    try:
        if is_first:
            yield
    except Exception as error:
        all_gather_object(f"{type(error).__name__}: {error}")
        raise
    failures = {rank: failure for rank, failure in enumerate(all_gather_object("")) if failure}
    if failures:
        rank, failure = next(iter(failures.items()))
        raise CollectiveError(f"first_rank: rank {rank} has failed in the block, which the others wait for: {failure}")
    if not is_first:
        yield


def new_group(ranks: Sequence[int] | Mesh) -> Group:
    """Make a group of some ranks, for the argument ``group`` of the other calls.

    Collective over the **world**: ranks that are not in the group call it too. A second call with the same ranks
    returns the same group.

    Args:
        ranks: global ranks, in any order; a group's ranks are sorted. Or one dimension of a ``DeviceMesh`` of all
            ranks, such as ``mesh["dp"]``, for the group of this rank in it.

    Raises:
        TypeError: no sequence of integers.
        ValueError: no rank, a rank twice, or one outside the world; a mesh of several dimensions.
    """
    if isinstance(ranks, Mesh):
        mine = ranks_of(ranks)
        groups = {row: new_group(row) for row in sorted(set(all_gather_object(mine)))}
        return groups[mine]
    backend = current()
    try:
        key = tuple(sorted(map(index, ranks)))
    except TypeError:
        raise TypeError(f"new_group({ranks!r}): pass global ranks as integers, such as new_group([0, 1]).") from None
    if backend.compares_all:
        compare(backend, None, "new_group", option=f"ranks {format_ranks(key)}")
    if not key or len(set(key)) < len(key) or key[0] < 0 or key[-1] >= backend.topology.world_size:
        raise ValueError(
            f"new_group({list(ranks)}) needs at least one rank, none twice, all from 0 to "
            f"{backend.topology.world_size - 1}."
        )
    if key not in backend.groups:
        rank = backend.topology.rank
        backend.groups[key] = replace(backend.new_group(key), _rank=key.index(rank) if rank in key else -1)
    return backend.groups[key]


def ranks_of(mesh: Mesh) -> tuple[int, ...]:
    """Return the global ranks that share one dimension of a mesh with this rank, ascending."""
    if mesh.ndim > 1:
        raise ValueError(f"{mesh} has {mesh.ndim} dimensions: pass one of them, as mesh['dp'].")
    return tuple(sorted(mesh.mesh.tolist()))


# --------------------------------------------------------------------------------- gradients
class _Collective(torch.autograd.Function):
    """A linear collective: ``run`` forward, its transpose backward."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, run: Callable[[Tensor], Tensor], transpose: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.transpose = transpose
        return run(tensor.detach())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transpose(grad), None, None


def _apply(tensor: Tensor, run: Callable[[Tensor], Tensor], transpose: Callable[[Tensor], Tensor]) -> Tensor:
    if torch.is_grad_enabled() and tensor.requires_grad:
        result: Tensor = _Collective.apply(tensor, run, transpose)  # type: ignore[no-untyped-call]
        return result
    return run(tensor.detach())


# --------------------------------------------------------------------------------- arguments
def member(group: Group | None) -> Backend:
    """Return the running backend, if this rank is in the group."""
    backend = current()
    if os.getpid() != backend.pid and not backend.works_in_forks:
        raise CollectiveError(
            f"{backend.label}: a process that was forked from a rank, such as a DataLoader's worker, is no rank: make "
            "collective calls in the rank's own process."
        )
    if group is not None and not isinstance(group, Group):
        raise TypeError(
            f"group={group!r} is not a group: pass what new_group(ranks), or new_group(mesh['dp']), returned."
        )
    if group is not None and backend.topology.rank not in group.ranks:
        raise ValueError(
            f"rank {backend.topology.rank} is not in the group of ranks {list(group.ranks)}, and only its members may "
            "make this call."
        )
    return backend


def _check_src(backend: Backend, src: int, group: Group | None) -> None:
    if src not in backend.ranks(group):
        raise ValueError(f"src={src} is not one of the ranks {list(backend.ranks(group))} that take part.")


def _check_dense(tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"collectives take tensors, not {type(tensor).__name__}: pass torch.as_tensor(...), or use "
            "allreduce_metric or all_gather_object."
        )
    if tensor.layout != torch.strided:
        raise TypeError(f"{tensor.layout} tensors are not supported: pass tensor.to_dense().")
    if tensor.is_meta:
        raise TypeError("a tensor on the meta device has no data: pass one of the CPU or of a GPU.")
    if tensor.is_quantized:
        raise TypeError("quantized tensors are not supported: pass tensor.dequantize(), or tensor.int_repr().")
    if tensor.is_nested:
        raise TypeError("nested tensors are not supported: pass tensor.to_padded_tensor(0.0).")


def _check_op(tensor: Tensor, op: str) -> None:
    if op not in _REDUCE_OPS:
        raise ValueError(f"op={op!r} is unknown: use one of {', '.join(_REDUCE_OPS)}.")
    _check_dense(tensor)
    dtype = tensor.dtype
    if (dtype == torch.bool) != (op in ("and", "or")):
        raise TypeError(
            f"{op!r} of {dtype}: 'and' and 'or' are for bool tensors only, which take no other operation: convert with "
            ".int() or .bool()."
        )
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise TypeError(f"the mean of {dtype} is not an integer: convert with .float() or .double(), or use op='sum'.")
    if dtype.is_complex and op not in ("sum", "mean"):
        raise TypeError(f"{op!r} of {dtype}: complex tensors take 'sum' and 'mean'.")
    if op not in ("sum", "mean") and tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{op!r} over ranks has no gradient here: pass tensor.detach(), or use 'sum' or 'mean'.")


def _backend_op(op: ReduceOp) -> Op:
    if op == "and":
        return "min"
    return "max" if op == "or" else op


def _splits(tensor: Tensor, splits: Sequence[int] | None, size: int) -> list[int]:
    rows = tensor.shape[0] if tensor.dim() else 0
    if splits is None:
        if tensor.dim() == 0 or rows % size:
            raise ValueError(
                f"shape {tuple(tensor.shape)} cannot be split into {size} equal parts along dim 0: pass splits=."
            )
        return [rows // size] * size
    counts = [int(n) for n in splits]
    if tensor.dim() == 0 or len(counts) != size or min(counts) < 0 or sum(counts) != rows:
        raise ValueError(
            f"splits={counts} must be {size} counts, none negative, that add up to the {rows} rows of shape "
            f"{tuple(tensor.shape)}."
        )
    return counts


# ------------------------------------------------------------------------------ conversion for the backend
def transport_device(backend: Backend, tensor: Tensor) -> torch.device:
    """Return the device on which a tensor is sent: its own if the backend supports that, else the CPU."""
    return tensor.device if tensor.device.type in backend.device_types else torch.device("cpu")


def _is_flat(backend: Backend, tensor: Tensor) -> bool:
    """Return whether the backend takes the tensor's own memory."""
    # One element counts as contiguous with any stride, of which no view of bytes is possible.
    is_dense = tensor.is_contiguous() and tensor.stride()[-1:] in ((), (1,)) and not is_lazy_view(tensor)
    return is_dense and transport_device(backend, tensor) == tensor.device


def _widened(backend: Backend, tensor: Tensor, op: str) -> Tensor:
    """Return a contiguous copy in a dtype that the backend reduces."""
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor.resolve_conj())
    dtype = torch.int32 if tensor.dtype == torch.bool else tensor.dtype
    if dtype not in backend.reducible:
        if dtype not in WIDER:
            raise TypeError(
                f"{op!r} of {dtype} is not supported: convert it first, for example with .float() or .long()."
            )
        dtype = WIDER[dtype]
    device = transport_device(backend, tensor)
    if dtype == tensor.dtype and device == tensor.device and not is_lazy_view(tensor):
        sent = tensor.clone(memory_format=torch.contiguous_format)
    else:
        sent = torch.empty(tensor.shape, dtype=dtype, device=device).copy_(tensor)
    return to_ordered(sent, op) if dtype.is_floating_point and op in ("min", "max") else sent


def _narrowed(sent: Tensor, like: Tensor, op: str) -> Tensor:
    if like.dtype.is_floating_point and op in ("min", "max"):
        sent = from_ordered(sent, op)
    if like.dtype.is_complex:
        sent = torch.view_as_complex(sent)
    return sent.to(dtype=like.dtype, device=like.device)


def to_ordered(numbers: Tensor, op: str) -> Tensor:
    """Return float32 or float64 as integers of the same order, with nan as the value that ``op`` returns.

    Backends compare floats with ``<``, so their min and max with a nan depend on its rank; torch's are nan.
    """
    ordered = _flip_negative(numbers.view(torch.int32 if numbers.dtype == torch.float32 else torch.int64))
    limits = torch.iinfo(ordered.dtype)
    return ordered.masked_fill_(numbers.isnan(), limits.max if op == "max" else limits.min)


def from_ordered(ordered: Tensor, op: str) -> Tensor:
    """Return the inverse of ``to_ordered``."""
    limits = torch.iinfo(ordered.dtype)
    nan = ordered == (limits.max if op == "max" else limits.min)
    numbers = _flip_negative(ordered).view(torch.float32 if ordered.dtype == torch.int32 else torch.float64)
    return numbers.masked_fill_(nan, torch.nan)


def _flip_negative(bits: Tensor) -> Tensor:
    # IEEE 754: sign and magnitude; two's complement counts the other way below zero.
    return bits ^ ((bits >> (bits.element_size() * 8 - 1)) & torch.iinfo(bits.dtype).max)


def _rows(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1


def _row_bytes(tensor: Tensor) -> int:
    return tensor.shape[1:].numel() * tensor.element_size()


def _to_bytes(backend: Backend, tensor: Tensor) -> Tensor:
    sent = tensor.resolve_conj().resolve_neg().to(device=transport_device(backend, tensor)).reshape(-1)
    # One expanded element counts as contiguous with stride 0, which no byte view takes.
    if not sent.is_contiguous() or sent.stride(0) != 1:
        sent = sent.clone(memory_format=torch.contiguous_format)
    return sent.view(torch.uint8)


def _from_bytes(flat: Tensor, like: Tensor, rows: int) -> Tensor:
    return flat.view(like.dtype).reshape(rows, *like.shape[1:]).to(like.device)


def _gather(
    backend: Backend, group: Group | None, call: str, tensor: Tensor, of: Tensor | None = None, pad: float | None = None
) -> tuple[list[int], Tensor]:
    """Return every rank's number of rows, and the bytes of all rows; raises on every rank when calls, dtypes or
    trailing dimensions differ.

    Args:
        call: the function's name.
        tensor: whose rows are sent.
        of: the call's argument, for the comparison; None: it is no tensor.
        pad: not None: the trailing dimensions of the argument may differ, but not their number.
    """
    data = _to_bytes(backend, tensor)
    option = "" if pad is None else f"pad={pad!r}"
    text = call if of is None else f"{call} {option} of {of.dtype} (*, {of.dim() if option else of.shape[1:]})"
    rows, payloads = _exchange(backend, group, text, described(call, of, option), _rows(tensor), data)
    sizes = [count * _row_bytes(tensor) for count in rows]
    if max(sizes) > payloads.shape[1]:
        return rows, backend.all_gather(data, sizes, group)
    return rows, torch.cat([row[:size] for row, size in zip(payloads, sizes)])


def _exchange(
    backend: Backend, group: Group | None, text: str, shown: str, count: int, data: Tensor
) -> tuple[list[int], Tensor]:
    """Compare a call, and exchange ``count`` and, where they fit, the bytes of ``data``, a row each. Collective.

    A row has as many bytes as the largest of the last call needed. A second call must follow where those of any rank
    do not fit: all ranks know all counts, and so decide alike.
    """
    compare(backend, group, text, shown=shown)
    inline = backend.inline_bytes.get(group, _INLINE_BYTES)
    header = torch.tensor([digest(text), count, data.numel()]).view(torch.uint8)
    sent = torch.zeros(len(header) + inline, dtype=torch.uint8)
    sent[: len(header)] = header
    if data.numel() <= inline:
        sent[len(header) : len(header) + data.numel()] = data
    size = len(backend.ranks(group))
    rows = backend.all_gather(sent, [sent.numel()] * size, group).view(size, -1)
    table = rows[:, : len(header)].contiguous().view(torch.int64).tolist()
    compare_gathered(backend, group, [row[0] for row in table], shown)
    longest = max(row[2] for row in table)
    backend.inline_bytes[group] = max(_INLINE_BYTES, _power_of_2(longest)) if longest <= _LARGEST_INLINE_BYTES else 0
    return [row[1] for row in table], rows[:, len(header) :]


def _power_of_2(number: int) -> int:
    """Return the next one from a number up."""
    return 1 << max(0, number - 1).bit_length()


class _PickleError(NamedTuple):
    """What a rank sends in place of an object that cannot be pickled."""

    text: str


def _pickled_or_error(obj: object) -> tuple[Tensor, Exception | None]:
    """Return the bytes of an object, or of a ``_PickleError`` beside the error."""
    try:
        data, error = pickle.dumps(obj), None
    except Exception as caught:
        data, error = pickle.dumps(_PickleError(f"{type(caught).__name__}: {caught}")), caught
    return torch.frombuffer(bytearray(data), dtype=torch.uint8), error


def _raise_if_unpicklable(backend: Backend, call: str, objects: dict[int, object], own: Exception | None) -> None:
    """Raise if a rank's object could not be pickled, so that all ranks have made the call.

    Args:
        backend: the running one.
        call: the function's name.
        objects: what the ranks have sent.
        own: this rank's error.
    """
    if own is not None:
        raise own
    for rank, each in objects.items():
        if isinstance(each, _PickleError):
            raise CollectiveError(f"{backend.label}: {call}: the object of rank {rank} cannot be pickled: {each.text}")


def unpickled(data: Tensor) -> Any:
    """Return the object that was pickled into bytes."""
    # Tensor.numpy() would need NumPy, which torch does not.
    return pickle.loads(ctypes.string_at(data.data_ptr(), data.numel()))
