"""Horovod's operations as calls of the backend: one function per kind."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from unidist.backends.base import Backend, Group, Op
from unidist.backends.reductions import WIDER, neutral_element
from unidist.collectives.operations import transport_device
from unidist.gradients.buckets import flatten_bytes, unflatten_bytes
from unidist.hvd.adasum import adasum
from unidist.hvd.messages import Signature
from unidist.hvd.operation import Operation

_BACKEND_OPS: dict[str, Op] = {"average": "sum", "sum": "sum", "min": "min", "max": "max", "product": "product"}
_ROW_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "average": lambda rows: rows.sum(0, dtype=rows.dtype),
    "sum": lambda rows: rows.sum(0, dtype=rows.dtype),
    "min": lambda rows: rows.amin(0),
    "max": lambda rows: rows.amax(0),
    "product": lambda rows: rows.prod(0, dtype=rows.dtype),
}
#: This rank's operations, in one order on all ranks; None for those that it has not submitted, because it has
#: joined.
Operations = Sequence[Operation | None]
Signatures = Sequence[Signature]


def scale_(tensor: Tensor, factor: float, divisor: int = 1, dtype: torch.dtype | None = None) -> Tensor:
    """Multiply and divide in place; integers are truncated towards 0.

    Integers are divided, not multiplied by the inverse: the product of 49 and 1 / 49 is below 1.

    Args:
        tensor: what is scaled.
        factor: multiplied with, in float32 for what is not of double precision.
        divisor: divided by.
        dtype: of the tensors that this is a wider copy of: numbers are rounded to it before and after, so that results
            have the bits of Horovod's, which scales them in place.
    """
    if factor == 1.0 and divisor == 1:
        return tensor
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        if dtype is None or dtype == tensor.dtype:
            return tensor.mul_(factor / divisor)
        return tensor.copy_(tensor.to(dtype).to(tensor.dtype).mul_(factor / divisor).to(dtype))
    if factor == 1.0:
        return tensor.copy_(torch.div(tensor.long(), divisor, rounding_mode="trunc"))
    return tensor.copy_(tensor.double().mul_(factor).div_(divisor).trunc_())


def _postscale_(tensor: Tensor, signature: Signature, size: int, dtype: torch.dtype) -> Tensor:
    return scale_(tensor, signature.postscale, size if signature.op == "average" else 1, dtype)


def _all_reduce(backend: Backend, group: Group, signatures: Signatures, operations: Operations) -> list[Any]:
    signature = signatures[0]
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    for index, operation in enumerate(operations):
        if operation is None:
            neutral = _neutral_tensors(signatures[index], backend.device)
            inputs += neutral
            outputs += neutral
        else:
            assert operation.outputs is not None
            inputs += operation.inputs
            outputs += operation.outputs
    # Grouped operations may have tensors of several dtypes.
    for dtype in dict.fromkeys(tensor.dtype for tensor in inputs):
        sources = [tensor for tensor in inputs if tensor.dtype == dtype]
        targets = [output for output, tensor in zip(outputs, inputs) if tensor.dtype == dtype]
        in_place = (
            len(sources) == 1 and dtype not in WIDER and transport_device(backend, sources[0]) == sources[0].device
        )
        if in_place:
            flat = targets[0].view(-1)
            parts = [flat]
            if sources[0] is not targets[0]:
                flat.copy_(sources[0].view(-1))
        else:
            flat, parts = _fusion_buffer(backend, sources)
        scale_(flat, signature.prescale, dtype=dtype)
        if flat.numel():
            if signature.op == "adasum":
                adasum(backend, parts, group)
            else:
                backend.all_reduce(flat, _BACKEND_OPS[signature.op], group)
        _postscale_(flat, signature, len(group.ranks), dtype)
        if not in_place:
            torch._foreach_copy_([_flat(target) for target in targets], parts)
    return [None] * len(operations)


def reduce_values(signature: Signature, values: list[bytes], size: int) -> bytes:
    """Return the reduction of small tensors that were sent as bytes: those of the ranks, in rank order."""
    dtype: torch.dtype = getattr(torch, signature.dtypes[0])
    rows = torch.frombuffer(bytearray().join(values), dtype=dtype).view(len(values), -1)
    rows = scale_(rows.to(WIDER.get(dtype, dtype)), signature.prescale, dtype=dtype)
    reduced = _postscale_(_ROW_REDUCTIONS[signature.op](rows), signature, size, dtype).to(dtype).contiguous()
    return ctypes.string_at(reduced.data_ptr(), reduced.nbytes)


def write_value(operation: Operation, value: bytes) -> None:
    """Write the result of ``reduce_values`` to an operation's output."""
    assert operation.outputs is not None
    output = operation.outputs[0]
    with torch.inference_mode(output.is_inference()), torch.no_grad():
        output.view(-1).copy_(torch.frombuffer(bytearray(value), dtype=output.dtype))


def _fusion_buffer(backend: Backend, tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Flat copies side by side, in a dtype and on a device of the backend, and each tensor's part."""
    first = tensors[0]
    dtype = WIDER.get(first.dtype, first.dtype)
    flat = torch.cat([_flat(tensor) for tensor in tensors]).to(dtype=dtype, device=transport_device(backend, first))
    # Ten times as fast as split, because autograd records no views.
    return flat, list(torch.unsafe_split_with_sizes(flat, [tensor.numel() for tensor in tensors]))


def _flat(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 1 else tensor.reshape(-1)


def _neutral_tensors(signature: Signature, device: torch.device) -> list[Tensor]:
    """Tensors that change no result, in place of those of a rank that has joined."""
    where = device if signature.device == "cuda" else torch.device("cpu")
    tensors = []
    for name, shape in zip(signature.dtypes, signature.shapes):
        dtype: torch.dtype = getattr(torch, name)
        tensors.append(torch.full(shape, neutral_element(signature.op, dtype), dtype=dtype, device=where))
    return tensors


def _broadcast(backend: Backend, group: Group, signatures: Signatures, operations: Operations) -> list[Any]:
    root = signatures[0].root
    pairs = [(i, o) for each in operations if each is not None for i, o in zip(each.inputs, each.outputs or ())]
    if len(pairs) == 1 and pairs[0][1].device.type in backend.device_types:
        source, target = pairs[0]
        if backend.topology.rank == root and source.data_ptr() != target.data_ptr():
            target.copy_(source)
        if target.numel():
            backend.broadcast(_bytes(target), root, group)
    else:
        flat = flatten_bytes([source for source, _ in pairs]).to(transport_device(backend, pairs[0][1]))
        if flat.numel():
            backend.broadcast(flat, root, group)
        unflatten_bytes(flat, [target for _, target in pairs])
    return [None] * len(operations)


def _all_gather(backend: Backend, group: Group, signatures: Signatures, operations: Operations) -> list[Any]:
    operation = _submitted(operations)
    size, count = len(group.ranks), len(operation.inputs)
    rows = torch.tensor([tensor.shape[0] for tensor in operation.inputs])
    rows_of_ranks = backend.all_gather(rows, [count] * size, group).view(size, count)
    results = []
    for tensor, rows in zip(operation.inputs, rows_of_ranks.t().tolist()):
        row = tensor.shape[1:].numel() * tensor.element_size()
        data = _bytes(tensor.to(transport_device(backend, tensor)))
        flat = backend.all_gather(data, [count * row for count in rows], group)
        results.append(_from_bytes(flat, tensor, (sum(rows), *tensor.shape[1:])))
    return [results]


def _all_to_all(backend: Backend, group: Group, signatures: Signatures, operations: Operations) -> list[Any]:
    operation = _submitted(operations)
    tensor = operation.inputs[0]
    send, ones = operation.splits, [1] * len(group.ranks)
    receive = backend.all_to_all(torch.tensor(send), ones, ones, group).tolist()
    row = tensor.shape[1:].numel() * tensor.element_size()
    data = _bytes(tensor.to(transport_device(backend, tensor)))[: sum(send) * row]
    flat = backend.all_to_all(data, [n * row for n in send], [n * row for n in receive], group)
    return [(_from_bytes(flat, tensor, (sum(receive), *tensor.shape[1:])), receive)]


def _reduce_scatter(backend: Backend, group: Group, signatures: Signatures, operations: Operations) -> list[Any]:
    operation = _submitted(operations)
    signature, size = operation.signature, len(group.ranks)
    me = group.ranks.index(backend.topology.rank)
    results = []
    for tensor in operation.inputs:
        flat, _ = _fusion_buffer(backend, [tensor])
        scale_(flat, signature.prescale, dtype=tensor.dtype)
        rows = tensor.shape[0]
        counts = [rows // size + (rank < rows % size) for rank in range(size)]
        if rows % size == 0:
            part = backend.reduce_scatter(flat, "sum", group) if flat.numel() else flat
        else:
            backend.all_reduce(flat, "sum", group)
            part = flat.view(tensor.shape).narrow(0, sum(counts[:me]), counts[me]).contiguous().view(-1)
        _postscale_(part, signature, size, tensor.dtype)
        results.append(part.to(dtype=tensor.dtype, device=tensor.device).view(counts[me], *tensor.shape[1:]))
    return [results]


def _submitted(operations: Operations) -> Operation:
    (operation,) = operations
    assert operation is not None, "a rank that has joined takes part in allreduce only"
    return operation


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _from_bytes(flat: Tensor, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return flat.view(like.dtype).view(shape).to(like.device)


#: By the kind of an operation. Each function takes the backend, the group of the process set, the signatures of
#: operations that are executed together (equal on all ranks), and this rank's operations; it returns a result per
#: operation, None where the outputs have been written. Collective.
EXECUTE: dict[str, Callable[[Backend, Group, Signatures, Operations], list[Any]]] = {
    "allreduce": _all_reduce,
    "broadcast": _broadcast,
    "allgather": _all_gather,
    "alltoall": _all_to_all,
    "reducescatter": _reduce_scatter,
}
