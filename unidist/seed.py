"""Seeding every random number generator that a training script uses."""

from __future__ import annotations

import random
import sys
from operator import index

import torch


def set_seed(seed: int) -> None:
    """Seed Python's, NumPy's (where loaded) and torch's generators, on every device.

    The same seed on every rank gives every rank the same numbers; add ``unidist.rank()`` for different ones.

    Args:
        seed: from 0 to 2**32 - 1, the range of NumPy's seeds.
    """
    try:
        seed = index(seed)
    except TypeError:
        raise TypeError(f"set_seed({seed!r}): pass an integer.") from None
    if not 0 <= seed < 2**32:
        raise ValueError(f"set_seed({seed}): a seed is from 0 to 2**32 - 1.")
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
