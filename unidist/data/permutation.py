"""A pseudorandom order of any number of items, of which each part can be computed without the others."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor

#: 4 rounds of random functions are a pseudorandom permutation (Luby and Rackoff); these functions are less than that.
_ROUNDS = 8
#: Odd numbers of 64 bits as int64 holds them: the golden ratio, and a multiplier of splitmix64.
_GOLDEN, _MIX = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64


class FeistelPermutation:
    """The numbers from 0 to ``length - 1`` in an order that the seed determines; it takes no memory.

    A Feistel network: a number is ``row * columns + column``, and each round adds a hash of one to the other, which
    keeps different numbers different. There are fewer than ``columns`` numbers too many; what becomes one of those
    goes through the rounds again.

    Args:
        length: at most 2**62.
        seed: another one gives an unrelated order.
    """

    def __init__(self, length: int, seed: int) -> None:
        self._length = length
        self._rows = math.isqrt(max(length, 1) - 1) + 1
        self._columns = max(1, -(-length // self._rows))
        numbers = random.Random(seed)
        self._keys = [numbers.getrandbits(63) for _ in range(_ROUNDS)]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> Tensor:
        places = range(self._length)[part]
        numbers = self._permute(torch.arange(places.start, places.stop, places.step, device="cpu"))
        while (outside := numbers >= self._length).any():
            numbers[outside] = self._permute(numbers[outside])
        return numbers

    def _permute(self, numbers: Tensor) -> Tensor:
        """Return the place of each number below ``rows * columns`` after all rounds."""
        changed = numbers // self._columns
        hashed = numbers - changed * self._columns
        size, other = self._rows, self._columns
        digest = torch.empty_like(numbers)
        for key in self._keys:
            torch.mul(hashed, _GOLDEN, out=digest).add_(key)
            digest.bitwise_xor_(digest >> 29).mul_(_MIX)
            # The upper 32 bits, scaled to the size without a division.
            digest.bitwise_right_shift_(32).bitwise_and_(2**32 - 1).mul_(size).bitwise_right_shift_(32)
            changed.add_(digest)
            changed.sub_((changed >= size) * size)
            changed, hashed, size, other = hashed, changed, other, size
        return changed.mul_(self._columns).add_(hashed)  # the number of rounds is even
