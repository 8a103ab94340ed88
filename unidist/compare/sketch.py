"""A sketch of a tensor: five numbers from which the distance of two tensors can be estimated.

A sketch is the norm, and the dot products with four fixed random directions. The mean square of the differences of two
tensors' products estimates the square of the tensors' distance, within a factor of 2 or so. A sum would miss two
elements that are swapped, and a norm a change of direction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor

Sketch: TypeAlias = Sequence[float]
DIRECTIONS = 4
#: Elements that are processed at a time; the directions take 32 bytes of memory for each.
BLOCK = 2**15


def sketches(tensors: Sequence[Tensor | None]) -> list[list[float]]:
    """A sketch of each tensor; None counts as zeros. The script's random generators are not used."""
    if not tensors:
        return []
    device = next((tensor.device for tensor in tensors if tensor is not None), torch.device("cpu"))
    found: list[list[float]] = torch.stack([_sketch(tensor).to(device) for tensor in tensors]).tolist()
    return found


@torch.no_grad()
def _sketch(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        return torch.zeros(1 + DIRECTIONS, dtype=torch.float64, device="cpu")
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    flat = (torch.view_as_real(dense) if dense.is_complex() else dense).reshape(-1)
    squares = torch.zeros(1, dtype=torch.float64, device=flat.device)
    products = torch.zeros(DIRECTIONS, dtype=torch.float64, device=flat.device)
    for number, block in enumerate(torch.split(flat, BLOCK)):
        part = block.double()
        squares += (part * part).sum()
        # Not a matrix product, which cuBLAS refuses if the script requires deterministic algorithms.
        products += _weights(number, flat.device) * (_directions(flat.device)[:, : len(part)] * part).sum(1)
    return torch.cat([squares.sqrt(), products])


@cache
def _directions(device: torch.device) -> Tensor:
    return _draw(0, DIRECTIONS, BLOCK).to(device)


@cache
def _weights(number: int, device: torch.device) -> Tensor:
    return _draw(1 + number, DIRECTIONS).to(device)


def _draw(seed: int, *shape: int) -> Tensor:
    """Numbers with mean 0 and mean square 1.

    They are of either sign, with absolute values within a factor of 3, so that the difference of a single element is
    measured as well as with 1 and -1, and two equal differences of opposite signs do not cancel out.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    sign, size = torch.rand((2, *shape), generator=generator, dtype=torch.float64, device="cpu")
    drawn: Tensor = torch.where(sign < 0.5, -1.0, 1.0) * (size + 0.5) / math.sqrt(13 / 12)
    return drawn


def norm(sketch: Sketch) -> float:
    """The tensor's norm."""
    return sketch[0]


def distance(left: Sketch, right: Sketch) -> float:
    """An estimate of the norm of the tensors' difference; 0 if they are equal, inf if only one is finite."""
    products = [gap(x, y) for x, y in zip(left[1:], right[1:])]
    estimate = math.hypot(*products) / math.sqrt(len(products))
    return max(estimate, gap(left[0], right[0]))


def gap(left: float, right: float) -> float:
    """The distance of two numbers; two nan are equal, and the distance of nan to a number is inf."""
    if left == right or (math.isnan(left) and math.isnan(right)):
        return 0.0
    between = abs(left - right)
    return math.inf if math.isnan(between) else between
