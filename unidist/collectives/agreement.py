"""Whether all ranks have the same values: ranks compare digests, and send values only where they differ."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from unidist.backends.base import Group
from unidist.collectives.operations import all_gather_object, all_reduce
from unidist.gradients.buckets import as_bytes, flatten_bytes, split_into_buckets

#: Words of 8 bytes that are mixed together: on the CPU they stay in a core's cache.
_CHUNK = 2**15
#: Words that one operation on a GPU takes.
_GPU_BLOCK = 2**24
#: Tensors of fewer bytes are copied together, in MiB at a time: a digest takes 27 us at least.
_SMALL_BYTES = 2**16
_TOGETHER_MB = 64
_LOWER_HALF = 2**32 - 1


class FirstDifference(NamedTuple):
    """Where the ranks' lists differ first."""

    position: int
    #: That entry on each rank of the group, in rank order; None where the list is shorter.
    values: list[str | int | None]


def first_difference(values: Sequence[str] | Sequence[int], group: Group | None = None) -> FirstDifference | None:
    """Return the first entry in which the ranks' lists differ; None if they are equal on all ranks. Collective.

    Equal lists cost one all_reduce of 16 bytes, others one of 16 bytes for each entry and one entry from each rank.

    Args:
        values: texts, or integers of 64 bits.
        group: the ranks that compare.
    """
    entries = [value if isinstance(value, int) else _hash(value.encode()) for value in values]
    whole = _hash(b"".join(entry.to_bytes(8, "little", signed=True) for entry in entries))
    if not _unequal(torch.tensor([whole]), group):
        return None
    longest = int(all_reduce(torch.tensor(len(entries)), "max", group))
    present = torch.arange(longest) < len(entries)
    padded = torch.tensor([*entries, *[0] * (longest - len(entries))])
    differing = _unequal(torch.stack([padded, present.long()]), group)
    index = min((i % longest for i in differing), default=0)
    return FirstDifference(index, all_gather_object(values[index] if index < len(values) else None, group))


def digests(tensors: Iterable[Tensor]) -> list[int]:
    """Return some digests, which depend on every bit of dense tensors; see ``digest``."""
    small: list[Tensor] = []
    large: list[Tensor] = []
    for tensor in tensors:
        (small if tensor.numel() * tensor.element_size() < _SMALL_BYTES else large).append(tensor)
    return [*(digest(flatten_bytes(same)) for same in split_into_buckets(small, _TOGETHER_MB)), *map(digest, large)]


def digest(tensor: Tensor) -> int:
    """Return 64 bits that depend on each bit of a dense tensor's elements and their order, not on its memory format.

    It is computed where the tensor is, and no copy is made of a contiguous one. Each word of 8 bytes is multiplied by a
    random odd number of its own, its upper half is mixed into the lower one, and the words are added.
    """
    data = as_bytes(tensor)
    count = data.numel()
    if data.data_ptr() % 8:
        data = data.clone()
    rest = data[count - count % 8 :]
    ends = torch.zeros(16, dtype=torch.uint8, device=data.device)
    ends[: rest.numel()] = rest
    ends[8:] = torch.tensor(list(count.to_bytes(8, "little")), dtype=torch.uint8, device=data.device)
    words = data[: count - count % 8].view(torch.int64)
    while words.numel() > _CHUNK:
        words = _sums(words)
    return int(_sums(torch.cat([words, ends.view(torch.int64)])))


def _sums(words: Tensor) -> Tensor:
    """Of each chunk, the sum of its mixed words."""
    factors = _factors(words.device)
    if words.numel() <= len(factors):
        return _mixed(words, factors[: words.numel()]).sum().view(1)
    whole = words[: words.numel() - words.numel() % _CHUNK].view(-1, _CHUNK)
    rows = 1 if words.device.type == "cpu" else _GPU_BLOCK // _CHUNK
    sums = [_mixed(block, factors[:_CHUNK]).sum(1) for block in torch.split(whole, rows)]
    rest = words[whole.numel() :]
    if rest.numel():
        sums.append(_mixed(rest, factors[: rest.numel()]).sum().view(1))
    return torch.cat(sums)


def _mixed(words: Tensor, factors: Tensor) -> Tensor:
    mixed = (words ^ factors).mul_(factors)
    return mixed.bitwise_xor_((mixed >> 32).bitwise_and_(_LOWER_HALF))  # the shift repeats the sign


@cache
def _factors(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    limits = torch.iinfo(torch.int64)
    factors = torch.randint(limits.min, limits.max, (_CHUNK + 2,), generator=generator)
    return (factors | 1).to(device)


def _unequal(numbers: Tensor, group: Group | None) -> list[int]:
    """Return the flat indices of the numbers that differ between ranks. Collective."""
    # The complement orders the other way, and does not overflow as the negative of the lowest number.
    highest, lowest = all_reduce(torch.stack([numbers, ~numbers]), "max", group)
    found: list[int] = (highest != ~lowest).view(-1).nonzero().view(-1).tolist()
    return found


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)
