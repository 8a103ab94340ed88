"""Wrapped models on torch.distributed: ``DistributedDataParallel``, whose C++ reducer averages the gradients."""

from __future__ import annotations

import re
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from unidist.diagnosis.spans import NEVER, spans
from unidist.errors import MismatchError, UnidistError
from unidist.gradients.backward_pass import BackwardPass, BackwardPasses, OutputHooks, PlainPass, current_pass
from unidist.gradients.reducer import GradientReducer
from unidist.gradients.wrapper import (
    M,
    ModelOptions,
    TrainedParameters,
    Wrapper,
    buffers_of,
    frozen_parameters,
    unused_parameters,
)
from unidist.tree import tensors_with_gradient


def wrap_in_ddp(model: M, options: ModelOptions, process_group: Any, reducer: GradientReducer) -> WrappedDDP[M]:
    """Wrap a model in DDP over a process group of torch. Collective."""
    devices = {p.device for p in model.parameters()}
    single_gpu = len(devices) == 1 and next(iter(devices)).type == "cuda"
    with reducer.backend().errors_of("wrap_model"):
        wrapped: WrappedDDP[M] = WrappedDDP(
            model,
            device_ids=[next(iter(devices))] if single_gpu else None,
            process_group=process_group,
            bucket_cap_mb=options.bucket_cap_mb,
            # One copy of the gradients, as on Horovod.
            gradient_as_bucket_view=True,
            find_unused_parameters=options.find_unused_parameters,
            static_graph=options.static_graph,
        )
    wrapped.options = options
    wrapped.frozen = frozen_parameters(model)
    wrapped.at_wrapping = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    wrapped.trained = TrainedParameters(model, accumulators=True)
    wrapped.bucket_reducer = reducer
    hook = None
    if options.compression is not None:
        hook = _compressed(options.compression, len(reducer.ranks))
    if spans.on:
        hook = _recorded(hook or _mean(len(reducer.ranks)), reducer.ranks)
    if hook is not None:
        wrapped.register_comm_hook(process_group, hook)
    return wrapped


class WrappedDDP(DistributedDataParallel, Wrapper[M]):
    """DistributedDataParallel without collectives in evaluation.

    DDP broadcasts buffers in every forward pass, also under ``no_grad``, where ranks with different numbers of
    evaluation batches would wait for each other for ever. Here they follow the first rank's during each backward pass
    that averages, so that they are equal after a step.
    """

    #: The parameters that it averages, by DDP's indices, with their names.
    at_wrapping: list[tuple[str, Tensor]]
    #: The collectives of the buffers.
    bucket_reducer: GradientReducer
    _buffer_passes: BackwardPasses | None = None
    _outputs: OutputHooks | None = None
    #: Whether the last output had no tensor that can be seen, but, say, an object of the user's with tensors.
    _hides_output = False
    #: The backward pass for which the reducer was prepared last.
    _last_pass = -1

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {**state, "_buffer_passes": None, "_outputs": None}  # a copy has another module

    def rebuild_buckets(self) -> None:
        """Rebuild DDP's buckets, as its second forward pass does on all ranks.

        DDP uses the strides that each parameter has then, and compares them between ranks in its constructor only.
        """
        if not self.reducer._rebuild_buckets() or self._join_config.enable:
            return  # ranks in DDP's own join() rebuild, and make no other collective call
        strides = zlib.crc32(repr([p.stride() for p in self.parameters() if p.requires_grad]).encode())
        ends = torch.tensor([strides, -strides], device=self.device)
        dist.all_reduce(ends, dist.ReduceOp.MAX, self.process_group)
        if ends.sum() != 0:
            raise MismatchError(
                "the memory format of a wrapped model was changed on some ranks only, so that their gradients cannot "
                "be averaged: change it before unidist.wrap_model, on every rank."
            )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self.check_forward()
        try:
            # In its own join() DDP notifies the other ranks before it rebuilds.
            if torch.is_grad_enabled() and not self._join_config.enable:
                self.rebuild_buckets()
            output = super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "unmarked_param_indices" in str(error):  # an assertion of its reducer
                raise UnidistError(
                    "a backward pass of this model has failed before, after which DistributedDataParallel cannot go "
                    "on: pass the model to wrap_model again, on every rank."
                ) from error
            # DDP reports unused parameters here, one step late and by their indices.
            found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            if found is None:
                raise
            params = [self.at_wrapping[int(index)] for index in found[1].split()]
            raise unused_parameters(dict(params)) from error
        follows = self.options.broadcast_buffers and self.modules_buffers and not self._join_config.enable
        if follows and torch.is_grad_enabled() and self.require_backward_grad_sync:
            if self._buffer_passes is None:
                self._buffer_passes = BackwardPasses([], _Buffers(self.module, self.bucket_reducer).begin)
            tensors = tensors_with_gradient(output)
            self._buffer_passes.expect(tensors, True)
            self._hides_output = not tensors
        return output

    def _post_forward(self, output: Any) -> Any:
        """Let DDP prepare its reducer only where no tensor shows when a backward pass begins."""
        averages = torch.is_grad_enabled() and self.require_backward_grad_sync and not self.static_graph
        found = tensors_with_gradient(output) if averages and not self._join_config.enable else []
        if not found:
            return super()._post_forward(output)  # type: ignore[no-untyped-call]
        # DDP would prepare its reducer now, for the next backward pass, whichever that is.
        self.require_backward_grad_sync = False
        try:
            output = super()._post_forward(output)  # type: ignore[no-untyped-call]
        finally:
            self.require_backward_grad_sync = self.require_forward_param_sync = True
        self._average_every_backward(tensors_with_gradient(output) if self.find_unused_parameters else found, found)
        return output

    def _average_every_backward(self, returned: list[Tensor], found: list[Tensor]) -> None:
        """Prepare the reducer when a backward pass begins.

        Args:
            returned: the tensors that DDP returns; with ``find_unused_parameters``, copies of those that it sees.
            found: the tensors of the model's own output.
        """
        # A tensor's hooks must not keep the tensor alive: the garbage collector does not see through them.
        own = set(map(id, returned))
        refs = [weakref.ref(tensor) for tensor in found if id(tensor) in own] if self.find_unused_parameters else []
        kept = [tensor for tensor in found if id(tensor) not in own]

        def begin(grad: Tensor) -> None:
            self.check_backward()
            task = current_pass()
            if task != self._last_pass:
                self._last_pass = task
                self.rebuild_buckets()  # as before each forward pass
                self.reducer.prepare_for_backward([*kept, *(tensor for ref in refs if (tensor := ref()) is not None)])

        if self._outputs is None:
            self._outputs = OutputHooks()
        self._outputs.watch(returned, begin)

    def _check_default_group(self) -> None:
        try:
            super()._check_default_group()  # type: ignore[no-untyped-call]
        except (RuntimeError, ValueError) as error:
            raise RuntimeError(
                "a wrapped model can be copied and pickled where its ranks are those of torch's default process group, "
                "which hvd.init() does not make: copy or pickle the model inside, .module, and wrap that on every rank."
            ) from error

    def will_sync_module_buffers(self) -> bool:
        # In its own join() DDP notifies the other ranks before it broadcasts; a hidden output shows no backward pass.
        syncs = (
            (self._join_config.enable or self._hides_output)
            and torch.is_grad_enabled()
            and self.require_backward_grad_sync
        )
        return self.options.broadcast_buffers and syncs and bool(self.modules_buffers)


class _Buffers:
    """The buffers of a model, which follow the first rank's. It keeps nothing alive that refers to it."""

    def __init__(self, module: nn.Module, reducer: GradientReducer) -> None:
        self._module = weakref.ref(module)
        self._reducer = reducer

    def begin(self, _: bool) -> BackwardPass:
        """Begin a backward pass. Collective."""
        module = self._module()
        return PlainPass(finish=self._reducer.start_broadcast([] if module is None else buffers_of(module)))


def _mean(size: int) -> Callable[..., Any]:
    """Return a communication hook that does what DDP does without one."""

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations, not their names
        future = dist.all_reduce(bucket.buffer().div_(size), group=state, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    return hook


def _recorded(hook: Callable[..., Any], ranks: Sequence[int]) -> Callable[..., Any]:
    """Return a communication hook whose buckets are in the timeline. A backward pass waits for the last one."""

    def recorded(state, bucket):  # type: ignore[no-untyped-def]  # see _mean
        span = spans.collective("backward", ranks, bucket.buffer())
        future = hook(state, bucket)
        if span is None:
            return future
        if not bucket.is_last():
            span.blocked = NEVER

        def end(done):  # type: ignore[no-untyped-def]
            span.end()
            return done.value()

        return future.then(end)

    return recorded


def _compressed(dtype: torch.dtype, size: int) -> Callable[..., Any]:
    """Return a communication hook that averages gradients in ``dtype``; torch's own takes no bfloat16 on the CPU."""

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # see _mean
        buffer = bucket.buffer()
        if buffer.is_sparse:  # half precision has no sparse arithmetic
            future = dist.all_reduce(buffer.div_(size), group=state, async_op=True).get_future()
            return future.then(lambda done: done.value()[0])
        real = torch.view_as_real(buffer) if buffer.is_complex() else buffer
        sent = real.to(dtype).div_(size)
        future = dist.all_reduce(sent, group=state, async_op=True).get_future()

        def widen(done):  # type: ignore[no-untyped-def]
            real.copy_(done.value()[0])
            return buffer

        return future.then(widen)

    return hook
