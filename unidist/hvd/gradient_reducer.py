"""The reduction of one optimizer's gradients, in buckets, while ``backward`` runs."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from unidist.backends.base import Group, Op
from unidist.collectives import operations as collectives
from unidist.collectives.agreement import first_difference
from unidist.errors import UnidistError
from unidist.gradients.backward_pass import watch_gradients
from unidist.gradients.buckets import (
    Bucket,
    BucketReductions,
    Wait,
    bucket_positions,
    empty_sparse_gradient,
    split_into_buckets,
)
from unidist.hvd.basics import Average, Max, Min, Product, Sum
from unidist.hvd.common.exceptions import HorovodInternalError
from unidist.hvd.compression import Compressor, FP16Compressor, NoneCompressor
from unidist.hvd.mpi_ops import sparse_allreduce_async
from unidist.hvd.operation import GLOBAL_SET
from unidist.hvd.process_sets import ProcessSet
from unidist.hvd.session import current_session

_BACKEND_OPS: dict[int, Op] = {Average: "sum", Sum: "sum", Min: "min", Max: "max", Product: "product"}
#: MiB of gradients that are reduced together.
_BUCKET_MB = 25.0


#: All reducers, in the order in which they were made.
_reducers: list[weakref.ref[GradientReducer]] = []


def rejoin() -> None:
    """Let all reducers go on in the running session, after one that has ended in the middle of a step.

    Not collective: in their first round the ranks compare their parameters, as those of new optimizers do.
    """
    _reducers[:] = [reference for reference in _reducers if reference() is not None]
    for reference in _reducers:
        if (reducer := reference()) is not None:
            reducer.rejoin()


class ReduceOptions(NamedTuple):
    """Arguments of ``DistributedOptimizer``."""

    compression: type[Compressor]
    op: int
    predivide: float
    sparse_as_dense: bool
    process_set: ProcessSet


class GradientReducer:
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
        self._buckets: list[Bucket] | None = None
        self._positions: dict[Tensor, tuple[int, int]] = {}
        self._sparse: list[Tensor] = []
        self._postscale = 1.0
        #: Of the current round, once the buckets are laid out.
        self._reductions: BucketReductions | None = None
        self._announced = False
        #: Whether a gradient has been accumulated since the last round.
        self.in_progress = False
        self._join_session()
        _reducers.append(weakref.ref(self))
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
        for wait in self._reductions.waits if self._reductions else ():
            wait()
        self._end_round()

    def finish(self) -> None:
        """Start the reductions that have not been started, and wait for all. Collective."""
        if self._session is not current_session():
            self._join_session()
        self.warn_of_unfrozen()
        self._announce_round()
        if self._buckets is None:
            self._buckets = self._lay_out()
            self._positions = bucket_positions(self._buckets)
        if self._reductions is None:
            self._reductions = BucketReductions(self._buckets)
        self._reductions.finish(self._start)
        for bucket in self._buckets:
            for param, view in zip(bucket.params, bucket.views):
                if param.grad is None:
                    param.grad = view
        self._reduce_sparse()
        self._end_round()

    def reduce_zeros(self) -> None:
        """One round with zeros, after this rank has joined. Collective."""
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
        self._buckets = self._reductions = None

    @property
    def _group(self) -> Group:
        group: Group = self._session.process_sets[self._id.set_id].gradients
        return group

    @property
    def _label(self) -> str:
        """Its name in operations and in the timeline."""
        return f"DistributedOptimizer.{self._id.set_id}.{self._id.number}"

    def _accumulated(self, param: Tensor) -> None:
        if self._passes_left[param] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                "backward_passes_per_step to accumulate gradients locally."
            )
        self._passes_left[param] -= 1
        self.in_progress = True
        laid_out = self._buckets is not None and param in self._positions and self._session is current_session()
        if self._passes_left[param] or not laid_out:
            return
        if self._reductions is None:
            assert self._buckets is not None
            self._reductions = BucketReductions(self._buckets)
        bucket, index = self._positions[param]
        self._reductions.ready(bucket, index)
        # Of several reducers' buckets, a backward pass may reach those of another one first on another rank.
        if self._session.rounds.is_only_reducer(self._id):
            self._reductions.start_ready(self._start)

    def _announce_round(self) -> None:
        if not self._announced:
            self._announced = True
            self._session.rounds.begin(self._id)

    def _end_round(self) -> None:
        self._reductions = None
        self._announced = self.in_progress = False
        self._passes_left = dict.fromkeys(self._names, self._passes)

    def _lay_out(self) -> list[Bucket]:
        """Compare the parameters with the other ranks', and make the buckets. Collective."""
        compression, op, predivide, sparse_as_dense, _ = self._options
        group = self._group
        options = f"options {op} {compression.__name__} {predivide}"
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
        self._sparse = [param for param, flag in zip(self._names, sparse_somewhere) if flag]
        dense = [param for param, flag in zip(self._names, sparse_somewhere) if not flag]
        # Averages are divided before the sum, in the pass that copies them, unless gradient_predivide_factor splits the
        # division. What is sent as float16 is divided after it, as by Horovod: small numbers would be lost.
        prescale, self._postscale = 1.0, 1.0
        is_wide = compression is NoneCompressor and all(param.dtype != torch.float16 for param in self._names)
        if op == Average and predivide == 1.0 and is_wide:
            prescale = 1.0 / len(group.ranks)
        elif op == Average:
            prescale, self._postscale = 1.0 / predivide, predivide / len(group.ranks)
        return [Bucket(params, prescale) for params in split_into_buckets(dense, _BUCKET_MB)]

    def _start(self, i: int, pending: set[int]) -> Wait:
        assert self._buckets is not None
        bucket = self._buckets[i]
        self._announce_round()
        sparse = [p for p in bucket.params if p.grad is not None and p.grad.is_sparse]
        for param in sparse:
            assert param.grad is not None
            param.grad = param.grad.to_dense()
        if bucket.is_referenced():  # by somebody who keeps gradients of an earlier step
            bucket.reallocate()
        bucket.copy_in(range(len(bucket.params)), bucket.prescale)
        wait = self._all_reduce(bucket, f"{self._label}.bucket.{i}")
        if not sparse:
            return wait

        def wait_and_restore() -> None:
            wait()
            for param in sparse:
                assert param.grad is not None
                param.grad = param.grad.to_sparse()

        return wait_and_restore

    def _all_reduce(self, bucket: Bucket, row: str) -> Wait:
        compression = self._options.compression
        backend, group, flat = self._session.backend, self._group, bucket.flat
        decompress: Callable[[], object] | None = None
        if compression is NoneCompressor:
            sent = flat
        elif compression is FP16Compressor:
            sent, ctx = FP16Compressor.compress(flat)
            decompress = lambda: flat.copy_(FP16Compressor.decompress(sent, ctx))  # noqa: E731
        else:
            sent, decompress = _compress_each(bucket, compression)
        timeline = self._session.timeline
        if timeline.on:
            timeline.begin(row, "ALLREDUCE")
        with horovod_errors():
            wait = backend.start_all_reduce(sent, _BACKEND_OPS[self._options.op], group)

        def finish() -> None:
            with horovod_errors():
                wait()
            if decompress is not None:
                decompress()
            if self._postscale != 1.0:
                flat.mul_(self._postscale)
            if timeline.on:
                timeline.end(row)

        return finish

    def _reduce_sparse(self) -> None:
        waits = []
        for param in self._sparse:
            grad = empty_sparse_gradient(param) if param.grad is None else param.grad
            dense = not grad.is_sparse
            sent = (grad.to_sparse(1) if dense else grad).detach()
            name = f"{self._label}.{self._names[param]}"
            finish = sparse_allreduce_async(sent, name, self._options.op, self._options.process_set)
            waits.append((param, dense, finish))
        for param, dense, finish in waits:
            result = finish()
            param.grad = result.to_dense() if dense else result


def _compress_each(bucket: Bucket, compression: type[Compressor]) -> tuple[Tensor, Callable[[], object]]:
    """What is sent of a bucket with a user's compressor, which compresses each gradient by itself; and its inverse."""
    parts, ctxs = zip(*(compression.compress(view) for view in bucket.views))
    sent = torch.cat([part.reshape(-1) for part in parts])

    def decompress() -> None:
        received = torch.split(sent, [part.numel() for part in parts])
        for view, part, like, ctx in zip(bucket.views, received, parts, ctxs):
            view.copy_(compression.decompress(part.view_as(like), ctx))

    return sent, decompress


@contextmanager
def horovod_errors() -> Iterator[None]:
    """Convert errors of the backend inside the block into ``HorovodInternalError``."""
    try:
        yield
    except UnidistError as error:
        raise HorovodInternalError(current_session().why_failed(error)) from error
