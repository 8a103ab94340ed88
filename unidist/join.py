"""Training on ranks that run out of data at different steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from unidist.backends.base import Group, tensors_in, unused_parameters
from unidist.backends.gradient_buckets import cut, fill, flat_bytes
from unidist.backends.joined import Joined
from unidist.collectives import all_reduce, broadcast, broadcast_object
from unidist.context import current, replaced
from unidist.model import broadcast_optimizer_state, is_wrapped


@contextmanager
def join(*objects: Any, group: Group | None = None) -> Iterator[None]:
    """A block in which ranks may run out of data at different steps. Collective; a rank leaves it when all are done.

    While others go on, a rank that has left the loop adds nothing to their gradients, which remain the mean over all
    ranks of the group, as in DDP's and Horovod's own joins; use ``global_mean`` for the mean over all samples. In
    ``allreduce_metric`` it has weight 0, in ``all_reduce`` it adds nothing, ``barrier`` does not wait for it. Calls
    that gather raise an error inside the block. At the end every rank gets the state of the lowest rank among those that
    went on longest.

    Inside, gradients travel when the backward pass is over, after one small message a step: use ``shard_loader``, whose
    shares are equally long, where you can.

    Args:
        objects: the wrapped models that train inside, and what else is to be equal on every rank afterwards: optimizers,
            schedulers, anything with a ``state_dict`` and ``load_state_dict``.
        group: the ranks that train together.

    Raises:
        TypeError: an object without a state_dict, or a wrapped model inside ``torch.compile``.
        MismatchError: on every rank, when ranks that have data make different calls.
    """
    for thing in objects:
        if is_wrapped(getattr(thing, "_orig_mod", None)):
            raise TypeError("unidist.join cannot look into a compiled wrapper: use wrap_model(torch.compile(model)).")
        if not hasattr(thing, "load_state_dict"):
            raise TypeError(
                f"unidist.join takes models, optimizers and the like, not {type(thing).__name__}: it has no state_dict."
            )
    engine = current()
    everyone = engine.ranks(group)
    if len(everyone) == 1:
        yield
        return
    joined = Joined(engine, group)
    with ExitStack() as stack:
        stack.enter_context(replaced(joined))
        for thing in objects:
            if is_wrapped(thing):
                stack.enter_context(_averaged_at_the_end(thing, joined, group))
        yield
        joined.run_out()
    if joined.active != everyone:
        for thing in objects:
            _follow(thing, joined.active[0], group)


@contextmanager
def _averaged_at_the_end(wrapper: Any, joined: Joined, group: Group | None) -> Iterator[None]:
    """Average a wrapped model's gradients by plain collective calls, when its backward pass is over."""
    wrapper.settle()
    average = _Average(wrapper, joined, group)
    hooks = [
        wrapper.register_forward_pre_hook(average.before),
        wrapper.register_forward_hook(average.after, always_call=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Average:
    def __init__(self, wrapper: Any, joined: Joined, group: Group | None) -> None:
        self.wrapper = wrapper
        self.joined = joined
        self.group = group
        self.asked = True
        self.task = -1

    def before(self, *_: Any) -> None:
        # The wrapper itself averages nothing.
        self.asked, self.wrapper.require_backward_grad_sync = self.wrapper.require_backward_grad_sync, False

    def after(self, _: nn.Module, __: Any, output: Any) -> None:
        self.wrapper.require_backward_grad_sync = self.asked
        if self.asked and torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self.begin)  # type: ignore[no-untyped-call]

    def begin(self, _: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task != self.task:
            self.task = task
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    @torch.no_grad()
    def finish(self) -> None:
        options = self.wrapper.options
        trained = [(name, p) for name, p in self.wrapper.module.named_parameters() if p.requires_grad]
        unused = [name for name, p in trained if p.grad is None]
        wanted = [True] * len(trained)
        if options.find_unused_parameters:
            used = torch.tensor([p.grad is not None for _, p in trained])
            wanted = all_reduce(used, "or", self.group).tolist()
        elif unused:
            raise unused_parameters(unused)
        for piece in cut([p for (_, p), somewhere in zip(trained, wanted) if somewhere], options.bucket_cap_mb):
            self._average(piece)
        buffers = list(self.wrapper.module.buffers())
        if options.broadcast_buffers and buffers:
            for device in {buffer.device for buffer in buffers}:
                same = [buffer for buffer in buffers if buffer.device == device]
                fill(same, broadcast(flat_bytes(same), self.joined.active[0], self.group))

    def _average(self, params: list[Tensor]) -> None:
        sparse = [p.grad is not None and p.grad.is_sparse for p in params]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in params]
        mean = all_reduce(torch.cat([grad.reshape(-1) for grad in grads]), "mean", self.group)
        for p, part, was_sparse in zip(params, torch.split(mean, [p.numel() for p in params]), sparse):
            part = part.view_as(p)
            if was_sparse:
                p.grad = part.to_sparse(1)
            elif p.grad is None:
                p.grad = part.clone()
            else:
                p.grad.copy_(part)


def _follow(thing: Any, src: int, group: Group | None) -> None:
    """Take over rank ``src``'s state."""
    if isinstance(thing, nn.Module):
        with torch.no_grad():
            for tensor in (*thing.parameters(), *thing.buffers()):
                tensor.copy_(broadcast(tensor, src, group))
    elif isinstance(thing, torch.optim.Optimizer):
        broadcast_optimizer_state(thing, src, group)
    else:
        thing.load_state_dict(broadcast_object(thing.state_dict(), src, group))
