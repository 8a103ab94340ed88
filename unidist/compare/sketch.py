"""A tensor in five numbers, from which the distance of two tensors can be told.

A sketch is the norm, and the products with four fixed random directions. Two sketches of the same shape tell how far apart
their tensors are: the mean square of the products' differences is, but for chance (a factor of 2 or so), the square of the
distance. A sum would miss two elements that changed places, and a norm a change of direction.
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
#: Elements that are taken at a time; the memory of the directions is 32 times that, in bytes.
BLOCK = 2**15


def sketches(tensors: Sequence[Tensor | None]) -> list[list[float]]:
    """A sketch of each; None counts as zeros. Uses no generator of the script's."""
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
        # No matrix product: cuBLAS would refuse it where the script asks for deterministic algorithms.
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

    Of either sign, and between 0.5 and 1.5 but for a factor: a single element that differs is measured well, as by 1 and -1, and two equal
    differences of opposite signs do not cancel out.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    sign, size = torch.rand((2, *shape), generator=generator, dtype=torch.float64, device="cpu")
    drawn: Tensor = torch.where(sign < 0.5, -1.0, 1.0) * (size + 0.5) / math.sqrt(13 / 12)
    return drawn


def norm(sketch: Sketch) -> float:
    """The tensor's norm."""
    return sketch[0]


def distance(left: Sketch, right: Sketch) -> float:
    """About the norm of the tensors' difference, and 0 if they are equal; inf where only one of them is not finite."""
    products = [gap(x, y) for x, y in zip(left[1:], right[1:])]
    estimate = math.hypot(*products) / math.sqrt(len(products))
    return max(estimate, gap(left[0], right[0]))


def gap(left: float, right: float) -> float:
    """The distance of two numbers; two nan are equal, and nan is infinitely far from a number."""
    if left == right or (math.isnan(left) and math.isnan(right)):
        return 0.0
    between = abs(left - right)
    return math.inf if math.isnan(between) else between
