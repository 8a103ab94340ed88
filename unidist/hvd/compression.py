"""Compression of what is reduced, with Horovod's interface for compressors of the user's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Compressor:
    """Base of compressors: ``compress`` before an allreduce, ``decompress`` after it."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor that is sent, and the context that ``decompress`` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """The tensor as it was before, but for its values."""
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
