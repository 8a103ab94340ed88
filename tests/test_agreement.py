"""Digests of tensors."""

import pytest
import torch

from unidist.collectives.agreement import digest, digests

pytestmark = pytest.mark.unit
#: Less than a chunk, and several with a rest.
SIZES = [1, 7, 100_001, 2**18 + 3]


@pytest.mark.parametrize("size", SIZES)
def test_a_digest_depends_on_every_bit_and_on_the_order(size: int) -> None:
    data = torch.randn(size, generator=torch.Generator().manual_seed(size))
    seen = {digest(data), digest(torch.cat([data, torch.zeros(1)]))}
    changes = [(0,), (size - 1,), (size // 2, size // 3), (0, size - 1)]
    for positions in dict.fromkeys(tuple(dict.fromkeys(change)) for change in changes):
        other = data.clone()
        other.view(torch.int32)[list(positions)] ^= torch.iinfo(torch.int32).min  # the signs
        seen.add(digest(other))
    for bit in range(32):
        other = data.clone()
        other.view(torch.int32)[size // 2] ^= 1 << bit if bit < 31 else torch.iinfo(torch.int32).min
        seen.add(digest(other))
    if size > 1:
        seen.add(digest(data.flip(0)))
        seen.add(digest(data.roll(1)))
    signs = len(dict.fromkeys(tuple(dict.fromkeys(change)) for change in changes))
    # The sign of the middle element is among the bits, too, and of one element it is all of them.
    assert len(seen) == 2 + signs + 32 + 2 * (size > 1) - (size == 1)


def test_a_digest_does_not_depend_on_where_the_elements_are() -> None:
    data = torch.randn(2, 3, 40, 50)
    expected = digest(data)
    assert digest(data.to(memory_format=torch.channels_last)) == expected
    assert digest(torch.cat([torch.zeros(1), data.view(-1)])[1:]) == expected  # at an odd address
    assert digest(data.conj()) == expected
    data = torch.randn(5, dtype=torch.complex64)
    assert digest(data.conj()) == digest(data.conj().resolve_conj()) != digest(data)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float64, torch.uint8])
def test_dtypes(dtype: torch.dtype) -> None:
    data = torch.tensor([0, 1, 1], dtype=dtype)
    assert digest(data) == digest(data.clone()) != digest(data.flip(0))
    assert digest(torch.empty(0, dtype=dtype)) == digest(torch.empty(0))


def test_many_small_tensors_share_digests() -> None:
    tensors = [torch.full((64,), float(i)) for i in range(1000)] + [torch.ones(2**18)]
    first = digests(tensors)
    assert len(first) == 2 and first == digests(tensors)
    tensors[500][63] += 1
    assert digests(tensors) != first
