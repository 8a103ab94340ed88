"""The device of a process."""

from __future__ import annotations

import torch

from unidist.errors import BackendError


def default_device(requested: torch.device | None, local_rank: int) -> torch.device:
    """Return the requested device, else this local rank's GPU, else the CPU.

    A single visible GPU belongs to this process (some schedulers show each task only its own).

    Raises:
        BackendError: a CUDA device was requested and there is none, or there are fewer GPUs than local ranks.
    """
    if requested is not None:
        if requested.type == "cuda" and not torch.cuda.is_available():
            raise BackendError(
                f"device {str(requested)!r} cannot be used: this torch sees no CUDA device. Leave device= out, or "
                'pass "cpu".'
            )
        if requested.type == "cuda" and requested.index is None:
            return torch.device("cuda", torch.cuda.current_device())
        return requested
    if not torch.cuda.is_available():
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if gpus > 1 and local_rank >= gpus:
        raise BackendError(
            f"local rank {local_rank} has no GPU of its own: {gpus} are visible. "
            'Start fewer processes per node, or pass device="cpu" to init().'
        )
    return torch.device("cuda", 0 if gpus == 1 else local_rank)
