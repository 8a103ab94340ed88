"""Reductions as on every backend: wider dtypes, neutral elements, and the reduction of tensors that are all here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unidist.backends.base import Op

#: Reduced in a wider dtype, and rounded once.
WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.int8: torch.int32,
    torch.uint8: torch.int32,
    torch.int16: torch.int32,
}
_PAIRWISE: dict[Op, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add, "mean": torch.add, "min": torch.minimum, "max": torch.maximum, "product": torch.mul
}  # fmt: skip


def neutral_element(op: str, dtype: torch.dtype) -> float:
    """Return the value that changes no result: 0 in a sum or mean, 1 in a product, the dtype's limit in ``min`` and
    ``max``.
    """
    if op in ("sum", "mean", "average"):
        return 0
    if op == "product":
        return 1
    if dtype.is_floating_point:
        return torch.inf if op == "min" else -torch.inf
    limits = torch.iinfo(dtype)
    return limits.max if op == "min" else limits.min


def reduced(tensors: Sequence[Tensor], op: Op) -> Tensor:
    """Return the reduction of tensors of one dtype and shape, in their order."""
    result = tensors[0].clone()
    for tensor in tensors[1:]:
        result = _PAIRWISE[op](result, tensor)
    return result.div_(len(tensors)) if op == "mean" else result
