"""Optimizers that reduce gradients over the ranks before they step."""

from __future__ import annotations

import sys
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from unidist import collectives
from unidist.backends.base import Group, Op
from unidist.backends.gradient_buckets import Bucket, cut, no_rows, remove
from unidist.errors import UnidistError
from unidist.hvd.adasum import adasum
from unidist.hvd.basics import Adasum, Average, Max, Min, Product, Sum
from unidist.hvd.common.exceptions import HorovodInternalError
from unidist.hvd.compression import Compression, Compressor, FP16Compressor, NoneCompressor
from unidist.hvd.mpi_ops import sparse_allreduce_async
from unidist.hvd.process_sets import ProcessSet, global_process_set
from unidist.hvd.session import GLOBAL, session

_ENGINE_OPS: dict[int, Op] = {Average: "sum", Sum: "sum", Min: "min", Max: "max", Product: "product"}
#: MiB of gradients that travel together.
_BUCKET_MB = 25.0


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """An optimizer like the given one whose ``step`` takes gradients reduced over the ranks.

    They travel in buckets while ``backward`` runs; ``synchronize()`` waits for them, ``step()`` does so first unless inside
    ``skip_synchronize()``. Parameters without a gradient count as zeros. Every rank steps equally often (or joins). The
    result's class is a subclass of the optimizer's, with its state, and it shares the parameter groups.

    Args:
        optimizer: plain; it is not used further.
        named_parameters: names for messages, usually ``model.named_parameters()``; all of the optimizer's parameters, or None.
        compression: what travels.
        backward_passes_per_step: how many passes add up before a reduction.
        op: ``Average``, ``Sum``, ``Min``, ``Max``, ``Product``, or ``Adasum``, which combines what steps change.
        gradient_predivide_factor: with ``Average``: gradients are divided by it before the sum, and the sum by size over it.
        num_groups: deprecated, see ``groups``.
        groups: checked and otherwise of no effect: buckets serve its purpose.
        sparse_as_dense: reduce sparse gradients as dense ones.
        process_set: the ranks that train together; on others nothing is reduced.

    Raises:
        ValueError: arguments that do not fit together, or names that do not fit the optimizer's parameters.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`.", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    _check_groups(groups)
    names = _names(optimizer, named_parameters)
    adaptive = op == Adasum and session().place.world_size > 1
    if adaptive and process_set is not global_process_set:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    mixin = _Adaptive if adaptive else _Reducing
    kind = type(optimizer)
    cls: Any = type(kind.__name__, (mixin, kind), {"__module__": mixin.__module__, "__doc__": kind.__doc__})
    # Not by its constructor: what has been loaded stays, and no signature is guessed at.
    wrapped: Any = cls.__new__(cls)
    wrapped.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    wrapped._begin(names, compression, backward_passes_per_step, op, gradient_predivide_factor, sparse_as_dense, process_set)  # fmt: skip
    return wrapped


class _Reducing(torch.optim.Optimizer):
    """What ``DistributedOptimizer`` puts before the class of an optimizer."""

    def _begin(
        self, names: dict[Tensor, str], compression: type[Compressor], passes: int, op: int, predivide: float,
        sparse_as_dense: bool, process_set: ProcessSet,
    ) -> None:  # fmt: skip
        self.backward_passes_per_step = passes
        self.op = op
        self.process_set = process_set
        self._synchronized = False
        self._should_synchronize = True
        self._gradients: _Gradients | None = None
        if process_set.included() and (process_set.size() or 1) > 1:
            self._gradients = _Gradients(names, compression, passes, op, predivide, sparse_as_dense, process_set)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """How many backward passes add up before a reduction, from now on."""
        self.backward_passes_per_step = passes
        if self._gradients is not None:
            self._gradients.expect(passes)

    def synchronize(self) -> None:
        """Wait until the gradients are reduced; begin with those that are not on their way. Collective."""
        if self._copied:
            raise HorovodInternalError(
                "this optimizer is a copy of a DistributedOptimizer, and reduces nothing: copy the model, and make its optimizer anew."
            )
        if self._gradients is not None:
            self._gradients.finish()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, ``step`` takes the gradients as they are, after a call of ``synchronize``."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Reduce what is not reduced yet, and step. Collective, unless inside ``skip_synchronize``.

        Args:
            closure: as for the optimizer; the gradients that it computes are its own rank's.
        """
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() was called after optimizer.synchronize() without optimizer.skip_synchronize(): the "
                    "gradients are reduced twice.",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        return super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of the optimizer.

        Raises:
            AssertionError: gradients are on their way, between ``backward()`` and ``step()`` or ``synchronize()``.
        """
        if self._gradients is not None and self._gradients.under_way:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(), while gradients were being reduced."
            )
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of the optimizer; warns that the group's gradients are not reduced."""
        super().add_param_group(param_group)
        if self._gradients is not None:
            self._gradients.warn_of_unreduced(
                self.param_groups[-1]["params"], "were added by add_param_group", stacklevel=3
            )

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """As of the optimizer; gradients that were on their way are forgotten."""
        if self._gradients is not None:
            self._gradients.forget()
        self._synchronized, self._should_synchronize = False, True
        super().load_state_dict(*args, **kwargs)

    #: Hooks and buckets belong to the original.
    _copied = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_should_synchronize" not in vars(self):  # load_state_dict() comes here too
            self._gradients, self._synchronized, self._should_synchronize, self._copied = None, False, True, True


class _Adaptive(_Reducing):
    """``_Reducing`` for Adasum: it combines what each rank's own step would change."""

    def _begin(self, names: dict[Tensor, str], *rest: Any) -> None:
        compression, passes, op, _, _, process_set = rest
        self.backward_passes_per_step = passes
        self.op = op
        self.process_set = process_set
        self._gradients = None
        self._synchronized = False
        self._should_synchronize = True
        self._compression: type[Compressor] = compression
        self._join_session()

    def _join_session(self) -> None:
        self._session = session()
        self._number = self._session.rounds.add(self, GLOBAL)

    def synchronize(self) -> None:
        """No-op: ``step`` combines."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raises ``AssertionError``."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        yield

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step on every rank for itself, and combine what that has changed. Collective."""
        if self._copied:
            super().synchronize()  # says why not
        loss = None if closure is None else closure()
        params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        with torch.no_grad():
            for param in params:
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
            before = [param.detach().clone() for param in params]
            super(_Reducing, self).step()
            changes = [param - start for param, start in zip(params, before)]
            self._combine(changes)
            for param, start, change in zip(params, before, changes):
                param.copy_(start + change)
        return loss

    def with_nothing(self) -> None:
        """A round of the others, after this rank has joined."""
        self._combine([torch.zeros_like(p) for group in self.param_groups for p in group["params"] if p.requires_grad])

    def _combine(self, changes: list[Tensor]) -> None:
        running = session()
        if running is not self._session:
            self._join_session()
        running.rounds.begin(self._number)
        group = running.groups[0].gradients
        wires, ctxs = zip(*(self._compression.compress(change) for change in changes))
        for dtype in dict.fromkeys(wire.dtype for wire in wires):
            same = [wire.contiguous() for wire in wires if wire.dtype == dtype]
            _engine(lambda same=same: adasum(running.backend, same, group))  # type: ignore[misc]
            for target, result in zip([wire for wire in wires if wire.dtype == dtype], same):
                target.copy_(result)
        for change, wire, ctx in zip(changes, wires, ctxs):
            change.copy_(self._compression.decompress(wire, ctx))


class _Gradients:
    """Reduces the gradients of one optimizer, in buckets of a fixed order.

    In the first round the ranks compare their parameters and tell which gradients are sparse, so reductions begin when all passes
    are done; later ones begin while backward runs.
    """

    def __init__(
        self, names: dict[Tensor, str], compression: type[Compressor], passes: int, op: int, predivide: float,
        sparse_as_dense: bool, process_set: ProcessSet,
    ) -> None:  # fmt: skip
        self._names = {param: name for param, name in names.items() if param.requires_grad}
        self._frozen = {param: name for param, name in names.items() if not param.requires_grad}
        self._compression = compression
        self._passes = passes
        self._op = op
        self._predivide = predivide
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        self._left = dict.fromkeys(self._names, passes)
        self._buckets: list[Bucket] | None
        self._waits: list[Callable[[], None]]
        self._places: dict[Tensor, tuple[Bucket, int]] = {}
        self._sparse: list[Tensor] = []
        self._after = 1.0
        self._begun = False
        #: Whether a gradient has been computed since the last reduction.
        self.under_way = False
        self._join_session()
        # A parameter's hooks must not hold this object: the garbage collector does not see them.
        this = weakref.ref(self)

        def watch(param: Tensor) -> None:
            if (gradients := this()) is not None:
                gradients._accumulated(param)

        hooks = [param.register_post_accumulate_grad_hook(watch) for param in self._names]  # type: ignore[no-untyped-call]
        weakref.finalize(self, remove, hooks)

    def expect(self, passes: int) -> None:
        """So many backward passes before the next reduction."""
        self._passes = passes
        self._left = dict.fromkeys(self._names, passes)

    def forget(self) -> None:
        """Leave what is under way."""
        for wait in self._waits:
            wait()
        self._reset()

    def finish(self) -> None:
        """Wait for all gradients, after beginning with those that are not on their way. Collective."""
        if self._session is not session():
            self._join_session()
        self.warn_of_unfrozen()
        self._begin_round()
        if self._buckets is None:
            self._buckets = self._lay_out()
        for bucket in self._buckets[len(self._waits) :]:
            self._launch(bucket)
        for wait in self._waits:
            wait()
        for bucket in self._buckets:
            for param, view in zip(bucket.params, bucket.views):
                if param.grad is None:
                    param.grad = view
        self._finish_sparse()
        self._reset()

    def warn_of_unfrozen(self) -> None:
        """Warn, once for each, of parameters that were frozen when the optimizer was made and require grad now."""
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
                f"DistributedOptimizer does not reduce {len(params)} parameters, the first {first}, which {reason}: each rank "
                "trains its own copy of them. Make the DistributedOptimizer again, on every rank, from a plain optimizer.",
                stacklevel=stacklevel,
            )

    def with_nothing(self) -> None:
        """One round with zeros, after this rank has joined. Collective."""
        for param in self._names:
            param.grad = None
        self.finish()

    # --------------------------------------------------------------------------------
    def _join_session(self) -> None:
        """Have a number in the session that runs, which may be another one than before."""
        self._session = session()
        self._number = self._session.rounds.add(self, self._process_set.process_set_id or GLOBAL)
        self._buckets = None
        self._waits = []

    @property
    def _group(self) -> Group:
        return self._session.groups[self._process_set.process_set_id or GLOBAL].gradients

    @property
    def _label(self) -> str:
        """Its name in operations and in the timeline."""
        return "DistributedOptimizer.{}.{}".format(*self._number)

    def _accumulated(self, param: Tensor) -> None:
        if self._left[param] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                "backward_passes_per_step to accumulate gradients locally."
            )
        self._left[param] -= 1
        self.under_way = True
        if self._left[param] or self._buckets is None or param not in self._places or self._session is not session():
            return
        bucket, index = self._places[param]
        bucket.pending.discard(index)
        # Where there are several, a backward pass may come to their buckets in another order on another rank.
        if not self._session.rounds.alone(self._number):
            return
        while len(self._waits) < len(self._buckets) and not self._buckets[len(self._waits)].pending:
            self._launch(self._buckets[len(self._waits)])

    def _begin_round(self) -> None:
        if not self._begun:
            self._begun = True
            self._session.rounds.begin(self._number)

    def _lay_out(self) -> list[Bucket]:
        """Compare with the other ranks, and cut the buckets. Collective."""
        sparse = [int(p.grad is not None and p.grad.is_sparse and not self._sparse_as_dense) for p in self._names]
        mine = [f"{name} {tuple(p.shape)} {p.dtype} strides {p.stride()}" for p, name in self._names.items()]
        code = zlib.crc32("\n".join(map(str, (self._op, self._compression.__name__, self._predivide, *mine))).encode())
        group = self._group
        rows = collectives.all_gather_object((code, mine, sparse), group)
        for rank, row in zip(group.ranks, rows):
            if row[0] != rows[0][0]:
                there = next((pair for pair in zip(rows[0][1], row[1]) if pair[0] != pair[1]), None)
                what = (
                    f"{there[0]!r} is {there[1]!r} there" if there
                    else f"they have {len(rows[0][1])} and {len(row[1])} parameters, or other options"
                )  # fmt: skip
                raise HorovodInternalError(
                    f"DistributedOptimizer: the parameters of rank {rank} differ from those of rank {group.ranks[0]}: {what}. Build the "
                    "same model and optimizer on every rank."
                )
        somewhere = [any(flags) for flags in zip(*(row[2] for row in rows))]
        self._sparse = [param for param, flag in zip(self._names, somewhere) if flag]
        dense = [param for param, flag in zip(self._names, somewhere) if not flag]
        # Averages are divided on the way in, unless the user has other wishes.
        size = len(group.ranks)
        share = 1.0 if self._op != Average else 1.0 / (self._predivide if self._predivide != 1.0 else size)
        self._after = self._predivide / size if self._op == Average and self._predivide != 1.0 else 1.0
        buckets = [Bucket(params, share) for params in cut(dense, _BUCKET_MB)] if dense else []
        self._places = {param: (bucket, i) for bucket in buckets for i, param in enumerate(bucket.params)}
        return buckets

    def _launch(self, bucket: Bucket) -> None:
        self._begin_round()
        sparse = [p for p in bucket.params if p.grad is not None and p.grad.is_sparse]
        for param in sparse:
            assert param.grad is not None
            param.grad = param.grad.to_dense()
        if _is_held(bucket):
            bucket.renew()
        bucket.take(range(len(bucket.params)), bucket.share)
        wait = self._start(bucket)
        if not sparse:
            self._waits.append(wait)
            return

        def wait_and_restore() -> None:
            wait()
            for param in sparse:
                assert param.grad is not None
                param.grad = param.grad.to_sparse()

        self._waits.append(wait_and_restore)

    def _start(self, bucket: Bucket) -> Callable[[], None]:
        backend, group, flat = self._session.backend, self._group, bucket.flat
        restore: Callable[[], object] | None = None
        if self._compression is NoneCompressor:
            wire = flat
        elif self._compression is FP16Compressor:
            wire, ctx = FP16Compressor.compress(flat)
            restore = lambda: flat.copy_(FP16Compressor.decompress(wire, ctx))  # noqa: E731
        else:
            wire, restore = self._compressed(bucket)
        timeline, row = self._session.timeline, f"{self._label}.bucket.{len(self._waits)}"
        if timeline.on:
            timeline.begin(row, "ALLREDUCE")
        wait = _engine(lambda: backend.start_all_reduce(wire, _ENGINE_OPS[self._op], group))

        def finish() -> None:
            _engine(wait)
            if restore is not None:
                restore()
            if self._after != 1.0:
                flat.mul_(self._after)
            if timeline.on:
                timeline.end(row)

        return finish

    def _compressed(self, bucket: Bucket) -> tuple[Tensor, Callable[[], object]]:
        """By a compressor of the user's, which takes each gradient by itself."""
        parts, ctxs = zip(*(self._compression.compress(view) for view in bucket.views))
        wire = torch.cat([part.reshape(-1) for part in parts])

        def restore() -> None:
            back = torch.split(wire, [part.numel() for part in parts])
            for view, part, like, ctx in zip(bucket.views, back, parts, ctxs):
                view.copy_(self._compression.decompress(part.view_as(like), ctx))

        return wire, restore

    def _finish_sparse(self) -> None:
        waits = []
        for param in self._sparse:
            grad = no_rows(param) if param.grad is None else param.grad
            dense = not grad.is_sparse
            wire = grad.to_sparse(1) if dense else grad
            name = f"{self._label}.{self._names[param]}"
            waits.append((param, dense, sparse_allreduce_async(wire.detach(), name, self._op, self._process_set)))
        for param, dense, finish in waits:
            result = finish()
            param.grad = result.to_dense() if dense else result

    def _reset(self) -> None:
        self._waits = []
        self._begun = False
        self.under_way = False
        self._left = dict.fromkeys(self._names, self._passes)
        for bucket in self._buckets or ():
            bucket.reset()


def _is_held(bucket: Bucket) -> bool:
    """Whether somebody keeps the gradients of an earlier step, which must not change."""
    # The bucket's own: flat and its parts, and here the storage's name.
    if torch._C._storage_Use_Count(bucket.flat.untyped_storage()._cdata) > len(bucket.views) + 2:
        return True
    return any(sys.getrefcount(view) > 3 for view in bucket.views)


def _engine(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except UnidistError as error:
        raise HorovodInternalError(str(error)) from error


def _names(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Tensor]] | None) -> dict[Tensor, str]:
    """The optimizer's parameters in its order, with their names."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if named is None:
        return {
            p: f"allreduce.noname.{i}.{j}"
            for i, group in enumerate(optimizer.param_groups)
            for j, p in enumerate(group["params"])
        }
    pairs = list(named)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by model.named_parameters()."
        )
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}")
    by_param = {param: name for name, param in pairs}
    missing = [index for index, param in enumerate(params) if param not in by_param]
    if missing:
        raise ValueError(
            f"named_parameters was specified, but {len(missing)} of the optimizer's parameters were not named, the first of shape "
            f"{tuple(params[missing[0]].shape)}: pass the names of all of them, or None."
        )
    return {param: by_param[param] for param in params}


def _check_groups(groups: int | list[list[Tensor]] | None) -> None:
    if groups is None:
        return
    if not isinstance(groups, list):
        if groups <= 0:
            raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
        return
    seen: set[Tensor] = set()
    for param in (param for group in groups for param in group):
        if not isinstance(param, Tensor):
            raise ValueError("groups must consist of torch.Tensor.")
        if param in seen:
            raise ValueError("A parameter can only appear once in groups.")
        seen.add(param)
