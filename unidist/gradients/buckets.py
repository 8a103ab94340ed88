"""Gradient buckets: flat tensors in which the gradients of several parameters are reduced together.

Parameters are laid out, last first, in buckets of one dtype and device, since gradients become ready in about that
order. A bucket is the storage of its parameters' gradients: ``copy_in`` moves them there, and the reduced gradients
need no copy out. (The scheme of Li et al., "PyTorch Distributed", VLDB 2020.)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from unidist.errors import UnidistError

#: Size in bytes of a gradient from which on a second copy of it is worth avoiding.
_LARGE_BYTES = 2**20
#: Waits for a reduction that has been started.
Wait = Callable[[], None]
#: Starts the reduction of a bucket, whose parameters in the set are not ready.
Start = Callable[[int, set[int]], Wait]


def _reference_counts(objects: Sequence[object]) -> list[int]:
    return [sys.getrefcount(each) for each in objects]


#: The count of an object to which only its list refers; how many references the call adds depends on the interpreter.
(_UNSHARED,) = _reference_counts([object()])


class Bucket:
    """Parameters of one dtype and device, whose gradients are views of ``flat``.

    Args:
        params: the parameters.
        prescale: the factor by which gradients are multiplied when they are copied in.
    """

    def __init__(self, params: list[Tensor], prescale: float) -> None:
        self.params = params
        self.prescale = prescale
        # Fixed from here on: a rank that changes a memory format later must not lay out its bucket unlike the others.
        self._layouts = [(p.numel(), p.shape, _dense_strides(p)) for p in params]
        self.reallocate()
        #: Whether each gradient is copied in when it is ready, which frees the memory of its own, or all together,
        #: which is faster.
        self.copies_each = max(view.numel() * view.element_size() for view in self.views) >= _LARGE_BYTES

    def reallocate(self) -> None:
        """Allocate the storage, also anew, so that gradients of an earlier step that somebody keeps stay as they
        are.
        """
        sizes = [size for size, _, _ in self._layouts]
        self.flat = torch.zeros(sum(sizes), dtype=self.params[0].dtype, device=self.params[0].device)
        self._parts = torch.split(self.flat, sizes)
        #: Each parameter's gradient in ``flat``.
        self.views = [self._view(index) for index in range(len(sizes))]
        self._addresses = [view.data_ptr() for view in self.views]

    def _view(self, index: int) -> Tensor:
        part, (_, shape, strides) = self._parts[index], self._layouts[index]
        return part.view(shape) if strides is None else part.as_strided(shape, strides)

    def fits(self) -> bool:
        """Whether the parameters still have the dtype and the device of the storage."""
        dtype, device = self.flat.dtype, self.flat.device
        return all(param.dtype == dtype and param.device == device for param in self.params)

    def is_referenced(self) -> bool:
        """Whether anything but this bucket and its parameters refers to the storage or a view."""
        # The bucket's own references: flat, its parts and its views; here the storage's name.
        if torch._C._storage_Use_Count(self.flat.untyped_storage()._cdata) > 2 * len(self.views) + 2:
            return True
        return max(_reference_counts(self.views), default=0) > _UNSHARED

    def copy_in(self, indices: Iterable[int], prescale: float) -> None:
        """Copy gradients, times ``prescale``, into ``flat``, which becomes their storage; zeros where a parameter
        has none.
        """
        if torch.is_grad_enabled():  # backward(create_graph=True) records what its hooks do
            with torch.no_grad():
                return self.copy_in(indices, prescale)
        grads, views, in_place = [], [], []
        for index in indices:
            param, grad = self.params[index], self.params[index].grad
            if self.views[index].data_ptr() != self._addresses[index]:  # p.grad.data = ..., model.double().float()
                self.views[index] = self._view(index)
            view = self.views[index]
            if grad is view:
                in_place.append(view)
            elif grad is None:
                view.zero_()
            elif grad.layout != torch.strided:
                raise UnidistError(
                    f"a parameter of shape {tuple(param.shape)} has a {grad.layout} gradient, which only nn.Embedding "
                    "and nn.EmbeddingBag with sparse=True may have."
                )
            else:
                grads.append(grad)
                views.append(view)
                param.grad = view
        if len(grads) == 1:
            torch.mul(grads[0], prescale, out=views[0])
        elif grads:
            torch._foreach_copy_(views, grads)
            in_place += views
        if prescale != 1:
            if len(in_place) == len(self.params):
                self.flat.mul_(prescale)
            elif in_place:
                torch._foreach_mul_(in_place, prescale)


class BucketReductions:
    """The reductions of one step. Each starts when its bucket's gradients are ready, in the same order on every rank.

    ``start`` copies the gradients of a bucket in and starts its reduction. It is an argument of each call, and not
    kept: a reference back would keep buffers alive until the garbage collector runs.

    Args:
        buckets: in the order of their reductions.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.waits: list[Wait] = []
        self.pending = [set(range(len(bucket.params))) for bucket in buckets]

    def ready(self, bucket: int, index: int) -> None:
        """The gradient of a bucket's parameter is ready."""
        self.pending[bucket].discard(index)

    def start_ready(self, start: Start) -> None:
        """Start those that are ready, up to the first that is not."""
        while len(self.waits) < len(self.pending) and not self.pending[len(self.waits)]:
            self._start_next(start)

    def start_all(self, start: Start) -> None:
        """Start the rest."""
        while len(self.waits) < len(self.pending):
            self._start_next(start)

    def finish(self, start: Start) -> None:
        """Start the rest, and wait for all."""
        self.start_all(start)
        for wait in self.waits:
            wait()

    def _start_next(self, start: Start) -> None:
        bucket = len(self.waits)
        self.waits.append(start(bucket, self.pending[bucket]))


def split_into_buckets(params: Iterable[Tensor], cap_mb: float) -> list[list[Tensor]]:
    """Parameters, last first, in lists of one dtype and device and of at most ``cap_mb`` MiB (or one parameter)."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for param in reversed(list(params)):
        by_kind.setdefault((param.dtype, param.device), []).append(param)
    buckets: list[list[Tensor]] = []
    for same in by_kind.values():
        bucket: list[Tensor] = []
        size = 0
        for param in same:
            nbytes = param.numel() * param.element_size()
            if bucket and size + nbytes > cap_mb * 2**20:
                buckets.append(bucket)
                bucket, size = [], 0
            bucket.append(param)
            size += nbytes
        buckets.append(bucket)
    return buckets


def bucket_positions(buckets: Sequence[Bucket]) -> dict[Tensor, tuple[int, int]]:
    """Where each parameter is: its bucket, and its index there."""
    return {param: (i, index) for i, bucket in enumerate(buckets) for index, param in enumerate(bucket.params)}


def empty_sparse_gradient(param: Tensor) -> Tensor:
    """A sparse (COO) gradient without rows, of a parameter that was not used."""
    rows = param.new_zeros((0, *param.shape[1:]))
    return torch.sparse_coo_tensor(
        torch.empty((1, 0), dtype=torch.int64), rows, param.shape, device=param.device, check_invariants=False
    )


def by_device(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors of one device together, in order of first appearance."""
    devices: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        devices.setdefault(tensor.device, []).append(tensor)
    return list(devices.values())


def flatten_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of tensors of one device, of any dtypes, in one uint8 tensor."""
    return torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors])


@torch.no_grad()
def unflatten_bytes(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Overwrite tensors with what ``flatten_bytes`` returned for others like them, where they differ.

    A graph may contain them: frozen statistics are left as they are, for another backward pass.
    """
    for tensor, part in zip(tensors, torch.split(flat, [t.numel() * t.element_size() for t in tensors])):
        if not torch.equal(tensor.detach().reshape(-1).view(torch.uint8), part):
            # A part may begin at an address that is not aligned to the dtype; its copy does not.
            tensor.copy_(part.clone().view(tensor.dtype).view_as(tensor))


def _dense_strides(param: Tensor) -> tuple[int, ...] | None:
    """The parameter's strides if they leave no gaps, else None. Fused optimizers need the gradient's strides to be
    the same.
    """
    expected = 1
    for stride, size in sorted(zip(param.stride(), param.shape)):
        if size != 1:
            if stride != expected:
                return None
            expected *= size
    return param.stride()
