"""Seeding every random number generator that a training script uses."""

from __future__ import annotations

import random
import sys
from operator import index

import torch


def integer(seed: object, call: str) -> int:
    """Return a seed as an integer, also where it is NumPy's or a tensor. Raises ``TypeError``, which names the call."""
    try:
        return index(seed)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{call}: pass an integer.") from None


def set_seed(seed: int) -> None:
    """Seed Python's, NumPy's (where loaded) and torch's generators, on every device.

    The same seed on every rank gives every rank the same numbers; add ``unidist.rank()`` for different ones.

    Args:
        seed: from 0 to 2**32 - 1, the range of NumPy's seeds.
    """
    seed = integer(seed, f"set_seed({seed!r})")
    if not 0 <= seed < 2**32:
        raise ValueError(f"set_seed({seed}): a seed is from 0 to 2**32 - 1.")
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
