"""The collectives of gradient buckets, by a backend's own calls."""

from __future__ import annotations

import torch
from torch import Tensor

from unidist.backends.base import Backend, Group
from unidist.gradients.buckets import Wait

_HALF = (torch.float16, torch.bfloat16, torch.complex32)


class BackendReducer:
    """Averages gradients by the asynchronous ``start_all_reduce`` of a backend.

    Args:
        backend: the running one.
        compression: the dtype in which gradients are sent. Default: their own, and half precision on the CPU in
            float32.
        group: the ranks that train the model together.
    """

    def __init__(self, backend: Backend, compression: torch.dtype | None, group: Group | None) -> None:
        self.backend = backend
        self.compression = compression
        self.group = group
        self.size = len(backend.ranks(group))

    def prescale(self, dtype: torch.dtype) -> float:
        """See ``Reducer``: half precision is scaled when it is sent, in float32."""
        return 1.0 if dtype in _HALF else 1.0 / self.size

    def start_mean(self, flat: Tensor, name: str) -> Wait:
        """See ``Reducer``; ``name`` is for backends whose operations have names."""
        real = torch.view_as_real(flat) if flat.is_complex() else flat
        sent = self._on_device(real)
        if self.compression is not None:
            sent = sent.to(self.compression)
        elif sent.dtype in _HALF and sent.device.type == "cpu":
            sent = sent.float()
        if flat.dtype in _HALF:
            sent.div_(self.size)
        reduced = self.backend.start_all_reduce(sent, "sum", self.group, call="backward")

        def wait() -> None:
            reduced()
            if sent is not real:
                real.copy_(sent)

        return wait

    def maximum(self, flat: Tensor) -> None:
        """See ``Reducer``."""
        self.backend.all_reduce(flat, "max", self.group)

    def start_broadcast(self, flat: Tensor, name: str) -> Wait:
        """See ``Reducer``."""
        sent = self._on_device(flat)
        self.backend.broadcast(sent, self.backend.ranks(self.group)[0], self.group)
        if sent is not flat:
            flat.copy_(sent)
        return lambda: None

    def sparse_mean(self, grad: Tensor) -> Tensor:
        """See ``Reducer``."""
        indices, values = self._gather(grad._indices().t()), self._gather(grad._values() / self.size)
        # Equal indices are added up in the same order on every rank.
        return torch.sparse_coo_tensor(indices.t(), values, grad.shape, check_invariants=False).coalesce()

    def _gather(self, rows: Tensor) -> Tensor:
        """Concatenate along dim 0, in which the ranks may differ."""
        flat = self._on_device(rows).contiguous().reshape(-1).view(torch.uint8)
        sizes = self.backend.all_gather(torch.tensor([flat.numel()]), [1] * self.size, self.group).tolist()
        whole = self.backend.all_gather(flat, sizes, self.group)
        return whole.view(rows.dtype).view(-1, *rows.shape[1:]).to(rows.device)

    def _on_device(self, tensor: Tensor) -> Tensor:
        """The tensor, or a copy where the backend takes it."""
        return tensor if tensor.device.type in self.backend.device_types else tensor.cpu()
