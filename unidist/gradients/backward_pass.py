"""Backward passes of autograd: when one begins, which gradients are ready, and when it is over.

The only module that calls private functions of ``torch.autograd``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle


def current_pass() -> int:
    """Return a number of the running backward pass, for comparison; -1 outside."""
    return torch._C._current_graph_task_id()


class BackwardPass(Protocol):
    """One backward pass of a model: made when it begins, dropped when it is over."""

    def ready(self, param: Tensor) -> None:
        """Take a parameter's gradient, which has been accumulated."""

    def finish(self) -> None:
        """End the pass: all gradients have been accumulated."""

    def abandon(self) -> None:
        """Drop the pass, which failed: another one has begun."""


class PlainPass:
    """A ``BackwardPass`` of two functions.

    Args:
        ready: called with each parameter whose gradient has been accumulated.
        finish: called when all have.
    """

    def __init__(
        self, ready: Callable[[Tensor], None] = lambda _: None, finish: Callable[[], None] = lambda: None
    ) -> None:
        self.ready = ready
        self.finish = finish

    def abandon(self) -> None:
        """See ``BackwardPass``."""


class BackwardPasses:
    """Watches the backward passes of one model, as long as this object lives.

    Args:
        params: the parameters whose gradients are watched.
        begin: called when a backward pass begins, with the ``sync`` of its forward pass.
        unexpected: whether a pass also begins with a gradient that no forward pass announced by ``expect``.
    """

    def __init__(
        self, params: Iterable[Tensor], begin: Callable[[bool], BackwardPass], *, unexpected: bool = False
    ) -> None:
        self._begin_pass = begin
        self._unexpected = unexpected
        #: The ``sync`` of the last forward pass, until its backward pass begins.
        self._expected: bool | None = None
        self._running: BackwardPass | None = None
        self._task = -1
        self._outputs = OutputHooks()
        #: What autograd calls at the end of the running pass; a pass that fails drops it.
        self._at_end: weakref.ref[Callable[[], None]] | None = None
        self.close = watch_gradients(params, self._accumulated)

    def expect(self, tensors: list[Tensor], sync: bool) -> None:
        """Call this after each forward pass that records gradients, with ``tensors_with_gradient`` of its output."""
        # A parameter's hook begins the pass where the output contains no visible tensor.
        self._expected = sync
        # A tensor's hook runs at the start of the backward pass that was called, while a parameter's may run in a pass
        # within it (reentrant checkpointing), which ends earlier.
        self._outputs.watch(tensors, lambda _: self._begin_unless_partial(sync))

    def expect_none(self) -> None:
        """Call this after a forward pass whose backward pass does not matter."""
        self._expected = None

    def _begin_unless_partial(self, sync: bool) -> None:
        # autograd.grad() and backward(inputs=...) may not reach the parameters; where they do, the parameters' hooks
        # begin.
        if torch.autograd._is_checkpoint_valid():  # type: ignore[no-untyped-call]
            self._begin(sync)

    def _begin(self, sync: bool) -> None:
        task = current_pass()
        if self._running is not None and task == self._task:
            return
        failed, self._running = self._running, None
        if failed is not None:
            failed.abandon()
        self._expected, self._task = None, task
        self._running = self._begin_pass(sync)
        at_end = partial(self._finish)
        self._at_end = weakref.ref(at_end)
        torch.autograd.Variable._execution_engine.queue_callback(at_end)

    def _accumulated(self, param: Tensor) -> None:
        if self._unexpected:
            if self._running is None or self._at_end is None or self._at_end() is None:
                self._begin(True)
        elif self._running is None and self._expected is not None:
            self._begin(self._expected)
        if self._running is not None:  # else it is of the bare module's pass, or of another wrapper's
            self._running.ready(param)

    def _finish(self) -> None:
        finished, self._running = self._running, None
        if finished is not None:
            finished.finish()


class OutputHooks:
    """What is called when a backward pass reaches an output of a model, forward pass after forward pass."""

    def __init__(self) -> None:
        #: A leaf, as a parameter that the model returns, keeps its hooks when the forward pass is over.
        self._of_leaves: list[RemovableHandle] = []

    def watch(self, tensors: list[Tensor], function: Callable[[Tensor], None]) -> None:
        """Call a function with the gradient of each of an output's tensors; of leaves, in place of the one before."""
        for handle in self._of_leaves:
            handle.remove()
        handles = [tensor.register_hook(function) for tensor in tensors]  # type: ignore[no-untyped-call]
        self._of_leaves = [handle for tensor, handle in zip(tensors, handles) if tensor.is_leaf]


def watch_gradients(params: Iterable[Tensor], accumulated: Callable[[Tensor], None]) -> Callable[[], None]:
    """Call a bound method whenever the gradient of a parameter has been accumulated, as long as its object lives.

    Returns:
        A function that ends it.
    """
    # A parameter's hooks must not keep the object alive: the garbage collector does not see through them.
    this, function = weakref.ref(accumulated.__self__), accumulated.__func__  # type: ignore[attr-defined]

    def hook(param: Tensor) -> None:
        if (owner := this()) is not None:
            function(owner, param)

    hooks = [param.register_post_accumulate_grad_hook(hook) for param in params]  # type: ignore[no-untyped-call]

    def remove() -> None:
        for handle in hooks:
            handle.remove()

    weakref.finalize(accumulated.__self__, remove)  # type: ignore[attr-defined]
    return remove
