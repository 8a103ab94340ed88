"""The tensors of a call, where MPI can reach them."""

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
    """One call of torch.distributed, while it is made ready.

    ``reads`` and ``writes`` give flat contiguous tensors in memory that MPI reaches: the tensor itself, or a copy that is
    brought back at the end. CUDA tensors are copied to pinned memory, unless the MPI library says that it takes them.
    """

    def __init__(self, name: str, inputs: Sequence[Tensor], outputs: list[Tensor], opts: Any = None) -> None:
        self.name = name
        #: What the profiler shows.
        self.inputs = inputs
        self.outputs = outputs
        self.timeout: timedelta = timedelta(0) if opts is None else opts.timeout
        #: Whether the caller will wait for it, where torch says so.
        self.at_once = opts is not None and not getattr(opts, "asyncOp", True)
        self.may_be_small = True
        self.moved: list[Tensor] = []
        self._before: list[Step] = []
        self._back: list[Step] = []

    def reads(self, tensor: Tensor) -> Tensor:
        """A flat tensor of the same values."""
        return self._reached(tensor)[0]

    def reads_apart(self, tensor: Tensor, *places: Tensor) -> Tensor:
        """As ``reads``, but not of the memory of ``places``: MPI must not read where it writes."""
        flat = self.reads(tensor)
        written = {place.untyped_storage().data_ptr() for place in places}
        return flat.clone() if flat.untyped_storage().data_ptr() in written else flat

    def writes(self, tensor: Tensor) -> Tensor:
        """A flat tensor whose values will be those of ``tensor`` in the end."""
        flat, back = self._reached(tensor)
        if back is not None:
            self._back.append(back)
        return flat

    def then(self, step: Step) -> None:
        """Do this when MPI has done its part, before results are brought back."""
        self._before.append(step)

    def finish(self) -> Step | None:
        """What completes the results, or None."""
        steps = [*self._before, *self._back]
        if not steps:
            return None

        def finish() -> None:
            for step in steps:
                step()

        return finish

    def _reached(self, tensor: Tensor) -> tuple[Tensor, Step | None]:
        tensor = tensor.detach()
        back: Step | None = None
        if tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            flat = tensor.view(-1)
        elif tensor.device.type == "cuda" and tensor.is_contiguous() and _takes_cuda():
            torch.cuda.current_stream(tensor.device).synchronize()
            flat = tensor.view(-1)
            back = lambda: torch.cuda.synchronize(tensor.device)  # noqa: E731
        else:
            flat, back = _copied(tensor)
        self.moved.append(flat)
        return flat, back


def named(tensor: Tensor) -> str:
    """A tensor in an error."""
    return f"a {str(tensor.dtype).removeprefix('torch.')} tensor of shape {list(tensor.shape)}"


def _copied(tensor: Tensor) -> tuple[Tensor, Step]:
    on_cpu = tensor.device.type == "cpu"
    flat = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=not on_cpu).copy_(tensor).view(-1)

    def back() -> None:
        tensor.copy_(flat.view(tensor.shape))
        if not on_cpu:
            torch.cuda.synchronize(tensor.device)

    return flat, back


@cache
def _takes_cuda() -> bool:
    """Whether the MPI library says that it takes CUDA tensors; Open MPI's and MPICH's way to ask."""
    with suppress(AttributeError, OSError):
        return bool(ctypes.CDLL(None).MPIX_Query_cuda_support())
    return False
