"""The tensors of one call as buffers that MPI can read and write."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch import Tensor

Step = Callable[[], object]


class Call:
    """One call of torch.distributed and its buffers.

    ``read_buffer`` and ``write_buffer`` return flat contiguous tensors in memory that MPI can access: the tensor
    itself, or a staging copy that is copied back at the end. CUDA tensors are staged in pinned memory, unless the MPI
    library is CUDA-aware.
    """

    def __init__(self, name: str, inputs: Sequence[Tensor], outputs: list[Tensor], opts: Any = None) -> None:
        self.name = name
        #: For the profiler.
        self.inputs = inputs
        self.outputs = outputs
        self.timeout: timedelta = timedelta(0) if opts is None else opts.timeout
        #: Whether the caller waits for it at once (``async_op=False``), where torch says so.
        self.synchronous = opts is not None and not getattr(opts, "asyncOp", True)
        self.may_be_nonblocking = True
        self.buffers: list[Tensor] = []
        self._before_copy_back: list[Step] = []
        self._copy_back: list[Step] = []

    def read_buffer(self, tensor: Tensor) -> Tensor:
        """Return a buffer for MPI to read."""
        return self._buffer(tensor)[0]

    def separate_read_buffer(self, tensor: Tensor, *outputs: Tensor) -> Tensor:
        """As ``read_buffer``, in other memory than ``outputs``: MPI must not read where it writes."""
        flat = self.read_buffer(tensor)
        written = {output.untyped_storage().data_ptr() for output in outputs}
        return flat.clone() if flat.untyped_storage().data_ptr() in written else flat

    def write_buffer(self, tensor: Tensor) -> Tensor:
        """Return a buffer for MPI to write (and read), whose values ``tensor`` has in the end."""
        flat, copy_back = self._buffer(tensor)
        if copy_back is not None:
            self._copy_back.append(copy_back)
        return flat

    def before_copy_back(self, step: Step) -> None:
        """Run ``step`` after MPI's part, before staging copies are copied back."""
        self._before_copy_back.append(step)

    def finish(self) -> Step | None:
        """Return what remains to be done after MPI's part, or None."""
        steps = [*self._before_copy_back, *self._copy_back]
        if not steps:
            return None

        def finish() -> None:
            for step in steps:
                step()

        return finish

    def _buffer(self, tensor: Tensor) -> tuple[Tensor, Step | None]:
        tensor = tensor.detach()
        copy_back: Step | None = None
        if tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            flat = tensor if tensor.dim() == 1 else tensor.view(-1)
        elif tensor.device.type == "cuda" and tensor.is_contiguous() and _is_cuda_aware():
            torch.cuda.current_stream(tensor.device).synchronize()
            flat = tensor.view(-1)
            copy_back = lambda: torch.cuda.synchronize(tensor.device)  # noqa: E731
        else:
            flat, copy_back = _staged(tensor)
        self.buffers.append(flat)
        return flat, copy_back


def describe(tensor: Tensor) -> str:
    """Return a tensor for an error message."""
    return f"a {str(tensor.dtype).removeprefix('torch.')} tensor of shape {list(tensor.shape)}"


def _staged(tensor: Tensor) -> tuple[Tensor, Step]:
    on_cpu = tensor.device.type == "cpu"
    flat = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=not on_cpu).copy_(tensor).view(-1)

    def copy_back() -> None:
        tensor.copy_(flat.view(tensor.shape))
        if not on_cpu:
            torch.cuda.synchronize(tensor.device)

    return flat, copy_back


@cache
def _is_cuda_aware() -> bool:
    """Return whether the MPI library says that it is CUDA-aware, in the way of Open MPI and MPICH."""
    with suppress(AttributeError, OSError):
        return bool(ctypes.CDLL(None).MPIX_Query_cuda_support())
    return False
