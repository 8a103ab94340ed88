"""Gradient buckets: flat tensors in which the gradients of several parameters are reduced together.

Parameters are laid out, last first, in buckets of one dtype and device, since gradients become ready in about that
order. A bucket is the storage of its parameters' gradients: ``copy_in`` moves them there, and the reduced gradients
need no copy out. (The scheme of Li et al., "PyTorch Distributed", VLDB 2020.)
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import cache

import torch
from torch import Tensor

from unidist.errors import UnidistError
from unidist.tree import is_lazy_view

#: Size in bytes of a gradient from which on a second copy of it is worth avoiding.
_LARGE_BYTES = 2**20
#: Size in bytes of a gradient from which on it is reduced alone, where autograd has put it.
_ALONE_BYTES = 2**22


def _reference_counts(objects: Sequence[object]) -> list[int]:
    return [sys.getrefcount(each) for each in objects]


#: The count of an object to which only its list refers; how many references the call adds depends on the interpreter.
(_UNSHARED,) = _reference_counts([object()])


@cache
def _of_grad() -> int:
    """Return by how much an object's count grows where it is the ``grad`` of a parameter, which depends on torch."""
    param, grad = torch.zeros(1, device="cpu", requires_grad=True), [torch.zeros(1, device="cpu")]
    param.grad = grad[0]
    return _reference_counts(grad)[0] - _UNSHARED


class Bucket:
    """Parameters of one dtype and device, whose gradients are views of ``flat``.

    The storage is allocated when the first gradient is copied in: the memory of the gradients that it replaces is freed
    one by one.

    Args:
        params: the parameters.
        prescale: the factor by which gradients are multiplied when they are copied in.
        takes_sparse: whether sparse (COO) gradients are copied in, as dense ones.
        serves_kept: whether gradients that are replaced, and to which the script refers, too, get the reduced values.
    """

    #: All gradients, one after the other; valid after ``copy_in``.
    flat: Tensor

    def __init__(self, params: list[Tensor], prescale: float, *, takes_sparse: bool, serves_kept: bool) -> None:
        self.params = params
        self.prescale = prescale
        # Fixed from here on: a rank that changes a memory format later must not lay out its bucket unlike the others.
        self._layouts = [(p.numel(), p.shape, _dense_strides(p)) for p in params]
        self._kind = params[0].dtype, params[0].device
        self._takes_sparse = takes_sparse
        #: The parameters whose gradients were sparse.
        self._were_sparse: list[Tensor] = []
        #: Each parameter's gradient in ``flat``; empty as long as there is no storage.
        self.views: list[Tensor] = []
        #: Whether each gradient is copied in when it is ready, which frees the memory of its own, or all together,
        #: which is faster.
        self.copies_each = max(map(_nbytes, params)) >= _LARGE_BYTES
        self._serves_kept = serves_kept
        #: Replaced gradients that the script keeps, and their parameters.
        self._kept: list[tuple[Tensor, Tensor]] = []

    def reallocate(self) -> None:
        """Allocate the storage, also anew, so that gradients of an earlier step that somebody keeps stay as they
        are.
        """
        sizes = [size for size, _, _ in self._layouts]
        self.flat = torch.empty(sum(sizes), dtype=self._kind[0], device=self._kind[1])
        self._parts = torch.split(self.flat, sizes)
        self.views = [self._view(part, index) for index, part in enumerate(self._parts)]
        self._addresses = [view.data_ptr() for view in self.views]

    def _view(self, part: Tensor, index: int) -> Tensor:
        _, shape, strides = self._layouts[index]
        return part.view(shape) if strides is None else part.as_strided(shape, strides)

    def fits(self) -> bool:
        """Return whether the parameters still have the dtype and the device of the storage."""
        dtype, device = self._kind
        return all(param.dtype == dtype and param.device == device for param in self.params)

    def is_referenced(self) -> bool:
        """Return whether anything but this bucket and its parameters refers to the storage or a view."""
        if not self.views:
            return False
        # The bucket's own references: flat, its parts and its views; here the storage's name.
        if torch._C._storage_Use_Count(self.flat.untyped_storage()._cdata) > 2 * len(self.views) + 2:
            return True
        for param, view, count in zip(self.params, self.views, _reference_counts(self.views)):
            if count > _UNSHARED and count > _UNSHARED + (_of_grad() if param.grad is view else 0):
                return True
        return False

    def copy_in(self, indices: Iterable[int], prescale: float) -> None:
        """Copy gradients, times ``prescale``, into ``flat``, which becomes their storage; zeros where a parameter
        has none.
        """
        with torch.no_grad():  # backward(create_graph=True) records what its hooks do
            if not self.views:
                self.reallocate()
            grads, views, in_place, replaced = [], [], [], []
            for index in indices:
                param, grad = self.params[index], self.params[index].grad
                if grad is not None and grad.layout != torch.strided:
                    grad = self._dense(param, grad)
                if self.views[index].data_ptr() != self._addresses[index]:  # p.grad.data = ..., model.double().float()
                    self.views[index] = self._view(self._parts[index], index)
                view = self.views[index]
                if grad is view:
                    in_place.append(view)
                elif grad is None:
                    view.zero_()
                else:
                    grads.append(grad)
                    views.append(view)
                    replaced.append(param)
                    param.grad = view
            grad = None  # a reference that would count
            if self._serves_kept and grads:
                self._note_kept(grads, replaced)
            if len(grads) == 1:
                torch.mul(grads[0], prescale, out=views[0])
            elif grads:
                torch._foreach_copy_(views, grads)
                in_place += views
            if prescale != 1 and len(in_place) == len(self.params):
                self.flat.mul_(prescale)
            elif prescale != 1 and in_place:
                torch._foreach_mul_(in_place, prescale)

    def _dense(self, param: Tensor, grad: Tensor) -> Tensor:
        if not (grad.is_sparse and self._takes_sparse):
            raise UnidistError(
                f"a parameter of shape {tuple(param.shape)} has a {grad.layout} gradient, which only nn.Embedding and "
                "nn.EmbeddingBag with sparse=True may have."
            )
        self._were_sparse.append(param)
        return grad.to_dense()

    def restore_sparse(self) -> None:
        """Make the gradients sparse that were when they were copied in."""
        for param in self._were_sparse:
            if param.grad is not None and not param.grad.is_sparse:
                param.grad = param.grad.to_sparse()
        self._were_sparse.clear()

    def _note_kept(self, grads: list[Tensor], params: list[Tensor]) -> None:
        for grad, param, count in zip(grads, params, _reference_counts(grads)):
            if count > _UNSHARED or grad.untyped_storage().nbytes() > grad.nbytes:
                self._kept.append((grad, param))

    @torch.no_grad()
    def serve_kept(self) -> None:
        """Give reduced values to the gradients that the script keeps; they are the parameters' again."""
        for grad, param in self._kept:
            reduced = param.grad
            if reduced is None or reduced is grad or reduced.is_sparse or grad.is_sparse or grad.requires_grad:
                continue
            if is_lazy_view(grad) or grad.untyped_storage().nbytes() > grad.nbytes:
                grad.copy_(reduced)  # part of a tensor of the script's
            else:
                grad.set_(reduced)  # type: ignore[call-overload]
            param.grad = grad
        self._kept.clear()

    def release(self) -> None:
        """Drop what is not needed until the next gradients: the parameters have theirs."""


class LargeBucket(Bucket):
    """One large parameter, whose gradient is reduced where autograd has put it, and is not kept."""

    def __init__(self, params: list[Tensor], prescale: float, *, takes_sparse: bool, serves_kept: bool) -> None:
        super().__init__(params, prescale, takes_sparse=takes_sparse, serves_kept=serves_kept)
        self.copies_each = False

    @torch.no_grad()
    def copy_in(self, indices: Iterable[int], prescale: float) -> None:
        """See ``Bucket``."""
        param, grad = self.params[0], self.params[0].grad
        if grad is not None:
            dense = grad if grad.layout == torch.strided else self._dense(param, grad)
            grad = dense.resolve_conj().resolve_neg()
        numel, _, strides = self._layouts[0]
        has_layout = grad is not None and (grad.stride() == strides or (strides is None and grad.is_contiguous()))
        if grad is not None and has_layout and not grad.requires_grad:
            view = grad
        else:
            view = self._view(torch.empty(numel, dtype=self._kind[0], device=self._kind[1]), 0)
            view.zero_() if grad is None else view.copy_(grad)
        if prescale != 1:
            view.mul_(prescale)
        if param.grad is not None and param.grad is not view:
            if self._serves_kept:
                self._kept.append((param.grad, param))
            param.grad = view
        self.views, self.flat = [view], view.as_strided((numel,), (1,))

    def is_referenced(self) -> bool:
        """See ``Bucket``."""
        return False

    def release(self) -> None:
        """See ``Bucket``."""
        self.views = []
        del self.flat


def make_bucket(params: list[Tensor], prescale: float, *, takes_sparse: bool, serves_kept: bool) -> Bucket:
    """Return a bucket for parameters of one dtype and device."""
    kind = LargeBucket if len(params) == 1 and _nbytes(params[0]) >= _ALONE_BYTES else Bucket
    return kind(params, prescale, takes_sparse=takes_sparse, serves_kept=serves_kept)


def split_into_buckets(params: Iterable[Tensor], cap_mb: float) -> list[list[Tensor]]:
    """Return parameters, last first, in lists of one dtype and device and of at most ``cap_mb`` MiB (or one parameter).
    Large ones are alone.
    """
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for param in reversed(list(params)):
        by_kind.setdefault((param.dtype, param.device), []).append(param)
    buckets: list[list[Tensor]] = []
    for same in by_kind.values():
        bucket: list[Tensor] = []
        size = 0
        for param in same:
            nbytes = _nbytes(param)
            if nbytes >= _ALONE_BYTES:
                buckets.append([param])
                continue
            if bucket and size + nbytes > cap_mb * 2**20:
                buckets.append(bucket)
                bucket, size = [], 0
            bucket.append(param)
            size += nbytes
        if bucket:
            buckets.append(bucket)
    return buckets


def _nbytes(param: Tensor) -> int:
    return param.numel() * param.element_size()


def by_device(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return the tensors of one device together, in order of first appearance."""
    devices: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        devices.setdefault(tensor.device, []).append(tensor)
    return list(devices.values())


def flatten_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """Return the bytes of tensors of one device, of any dtypes, in one uint8 tensor."""
    return torch.cat([as_bytes(tensor) for tensor in tensors])


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor of any dtype; no copy is made of a contiguous one."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    # One element may have any stride, of which no view of another dtype is possible.
    return (flat if flat.stride() == (1,) else flat.clone(memory_format=torch.contiguous_format)).view(torch.uint8)


@torch.no_grad()
def unflatten_bytes(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Overwrite tensors with what ``flatten_bytes`` returned for others like them, where they differ.

    A graph may contain them: frozen statistics are left as they are, for another backward pass.
    """
    for tensor, part in zip(tensors, torch.split(flat, [t.numel() * t.element_size() for t in tensors])):
        if not torch.equal(as_bytes(tensor), part):
            # A part may begin at an address that is not aligned to the dtype; its copy does not.
            tensor.copy_(part.clone().view(tensor.dtype).view_as(tensor))


def _dense_strides(param: Tensor) -> tuple[int, ...] | None:
    """Return the parameter's strides if they leave no gaps, else None. Fused optimizers need the gradient's strides to
    be the same.
    """
    expected = 1
    for stride, size in sorted(zip(param.stride(), param.shape)):
        if size != 1:
            if stride != expected:
                return None
            expected *= size
    return param.stride()
