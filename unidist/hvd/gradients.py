"""The gradients of one optimizer, reduced in buckets while ``backward`` runs."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from unidist.backends.base import Op, Wait
from unidist.collectives import operations as collectives
from unidist.collectives.agreement import first_difference
from unidist.diagnosis.watch.locations import here
from unidist.errors import UnidistError
from unidist.gradients.averager import GradientAverager
from unidist.gradients.backward_pass import watch_gradients
from unidist.gradients.buckets import Bucket
from unidist.gradients.reducer import GradientReducer, empty_sparse_gradient
from unidist.hvd.basics import Average, Max, Min, Product, Sum
from unidist.hvd.compression import Compressor, FP16Compressor, NoneCompressor, compress_bucket
from unidist.hvd.errors import HorovodInternalError
from unidist.hvd.mpi_ops import sparse_allreduce_async
from unidist.hvd.operation import GLOBAL_SET
from unidist.hvd.process_sets import ProcessSet
from unidist.hvd.rounds import ReducerId
from unidist.hvd.session import Session, current_session

_BACKEND_OPS: dict[int, Op] = {Average: "sum", Sum: "sum", Min: "min", Max: "max", Product: "product"}
#: MiB of gradients that are reduced together.
_BUCKET_MB = 25.0


#: The gradients of all optimizers, in the order in which they were made.
_all: list[weakref.ref[OptimizerGradients]] = []


def rejoin() -> None:
    """Let all optimizers go on in the running session, after one that has ended in the middle of a step.

    Not collective: in their first round the ranks compare their parameters, as those of new optimizers do.
    """
    _all[:] = [reference for reference in _all if reference() is not None]
    for reference in _all:
        if (gradients := reference()) is not None:
            gradients.rejoin()


class ReduceOptions(NamedTuple):
    """Arguments of ``DistributedOptimizer``."""

    compression: type[Compressor]
    op: int
    predivide: float
    sparse_as_dense: bool
    process_set: ProcessSet


class OptimizerGradients:
    """Reduces gradients in buckets of a fixed order; one reduction of all is a round.

    In the first round the ranks compare their parameters, and learn which gradients are sparse, so reductions start at
    its end; in later ones they start while backward runs.

    Args:
        names: the optimizer's parameters, and their names.
        passes: backward passes per round.
        options: what is done with the gradients.
    """

    def __init__(self, names: dict[Tensor, str], passes: int, options: ReduceOptions) -> None:
        self._names = {param: name for param, name in names.items() if param.requires_grad}
        self._frozen = {param: name for param, name in names.items() if not param.requires_grad}
        self._options = options
        self._passes = passes
        #: Backward passes that a parameter has left in this round.
        self._passes_left = dict.fromkeys(self._names, passes)
        self._averager: GradientAverager | None = None
        self._announced = self._averaging = False
        #: Whether a gradient has been accumulated since the last round.
        self.in_progress = False
        self._join_session()
        _all.append(weakref.ref(self))
        watch_gradients(self._names, self._accumulated)

    def set_passes(self, passes: int) -> None:
        """Expect so many backward passes before the next round."""
        self._passes = passes
        self._passes_left = dict.fromkeys(self._names, passes)

    def rejoin(self) -> None:
        """Forget the current round, and join the running session."""
        self._end_round()
        self._join_session()

    def abandon(self) -> None:
        """Forget the current round, after the reductions that have been started."""
        if self._averager is not None:
            self._averager.settle()
        self._end_round()

    def finish(self) -> None:
        """Start the reductions that have not been started, and wait for all. Collective."""
        if self._session is not current_session():
            self._join_session()
        self.warn_of_unfrozen()
        self._announce_round()
        if self._averager is None or not self._fits(self._averager):
            self._averager = self._make_averager()
        self._begin(self._averager)
        self._averager.finish()
        self._end_round()

    def reduce_zeros(self) -> None:
        """Make one round with zeros, after this rank has joined. Collective."""
        for param in self._names:
            param.grad = None
        self.finish()

    def warn_of_unfrozen(self) -> None:
        """Warn once of parameters that were frozen when the optimizer was made and require grad now."""
        unfrozen = [param for param in self._frozen if param.requires_grad]
        if unfrozen:
            self.warn_of_unreduced(unfrozen, "were frozen when it was made and require grad now", stacklevel=6)
            self._frozen = {param: name for param, name in self._frozen.items() if not param.requires_grad}

    def warn_of_unreduced(self, params: Sequence[Tensor], reason: str, stacklevel: int) -> None:
        """Warn of parameters that this optimizer steps and does not reduce, as Horovod's does not."""
        params = [param for param in params if param.requires_grad and param not in self._names]
        if params:
            first = self._frozen.get(params[0]) or f"of shape {tuple(params[0].shape)}"
            warnings.warn(
                f"DistributedOptimizer does not reduce {len(params)} parameters, the first {first}, which {reason}: "
                "each rank trains its own copy of them. Make the DistributedOptimizer again, on every rank, from a "
                "plain optimizer.",
                stacklevel=stacklevel,
            )

    # --------------------------------------------------------------------------------
    def _join_session(self) -> None:
        """Register with the running session, which may be another one than before."""
        self._session = current_session()
        self._id = self._session.rounds.add(self, self._options.process_set.process_set_id or GLOBAL_SET)
        self._averager = None

    def _accumulated(self, param: Tensor) -> None:
        if self._passes_left[param] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                "backward_passes_per_step to accumulate gradients locally."
            )
        self._passes_left[param] -= 1
        self.in_progress = True
        averager = self._averager
        if averager is None or self._session.ended or not self._fits(averager):
            return
        self._begin(averager)
        if self._passes_left[param]:
            averager.accumulate(param)
        else:
            averager.ready(param)

    def _begin(self, averager: GradientAverager) -> None:
        if not self._averaging:
            self._averaging = True
            # Of several optimizers' buckets, a backward pass may reach those of another one first on another rank.
            averager.overlap = self._session.rounds.is_only_reducer(self._id)
            averager.begin()

    def _fits(self, averager: GradientAverager) -> bool:
        """Return whether the buckets serve this round: no longer those of before ``model.double()``."""
        return self._averaging or averager.fits()

    def _announce_round(self) -> None:
        if not self._announced:
            self._announced = True
            self._session.rounds.begin(self._id)

    def _end_round(self) -> None:
        self._announced = self._averaging = self.in_progress = False
        self._passes_left = dict.fromkeys(self._names, self._passes)

    def _make_averager(self) -> GradientAverager:
        """Compare the parameters with the other ranks', and make the buckets. Collective."""
        compression, op, predivide, sparse_as_dense, _ = self._options
        group = self._session.process_sets[self._id.set_id].gradients
        named = getattr(compression, "__name__", type(compression).__name__)  # a class, or an object with its methods
        options = f"options {op} {named} {predivide}"
        mine = [f"{name!r} {tuple(p.shape)} {p.dtype} strides {p.stride()}" for p, name in self._names.items()]
        difference = first_difference([options, *mine], group)
        if difference is not None:
            first, *others = difference.values
            rank, other = next((r, value) for r, value in zip(group.ranks[1:], others) if value != first)
            raise HorovodInternalError(
                f"DistributedOptimizer: the parameters of rank {rank} differ from those of rank {group.ranks[0]}: "
                f"{first or 'no further parameter'} on rank {group.ranks[0]} is {other or 'no further parameter'} on "
                f"rank {rank}. Build the same model and optimizer on every rank."
            )
        sparse = [p.grad is not None and p.grad.is_sparse and not sparse_as_dense for p in self._names]
        sparse_somewhere = collectives.all_reduce(torch.tensor(sparse), "or", group).tolist()
        wide = all(param.dtype != torch.float16 for param in self._names)
        this = weakref.ref(self)

        def announce() -> None:
            if (gradients := this()) is not None:
                gradients._announce_round()

        return GradientAverager(
            self._names,
            [param for param, flag in zip(self._names, sparse_somewhere) if flag],
            _Reducer(self._session, self._options, self._id, wide, announce),
            unused="zeros",
            bucket_cap_mb=_BUCKET_MB,
        )


class _Reducer(GradientReducer):
    """Reduces the buckets of one optimizer by its options.

    Args:
        session: the running one.
        options: of the optimizer.
        reducer_id: of the optimizer.
        wide: whether no parameter is in half precision.
        announce: called before each operation of a round.
    """

    takes_sparse = True
    serves_kept = True

    def __init__(
        self, session: Session, options: ReduceOptions, reducer_id: ReducerId, wide: bool, announce: Callable[[], None]
    ) -> None:
        super().__init__(lambda: session.backend, None, session.process_sets[reducer_id.set_id].gradients)
        self._session = session
        self._options = options
        self._announce = announce
        #: Its name in operations and in the timeline.
        self._label = f"DistributedOptimizer.{reducer_id.set_id}.{reducer_id.number}"
        # Averages are divided before the sum, in the pass that copies them, unless gradient_predivide_factor splits the
        # division. What is sent as float16 is divided after it, as by Horovod: small numbers would be lost.
        self._prescale, self._postscale = 1.0, 1.0
        if options.op == Average and options.predivide == 1.0 and wide and options.compression is NoneCompressor:
            self._prescale = 1.0 / len(self.ranks)
        elif options.op == Average:
            self._prescale, self._postscale = 1.0 / options.predivide, options.predivide / len(self.ranks)
        #: Whether they are factors of what a user's compressor makes of the gradients, as Horovod's are.
        self._scales_compressed = options.compression not in (NoneCompressor, FP16Compressor)

    def prescale(self, dtype: torch.dtype) -> float:
        """See ``GradientReducer``."""
        return 1.0 if self._scales_compressed else self._prescale

    def start(self, bucket: Bucket, index: int) -> Wait:
        """See ``GradientReducer``."""
        self._announce()
        flat, timeline, row = bucket.flat, self._session.timeline, f"{self._label}.bucket.{index}"
        sent, decompress = compress_bucket(bucket, self._options.compression)
        scaled, postscale = flat, self._postscale
        if self._scales_compressed and sent.is_floating_point():
            scaled = sent.mul_(self._prescale)
        elif self._scales_compressed:  # integers have no fractions
            postscale *= self._prescale
        if timeline.on:
            timeline.begin(row, "ALLREDUCE")
        with horovod_errors():
            wait = self.backend().start_all_reduce(sent, _BACKEND_OPS[self._options.op], self.group)

        def finish() -> None:
            with horovod_errors():
                wait()
            if scaled is not flat:
                scaled.mul_(postscale)
            if decompress is not None:
                decompress()
            if scaled is flat and postscale != 1.0:
                flat.mul_(postscale)
            if timeline.on:
                timeline.end(row)
            bucket.restore_sparse()
            bucket.serve_kept()

        return finish

    def start_sparse(self, param: Tensor, name: str) -> Wait:
        """See ``GradientReducer``."""
        self._announce()
        grad = empty_sparse_gradient(param) if param.grad is None else param.grad
        dense = not grad.is_sparse
        sent = (grad.to_sparse(1) if dense else grad).detach()
        finish = sparse_allreduce_async(sent, f"{self._label}.{name}", self._options.op, self._options.process_set)

        def wait() -> None:
            result = finish()
            param.grad = result.to_dense() if dense else result

        return wait


@contextmanager
def horovod_errors() -> Iterator[None]:
    """Convert errors of the backend inside the block into ``HorovodInternalError``."""
    try:
        yield
    except UnidistError as error:
        reason = current_session().why_failed(error)
        if reason != str(error):  # which tells where it was called
            reason = f"DistributedOptimizer: {reason} (called at {here()})"
        raise HorovodInternalError(reason) from error
