"""Metrics over all ranks: one collective for all values of a call."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from numbers import Integral, Real
from typing import Any, Literal, NoReturn, TypeVar

import torch
from torch import Tensor

from unidist.backends.base import Group
from unidist.collectives.agreement import first_difference
from unidist.collectives.consistency import compare
from unidist.collectives.operations import from_ordered, member, to_ordered
from unidist.context import current
from unidist.diagnosis.operations import dtype_name
from unidist.errors import MismatchError
from unidist.tree import map_leaves, walk

T = TypeVar("T")
MetricOp = Literal["mean", "sum", "min", "max"]

#: Payloads are padded to a multiple of this length, so that an extra value on one rank is detected by the header
#: instead of being an error of the backend.
_BLOCK = 64
#: float64 represents integers exactly up to here.
_EXACT = 2**53


def allreduce_metric(
    value: T, weight: float | Tensor | None = None, op: MetricOp = "mean", group: Group | None = None
) -> T:
    """Reduce a number or tensor, or a structure of them, over all ranks. Collective.

    All values of a call are reduced in one collective, in float64; sums of integers are exact.

    Args:
        value: a number, a tensor, or nested dicts, lists and tuples of them; the same structure on every rank.
        weight: this rank's weight in a mean, such as its number of samples, so that a short last batch counts
            less; with 0 this rank's value is ignored. Default: all ranks have equal weights.
        op: ``mean``, ``sum``, ``min`` or ``max``.
        group: the ranks that take part, such as those of the data-parallel dimension.

    Returns:
        The same structure: numbers for numbers (a mean is a float; ``sum``, ``min`` and ``max`` of integers are
        integers), new tensors of the same shape, dtype and device for tensors. The mean of an integer or bool
        tensor is float32, its sum int64. A total weight of 0 gives nan; a nan on any rank gives nan.

    Raises:
        TypeError: a value that is not a real number or tensor.
        ValueError: unknown ``op``, a weight that is negative or not finite, or one with an ``op`` other than
            ``mean``; an integer beyond 2**80 in a sum, or beyond 2**53 in ``min`` and ``max``; on every rank, a sum
            of integer tensors beyond int64.
        MismatchError: on every rank, when the ranks' structures differ; names the first difference. After the first 100
            calls a ``CollectiveError``, and on gloo the end of the job, if one is so much larger (more than 60 numbers)
            that the backend fails first.
    """
    factor = _checked_weight(weight, op)
    found = walk(value)
    numbers = _header(found, op, factor)
    skip = len(numbers)
    tensors: list[Tensor] = []
    for _, leaf in found:
        if isinstance(leaf, Tensor):
            tensors.append(_pack_tensor(leaf, op, factor))
        else:
            numbers += _pack(leaf, op, factor)
    sizes = [len(numbers), *map(len, tensors)]
    padding = -sum(sizes) % _BLOCK
    backend = member(group)
    payload = torch.tensor(numbers if tensors else numbers + [0.0] * padding, dtype=torch.float64)
    if tensors:
        payload = torch.cat([payload, *tensors, payload.new_zeros(padding)])
    compare(backend, group, "allreduce_metric", option=f"{op} of {sum(sizes) + padding} numbers, padded")
    extremum = op in ("min", "max")
    reduced = (to_ordered(payload, op) if extremum else payload).to(backend.device)
    backend.all_reduce(reduced, "sum" if op == "mean" else op, group)
    combined = from_ordered(reduced.cpu(), op) if extremum else reduced.cpu()
    head, *parts = torch.split(combined, [*sizes, padding]) if tensors else [combined]
    totals = head.tolist()
    if not _is_same(totals, op):
        _raise_different(found, group)
    scalars, tensor_parts = iter(totals[skip:]), iter(parts)

    def unpack(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return _unpack_tensor(next(tensor_parts), leaf, op, totals[0])
        return _unpack(scalars, leaf, op, totals)

    unpacked: T = map_leaves(unpack, value)
    return unpacked


def _checked_weight(weight: float | Tensor | None, op: str) -> float:
    if op not in ("mean", "sum", "min", "max"):
        raise ValueError(f"op={op!r} is unknown: use 'mean', 'sum', 'min' or 'max'.")
    if weight is None:
        return 1.0
    if op != "mean":
        raise ValueError(f"weight={weight} needs op='mean', not {op!r}.")
    factor = float(weight)
    if not 0 <= factor < math.inf:
        raise ValueError(f"weight={weight} must be a finite number, 0 or above: this rank's number of samples.")
    return factor


# ------------------------------------------------------------------------------------ one value
def _pack(leaf: Any, op: str, weight: float) -> list[float]:
    """Return a number as floats that can be reduced element by element."""
    if not isinstance(leaf, (float, Real)) and not _is_integer(leaf):
        raise TypeError(
            f"allreduce_metric takes numbers and tensors in dicts, lists and tuples, not {type(leaf).__name__}."
        )
    if op == "mean":
        # Not a product alone: an empty shard's nan must not count.
        return [float(leaf) * weight if weight else 0.0]
    n = int(leaf) if _is_integer(leaf) else None
    limit = 2**80 if op == "sum" else _EXACT
    if n is not None and abs(n) > limit:
        raise ValueError(f"the {op} of {leaf} is not exact beyond {limit}: pass a float.")
    if op != "sum":
        return [float(leaf)]
    # A rank may report 0 where another reports 0.5, so integers and floats take as many elements.
    return [float(leaf), 0.0, 0.0, 0.0] if n is None else [0.0, float(n >> 32), float(n & 0xFFFFFFFF), 1.0]


def _pack_tensor(leaf: Tensor, op: str, weight: float) -> Tensor:
    """Return a tensor as float64 on the CPU, in a form that can be reduced element by element."""
    if leaf.dtype.is_complex or leaf.layout != torch.strided:
        raise TypeError(f"allreduce_metric takes dense real tensors, not {leaf.dtype} ({leaf.layout}).")
    flat = leaf.detach().cpu().reshape(-1)
    if op == "mean":
        numbers = flat.double()
        return numbers * weight if weight else torch.zeros_like(numbers)
    if flat.dtype.is_floating_point:
        return flat.double()
    flat = flat.long()
    if op == "sum":
        high = flat >> 32 & 0xFFFFFFFF if leaf.dtype == torch.uint64 else flat >> 32
        return torch.cat([high, flat & 0xFFFFFFFF]).double()
    if flat.numel() and not -_EXACT <= int(flat.min()) <= int(flat.max()) <= _EXACT:
        raise ValueError(f"the {op} of integers is not exact beyond {_EXACT}: pass floats.")
    return flat.double()


def _unpack(elements: Iterator[float], leaf: Any, op: str, header: Sequence[float]) -> float:
    """Return the reduced number, from as many elements as ``_pack`` made of it."""
    value = next(elements)
    if op == "mean":
        return value / header[0] if header[0] else math.nan
    if op == "sum":
        high, low, integers = next(elements), next(elements), next(elements)
        exact = (int(high) << 32) + int(low)
        return exact if integers == header[1] else value + exact
    return int(value) if _is_integer(leaf) and value.is_integer() else value


def _is_integer(leaf: Any) -> bool:
    return isinstance(leaf, Integral) or type(leaf).__name__.startswith("bool")  # NumPy's bool is no Integral


def _unpack_tensor(part: Tensor, leaf: Tensor, op: str, weight: float) -> Tensor:
    floating = leaf.dtype.is_floating_point
    dtype = leaf.dtype
    if op == "mean":
        part = part / weight
        dtype = leaf.dtype if floating else torch.float32
    elif op == "sum" and not floating:
        high, low = part.view(2, -1)
        carried = high + (low / 2**32).floor()
        if not ((carried >= -(2**31)) & (carried < 2**31)).all():
            raise ValueError(
                f"a sum of {leaf.dtype} over the ranks is beyond int64: pass .double(), or Python's integers."
            )
        part = (high.long() << 32) + low.long()
        dtype = torch.int64
    return part.view(leaf.shape).to(dtype=dtype, device=leaf.device)


# ------------------------------------------------------------------------------ the same on every rank?
def _header(found: Sequence[tuple[Any, Any]], op: str, weight: float) -> list[float]:
    """Return this rank's weight, 1 to count the ranks, and a checksum of the structure, in a form whose reduction shows
    a difference.
    """
    checksum = zlib.crc32(repr((op, [(path, _kind(leaf)) for path, leaf in found])).encode()) % 2**20
    return [weight, 1, checksum, checksum**2] if op in ("mean", "sum") else [checksum, -checksum]


def _kind(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype.is_floating_point) if isinstance(leaf, Tensor) else 0


def _named(leaf: Any) -> str:
    return f"a {dtype_name(leaf.dtype)} tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else "a number"


def _is_same(result: Sequence[float], op: str) -> bool:
    if op in ("mean", "sum"):
        # Equality in the Cauchy-Schwarz inequality: all checksums are equal.
        ranks, total, squares = map(int, result[1:4])
        return ranks * squares == total**2
    return int(result[0]) == -int(result[1])


def _raise_different(found: Sequence[tuple[Any, Any]], group: Group | None) -> NoReturn:
    """Name the first value in which the ranks differ. Collective, outside ``unidist.join``."""
    entries = [f"{''.join(f'[{key!r}]' for key in path)} {_named(leaf)}".strip() for path, leaf in found]
    difference = first_difference(entries, group) if current().compares else None
    where = ""
    if difference is not None:
        values = dict(zip(current().ranks(group), difference.values))
        where = " (" + ", ".join(f"rank {rank}: {value or 'nothing more'}" for rank, value in values.items()) + ")"
    raise MismatchError(
        f"allreduce_metric: the ranks passed values of different structure{where}: pass the same keys, lengths and "
        "shapes on every rank."
    )
