"""Optimizers that reduce gradients over the ranks before they step."""

from __future__ import annotations

import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from unidist.hvd.adasum import adasum
from unidist.hvd.basics import Adasum, Average
from unidist.hvd.compression import Compression, Compressor
from unidist.hvd.errors import HorovodInternalError
from unidist.hvd.gradients import OptimizerGradients, ReduceOptions, horovod_errors
from unidist.hvd.mpi_ops import allreduce_async_
from unidist.hvd.operation import GLOBAL_SET
from unidist.hvd.process_sets import ProcessSet, global_process_set
from unidist.hvd.session import current_session
from unidist.launch import membership

#: Optimizers whose state is that of ``broadcast_optimizer_state``'s step alone.
with_first_state: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()


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
    """Return an optimizer like the given one whose ``step`` takes gradients reduced over the ranks.

    They are reduced in buckets while ``backward`` runs; ``synchronize()`` waits for them, and ``step()`` calls it first
    unless inside ``skip_synchronize()``. A parameter without a gradient counts as zeros. Every rank steps equally often
    (or joins). The result's class is a subclass of the optimizer's; it has its state and shares its parameter groups.

    Args:
        optimizer: plain; it is not used further.
        named_parameters: names for messages, usually ``model.named_parameters()``; all of the optimizer's parameters,
            or None.
        compression: applied to what is sent.
        backward_passes_per_step: number of backward passes whose gradients add up before a reduction.
        op: ``Average``, ``Sum``, ``Min``, ``Max``, ``Product``, or ``Adasum``, which reduces the changes that steps
            make.
        gradient_predivide_factor: with ``Average``: gradients are divided by it before the sum, and the sum by size
            over it.
        num_groups: deprecated, see ``groups``.
        groups: checked, and otherwise of no effect: buckets take its place.
        sparse_as_dense: reduce sparse gradients as dense ones.
        process_set: the ranks that train together; on others nothing is reduced.

    Raises:
        TypeError: the optimizer is a ``DistributedOptimizer``.
        ValueError: arguments that do not fit together, or names that do not fit the optimizer's parameters.
    """
    if isinstance(optimizer, _DistributedOptimizer):
        raise TypeError(
            f"this {type(optimizer).__name__} is a DistributedOptimizer already, which cannot be wrapped again: use it "
            "as it is, or wrap the plain optimizer."
        )
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`.", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    _check_groups(groups)
    names = _names(optimizer, named_parameters)
    is_adasum = op == Adasum and current_session().topology.world_size > 1
    if is_adasum and process_set is not global_process_set:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    mixin = _DistributedAdasumOptimizer if is_adasum else _DistributedOptimizer
    kind = type(optimizer)
    cls: Any = type(
        kind.__name__, (mixin, kind), {"__module__": DistributedOptimizer.__module__, "__doc__": kind.__doc__}
    )
    # Not by its constructor: loaded state stays, and the constructor's arguments are not known.
    wrapped: Any = cls.__new__(cls)
    wrapped.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    if with_first_state.get(optimizer) is optimizer.state:  # Horovod's begins without state
        wrapped.state = defaultdict(dict)
    options = ReduceOptions(compression, op, gradient_predivide_factor, sparse_as_dense, process_set)
    wrapped._set_up(names, backward_passes_per_step, options)
    return wrapped


class _DistributedOptimizer(torch.optim.Optimizer):
    """The class that ``DistributedOptimizer`` puts before that of the optimizer."""

    #: Whether this is a copy: hooks and buckets belong to the original.
    _copied = False

    def _set_up(self, names: dict[Tensor, str], passes: int, options: ReduceOptions) -> None:
        self.backward_passes_per_step = passes
        self.op = options.op
        self.gradient_predivide_factor = options.predivide
        self.sparse_as_dense = options.sparse_as_dense
        self.process_set = options.process_set
        self._parameter_names = names
        self._compression = options.compression
        self._synchronized = False
        self._should_synchronize = True
        self._gradients: OptimizerGradients | None = None
        self._start(options)

    def _start(self, options: ReduceOptions) -> None:
        # Others may join an elastic run later.
        several = (self.process_set.size() or 1) > 1 or membership.current() is not None
        if self.process_set.included() and several:
            self._gradients = OptimizerGradients(self._parameter_names, self.backward_passes_per_step, options)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes whose gradients add up before a reduction."""
        self.backward_passes_per_step = passes
        if self._gradients is not None:
            self._gradients.set_passes(passes)

    def synchronize(self) -> None:
        """Wait until all gradients are reduced. Collective."""
        if self._copied:
            raise HorovodInternalError(
                "this optimizer is a copy of a DistributedOptimizer, and reduces nothing: copy the model, and make a "
                "new DistributedOptimizer for it."
            )
        if self._gradients is not None:
            self._gradients.finish()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let ``step`` inside take the gradients as they are, after a call of ``synchronize``."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Wait until all gradients are reduced, and step. Collective, unless inside ``skip_synchronize``.

        Args:
            closure: as for the optimizer; the gradients that it computes are not reduced.
        """
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): the gradients are reduced twice.",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        return super().step(closure)

    def _allreduce_grad_async(self, p: Tensor) -> tuple[int, Any]:
        """Start the reduction of one gradient by itself. Not used here: ignite knows the optimizer by it."""
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        (sent, context), factor = self._compression.compress(p.grad), self.gradient_predivide_factor
        name = self._parameter_names[p]
        return allreduce_async_(sent, None, name, self.op, 1.0 / factor, factor, self.process_set), context

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of the optimizer.

        Raises:
            AssertionError: called between ``backward()`` and ``step()`` or ``synchronize()``, while gradients are
                reduced.
        """
        if self._gradients is not None and self._gradients.in_progress:
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
        """As of the optimizer; reductions in progress are abandoned."""
        if self._gradients is not None:
            self._gradients.abandon()
        self._synchronized, self._should_synchronize = False, True
        super().load_state_dict(*args, **kwargs)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_should_synchronize" not in vars(self):  # load_state_dict() comes here too
            self._gradients, self._synchronized, self._should_synchronize, self._copied = None, False, True, True


class _DistributedAdasumOptimizer(_DistributedOptimizer):
    """``_DistributedOptimizer`` for Adasum: it reduces the changes that each rank's own step makes."""

    def _start(self, options: ReduceOptions) -> None:
        self._join_session()

    def _join_session(self) -> None:
        self._session = current_session()
        self._id = self._session.rounds.add(self, GLOBAL_SET)

    def synchronize(self) -> None:
        """Do nothing: ``step`` reduces."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raise ``AssertionError``."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        yield

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step on every rank by itself, and reduce the changes. Collective."""
        if self._copied:
            super().synchronize()  # raises the error
        loss = None if closure is None else closure()
        params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        with torch.no_grad():
            for param in params:
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
            before = [param.detach().clone() for param in params]
            super(_DistributedOptimizer, self).step()
            changes = [param - start for param, start in zip(params, before)]
            self._reduce(changes)
            for param, start, change in zip(params, before, changes):
                param.copy_(start + change)
        return loss

    def reduce_zeros(self) -> None:
        """Make a round with zeros, after this rank has joined. Collective."""
        self._reduce([torch.zeros_like(p) for group in self.param_groups for p in group["params"] if p.requires_grad])

    def _reduce(self, changes: list[Tensor]) -> None:
        session = current_session()
        if session is not self._session:
            self._join_session()
        session.rounds.begin(self._id)
        group = session.process_sets[GLOBAL_SET].gradients
        compressed, ctxs = zip(*(self._compression.compress(change) for change in changes))
        for dtype in dict.fromkeys(tensor.dtype for tensor in compressed):
            targets = [tensor for tensor in compressed if tensor.dtype == dtype]
            sent = [tensor.contiguous() for tensor in targets]
            with horovod_errors():
                adasum(session.backend, sent, group)
            for target, result in zip(targets, sent):
                target.copy_(result)
        for change, tensor, ctx in zip(changes, compressed, ctxs):
            change.copy_(self._compression.decompress(tensor, ctx))


def _names(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Tensor]] | None) -> dict[Tensor, str]:
    """Return the optimizer's parameters in its order, with their names."""
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
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}")
    by_param = {param: name for name, param in pairs}
    missing = [index for index, param in enumerate(params) if param not in by_param]
    if missing:
        raise ValueError(
            f"named_parameters was specified, but {len(missing)} of the optimizer's parameters were not named, the "
            "first of shape "
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
