"""Tensors whose values every rank can compute for every other."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

import unidist

# torch 2.13 renamed them.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

INTEGERS = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64
]  # fmt: skip
HALVES = [torch.float16, torch.bfloat16]
FLOATS = [torch.float32, torch.float64, *HALVES]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [*INTEGERS, *FLOATS, torch.bool, *COMPLEX]

#: Of one number, of less and more than what goes in one nonblocking call; of nothing; of two dimensions.
SHAPES = [(), (5,), (0,), (40_003,), (3, 7, 2)]


def value(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What a rank passes: small whole numbers, exact in every dtype also when three of them are multiplied."""
    generator = torch.Generator().manual_seed(100 + rank)
    numbers = torch.randint(1, 5, shape, generator=generator)
    if dtype is torch.bool:
        return numbers > 2
    if dtype.is_complex:
        return torch.complex(numbers.double(), (5 - numbers).double()).to(dtype)
    return numbers.to(dtype)


def mine(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """This rank's."""
    return value(unidist.rank(), shape, dtype)


def all_ranks(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Every rank's."""
    return [value(rank, shape, dtype) for rank in range(unidist.world_size())]


def same(found: Tensor, expected: Tensor) -> bool:
    """Equal in all respects; torch cannot compare all of its dtypes."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    if found.dtype in (torch.uint16, torch.uint32, torch.uint64):
        found, expected = found.to(torch.int64), expected.to(torch.int64)
    return torch.equal(found, expected)


def combined(tensors: list[Tensor], op: str) -> Tensor:
    """What a reduction of them is."""
    dtype = tensors[0].dtype
    if dtype is torch.bool:
        rows = torch.stack(tensors).int()
        found = {
            "sum": rows.amax(0), "max": rows.amax(0), "bor": rows.amax(0), "product": rows.amin(0), "min": rows.amin(0),
            "band": rows.amin(0), "bxor": rows.sum(0) % 2,
        }[op]  # fmt: skip
        return found.bool()
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    rows = torch.stack([tensor.to(wide) for tensor in tensors])
    if op == "avg":
        total = rows.sum(0)
        found = total / len(tensors) if dtype.is_floating_point or dtype.is_complex else total // len(tensors)
    elif op in ("band", "bor", "bxor"):
        found = rows[0]
        for row in rows[1:]:
            found = getattr(torch, {"band": "bitwise_and", "bor": "bitwise_or", "bxor": "bitwise_xor"}[op])(found, row)
    else:
        found = {"sum": rows.sum, "product": rows.prod, "min": rows.amin, "max": rows.amax}[op](0)
    return found.to(dtype)
