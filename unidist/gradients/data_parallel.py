"""Wrapped models for backends without ``DistributedDataParallel``: gradients are averaged during the backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from unidist.gradients.averager import GradientAverager, Unused
from unidist.gradients.backward_pass import BackwardPass, BackwardPasses, OutputHooks, PlainPass
from unidist.gradients.reducer import GradientReducer
from unidist.gradients.wrapper import M, ModelOptions, TrainedParameters, Wrapper, buffers_of, frozen_parameters
from unidist.tree import tensors_with_gradient


class DataParallel(Wrapper[M]):
    """A wrapped model whose gradients a ``GradientAverager`` averages.

    Args:
        module: the plain model; equal on all ranks.
        options: of ``wrap_model``.
        reducer: None in a world of one rank, where there is nothing to average.
    """

    def __init__(self, module: M, options: ModelOptions, reducer: GradientReducer | None) -> None:
        super().__init__()
        self.module = module
        self.options = options
        self.frozen = frozen_parameters(module)
        self.trained = TrainedParameters(module)
        self.require_backward_grad_sync = True
        self._reducer = reducer
        self._outputs = OutputHooks()
        self._passes = None if reducer is None else _watch(module, options, reducer)

    def __getstate__(self) -> dict[str, Any]:
        # A copy makes its own passes in its first training step.
        return {**self.__dict__, "_passes": None, "_outputs": OutputHooks()}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        self.check_forward()
        if self._reducer is None:
            return self.module(*args, **kwargs)
        if self._passes is None:
            self._passes = _watch(self.module, self.options, self._reducer)
        sync = self.require_backward_grad_sync
        output = self.module(*args, **kwargs)
        tensors = tensors_with_gradient(output)
        self._passes.expect(tensors, sync)
        if sync:
            this = weakref.ref(self)  # a tensor's hooks are not seen by the garbage collector
            self._outputs.watch(tensors, lambda _: _check_backward(this()))
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def rebuild_buckets(self) -> None:
        pass


def _check_backward(wrapper: DataParallel[Any] | None) -> None:
    if wrapper is not None:
        wrapper.check_backward()


def _watch(module: nn.Module, options: ModelOptions, reducer: GradientReducer) -> BackwardPasses:
    names: dict[Tensor, str] = {p: name for name, p in module.named_parameters() if p.requires_grad}
    return BackwardPasses(names, _Averaging(module, names, options, reducer).begin)


class _Averaging:
    """What happens in a backward pass. It keeps nothing alive that refers to it."""

    def __init__(
        self, module: nn.Module, names: dict[Tensor, str], options: ModelOptions, reducer: GradientReducer
    ) -> None:
        self._module = weakref.ref(module)
        self._options = options
        unused: Unused = "keep" if options.find_unused_parameters else "error"
        self._averager = GradientAverager(
            names, with_sparse_gradients(module), reducer, unused=unused, bucket_cap_mb=options.bucket_cap_mb
        )

    def begin(self, sync: bool) -> BackwardPass:
        """Begin a backward pass; if it averages, buffers follow the first rank's meanwhile."""
        averager, module = self._averager, self._module()
        if not sync:
            averager.prepare()
            return PlainPass(ready=averager.accumulate)
        if self._options.broadcast_buffers and module is not None:
            averager.begin(averager.reducer.start_broadcast(buffers_of(module)))
        else:
            averager.begin()
        return averager


def with_sparse_gradients(module: nn.Module) -> set[Tensor]:
    """Return the parameters of a model whose gradients are sparse."""
    layers = [layer for layer in module.modules() if isinstance(layer, (nn.Embedding, nn.EmbeddingBag))]
    return {layer.weight for layer in layers if layer.sparse}
