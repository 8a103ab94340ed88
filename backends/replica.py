"""A model that is data-parallel as it is: its parameters are watched, and nothing else of it changes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import count

import torch
from torch import Tensor, nn

from unidist.backends.backward_pass import AtEnd, BackwardPass, BackwardPasses, current_pass
from unidist.backends.base import ModelOptions
from unidist.backends.data_parallel import AveragingPass, LocalPass, ModelGradients, Reducer
from unidist.backends.wrapper import frozen_parameters, refuse_join, refuse_unfrozen

#: The passes of all models that have not ended.
_running: list[_ReplicaPass] = []


class Replica:
    """Averages the gradients of a model as long as this object lives. It keeps the parameters alive, not the model.

    Args:
        model: has parameters that require grad.
        options: of ``replicate``.
        reducer: None in a world of one rank.
    """

    def __init__(self, model: nn.Module, options: ModelOptions, reducer: Reducer | None) -> None:
        self.options = options
        self._watched = _Watched(model, options, reducer)
        self._passes = BackwardPasses(self.params, self._watched.begin, unexpected=True)

    @property
    def params(self) -> Collection[Tensor]:
        """The parameters whose gradients are averaged."""
        return self._watched.names.keys()

    @property
    def sync(self) -> bool:
        """Whether the backward passes that begin now average."""
        return self._watched.sync

    @sync.setter
    def sync(self, sync: bool) -> None:
        self._watched.sync = sync

    def average_by(self, average: Callable[[], None] | None) -> None:
        """Call this at the end of each backward pass that averages, in place of this object's reductions."""
        self._watched.average = average

    def set_overlap(self, overlap: bool) -> None:
        """Whether reductions start during the backward pass: with several models only if their order is sure."""
        if self._watched.gradients is not None:
            self._watched.gradients.overlap = overlap


class _Watched:
    """The parameters of one model. It refers to nothing that refers to it, so its hooks end with the ``Replica``."""

    _made = count()

    def __init__(self, model: nn.Module, options: ModelOptions, reducer: Reducer | None) -> None:
        self.options = options
        #: In the order in which models are made, which is the same on every rank.
        self.number = next(self._made)
        self.frozen = frozen_parameters(model)
        self.names: dict[Tensor, str] = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self.sync = True
        self.average: Callable[[], None] | None = None
        self.gradients: ModelGradients | None = None
        if reducer is not None:
            self.gradients = ModelGradients(model, options, reducer)
            self.gradients.start_broadcast([*model.parameters(), *model.buffers()])()

    def begin(self, _: bool) -> BackwardPass:
        refuse_unfrozen(self.frozen, "unidist.replicate(model)")
        if self.sync and self.average is not None:
            return AtEnd(self.average)
        if self.sync:
            refuse_join(self.options)
        if self.gradients is None:
            return AtEnd(self._zeros)
        if any(not bucket.fits() for bucket in self.gradients.buckets):  # model.cuda(), model.half()
            self.gradients.lay_out()
        for bucket in self.gradients.buckets:
            if bucket.is_referenced():  # by somebody who keeps gradients of an earlier step
                bucket.reallocate()
        return _ReplicaPass(self.gradients, self.number) if self.sync else LocalPass(self.gradients)

    def _zeros(self) -> None:
        for param in self.names:
            if self.sync and param.grad is None and param.requires_grad:
                param.grad = torch.zeros_like(param)


class _ReplicaPass(AveragingPass):
    """A backward pass of one model, of which several may run in the same pass of autograd.

    They end in the order of their numbers: backward passes may reach the models in another order on another rank.
    """

    def __init__(self, gradients: ModelGradients, number: int) -> None:
        super().__init__(gradients)
        self._number = number
        self._task = current_pass()
        _running.append(self)

    def finish(self) -> None:
        if self not in _running:
            return  # it has ended with another model's
        passes = sorted((each for each in _running if each._task == self._task), key=lambda each: each._number)
        try:
            for each in passes:
                each._start_all()
            for each in passes:
                each._finish()
        except BaseException:
            for each in passes:
                each.abandon()
            raise
        for each in passes:
            _running.remove(each)

    def abandon(self) -> None:
        if self in _running:
            _running.remove(self)
            super().abandon()

    def _start_all(self) -> None:
        self._reductions.start_all(self._start)

    def _finish(self) -> None:
        self._reductions.finish(self._start)
        for bucket in self._gradients.buckets:
            for param, view in zip(bucket.params, bucket.views):
                if param.grad is None and param.requires_grad:  # as from Horovod
                    param.grad = view
        self._average_sparse(self._gradients.sparse)
