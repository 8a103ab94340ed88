"""Facts of reductions that hold on every backend: wider dtypes, and neutral elements."""

from __future__ import annotations

import torch

#: Reduced in a wider dtype, and rounded once.
WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.int8: torch.int32,
    torch.uint8: torch.int32,
    torch.int16: torch.int32,
}


def neutral_element(op: str, dtype: torch.dtype) -> float:
    """The value that changes no result: 0 in a sum or mean, 1 in a product, the dtype's limit in ``min`` and
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
