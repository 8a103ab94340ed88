"""Data parallelism with flat gradient buckets, for engines that bring no DDP of their own.

Parameters are laid out, last first, in flat buckets of one dtype and device. A bucket is the
storage of its parameters' gradients. A hook runs when a parameter's gradient has been accumulated;
when all of a bucket's have, its reduction starts while the backward pass goes on. Buckets start in
the same order on every rank. At the end of the backward pass the reductions are waited for.
(The scheme of Li et al., "PyTorch Distributed", VLDB 2020.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unidist.backends.base import (
    M,
    ModelOptions,
    WrappedModel,
    check_frozen,
    check_not_joined,
    frozen_parameters,
    tensors_in,
    unused_parameters,
)
from unidist.errors import UnidistError

#: Bytes of a gradient from which on a second copy of it is worth avoiding.
EAGER = 2**20


class Reducer(Protocol):
    """What the buckets ask of an engine."""

    def share(self, dtype: torch.dtype) -> float:
        """What gradients of a dtype are multiplied with on their way into a bucket."""

    def start_mean(self, flat: Tensor, name: str) -> Callable[[], None]:
        """Start to average the gradients in place, ``share`` of them being in ``flat``; the result waits for it. Collective."""

    def maximum(self, flat: Tensor) -> None:
        """Take the maximum of an int32 CPU tensor over the ranks in place. Collective."""

    def start_broadcast(self, flat: Tensor, name: str) -> Callable[[], None]:
        """Start to overwrite bytes with the first rank's; the result waits for it. Collective."""

    def sparse_mean(self, grad: Tensor) -> Tensor:
        """The average of sparse (COO) gradients, in which every rank may have other rows, or none. Collective."""


class DataParallel(WrappedModel[M]):
    """A wrapped model without ``DistributedDataParallel``; on its own, for a world of one rank."""

    def __init__(self, module: M, options: ModelOptions) -> None:
        super().__init__()
        self.module = module
        self.options = options
        self.frozen = frozen_parameters(module)
        self.require_backward_grad_sync = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            check_not_joined(self)
            check_frozen(self.frozen)
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


class Bucket:
    """Some parameters of one dtype and device, whose gradients lie side by side in ``flat``."""

    def __init__(self, params: list[Tensor], share: float) -> None:
        self.params = params
        #: What its gradients are multiplied with on their way in.
        self.share = share
        # Fixed from here on: a rank that changes its memory format later must not lay out its bucket unlike the others.
        self._layouts = [(p.numel(), p.shape, _strides_without_gaps(p)) for p in params]
        self.renew()
        #: Whether gradients come in one by one, lest a second copy of them stay alive, or all together, which is faster.
        self.eager = max(view.numel() * view.element_size() for view in self.views) >= EAGER
        self.pending = set(range(len(params)))
        self.wait: Callable[[], None] | None = None

    def renew(self) -> None:
        """Lay the storage out, anew where somebody else keeps the old one's gradients."""
        sizes = [size for size, _, _ in self._layouts]
        self.flat = torch.zeros(sum(sizes), dtype=self.params[0].dtype, device=self.params[0].device)
        parts = torch.split(self.flat, sizes)
        self.views = [
            part.view(shape) if strides is None else part.as_strided(shape, strides)
            for part, (_, shape, strides) in zip(parts, self._layouts)
        ]

    def take(self, indices: Iterable[int], share: float) -> None:
        """Bring ``share`` of some parameters' gradients into ``flat``, which becomes their storage."""
        if torch.is_grad_enabled():  # backward(create_graph=True) records what its hooks do
            with torch.no_grad():
                return self.take(indices, share)
        grads, views, kept = [], [], []
        for index in indices:
            param, view = self.params[index], self.views[index]
            grad = param.grad
            if grad is view:
                kept.append(view)
            elif grad is None:
                view.zero_()
            elif grad.layout != torch.strided:
                raise UnidistError(
                    f"a parameter of shape {tuple(param.shape)} has a {grad.layout} gradient, which only nn.Embedding and "
                    "nn.EmbeddingBag with sparse=True may have."
                )
            else:
                grads.append(grad)
                views.append(view)
                param.grad = view
        if len(grads) == 1:
            torch.mul(grads[0], share, out=views[0])
        elif grads:
            torch._foreach_copy_(views, grads)
            kept += views
        if share != 1:
            if len(kept) == len(self.params):
                self.flat.mul_(share)
            elif kept:
                torch._foreach_mul_(kept, share)

    def reset(self) -> None:
        """Make ready for the next backward pass."""
        self.pending = set(range(len(self.params)))
        self.wait = None


class BucketedDataParallel(DataParallel[M]):
    """``DataParallel`` that averages gradients through a ``Reducer`` while backward runs."""

    _made = count()

    def __init__(self, module: M, options: ModelOptions, reducer: Reducer) -> None:
        super().__init__(module, options)
        self._reducer = reducer
        self._forget()
        self._start_to_follow([*module.parameters(), *module.buffers()])()
        self._prepare()

    def _forget(self) -> None:
        self._label = ""
        self._buckets: list[Bucket] = []
        self._names: dict[Tensor, str] = {}
        #: Parameters whose gradients are sparse: they travel one by one at the end of the backward pass.
        self._sparse: list[Tensor] = []
        self._sparse_pending: set[Tensor] = set()
        self._buffers_followed = _nothing
        #: How many buckets are on their way.
        self._next = 0
        #: What the last forward pass asked of its backward pass, until that begins: to average, or not.
        self._expected: bool | None = None
        #: What the running backward pass does, and the graph task that it is.
        self._running: bool | None = None
        self._task = -1
        #: What a backward pass that failed has left on its way: its names are free once it has arrived.
        self._unfinished: list[Callable[[], None]] = []

    def _prepare(self) -> None:
        """Lay out the buckets, and watch the gradients for as long as this object lives."""
        trained = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        self._names = {p: name for name, p in trained}
        sparse = _with_sparse_gradients(self.module)
        self._sparse = [p for p in self._names if p in sparse]
        self._sparse_pending = set(self._sparse)
        pieces = cut([p for p in self._names if p not in sparse], self.options.bucket_cap_mb)
        self._buckets = [Bucket(params, self._reducer.share(params[0].dtype)) for params in pieces]
        # The garbage collector does not see through a parameter's hooks: they must not hold this object.
        this = weakref.ref(self)

        def watcher(bucket: Bucket, index: int) -> Callable[[Tensor], None]:
            def watch(_: Tensor) -> None:
                if (wrapper := this()) is not None:
                    wrapper._accumulated(bucket, index)

            return watch

        hooks = [
            param.register_post_accumulate_grad_hook(watcher(bucket, index))  # type: ignore[no-untyped-call]
            for bucket in self._buckets
            for index, param in enumerate(bucket.params)
        ]

        def watch_sparse(param: Tensor) -> None:
            if (wrapper := this()) is not None:
                wrapper._accumulated_sparse(param)

        hooks += [param.register_post_accumulate_grad_hook(watch_sparse) for param in self._sparse]  # type: ignore[no-untyped-call]
        weakref.finalize(self, remove, hooks)

    def __getstate__(self) -> dict[str, Any]:
        # Buckets and hooks belong to this object's parameters; a copy makes its own.
        made = (
            "_label",
            "_buckets",
            "_names",
            "_sparse",
            "_sparse_pending",
            "_buffers_followed",
            "_unfinished",
        )
        return {name: value for name, value in self.__dict__.items() if name not in made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._forget()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        if not self._names:
            self._prepare()  # a copy's first training step
        check_not_joined(self)
        check_frozen(self.frozen)
        sync = self._expected = self.require_backward_grad_sync
        output = self.module(*args, **kwargs)
        # Their hooks run at the start of the backward pass that was called, while a parameter's may run in a
        # pass within it (reentrant checkpointing), whose end is not the end.
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._begin_unless_partial(sync))  # type: ignore[no-untyped-call]
        return output

    def _begin_unless_partial(self, sync: bool) -> None:
        # autograd.grad(), and backward(inputs=...), may stop short of the parameters; if not, their hooks begin.
        if torch.autograd._is_checkpoint_valid():  # type: ignore[no-untyped-call]
            self._begin(sync)

    def _begin(self, sync: bool) -> None:
        """A backward pass comes to this model."""
        task = torch._C._current_graph_task_id()
        if self._running is not None and task == self._task:
            return
        if self._running is not None:
            self._reset()  # the last pass did not come to its end
        self._expected, self._running, self._task = None, sync, task
        while sync and self._unfinished:
            self._unfinished.pop(0)()
        torch.autograd.Variable._execution_engine.queue_callback(self._finish if sync else self._reset)
        if sync and self.options.broadcast_buffers:
            # They take part in no backward pass, so their way is hidden behind it.
            self._buffers_followed = self._start_to_follow(self.module.buffers())

    def _accumulated(self, bucket: Bucket, index: int) -> None:
        if not self._has_begun():
            return
        if not self._running:
            if bucket.eager:
                bucket.take([index], 1.0)
            return
        if index not in bucket.pending:
            raise UnidistError(
                f"the gradient of {self._names[bucket.params[index]]!r} came twice in one backward pass: a parameter shared "
                "between checkpointed parts? Use torch.utils.checkpoint with use_reentrant=False."
            )
        if bucket.eager:
            bucket.take([index], bucket.share)
        bucket.pending.discard(index)
        if not bucket.pending:
            while self._next < len(self._buckets) and not self._buckets[self._next].pending:
                self._launch_next()

    def _accumulated_sparse(self, param: Tensor) -> None:
        if self._has_begun():
            self._sparse_pending.discard(param)

    def _has_begun(self) -> bool:
        """Whether a gradient is of this wrapper's backward pass, which the first one begins; not of the bare module's, or of another wrapper's."""
        if self._running is None and self._expected is not None:
            self._begin(self._expected)
        return self._running is not None

    def _launch_next(self) -> None:
        bucket = self._buckets[self._next]
        bucket.take(bucket.pending if bucket.eager else range(len(bucket.params)), bucket.share)
        bucket.wait = self._reducer.start_mean(bucket.flat, f"{self._name()}.bucket{self._next}")
        self._next += 1

    def _finish(self) -> None:
        """End of the backward pass: every gradient becomes the mean."""
        if not any(param.requires_grad for param in self._names):
            # Frozen for this pass, as a GAN's discriminator that only passes gradients on: there is nothing to average.
            self._reset()
            return
        unused = {b.params[i] for b in self._buckets for i in b.pending} | self._sparse_pending
        if unused and not self.options.find_unused_parameters:
            self._reset()
            raise unused_parameters([name for p, name in self._names.items() if p in unused])
        find_unused = self.options.find_unused_parameters
        places = (
            [(bucket, index) for bucket in self._buckets for index in range(len(bucket.params))] if find_unused else []
        )
        used = [bucket.params[index].grad is not None for bucket, index in places]
        while self._next < len(self._buckets):
            self._launch_next()
        for bucket in self._buckets:
            assert bucket.wait is not None
            bucket.wait()
        self._buffers_followed()
        sparse = self._sparse
        if find_unused:
            flags = torch.tensor([*used, *(param.grad is not None for param in sparse)], dtype=torch.int32)
            self._reducer.maximum(flags)
            somewhere = flags.tolist()
            for (bucket, index), wanted in zip(places, somewhere):
                if wanted and bucket.params[index].grad is None:
                    bucket.params[index].grad = bucket.views[index]
            sparse = [param for param, wanted in zip(sparse, somewhere[len(places) :]) if wanted]
        with torch.no_grad():
            for param in sparse:
                self._average_sparse(param)
        self._end()

    def _average_sparse(self, param: Tensor) -> None:
        grad = param.grad
        if grad is None:  # it was used on other ranks
            grad = no_rows(param)
        if grad.is_sparse:
            param.grad = self._reducer.sparse_mean(grad)
        else:  # another layer uses it too
            grad.copy_(self._reducer.sparse_mean(grad.to_sparse(1)).to_dense())

    def _reset(self) -> None:
        """Forget a backward pass that did not come to its end, or that averages nothing."""
        if self._running:
            self._unfinished = [bucket.wait for bucket in self._buckets if bucket.wait is not None]
            self._unfinished.append(self._buffers_followed)
        self._end()

    def _end(self) -> None:
        self._next = 0
        self._running = None
        self._buffers_followed = _nothing
        self._sparse_pending = set(self._sparse)
        for bucket in self._buckets:
            bucket.reset()

    def _name(self) -> str:
        """This model's name between ranks, given at its first collective: those come in the same order everywhere."""
        self._label = self._label or f"model{next(BucketedDataParallel._made)}"
        return self._label

    def _start_to_follow(self, tensors: Iterable[Tensor]) -> Callable[[], None]:
        """Start to overwrite tensors with the first rank's, in one broadcast of bytes for each device."""
        places = by_device(tensors)
        flats = [flat_bytes(same) for same in places]
        waits = [self._reducer.start_broadcast(flat, f"{self._name()}.follow{i}") for i, flat in enumerate(flats)]

        def finish() -> None:
            for wait, same, flat in zip(waits, places, flats):
                wait()
                fill(same, flat)

        return finish


def _strides_without_gaps(param: Tensor) -> tuple[int, ...] | None:
    """The parameter's strides, which its gradient shares because fused optimizers walk through both alike; None if they leave gaps."""
    expected = 1
    for stride, size in sorted(zip(param.stride(), param.shape)):
        if size != 1:
            if stride != expected:
                return None
            expected *= size
    return param.stride()


def by_device(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors of one device together, in order of first appearance."""
    places: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        places.setdefault(tensor.device, []).append(tensor)
    return list(places.values())


def flat_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of tensors on one device, side by side."""
    return torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors])


@torch.no_grad()
def fill(tensors: Sequence[Tensor], flat: Tensor) -> None:
    """Overwrite tensors with what ``flat_bytes`` made of others like them."""
    for tensor, part in zip(tensors, torch.split(flat, [t.numel() * t.element_size() for t in tensors])):
        # A part may begin where its dtype does not; a copy of it does not.
        tensor.copy_(part.clone().view(tensor.dtype).view_as(tensor))


def _with_sparse_gradients(module: nn.Module) -> set[Tensor]:
    layers = [layer for layer in module.modules() if isinstance(layer, (nn.Embedding, nn.EmbeddingBag))]
    return {layer.weight for layer in layers if layer.sparse}


def cut(params: list[Tensor], cap_mb: float) -> list[list[Tensor]]:
    """Parameters, last first, in pieces of one dtype and device of at most ``cap_mb`` MiB (or one parameter)."""
    pieces: list[list[Tensor]] = []
    for same in by_kind(reversed(params)):
        piece: list[Tensor] = []
        size = 0
        for param in same:
            nbytes = param.numel() * param.element_size()
            if piece and size + nbytes > cap_mb * 2**20:
                pieces.append(piece)
                piece, size = [], 0
            piece.append(param)
            size += nbytes
        pieces.append(piece)
    return pieces


def no_rows(param: Tensor) -> Tensor:
    """The sparse gradient of a parameter that was not used."""
    rows = param.new_zeros((0, *param.shape[1:]))
    return torch.sparse_coo_tensor(
        torch.empty((1, 0), dtype=torch.int64), rows, param.shape, device=param.device, check_invariants=False
    )


def remove(hooks: Iterable[RemovableHandle]) -> None:
    """Take hooks off."""
    for hook in hooks:
        hook.remove()


def _nothing() -> None:
    pass


def by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors of one dtype and device together, in order of first appearance."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(kinds.values())
