"""Gradients, averaged over the ranks in buckets while a backward pass runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import torch
from torch import Tensor

from unidist.backends.base import Wait
from unidist.errors import UnidistError
from unidist.gradients.backward_pass import current_pass
from unidist.gradients.buckets import Bucket, make_bucket, split_into_buckets
from unidist.gradients.reducer import GradientReducer
from unidist.gradients.wrapper import unused_parameters

#: What a parameter without a gradient on any rank gets: an error, nothing, or zeros.
Unused = Literal["error", "keep", "zeros"]


class GradientAverager:
    """Averages the gradients of one model or optimizer, as often as it is asked to.

    One averaging is ``begin``, ``ready`` for each gradient, and ``finish``: the interface of a ``BackwardPass``. The
    reduction of a bucket starts when its gradients are ready, in the same order on every rank. It refers to no model,
    so that a model which is dropped takes its hooks along at once.

    Args:
        names: the parameters whose gradients are averaged, with their names for errors.
        sparse: those of them whose gradients are sparse (COO); they are averaged one by one at the end.
        reducer: the collectives.
        unused: what a parameter gets that has a gradient on no rank.
        bucket_cap_mb: MiB of gradients that are reduced together.
    """

    def __init__(
        self,
        names: dict[Tensor, str],
        sparse: Collection[Tensor],
        reducer: GradientReducer,
        *,
        unused: Unused,
        bucket_cap_mb: float,
    ) -> None:
        self.names = names
        self.reducer = reducer
        #: Whether reductions start when their gradients are ready, in place of in ``finish``.
        self.overlap = True
        self._unused = unused
        self._bucket_cap_mb = bucket_cap_mb
        sparse = set(sparse)
        self._sparse = {param: None for param in names if param in sparse}
        self._pending: list[set[int]] = []
        #: Bucket and index of the last gradient that was ready, if it is copied or makes its bucket full: hooks of the
        #: user's may change it still.
        self._last: tuple[Bucket, int] | None = None
        self._waits: list[Wait] = []
        self._started = 0
        self.lay_out()

    def lay_out(self) -> None:
        """Make the buckets, also anew. The same parameters on every rank."""
        dense = split_into_buckets([p for p in self.names if p not in self._sparse], self._bucket_cap_mb)
        self.buckets = [
            make_bucket(
                params,
                self.reducer.prescale(params[0].dtype),
                takes_sparse=self.reducer.takes_sparse,
                serves_kept=self.reducer.serves_kept,
            )
            for params in dense
        ]
        self._positions = {
            param: (i, index) for i, bucket in enumerate(self.buckets) for index, param in enumerate(bucket.params)
        }

    def fits(self) -> bool:
        """Return whether the buckets have the dtypes and devices of the parameters; not after ``model.double()``."""
        return all(bucket.fits() for bucket in self.buckets)

    def begin(self, *waits: Wait) -> None:
        """Begin an averaging, after the operations of one that failed.

        Args:
            waits: of other operations that have been started, which ``finish`` waits for, too.
        """
        self.prepare()
        self._waits = list(waits)
        self._started = 0
        self._last = None
        self._pending = [set(range(len(bucket.params))) for bucket in self.buckets]
        self._sparse_pending = set(self._sparse)

    def prepare(self) -> None:
        """Make the buckets free for gradients."""
        self.settle()
        for bucket in self.buckets:
            if bucket.is_referenced():  # by somebody who keeps gradients of an earlier step
                bucket.reallocate()

    def settle(self) -> None:
        """Wait for the operations that have been started."""
        while self._waits:
            self._waits.pop(0)()

    def accumulate(self, param: Tensor) -> None:
        """Record that the gradient of a parameter has been accumulated, and will be again before it is averaged."""
        position = self._positions.get(param)
        if position is not None and self.buckets[position[0]].copies_each:
            self.buckets[position[0]].copy_in([position[1]], 1.0)

    def ready(self, param: Tensor) -> None:
        """Take a parameter's gradient, which is complete but for hooks of the user's that run after this one."""
        position = self._positions.get(param)  # once: the hash of a tensor is a call of Python
        if position is None:
            self._sparse_pending.discard(param)
            return
        i, index = position
        bucket, pending = self.buckets[i], self._pending[i]
        if index not in pending:
            raise UnidistError(
                f"the gradient of {self.names[param]!r} was accumulated twice in one backward pass: is the parameter "
                "shared between checkpointed parts? Use torch.utils.checkpoint with use_reentrant=False."
            )
        if param.grad is None:
            raise self._removed(param)
        if self._last is not None:
            self._take_last()
        pending.discard(index)
        if not pending or bucket.copies_each:
            self._last = bucket, index

    def start_all(self) -> None:
        """Start the reductions that have not been started."""
        self._take_last()
        while self._started < len(self.buckets):
            self._start()

    def finish(self) -> None:
        """Start the rest, and wait for all. Collective.

        Raises:
            UnidistError: a parameter has no gradient, with ``unused="error"``.
        """
        missing = [self.buckets[i].params[index] for i, pending in enumerate(self._pending) for index in pending]
        missing += self._sparse_pending
        if self._unused == "error" and missing:
            if not any(param.requires_grad for param in self.names):
                return  # frozen for this pass, as a GAN's discriminator that only passes gradients on
            unused = set(missing)
            raise unused_parameters({name: param for param, name in self.names.items() if param in unused})
        self.start_all()
        self.settle()
        params = [*self._positions, *self._sparse]
        used = [True] * len(params)
        if self._unused == "keep":
            flags = torch.tensor([param.grad is not None for param in params], dtype=torch.int32)
            self.reducer.maximum(flags)
            used = flags.bool().tolist()
        if self._unused != "error":
            self._fill([param for param, used_by_any in zip(params, used) if used_by_any])
        for param, used_by_any in zip(self._sparse, used[len(self._positions) :]):
            if used_by_any:
                self._waits.append(self.reducer.start_sparse(param, self.names[param]))
        self.settle()
        for bucket in self.buckets:
            bucket.release()

    def abandon(self) -> None:
        """See ``BackwardPass``; the next ``begin`` waits for what has been started."""

    # --------------------------------------------------------------------------------
    def _take_last(self) -> None:
        """Take the last gradient into its bucket, and start the buckets that are ready, up to the first that is not."""
        if self._last is not None:
            (bucket, index), self._last = self._last, None
            for param in [bucket.params[index]] if bucket.copies_each else bucket.params:
                if param.grad is None and current_pass() >= 0:  # else the script has, before it steps
                    raise self._removed(param)
            if bucket.copies_each:
                bucket.copy_in([index], bucket.prescale)
        while self.overlap and self._started < len(self.buckets) and not self._pending[self._started]:
            self._start()

    def _removed(self, param: Tensor) -> UnidistError:
        return UnidistError(
            f"a hook has removed the gradient of {self.names[param]!r} before it was averaged: hooks of parameters get "
            "this rank's gradient. Let the optimizer step after backward()."
        )

    def _start(self) -> None:
        i, bucket = self._started, self.buckets[self._started]
        bucket.copy_in(self._pending[i] if bucket.copies_each else range(len(bucket.params)), bucket.prescale)
        self._started += 1
        self._waits.append(self.reducer.start(bucket, i))

    def _fill(self, params: Sequence[Tensor]) -> None:
        """Give parameters without a gradient the average of the others' gradients; with zeros, frozen ones, too."""
        for param in params:
            if param.grad is None and param in self._positions and (param.requires_grad or self._unused == "zeros"):
                i, index = self._positions[param]
                param.grad = self.buckets[i].views[index]
