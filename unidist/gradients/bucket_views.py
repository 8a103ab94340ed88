"""Gradients that are views of DDP's buckets, and that the script may keep.

With ``gradient_as_bucket_view`` there is one copy of the gradients. DDP alone would overwrite those of an earlier pass
that the script still refers to, which plain PyTorch leaves as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unidist.gradients.backward_pass import PlainPass, queue_callback
from unidist.gradients.buckets import UNSHARED, reference_counts, storage_references


class BucketViews:
    """The gradients of a model whose parameters all take part in each of DDP's averagings.

    ``.grad`` gets an alias of DDP's view, never the view itself: so DDP's tensors can move to another storage, and what
    the script has stays as it is.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._trained = params
        self._forget()

    def rebuild(self, rebuild: Callable[[], bool]) -> bool:
        """Let DDP make new buckets, to which it copies the gradients that there are; returns whether it has."""
        present = [param.grad is alias for param, alias in zip(self._params, self._aliases)]
        kept = self._aliases if all(present) else []
        self._forget()  # which would keep the old buckets' memory
        if not rebuild():
            return False
        if kept:
            self._find()
            for i, (param, alias, view) in enumerate(zip(self._params, kept, self._views)):
                alias.data = view
                self._aliases[i] = param.grad = alias
        return True

    def _forget(self) -> None:
        #: The parameters whose gradients are DDP's views, these, and their aliases, which are no views to autograd.
        self._params: list[Tensor] = []
        self._views: list[Tensor] = []
        self._aliases: list[Tensor] = []
        #: DDP's buckets, each with its parameters' indices, and how many tensors have its storage if no others do.
        self._buckets: list[tuple[Tensor, list[int], int]] = []

    def begin(self) -> None:
        """A backward pass begins, which will overwrite the buckets."""
        # At the end of the pass, and then after what DDP has queued meanwhile.
        queue_callback(lambda: queue_callback(self._alias))
        counts = reference_counts(self._aliases)
        for bucket, indices, references in self._buckets:
            if storage_references(bucket) > references or any(counts[i] > UNSHARED for i in indices):
                left = [i for i in indices if self._params[i].grad is not self._aliases[i]]
                if left and (storage_references(bucket) > references or any(counts[i] > UNSHARED for i in left)):
                    self._move(bucket, indices)

    def begin_hidden(self, _: bool) -> PlainPass:
        """The same, at the first gradient, where the output shows no tensor."""
        self.begin()
        return PlainPass()

    @torch.no_grad()
    def _move(self, bucket: Tensor, indices: Sequence[int]) -> None:
        """Give a bucket another storage, with the gradients that the parameters still have."""
        first = bucket.storage_offset()
        flat = torch.empty_like(bucket)
        bucket.data = flat
        for i in indices:
            view, alias = self._views[i], self._aliases[i]
            view.data = flat.as_strided(view.shape, view.stride(), view.storage_offset() - first)
            if self._params[i].grad is alias:
                view.copy_(alias)
                alias.data = view
            else:
                self._aliases[i] = view.data

    def _alias(self) -> None:
        """DDP has averaged, unless autograd.grad() was called: the parameters get aliases."""
        grads = [param.grad for param in self._params]
        new = (
            grad
            for grad, view, alias in zip(grads, self._views, self._aliases)
            if grad is not None and grad is not view and grad is not alias
        )
        if not self._params or any(grad._base is not None for grad in new):
            self._find()
            grads = [*self._views]
        for i, (param, grad, view) in enumerate(zip(self._params, grads, self._views)):
            if grad is view:
                if self._aliases[i].data_ptr() != view.data_ptr():  # p.grad.data = ..., model.double().float()
                    self._aliases[i] = view.data
                param.grad = self._aliases[i]
        self._buckets = [(bucket, i, min(known, storage_references(bucket))) for bucket, i, known in self._buckets]

    def _find(self) -> None:
        """Look for DDP's buckets, each of whose gradients must be there; sparse gradients are in none."""
        self._forget()
        buckets: dict[int, tuple[Tensor, list[Tensor]]] = {}
        for param in self._trained:
            if param.grad is not None and (bucket := param.grad._base) is not None:
                buckets.setdefault(id(bucket), (bucket, []))[1].append(param)
        for bucket, params in buckets.values():
            views = [param.grad for param in params if param.grad is not None]
            if bucket.numel() == sum(view.numel() for view in views):
                first = len(self._params)
                self._params += params
                self._views += views
                self._aliases += [view.data for view in views]
                self._buckets.append((bucket, [*range(first, len(self._params))], sys.maxsize))
