"""What is done when an operation may begin: engine calls on what Horovod's operations mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unidist.backends.base import Backend, Group, Op
from unidist.backends.gradient_buckets import fill, flat_bytes
from unidist.collectives import carrier
from unidist.hvd.adasum import adasum
from unidist.hvd.negotiation import Answer, Form

if TYPE_CHECKING:
    from unidist.hvd.session import Operation

#: Combined in a wider dtype, and rounded once.
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_ENGINE_OPS: dict[str, Op] = {"average": "sum", "sum": "sum", "min": "min", "max": "max", "product": "product"}
_ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "average": lambda rows: rows.sum(0, dtype=rows.dtype),
    "sum": lambda rows: rows.sum(0, dtype=rows.dtype),
    "min": lambda rows: rows.amin(0),
    "max": lambda rows: rows.amax(0),
    "product": lambda rows: rows.prod(0, dtype=rows.dtype),
}
#: What changes nothing, for ranks that have joined.
_NEUTRAL = {"average": 0, "sum": 0, "product": 1}


def execute(backend: Backend, group: Group, answer: Answer, operations: Sequence[Operation | None]) -> list[Any]:
    """Do what was answered; a result for each operation, None where its outputs were there before. Collective.

    Args:
        backend: the engine.
        group: the process set's.
        answer: equal on every rank.
        operations: this rank's; None for those in which it takes part with nothing, because it has joined.
    """
    kind = answer.forms[0].kind
    if kind == "allreduce" and answer.table:
        return _all_reduce_told(answer, operations[0], len(group.ranks))
    if kind == "allreduce":
        return _all_reduce(backend, group, answer.forms, operations)
    if kind == "broadcast":
        return _broadcast(backend, group, answer.forms[0].root, operations)
    operation = operations[0]
    assert operation is not None, "ranks that have joined take part in sums alone"
    if kind == "allgather":
        return [_all_gather(backend, group, answer, operation)]
    if kind == "alltoall":
        return [_all_to_all(backend, group, answer, operation)]
    if kind == "reducescatter":
        return [_reduce_scatter(backend, group, operation)]
    assert kind == "barrier", kind  # to have agreed on it is all
    return [None]


def scaled(tensor: Tensor, factor: float, divisor: int = 1) -> Tensor:
    """Multiplied and divided in place; whole numbers are cut off towards 0.

    Whole numbers are divided: the product of 49 and 1 / 49 is below 1.
    """
    if factor == 1.0 and divisor == 1:
        return tensor
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor.mul_(factor / divisor)
    if factor == 1.0:
        return tensor.copy_(torch.div(tensor.long(), divisor, rounding_mode="trunc"))
    return tensor.copy_(tensor.double().mul_(factor).div_(divisor).trunc_())


# ---------------------------------------------------------------------------------------------
def _after(form: Form, size: int) -> tuple[float, int]:
    """What a sum is multiplied with, and divided by."""
    return form.postscale, size if form.op == "average" else 1


def _all_reduce(
    backend: Backend, group: Group, forms: Sequence[Form], operations: Sequence[Operation | None]
) -> list[None]:
    form = forms[0]
    after = _after(form, len(group.ranks))
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    for index, operation in enumerate(operations):
        if operation is None:
            device = backend.device if form.device == "cuda" else torch.device("cpu")
            like = zip(forms[index].dtypes, forms[index].shapes)
            nothing = [_neutral(dtype, shape, form.op, device) for dtype, shape in like]
            inputs += nothing
            outputs += nothing
        else:
            assert operation.outputs is not None
            inputs += operation.inputs
            outputs += operation.outputs
    # A group may have tensors of several dtypes.
    for dtype in dict.fromkeys(tensor.dtype for tensor in inputs):
        chosen = [index for index, tensor in enumerate(inputs) if tensor.dtype == dtype]
        _combine(backend, group, [inputs[i] for i in chosen], [outputs[i] for i in chosen], form, after)
    return [None] * len(operations)


def _all_reduce_told(answer: Answer, operation: Operation | None, size: int) -> list[None]:
    """From numbers that have come with the answer."""
    if operation is not None:
        form = answer.forms[0]
        assert operation.outputs is not None
        output = operation.outputs[0]
        data = bytearray().join(answer.table)  # type: ignore[arg-type]
        rows = torch.frombuffer(data, dtype=output.dtype).view(len(answer.table), -1)
        rows = scaled(rows.to(_WIDER.get(rows.dtype, rows.dtype)), form.prescale)
        result = scaled(_ROWS[form.op](rows), *_after(form, size))
        output.view(-1).copy_(result)
    return [None]


def _combine(
    backend: Backend,
    group: Group,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    form: Form,
    after: tuple[float, int],
) -> None:
    alone = len(inputs) == 1 and inputs[0].dtype not in _WIDER and carrier(backend, inputs[0]) == inputs[0].device
    if alone:
        flat = outputs[0].view(-1)
        parts = [flat]
        if inputs[0] is not outputs[0]:
            flat.copy_(inputs[0].view(-1))
    else:
        flat, parts = _wire(backend, inputs)
    scaled(flat, form.prescale)
    if flat.numel():
        if form.op == "adasum":
            adasum(backend, parts, group)
        else:
            backend.all_reduce(flat, _ENGINE_OPS[form.op], group)
    scaled(flat, *after)
    if not alone:
        torch._foreach_copy_([_flat(output) for output in outputs], parts)


def _wire(backend: Backend, tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Flat copies side by side, in a dtype and on a device of the engine."""
    first = tensors[0]
    dtype = _WIDER.get(first.dtype, first.dtype)
    flat = torch.cat([_flat(tensor) for tensor in tensors]).to(dtype=dtype, device=carrier(backend, first))
    # Ten times as fast as split: no record that the parts are views of one tensor.
    return flat, list(torch.unsafe_split_with_sizes(flat, [tensor.numel() for tensor in tensors]))


def _flat(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 1 else tensor.reshape(-1)


def _neutral(dtype: str, shape: Sequence[int], op: str, device: torch.device) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    if op in _NEUTRAL:
        value: float = _NEUTRAL[op]
    elif kind.is_floating_point:
        value = torch.inf if op == "min" else -torch.inf
    else:
        value = torch.iinfo(kind).max if op == "min" else torch.iinfo(kind).min
    return torch.full(tuple(shape), value, dtype=kind, device=device)


def _broadcast(backend: Backend, group: Group, root: int, operations: Sequence[Operation | None]) -> list[None]:
    pairs = [(i, o) for each in operations if each is not None for i, o in zip(each.inputs, each.outputs or ())]
    mine = backend.topology.rank == root
    if len(pairs) == 1 and pairs[0][1].device.type in backend.device_types:
        source, target = pairs[0]
        if mine and source.data_ptr() != target.data_ptr():
            target.copy_(source)
        if target.numel():
            backend.broadcast(_bytes(target), root, group)
    else:
        flat = flat_bytes([source for source, _ in pairs]).to(carrier(backend, pairs[0][1]))
        if flat.numel():
            backend.broadcast(flat, root, group)
        fill([target for _, target in pairs], flat)
    return [None] * len(operations)


def _all_gather(backend: Backend, group: Group, answer: Answer, operation: Operation) -> list[Tensor]:
    results = []
    for index, tensor in enumerate(operation.inputs):
        rows = [own[index] for own in answer.table]
        row = tensor.shape[1:].numel() * tensor.element_size()
        data = _bytes(tensor.to(carrier(backend, tensor)))
        flat = backend.all_gather(data, [count * row for count in rows], group)
        results.append(_tensor(flat, tensor, (sum(rows), *tensor.shape[1:])))
    return results


def _all_to_all(backend: Backend, group: Group, answer: Answer, operation: Operation) -> tuple[Tensor, list[int]]:
    tensor = operation.inputs[0]
    me = group.ranks.index(backend.topology.rank)
    send, receive = operation.own, [own[me] for own in answer.table]
    row = tensor.shape[1:].numel() * tensor.element_size()
    data = _bytes(tensor.to(carrier(backend, tensor)))[: sum(send) * row]
    flat = backend.all_to_all(data, [n * row for n in send], [n * row for n in receive], group)
    return _tensor(flat, tensor, (sum(receive), *tensor.shape[1:])), receive


def _reduce_scatter(backend: Backend, group: Group, operation: Operation) -> list[Tensor]:
    form, size = operation.form, len(group.ranks)
    me = group.ranks.index(backend.topology.rank)
    results = []
    for tensor in operation.inputs:
        flat, _ = _wire(backend, [tensor])
        scaled(flat, form.prescale)
        rows = tensor.shape[0]
        counts = [rows // size + (rank < rows % size) for rank in range(size)]
        if rows % size == 0:
            part = backend.reduce_scatter(flat, "sum", group) if flat.numel() else flat
        else:
            backend.all_reduce(flat, "sum", group)
            part = flat.view(tensor.shape).narrow(0, sum(counts[:me]), counts[me]).contiguous().view(-1)
        scaled(part, *_after(form, size))
        results.append(part.to(dtype=tensor.dtype, device=tensor.device).view(counts[me], *tensor.shape[1:]))
    return results


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _tensor(flat: Tensor, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return flat.view(like.dtype).view(shape).to(like.device)
