"""Compression of what is reduced, with Horovod's interface for compressors of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unidist.gradients.buckets import Bucket


class Compressor:
    """Base of compressors: ``compress`` before an allreduce, ``decompress`` after it."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor that is sent, and the context that ``decompress`` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the tensor as it was before, but for its values."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


class FP16Compressor(Compressor):
    """Sends floating point numbers as float16."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor.to(torch.float16) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class Compression:
    """The compressors that come with it."""

    none = NoneCompressor
    fp16 = FP16Compressor


def compress_bucket(bucket: Bucket, compression: type[Compressor]) -> tuple[Tensor, Callable[[], object] | None]:
    """Return what is sent of a bucket, and what puts the result of it into the bucket."""
    flat = bucket.flat
    if compression is NoneCompressor:
        return flat, None
    if compression is FP16Compressor:
        sent, ctx = FP16Compressor.compress(flat)
        return sent, lambda: flat.copy_(FP16Compressor.decompress(sent, ctx))
    return _compress_each(bucket, compression)


def _compress_each(bucket: Bucket, compression: type[Compressor]) -> tuple[Tensor, Callable[[], object]]:
    """Return what is sent of a bucket with a user's compressor, which takes gradients one by one; and its inverse."""
    parts, ctxs = zip(*(compression.compress(view) for view in bucket.views))
    sent = torch.cat([part.reshape(-1) for part in parts])

    def decompress() -> None:
        received = torch.split(sent, [part.numel() for part in parts])
        for view, part, like, ctx in zip(bucket.views, received, parts, ctxs):
            view.copy_(compression.decompress(part.view_as(like), ctx))

    return sent, decompress
