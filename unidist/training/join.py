"""Training on ranks that run out of data at different steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from unidist.backends.base import Group
from unidist.backends.joined import Joined
from unidist.collectives.operations import all_reduce, broadcast, broadcast_object
from unidist.context import current, replaced
from unidist.gradients.averager import Unused
from unidist.gradients.backward_pass import BackwardPasses, PlainPass
from unidist.gradients.buckets import by_device, flatten_bytes, split_into_buckets, unflatten_bytes
from unidist.gradients.wrapper import ModelOptions, WrappedModel, unused_parameters
from unidist.training.model import broadcast_optimizer_state, is_wrapped, replica_of
from unidist.tree import tensors_with_gradient


@contextmanager
def join(*objects: Any, group: Group | None = None) -> Iterator[None]:
    """Return a block in which ranks may run out of data at different steps. Collective: it ends when all are done.

    A rank that has left the loop contributes zeros to the others' gradients, which remain the mean over all ranks of
    the group, as in the joins of DDP and Horovod; use ``global_mean`` for the mean over all samples. In
    ``allreduce_metric`` it has weight 0, in ``all_reduce`` it contributes nothing (a mean is divided by all ranks), and
    ``barrier`` does not wait for it. Calls that gather, such as ``save_checkpoint`` and ``assert_in_sync``, raise an
    error inside the block. At the end every rank gets the state of the lowest of the ranks that trained longest.

    ::

        with unidist.join(model, optimizer):
            for inputs, targets in my_batches:  # not equally many on each rank
                optimizer.zero_grad()
                loss_sum = F.cross_entropy(model(inputs), targets, reduction="sum")
                unidist.global_mean(loss_sum, len(targets)).backward()
                optimizer.step()

    Inside, gradients are reduced uncompressed after the backward pass, and each collective call needs a small message
    before: prefer ``shard_loader``, whose shards are equally long. Finish a step of gradient accumulation before you
    leave the loop: gradients of an unfinished one are lost.

    Args:
        objects: the wrapped or replicated models that train inside, and others that must be equal on every rank
            afterwards: optimizers, schedulers, anything with ``state_dict`` and ``load_state_dict``.
        group: the ranks that train together.

    Raises:
        ValueError: a model wrapped with ``static_graph=True`` or for another group.
        TypeError: an object without a state_dict, a model that requires grad and is not wrapped, a model that another
            library wrapped, or a wrapped model inside ``torch.compile``.
        MismatchError: on every rank, when ranks that have data make different calls.
    """
    for thing in objects:
        if is_wrapped(getattr(thing, "_orig_mod", None)):
            raise TypeError("unidist.join does not take a compiled wrapper: use wrap_model(torch.compile(model)).")
        if is_wrapped(thing) and not isinstance(getattr(thing, "options", None), ModelOptions):
            raise TypeError("unidist.join takes what unidist.wrap_model returned, not another DistributedDataParallel.")
        trained = isinstance(thing, nn.Module) and any(p.requires_grad for p in thing.parameters())
        if trained and not is_wrapped(thing) and replica_of(thing) is None:
            raise TypeError(
                f"unidist.join({type(thing).__name__}): pass what unidist.wrap_model returned, or a model that was "
                "given to unidist.replicate; a copy that is not trained needs requires_grad_(False)."
            )
        if not hasattr(thing, "load_state_dict"):
            raise TypeError(
                f"unidist.join takes models, optimizers and the like, not {type(thing).__name__}: it has no state_dict."
            )
    backend = current()
    everyone = backend.ranks(group)
    for thing in objects:
        replica = replica_of(thing)
        options = thing.options if is_wrapped(thing) else replica and replica.options
        if options and options.static_graph:
            raise ValueError("unidist.join: a model wrapped with static_graph=True is not supported.")
        if options and options.ranks != everyone:
            raise ValueError(
                f"unidist.join over the ranks {list(everyone)}: the model is data-parallel over {list(options.ranks)}; "
                "pass its group."
            )
    joined = Joined(backend, group)
    with ExitStack() as stack:
        stack.enter_context(replaced(joined))
        for thing in objects:
            if is_wrapped(thing):
                stack.enter_context(_averaged_after_backward(thing, joined, group))
            elif (replica := replica_of(thing)) is not None:
                replica.average_by(_Averaging(thing, replica.options, joined, group, unused="zeros").average)
                stack.callback(replica.average_by, None)
        yield
        joined.run_out()
    if joined.active != everyone:
        for thing in objects:
            _broadcast_state(thing, joined.active[0], group)


@contextmanager
def _averaged_after_backward(wrapper: WrappedModel[Any], joined: Joined, group: Group | None) -> Iterator[None]:
    """Average a wrapped model's gradients by collective calls at the end of its backward pass, instead of during it."""
    wrapper.rebuild_buckets()
    unused: Unused = "keep" if wrapper.options.find_unused_parameters else "error"
    averaging = _Averaging(wrapper.module, wrapper.options, joined, group, unused)
    trained = [param for param in wrapper.module.parameters() if param.requires_grad]
    passes = BackwardPasses(trained, lambda sync: PlainPass(finish=averaging.average))
    sync = [True]

    def before_forward(*_: Any) -> None:
        # The wrapper itself averages nothing.
        sync[0], wrapper.require_backward_grad_sync = wrapper.require_backward_grad_sync, False

    def after_forward(_: nn.Module, __: Any, output: Any) -> None:
        wrapper.require_backward_grad_sync = sync[0]
        if sync[0] and torch.is_grad_enabled():
            passes.expect(tensors_with_gradient(output), True)
        else:
            passes.expect_none()

    hooks = [
        wrapper.register_forward_pre_hook(before_forward),
        wrapper.register_forward_hook(after_forward, always_call=True),
    ]
    try:
        yield
    finally:
        passes.close()
        for hook in hooks:
            hook.remove()


class _Averaging:
    def __init__(
        self, module: nn.Module, options: ModelOptions, joined: Joined, group: Group | None, unused: Unused
    ) -> None:
        self.module = module
        self.options = options
        self.joined = joined
        self.group = group
        self.unused = unused

    @torch.no_grad()
    def average(self) -> None:
        """Average gradients, and give buffers the values of the first rank that has data. Collective."""
        trained = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        unused = {name: p for name, p in trained if p.grad is None}
        used = [True] * len(trained)
        if self.unused == "keep":
            here = torch.tensor([p.grad is not None for _, p in trained])
            used = all_reduce(here, "or", self.group).tolist()
        elif self.unused == "error" and unused:
            raise unused_parameters(unused)
        params = [p for (_, p), used_by_any in zip(trained, used) if used_by_any]
        for bucket in split_into_buckets(params, self.options.bucket_cap_mb):
            self._average(bucket)
        if self.options.broadcast_buffers:
            for same in by_device(self.module.buffers()):
                unflatten_bytes(broadcast(flatten_bytes(same), self.joined.active[0], self.group), same)

    def _average(self, params: list[Tensor]) -> None:
        # Not in a Bucket: the wrapper's own buckets are the storage of these gradients.
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


def _broadcast_state(thing: Any, src: int, group: Group | None) -> None:
    """Give all ranks the state of rank ``src``."""
    if isinstance(thing, nn.Module):
        with torch.no_grad():
            for tensor in (*thing.parameters(), *thing.buffers()):
                tensor.copy_(broadcast(tensor, src, group))
    elif isinstance(thing, torch.optim.Optimizer):
        broadcast_optimizer_state(thing, src, group)
    else:
        thing.load_state_dict(broadcast_object(thing.state_dict(), src, group))
