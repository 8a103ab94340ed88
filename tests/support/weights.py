"""Files of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def distance(left: Path, right: Path) -> float:
    """The largest difference between the weights of two files."""
    pairs = list(zip(_weights(left), _weights(right), strict=True))
    assert pairs
    return max(float((a - b).abs().max()) for a, b in pairs)


def _weights(path: Path) -> list[torch.Tensor]:
    """All tensors of a file, in order, as a mutation may change their names."""

    def tensors(part: Any) -> list[torch.Tensor]:
        if isinstance(part, torch.Tensor):
            return [part.double()]
        return [found for inner in part.values() for found in tensors(inner)] if isinstance(part, dict) else []

    return tensors(torch.load(path, weights_only=False))
