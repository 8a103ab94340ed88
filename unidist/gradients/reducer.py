"""The collectives of gradient buckets, by a backend's own calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unidist.backends.base import Backend, Group, Wait
from unidist.errors import BackendError
from unidist.gradients.buckets import Bucket, by_device, flatten_bytes, unflatten_bytes

_HALF = (torch.float16, torch.bfloat16, torch.complex32)


class GradientReducer:
    """Averages gradients by the asynchronous ``start_all_reduce`` of a backend.

    Args:
        backend: returns the running one. A copied or unpickled model uses the one that runs then.
        compression: the dtype in which gradients are sent. Default: their own, and half precision on the CPU in
            float32.
        group: the ranks that train together.
    """

    #: Whether sparse gradients may be in buckets, as dense ones.
    takes_sparse = False
    #: Whether gradients that the script keeps, and that a bucket replaces, get the reduced values.
    serves_kept = False

    def __init__(self, backend: Callable[[], Backend], compression: torch.dtype | None, group: Group | None) -> None:
        self.backend = backend
        self.compression = compression
        self.group = group
        self.ranks = backend().ranks(group)

    def __reduce__(self) -> tuple[Any, ...]:
        return _of_ranks, (self.backend, self.compression, self.group and self.ranks)

    def prescale(self, dtype: torch.dtype) -> float:
        """Return the factor by which gradients are multiplied when they are copied into a bucket.

        Half precision is scaled when it is sent, in float32.
        """
        return 1.0 if dtype in _HALF else 1.0 / len(self.ranks)

    def start(self, bucket: Bucket, index: int) -> Wait:
        """Start to average the gradients of a bucket, which were multiplied by ``prescale``. Collective.

        Args:
            bucket: full.
            index: its position among the buckets.
        """
        flat = bucket.flat
        real = torch.view_as_real(flat) if flat.is_complex() else flat
        sent = self._on_device(real)
        if self.compression is not None:
            sent = sent.to(self.compression)
        elif sent.dtype in _HALF and sent.device.type == "cpu":
            sent = sent.float()
        if flat.dtype in _HALF:
            sent.div_(len(self.ranks))
        reduced = self.backend().start_all_reduce(sent, "sum", self.group, call="backward")

        def wait() -> None:
            reduced()
            if sent is not real:
                real.copy_(sent)

        return wait

    def maximum(self, flags: Tensor) -> None:
        """Take the maximum of an int32 CPU tensor over the ranks in place. Collective."""
        self.backend().all_reduce(flags, "max", self.group)

    def start_broadcast(self, tensors: list[Tensor]) -> Wait:
        """Start to overwrite tensors with the first rank's, in one broadcast of bytes per device. Collective."""
        devices = by_device(tensors)
        flats = [flatten_bytes(same) for same in devices]
        sent = [self._on_device(flat) for flat in flats]
        waits = [self.backend().start_broadcast(each, self.ranks[0], self.group) for each in sent]

        def wait() -> None:
            for finish, each, flat, same in zip(waits, sent, flats, devices):
                finish()
                unflatten_bytes(each.to(flat.device), same)

        return wait

    def start_sparse(self, param: Tensor, name: str) -> Wait:
        """Start to average a sparse (COO) gradient, in which every rank may have other rows, or none. Collective."""
        return torch.no_grad()(lambda: self._average_sparse(param))

    def _average_sparse(self, param: Tensor) -> None:
        grad = empty_sparse_gradient(param) if param.grad is None else param.grad
        if grad.is_sparse:
            param.grad = self._sparse_mean(grad)
        else:  # another layer uses the parameter, too
            grad.copy_(self._sparse_mean(grad.to_sparse(1)).to_dense())

    def _sparse_mean(self, grad: Tensor) -> Tensor:
        indices, values = self._gather(grad._indices().t()), self._gather(grad._values() / len(self.ranks))
        # Equal indices are added up in the same order on every rank.
        return torch.sparse_coo_tensor(indices.t(), values, grad.shape, check_invariants=False).coalesce()

    def _gather(self, rows: Tensor) -> Tensor:
        """Concatenate along dim 0, in which the ranks may differ."""
        backend = self.backend()
        flat = self._on_device(rows).contiguous().reshape(-1).view(torch.uint8)
        sizes = backend.all_gather(torch.tensor([flat.numel()]), [1] * len(self.ranks), self.group).tolist()
        whole = backend.all_gather(flat, sizes, self.group)
        return whole.view(rows.dtype).view(-1, *rows.shape[1:]).to(rows.device)

    def _on_device(self, tensor: Tensor) -> Tensor:
        """Return the tensor, or a copy where the backend takes it."""
        return tensor if tensor.device.type in self.backend().device_types else tensor.cpu()


def empty_sparse_gradient(param: Tensor) -> Tensor:
    """Return a sparse (COO) gradient without rows, of a parameter that was not used."""
    rows = param.new_zeros((0, *param.shape[1:]))
    return torch.sparse_coo_tensor(
        torch.empty((1, 0), dtype=torch.int64), rows, param.shape, device=param.device, check_invariants=False
    )


def _of_ranks(
    backend: Callable[[], Backend], compression: torch.dtype | None, ranks: tuple[int, ...] | None
) -> GradientReducer:
    if ranks is not None and ranks not in backend().groups:
        raise BackendError(f"this model was wrapped for the ranks {list(ranks)}: call new_group with them first.")
    return GradientReducer(backend, compression, None if ranks is None else backend().groups[ranks])
