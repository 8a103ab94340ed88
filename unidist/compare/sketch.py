"""A sketch of a tensor: five numbers from which the distance of two tensors can be estimated.

A sketch is the norm, and the dot products with four fixed random directions. The mean square of the differences of two
tensors' products estimates the square of the tensors' distance, within a factor of 2 or so. A sum would miss two
elements that are swapped, and a norm a change of direction.

Sketches of several tensors are a tensor with a row for each, float64 and on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

DIRECTIONS = 4
#: Elements of one tensor that are processed at a time; the directions take 32 bytes of memory for each.
BLOCK = 2**15
#: Elements of several tensors that are processed at a time.
BATCH = 2**16
#: Tensors with fewer elements are processed with others of about their size.
SMALL = 4096


@torch.no_grad()
def sketches(tensors: Sequence[Tensor | None]) -> Tensor:
    """Return a sketch of each tensor; None counts as zeros. The script's random generators are not used."""
    found = torch.zeros((len(tensors), 1 + DIRECTIONS), dtype=torch.float64, device="cpu")
    alike: dict[tuple[int, torch.dtype, torch.device], list[tuple[int, Tensor]]] = {}
    for number, tensor in enumerate(tensors):
        if tensor is not None:
            flat = _flat(tensor)
            size = flat.numel()
            width = size if size >= SMALL else 2 ** (size - 1).bit_length()
            alike.setdefault((width, flat.dtype, flat.device), []).append((number, flat))
    parts: dict[torch.device, list[tuple[list[int], Tensor]]] = {}
    # Many small tensors are processed together, as the calls take more time than the numbers.
    for (width, _, device), group in alike.items():
        together = max(1, BATCH // max(1, width))
        for first in range(0, len(group), together):
            numbers, rows = zip(*group[first : first + together])
            parts.setdefault(device, []).append((list(numbers), _of_rows(_matrix(rows))))
    for pairs in parts.values():
        order = [number for numbers, _ in pairs for number in numbers]
        found[order] = torch.cat([rows for _, rows in pairs]).cpu()
    return found


def _flat(tensor: Tensor) -> Tensor:
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return (torch.view_as_real(dense) if dense.dtype.is_complex else dense).reshape(-1)


def _matrix(rows: Sequence[Tensor]) -> Tensor:
    """Return the rows, with zeros behind the shorter ones."""
    if len(rows) == 1:
        return rows[0].unsqueeze(0)
    same = len({row.numel() for row in rows}) == 1
    return torch.stack(tuple(rows)) if same else pad_sequence(list(rows), batch_first=True)


def _of_rows(rows: Tensor) -> Tensor:
    """Return the sketch of each row of a matrix."""
    device = rows.device
    squares = torch.zeros(len(rows), 1, dtype=torch.float64, device=device)
    products = torch.zeros(len(rows), DIRECTIONS, dtype=torch.float64, device=device)
    for number, block in enumerate(torch.split(rows, BLOCK, dim=1)):
        part = block.double()
        squares += (part * part).sum(1, keepdim=True)
        # Not a matrix product, which cuBLAS refuses if the script requires deterministic algorithms.
        directions = _directions(device)[:, : part.shape[1]]
        products += _weights(number, device) * (directions * part.unsqueeze(1)).sum(2)
    return torch.cat([squares.sqrt(), products], dim=1)


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


def norms(sketches: Tensor) -> Tensor:
    """Return the tensors' norms."""
    return sketches[:, 0]


def distances(left: Tensor, right: Tensor) -> Tensor:
    """Return estimates of the norms of the tensors' differences; 0 if they are equal, inf if only one is finite."""
    between = gaps(left, right)
    estimates = between[:, 1:].square().mean(1).sqrt()
    return torch.maximum(estimates, between[:, 0])


def gaps(left: Tensor, right: Tensor) -> Tensor:
    """Return the distances of numbers; two nan are equal, and the distance of nan to a number is inf."""
    equal = (left == right) | (left.isnan() & right.isnan())
    return torch.where(equal, 0.0, (left - right).abs().nan_to_num(nan=math.inf, posinf=math.inf))


def gap(left: float, right: float) -> float:
    """As ``gaps``, of two numbers."""
    if left == right or (math.isnan(left) and math.isnan(right)):
        return 0.0
    between = abs(left - right)
    return math.inf if math.isnan(between) else between
