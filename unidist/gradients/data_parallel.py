"""Data-parallel models for backends without ``DistributedDataParallel``: gradients are averaged in buckets during
the backward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from unidist.backends.base import M, ModelOptions
from unidist.errors import UnidistError
from unidist.gradients.backward_pass import BackwardPass, BackwardPasses
from unidist.gradients.buckets import (
    Bucket,
    BucketReductions,
    Wait,
    bucket_positions,
    by_device,
    empty_sparse_gradient,
    flatten_bytes,
    split_into_buckets,
    unflatten_bytes,
)
from unidist.gradients.wrapper import TrainedParameters, Wrapper, frozen_parameters, unused_parameters
from unidist.tree import tensors_in


class Reducer(Protocol):
    """The collectives that ``BucketedDataParallel`` needs of a backend."""

    def prescale(self, dtype: torch.dtype) -> float:
        """The factor by which gradients of a dtype are multiplied when they are copied into a bucket."""

    def start_mean(self, flat: Tensor, name: str) -> Wait:
        """Start to average gradients, which were multiplied by ``prescale``, in place. Collective."""

    def maximum(self, flat: Tensor) -> None:
        """Take the maximum of an int32 CPU tensor over the ranks in place. Collective."""

    def start_broadcast(self, flat: Tensor, name: str) -> Wait:
        """Start to overwrite bytes with the first rank's. Collective."""

    def sparse_mean(self, grad: Tensor) -> Tensor:
        """The average of sparse (COO) gradients, in which every rank may have other rows, or none. Collective."""


class DataParallel(Wrapper[M]):
    """A wrapped model in a world of one rank, where there is nothing to average."""

    def __init__(self, module: M, options: ModelOptions) -> None:
        super().__init__()
        self.module = module
        self.options = options
        self.frozen = frozen_parameters(module)
        self.trained = TrainedParameters(module)
        self.require_backward_grad_sync = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self.check_forward()
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def rebuild_buckets(self) -> None:
        pass


class BucketedDataParallel(DataParallel[M]):
    """``DataParallel`` that averages gradients through a ``Reducer`` during the backward pass."""

    def __init__(self, module: M, options: ModelOptions, reducer: Reducer) -> None:
        super().__init__(module, options)
        self._reducer = reducer
        gradients = ModelGradients(module, options, reducer)
        self._passes: BackwardPasses | None = BackwardPasses(gradients.names, gradients.begin)
        gradients.start_broadcast([*module.parameters(), *module.buffers()])()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_passes": None}  # a copy makes its own in its first training step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        if self._passes is None:
            gradients = ModelGradients(self.module, self.options, self._reducer)
            self._passes = BackwardPasses(gradients.names, gradients.begin)
        self.check_forward()
        sync = self.require_backward_grad_sync
        output = self.module(*args, **kwargs)
        self._passes.expect(output, sync)
        if sync:
            this = weakref.ref(self)  # a tensor's hooks are not seen by the garbage collector
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: _check_backward(this()))  # type: ignore[no-untyped-call]
        return output


def _check_backward(wrapper: BucketedDataParallel[Any] | None) -> None:
    if wrapper is not None:
        wrapper.check_backward()


class ModelGradients:
    """The gradients of one model: their buckets, and the collectives that average them.

    It refers to nothing that refers to it, so that a wrapper that is dropped takes its hooks along at once.
    """

    _names_given = count()

    def __init__(self, module: nn.Module, options: ModelOptions, reducer: Reducer) -> None:
        self._module = weakref.ref(module)
        self.options = options
        self.reducer = reducer
        self.names: dict[Tensor, str] = {p: name for name, p in module.named_parameters() if p.requires_grad}
        sparse = _with_sparse_gradients(module)
        #: Parameters whose gradients are sparse: they are averaged one by one at the end of the backward pass.
        self.sparse = {p: None for p in self.names if p in sparse}
        self.lay_out()
        #: Whether reductions start during the backward pass, in place of at its end.
        self.overlap = True
        #: Operations of a backward pass that failed: their names are free for others when they are done.
        self.unfinished: list[Wait] = []
        self._name = ""

    def lay_out(self) -> None:
        """Make the buckets, also anew."""
        dense = split_into_buckets([p for p in self.names if p not in self.sparse], self.options.bucket_cap_mb)
        self.buckets = [Bucket(params, self.reducer.prescale(params[0].dtype)) for params in dense]
        self.positions = bucket_positions(self.buckets)

    def begin(self, sync: bool) -> BackwardPass:
        """A backward pass of the model begins."""
        if not sync:
            return LocalPass(self)
        while self.unfinished:
            self.unfinished.pop(0)()
        return AveragingPass(self)

    def operation(self, name: str) -> str:
        """An operation's name, the same on every rank: models are numbered at their first collective."""
        self._name = self._name or f"model{next(ModelGradients._names_given)}"
        return f"{self._name}.{name}"

    def buffers(self) -> list[Tensor]:
        """The model's buffers."""
        module = self._module()
        return [] if module is None else list(module.buffers())

    def start_broadcast(self, tensors: Iterable[Tensor]) -> Wait:
        """Start to overwrite tensors with the first rank's, in one broadcast of bytes per device."""
        devices = by_device(tensors)
        flats = [flatten_bytes(same) for same in devices]
        waits = [self.reducer.start_broadcast(f, self.operation(f"broadcast{i}")) for i, f in enumerate(flats)]

        def finish() -> None:
            for wait, same, flat in zip(waits, devices, flats):
                wait()
                unflatten_bytes(flat, same)

        return finish


class LocalPass:
    """A backward pass inside ``no_sync``: gradients are accumulated in the buckets."""

    def __init__(self, gradients: ModelGradients) -> None:
        self._gradients = gradients

    def ready(self, param: Tensor) -> None:
        if param in self._gradients.positions:
            i, index = self._gradients.positions[param]
            if self._gradients.buckets[i].copies_each:
                self._gradients.buckets[i].copy_in([index], 1.0)

    def finish(self) -> None:
        pass

    def abandon(self) -> None:
        pass


class AveragingPass:
    """A backward pass in which gradients are averaged, while buffers follow the first rank's."""

    def __init__(self, gradients: ModelGradients) -> None:
        self._gradients = gradients
        self._positions, self._buckets = gradients.positions, gradients.buckets
        self._reductions = BucketReductions(gradients.buckets)
        self._pending = self._reductions.pending
        self._sparse_pending = set(gradients.sparse)
        # Buffers take part in no backward pass, so their broadcast overlaps with it.
        self._buffers: Wait = _nothing
        if gradients.options.broadcast_buffers:
            self._buffers = gradients.start_broadcast(gradients.buffers())

    def ready(self, param: Tensor) -> None:
        position = self._positions.get(param)  # once: the hash of a tensor is a call of Python
        if position is None:
            self._sparse_pending.discard(param)
            return
        i, index = position
        bucket, pending = self._buckets[i], self._pending[i]
        if index not in pending:
            raise UnidistError(
                f"the gradient of {self._gradients.names[param]!r} was accumulated twice in one backward pass: is the "
                "parameter shared between checkpointed parts? Use torch.utils.checkpoint with use_reentrant=False."
            )
        if bucket.copies_each:
            bucket.copy_in([index], bucket.prescale)
        pending.discard(index)
        if not pending and self._gradients.overlap:
            self._reductions.start_ready(self._start)

    def _start(self, i: int, pending: set[int]) -> Wait:
        bucket = self._gradients.buckets[i]
        bucket.copy_in(pending if bucket.copies_each else range(len(bucket.params)), bucket.prescale)
        return self._gradients.reducer.start_mean(bucket.flat, self._gradients.operation(f"bucket{i}"))

    def finish(self) -> None:
        try:
            self._finish()
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        self._gradients.unfinished = [*self._reductions.waits, self._buffers]

    def _finish(self) -> None:
        gradients = self._gradients
        if not any(param.requires_grad for param in gradients.names):
            # Frozen for this pass, as a GAN's discriminator that only passes gradients on: there is nothing to average.
            self.abandon()
            return
        missing = {
            gradients.buckets[i].params[index]
            for i, pending in enumerate(self._reductions.pending)
            for index in pending
        }
        missing |= self._sparse_pending
        if not gradients.options.find_unused_parameters:
            if missing:
                raise unused_parameters([name for param, name in gradients.names.items() if param in missing])
            self._reductions.finish(self._start)
            self._buffers()
            self._average_sparse(gradients.sparse)
            return
        dense = list(gradients.positions)
        used = [param.grad is not None for param in dense]
        self._reductions.finish(self._start)
        self._buffers()
        flags = torch.tensor([*used, *(param.grad is not None for param in gradients.sparse)], dtype=torch.int32)
        gradients.reducer.maximum(flags)
        used_somewhere = flags.tolist()
        for param, used_by_any in zip(dense, used_somewhere):
            if used_by_any and param.grad is None:
                i, index = gradients.positions[param]
                param.grad = gradients.buckets[i].views[index]
        self._average_sparse(
            [param for param, any_rank in zip(gradients.sparse, used_somewhere[len(dense) :]) if any_rank]
        )

    @torch.no_grad()
    def _average_sparse(self, params: Iterable[Tensor]) -> None:
        for param in params:
            grad = empty_sparse_gradient(param) if param.grad is None else param.grad
            if grad.is_sparse:
                param.grad = self._gradients.reducer.sparse_mean(grad)
            else:  # another layer uses the parameter, too
                grad.copy_(self._gradients.reducer.sparse_mean(grad.to_sparse(1)).to_dense())


def _with_sparse_gradients(module: nn.Module) -> set[Tensor]:
    layers = [layer for layer in module.modules() if isinstance(layer, (nn.Embedding, nn.EmbeddingBag))]
    return {layer.weight for layer in layers if layer.sparse}


def _nothing() -> None:
    pass
