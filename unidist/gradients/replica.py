"""A model that is data-parallel as it is: its parameters are watched, and nothing else of it changes."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from unidist.backends.base import ModelOptions
from unidist.gradients.backward_pass import AtEnd, BackwardPass, BackwardPasses, current_pass
from unidist.gradients.data_parallel import AveragingPass, LocalPass, ModelGradients, Reducer
from unidist.gradients.wrapper import frozen_parameters, refuse_join, refuse_unfrozen, world_ended

#: How many models have been made, by the ranks that train them.
_made = Counter[tuple[int, ...]]()
#: The passes of all models that have not ended.
_running: list[_ReplicaPass] = []
#: The parameters of all models, as long as they are watched, by the ranks that train them and the model's number.
_watched: weakref.WeakValueDictionary[tuple[tuple[int, ...], int], _Watched] = weakref.WeakValueDictionary()


def end_all() -> None:
    """The world of all models has ended: their next backward pass that averages is an error."""
    for watched in _watched.values():
        watched.ended = True
    _made.clear()
    _watched.clear()
    _running.clear()


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
        """Whether reductions start during the backward pass: if no other model may take part in it."""
        if self._watched.gradients is not None:
            self._watched.gradients.overlap = overlap

    def close(self) -> None:
        """Average nothing from now on."""
        self._passes.close()


class _Watched:
    """The parameters of one model. It refers to nothing that refers to it, so its hooks end with the ``Replica``."""

    def __init__(self, model: nn.Module, options: ModelOptions, reducer: Reducer | None) -> None:
        self.options = options
        #: Models are numbered in the order in which they are made, which is the same on all ranks that train them.
        self.number = _made[options.ranks]
        _made[options.ranks] += 1
        _watched[options.ranks, self.number] = self
        self.frozen = frozen_parameters(model)
        self.names: dict[Tensor, str] = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self.sync = True
        #: Whether the world in which it was made has ended.
        self.ended = False
        self.average: Callable[[], None] | None = None
        self.gradients: ModelGradients | None = None
        if reducer is not None:
            self.gradients = ModelGradients(model, options, reducer)
            self.gradients.start_broadcast([*model.parameters(), *model.buffers()])()

    def begin(self, _: bool) -> BackwardPass:
        refuse_unfrozen(self.frozen, "unidist.replicate(model)")
        if self.sync and self.ended and self.gradients is not None:
            raise world_ended("unidist.replicate")
        if self.sync and self.average is not None:
            return AtEnd(self.average)
        if self.sync:
            refuse_join(self.options)
        if self.gradients is None:
            return AtEnd(self._zeros)
        self.prepare(self.gradients)
        return _ReplicaPass(self, self.gradients) if self.sync else LocalPass(self.gradients)

    @staticmethod
    def prepare(gradients: ModelGradients) -> None:
        """Before a pass: the buckets must be free, and fit."""
        while gradients.unfinished:  # of a pass that failed
            gradients.unfinished.pop(0)()
        if any(not bucket.fits() for bucket in gradients.buckets):  # model.cuda(), model.half()
            gradients.lay_out()
        for bucket in gradients.buckets:
            if bucket.is_referenced():  # by somebody who keeps gradients of an earlier step
                bucket.reallocate()

    def _zeros(self) -> None:
        for param in self.names:
            if self.sync and param.grad is None and param.requires_grad:
                param.grad = torch.zeros_like(param)


class _ReplicaPass(AveragingPass):
    """A backward pass of one model, of which several may run in the same pass of autograd.

    Where there are several models, a rank's pass may reach others, or in another order, than another rank's. So the
    ranks agree at its end which models any of them has reached, and average these in the order of their numbers: a
    model that a rank's pass has not reached has the gradients there that it had before, which are averaged already.
    """

    def __init__(self, watched: _Watched, gradients: ModelGradients) -> None:
        super().__init__(gradients)
        self._watched = watched
        self._task = current_pass()
        _running.append(self)

    def finish(self) -> None:
        if self not in _running:
            return  # it has ended with another model's
        ranks = self._watched.options.ranks
        passes = {
            each._watched.number: each
            for each in _running
            if each._task == self._task and each._watched.options.ranks == ranks
        }
        try:
            if not self._gradients.overlap:
                self._add_others(passes)
            for number in sorted(passes):
                passes[number]._start_all()
            for number in sorted(passes):
                passes[number]._finish()
        except BaseException:
            for each in passes.values():
                each.abandon()
            raise
        for each in passes.values():
            _running.remove(each)

    def abandon(self) -> None:
        if self in _running:
            _running.remove(self)
            super().abandon()

    def _add_others(self, passes: dict[int, _ReplicaPass]) -> None:
        """Add passes of the models that other ranks have reached. Collective."""
        ranks = self._watched.options.ranks
        reached = torch.zeros(_made[ranks], dtype=torch.int32)
        reached[list(passes)] = 1
        self._gradients.reducer.maximum(reached)
        for number in reached.nonzero().flatten().tolist():
            other = _watched.get((ranks, number))
            if number not in passes and other is not None and other.gradients is not None:
                other.prepare(other.gradients)
                passes[number] = _ReplicaPass(other, other.gradients)

    def _start_all(self) -> None:
        self._reductions.start_all(self._start)

    def _finish(self) -> None:
        self._reductions.finish(self._start)
        for bucket in self._gradients.buckets:
            for param, view in zip(bucket.params, bucket.views):
                if param.grad is None and param.requires_grad:  # as from Horovod
                    param.grad = view
        self._average_sparse(self._gradients.sparse)
