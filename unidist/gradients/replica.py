"""A model that is data-parallel as it is: its parameters are watched, and nothing else of it changes."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from unidist.gradients.averager import GradientAverager
from unidist.gradients.backward_pass import BackwardPass, BackwardPasses, PlainPass, current_pass
from unidist.gradients.data_parallel import with_sparse_gradients
from unidist.gradients.reducer import GradientReducer
from unidist.gradients.wrapper import ModelOptions, frozen_parameters, refuse_join, refuse_unfrozen, world_ended

Ranks = tuple[int, ...]


class ReplicatedModels:
    """The replicated models of one world, by the ranks that train them and their numbers.

    They are numbered in the order in which they are made, which is the same on all ranks that train them.
    """

    def __init__(self) -> None:
        self.made = Counter[Ranks]()
        self.models: weakref.WeakValueDictionary[tuple[Ranks, int], _Watched] = weakref.WeakValueDictionary()
        #: The backward passes that have not ended, of models that there are.
        self.passes: weakref.WeakSet[_ReplicaPass] = weakref.WeakSet()

    def add(self, watched: _Watched) -> int:
        """Return the number of a new model."""
        ranks = watched.options.ranks
        number = self.made[ranks]
        self.made[ranks] += 1
        self.models[ranks, number] = watched
        return number

    def end(self) -> None:
        """Make the next backward pass of a model that averages an error: the world has ended."""
        for watched in self.models.values():
            watched.ended = True


class Replica:
    """Averages the gradients of a model as long as this object lives. It keeps the parameters alive, not the model.

    Args:
        model: has parameters that require grad; equal on all ranks.
        options: of ``replicate``.
        reducer: None in a world of one rank.
        models: those of the world.
    """

    def __init__(
        self, model: nn.Module, options: ModelOptions, reducer: GradientReducer | None, models: ReplicatedModels
    ) -> None:
        self.options = options
        self._watched = _Watched(model, options, reducer, models)
        self._passes = BackwardPasses(self.params, self._watched.begin, unexpected=True)

    @property
    def params(self) -> Collection[Tensor]:
        """The parameters whose gradients are averaged."""
        return self._watched.names.keys()

    @property
    def sync(self) -> bool:
        """Whether the backward passes that begin now average; off inside ``no_sync``."""
        return self._watched.sync

    @sync.setter
    def sync(self, sync: bool) -> None:
        self._watched.sync = sync

    def average_by(self, average: Callable[[], None] | None) -> None:
        """Call this at the end of each backward pass that averages, in place of this object's reductions."""
        self._watched.average = average

    def set_overlap(self, overlap: bool) -> None:
        """Set whether reductions start during the backward pass: if no other model may take part in it."""
        if self._watched.averager is not None:
            self._watched.averager.overlap = overlap

    def close(self) -> None:
        """Average nothing from now on."""
        self._passes.close()


class _Watched:
    """The parameters of one model. It refers to nothing that refers to it, so its hooks end with the ``Replica``."""

    def __init__(
        self, model: nn.Module, options: ModelOptions, reducer: GradientReducer | None, models: ReplicatedModels
    ) -> None:
        self.options = options
        self.models = models
        self.number = models.add(self)
        self.frozen = frozen_parameters(model)
        self.names: dict[Tensor, str] = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self.sync = True
        #: Whether the world in which it was made has ended.
        self.ended = False
        self.average: Callable[[], None] | None = None
        self.averager: GradientAverager | None = None
        if reducer is not None:
            sparse = with_sparse_gradients(model)
            self.averager = GradientAverager(
                self.names, sparse, reducer, unused="zeros", bucket_cap_mb=options.bucket_cap_mb
            )

    def begin(self, _: bool) -> BackwardPass:
        refuse_unfrozen(self.frozen, "unidist.replicate(model)")
        if self.sync and self.ended and self.averager is not None:
            raise world_ended("unidist.replicate")
        if self.sync and self.average is not None:
            return PlainPass(finish=self.average)
        if self.sync:
            refuse_join(self.options)
        if self.averager is None:
            return PlainPass(finish=self._zeros)
        if self.sync:
            return _ReplicaPass(self, self.averager)
        self.fit(self.averager)
        self.averager.prepare()
        return PlainPass(ready=self.averager.accumulate)

    @staticmethod
    def fit(averager: GradientAverager) -> None:
        """Make the buckets anew after ``model.cuda()``, ``model.half()`` and the like."""
        if not averager.fits():
            averager.settle()
            averager.lay_out()

    def _zeros(self) -> None:
        for param in self.names:
            if self.sync and param.grad is None and param.requires_grad:
                param.grad = torch.zeros_like(param)


class _ReplicaPass:
    """A backward pass of one model, of which several may run in the same pass of autograd.

    Where there are several models, a rank's pass may reach others, or in another order, than another rank's. So the
    ranks agree at its end which models any of them has reached, and average these in the order of their numbers: a
    model that a rank's pass has not reached has the gradients there that it had before, which are averaged already.
    """

    def __init__(self, watched: _Watched, averager: GradientAverager) -> None:
        self.watched = watched
        self.averager = averager
        self.task = current_pass()
        watched.fit(averager)
        averager.begin()
        self.ready = averager.ready
        self._running = watched.models.passes
        self._running.add(self)

    def finish(self) -> None:
        """See ``BackwardPass``."""
        if self not in self._running:
            return  # it has ended with another model's
        ranks = self.watched.options.ranks
        passes = {
            each.watched.number: each
            for each in self._running
            if each.task == self.task and each.watched.options.ranks == ranks
        }
        try:
            if not self.averager.overlap:
                self._add_others(passes)
            for number in sorted(passes):
                passes[number].averager.start_all()
            for number in sorted(passes):
                passes[number].averager.finish()
        finally:
            for each in passes.values():
                each.abandon()

    def abandon(self) -> None:
        """See ``BackwardPass``."""
        self._running.discard(self)

    def _add_others(self, passes: dict[int, _ReplicaPass]) -> None:
        """Add passes of the models that other ranks have reached. Collective."""
        models, ranks = self.watched.models, self.watched.options.ranks
        reached = torch.zeros(models.made[ranks], dtype=torch.int32)
        reached[list(passes)] = 1
        self.averager.reducer.maximum(reached)
        for number in reached.nonzero().flatten().tolist():
            other = models.models.get((ranks, number))
            if number not in passes and other is not None and other.averager is not None:
                passes[number] = _ReplicaPass(other, other.averager)
