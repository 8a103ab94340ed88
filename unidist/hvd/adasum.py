"""Adasum: sums in which what gradients have in common counts once.

Maleki et al., "Scaling Distributed Training with Adaptive Summation" (MLSys 2021): two vectors a and b become
``(1 - ab / 2aa) a + (1 - ab / 2bb) b``; more ranks combine in a binary tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unidist.backends.base import Backend, Group


def adasum(backend: Backend, tensors: Sequence[Tensor], group: Group) -> None:
    """Combine tensors, each by itself, in place. Collective.

    Args:
        backend: the backend.
        tensors: of one dtype, contiguous, on a device of the backend.
        group: a power of 2 of ranks.
    """
    ranks = backend.ranks(group)
    me = ranks.index(backend.topology.rank)
    sizes = [tensor.numel() for tensor in tensors]
    mine = torch.cat([tensor.reshape(-1) for tensor in tensors])
    distance = 1
    while distance < len(ranks):
        partner = me ^ distance
        counts = [mine.nbytes if rank == partner else 0 for rank in range(len(ranks))]
        theirs = backend.all_to_all(mine.view(torch.uint8), counts, counts, group).view(mine.dtype)
        # Every rank adds in the same order, so that all have the same bits.
        first, second = (mine, theirs) if me < partner else (theirs, mine)
        mine = torch.cat([_pair(a, b) for a, b in zip(torch.split(first, sizes), torch.split(second, sizes))])
        distance *= 2
    for tensor, part in zip(tensors, torch.split(mine, sizes)):
        tensor.copy_(part.view_as(tensor))


def _pair(a: Tensor, b: Tensor) -> Tensor:
    wide_a, wide_b = a.double(), b.double()
    common, aa, bb = wide_a.dot(wide_b), wide_a.dot(wide_a), wide_b.dot(wide_b)
    share_a = torch.where(aa > 0, 1 - common / (2 * aa), 1.0)
    share_b = torch.where(bb > 0, 1 - common / (2 * bb), 1.0)
    return (share_a * wide_a + share_b * wide_b).to(a.dtype)
