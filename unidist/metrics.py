"""Figures over all ranks: one collective for everything that one call reports."""

from __future__ import annotations

import math
import zlib
from numbers import Integral, Real
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from unidist.context import current
from unidist.errors import MismatchError
from unidist.tree import leaves, map_leaves, walk

T = TypeVar("T")
MetricOp = Literal["mean", "sum", "min", "max"]

#: Payloads have a multiple of this length, so that an extra value on one rank is told from the payload's
#: first numbers instead of confusing the engine.
_BLOCK = 64
#: float64 holds whole numbers exactly up to here.
_EXACT = 2**53


def allreduce_metric(value: T, weight: float | Tensor | None = None, op: MetricOp = "mean") -> T:
    """Combine a figure, or a structure of figures, over all ranks. Collective.

    Everything of one call travels in one collective, in float64; sums of integers are exact.

    Args:
        value: a number, a tensor, or nested dicts, lists and tuples of them; the same structure on every rank.
        weight: this rank's share in a mean, such as its number of samples, so that a short last batch counts
            for what it is; 0 leaves this rank out, whatever its value. Default: every rank counts the same.
        op: ``mean``, ``sum``, ``min`` or ``max``.

    Returns:
        The same structure: numbers for numbers (a mean is a float; ``sum``, ``min`` and ``max`` of integers are
        integers), new tensors of the same shape, dtype and device for tensors. The mean of an integer or bool
        tensor is float32, the sum of a bool tensor int64. A total weight of 0 gives nan.

    Raises:
        TypeError: a value that is not a real number or tensor.
        ValueError: unknown ``op``, a weight that is negative or not finite, or one with an ``op`` other than
            ``mean``; an integer beyond 2**80 in a sum, or beyond 2**53 in ``min`` and ``max``.
        MismatchError: the ranks' structures differ.
    """
    share = _share(weight, op)
    parts = leaves(value)
    packed = [_pack(leaf, op, share) for leaf in parts]
    header = _header(value, op, share)
    length = len(header) + sum(map(len, packed))
    payload = torch.cat([header, *packed, header.new_zeros(-length % _BLOCK)])
    backend = current()
    wire = payload.to(backend.device)
    backend.all_reduce(wire, "sum" if op == "mean" else op)
    result = wire.cpu()
    _check_header(header, result, op, backend.topology.world_size)
    answers = torch.split(result[len(header) : length], [len(part) for part in packed])
    pairs = iter(zip(answers, parts))
    combined: T = map_leaves(lambda _: _unpack(*next(pairs), op, result, backend.topology.world_size), value)
    return combined


def _share(weight: float | Tensor | None, op: str) -> float:
    if op not in ("mean", "sum", "min", "max"):
        raise ValueError(f"op={op!r} is unknown: use 'mean', 'sum', 'min' or 'max'.")
    if weight is None:
        return 1.0
    if op != "mean":
        raise ValueError(f"weight={weight} goes with op='mean' only, not with {op!r}.")
    share = float(weight)
    if not 0 <= share < math.inf:
        raise ValueError(f"weight={weight} must be a finite number, 0 or above: this rank's number of samples.")
    return share


# ------------------------------------------------------------------------------------ one value
def _pack(leaf: Any, op: str, share: float) -> Tensor:
    """A value as float64 numbers on the CPU that can be combined one by one."""
    if isinstance(leaf, Tensor):
        if leaf.dtype.is_complex or leaf.layout != torch.strided:
            raise TypeError(f"allreduce_metric takes dense real tensors, not {leaf.dtype} ({leaf.layout}).")
        return _pack_tensor(leaf.detach().cpu().reshape(-1), op, share)
    if not isinstance(leaf, Real):
        raise TypeError(
            f"allreduce_metric takes numbers and tensors in dicts, lists and tuples, not {type(leaf).__name__}."
        )
    if op == "mean":
        return _weighted(torch.tensor([float(leaf)], dtype=torch.float64), share)
    n = int(leaf) if isinstance(leaf, Integral) else None
    limit = 2**80 if op == "sum" else _EXACT
    if n is not None and abs(n) > limit:
        raise ValueError(f"the {op} of {leaf} is not exact beyond {limit}: pass a float.")
    if op != "sum":
        return torch.tensor([float(leaf)], dtype=torch.float64)
    # A rank may report 0 where another reports 0.5, so integers and floats take the same room.
    parts = [float(leaf), 0, 0, False] if n is None else [0.0, n >> 32, n & 0xFFFFFFFF, True]
    return torch.tensor(parts, dtype=torch.float64)


def _pack_tensor(flat: Tensor, op: str, share: float) -> Tensor:
    if op == "mean":
        return _weighted(flat.double(), share)
    if flat.dtype.is_floating_point:
        return flat.double()
    flat = flat.long()
    if op == "sum":
        return torch.cat([flat >> 32, flat & 0xFFFFFFFF]).double()
    if flat.numel() and not -_EXACT <= int(flat.min()) <= int(flat.max()) <= _EXACT:
        raise ValueError(f"the {op} of integers is not exact beyond {_EXACT}: pass floats.")
    return flat.double()


def _weighted(numbers: Tensor, share: float) -> Tensor:
    # Not a product: an empty shard's nan must not count.
    return numbers * share if share else torch.zeros_like(numbers)


def _unpack(answer: Tensor, leaf: Any, op: str, result: Tensor, world_size: int) -> Any:
    if isinstance(leaf, Tensor):
        return _unpack_tensor(answer, leaf, op, result)
    if op == "mean":
        return float(answer / result[0])
    if op == "sum":
        total, high, low, integers = answer.tolist()
        exact = (int(high) << 32) + int(low)
        return exact if integers == world_size else total + exact
    number = float(answer)
    return int(number) if isinstance(leaf, Integral) and number.is_integer() else number


def _unpack_tensor(answer: Tensor, leaf: Tensor, op: str, result: Tensor) -> Tensor:
    floating = leaf.dtype.is_floating_point
    dtype = leaf.dtype
    if op == "mean":
        answer = answer / result[0]
        dtype = leaf.dtype if floating else torch.float32
    elif op == "sum" and not floating:
        high, low = answer.long().view(2, -1)
        answer = (high << 32) + low
        dtype = torch.int64 if leaf.dtype == torch.bool else leaf.dtype
    return answer.view(leaf.shape).to(dtype=dtype, device=leaf.device)


# ------------------------------------------------------------------------------ the same on every rank?
def _header(value: Any, op: str, share: float) -> Tensor:
    """This rank's share, and a fingerprint of the structure in a form whose combination shows a difference."""
    form = zlib.crc32(repr((op, [(path, _form(leaf)) for path, leaf in walk(value)])).encode()) % 2**20
    numbers = [share, form, form**2] if op in ("mean", "sum") else [form, -form]
    return torch.tensor(numbers, dtype=torch.float64)


def _form(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype.is_floating_point) if isinstance(leaf, Tensor) else "number"


def _check_header(mine: Tensor, result: Tensor, op: str, world_size: int) -> None:
    if op in ("mean", "sum"):
        # Equality in the inequality of Cauchy and Schwarz: all fingerprints are the same.
        total, squares = int(result[1]), int(result[2])
        same = world_size * squares == total**2
    else:
        same = int(result[0]) == -int(result[1])
    if not same:
        raise MismatchError(
            "allreduce_metric got another structure on another rank: pass the same keys, lengths and shapes on every rank."
        )
