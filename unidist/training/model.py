"""Data-parallel models, with DDP's behaviour on every backend."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook

from unidist.backends.base import Group
from unidist.collectives.agreement import digest, digests, first_difference
from unidist.collectives.operations import all_reduce, broadcast_object, broadcast_tensors_
from unidist.context import current, in_join, is_initialized, of_world
from unidist.errors import MismatchError
from unidist.gradients.data_parallel import DataParallel
from unidist.gradients.reducer import GradientReducer
from unidist.gradients.replica import Replica, ReplicatedModels
from unidist.gradients.wrapper import M, ModelOptions, TrainedParameters, WrappedModel, Wrapper, replaced_parameters
from unidist.training.batch_norm import convert_batch_norm
from unidist.tree import map_leaves, walk
from unidist.world import Feature

_COMPRESSION = {"fp16": torch.float16, "bf16": torch.bfloat16}
T = TypeVar("T")
N = TypeVar("N", bound=nn.Module)
#: Models that were given to ``replicate``. Nothing is kept in the model, so that its copies are plain models.
_replicas: weakref.WeakKeyDictionary[nn.Module, Replica] = weakref.WeakKeyDictionary()


class _Models(Feature):
    """The data-parallel models of this world: none averages with the ranks of the next one."""

    def __init__(self) -> None:
        #: What ``wrap_model`` has returned, of several ranks.
        self.wrapped: weakref.WeakSet[Wrapper[Any]] = weakref.WeakSet()
        self.replicated = ReplicatedModels()
        #: Parts of replicated models that have parameters: they may live longer than the model.
        self.parts: weakref.WeakKeyDictionary[nn.Module, Replica] = weakref.WeakKeyDictionary()
        #: Of the models that were given to ``replicate``, the parameters that they had then.
        self.trained: weakref.WeakKeyDictionary[nn.Module, TrainedParameters] = weakref.WeakKeyDictionary()

    def close(self) -> None:
        self.replicated.end()
        for wrapped in self.wrapped:
            wrapped.ended = True


def wrap_model(
    model: M,
    *,
    sync_bn: bool = False,
    find_unused_parameters: bool = False,
    broadcast_buffers: bool = True,
    bucket_cap_mb: float = 25,
    compression: Literal["fp16", "bf16"] | None = None,
    static_graph: bool = False,
    group: Group | None = None,
) -> WrappedModel[M]:
    """Make a model data-parallel: after ``backward()``, each ``.grad`` is the mean over the ranks. Collective.

    The optimizer is a plain one, and everything between ``backward()`` and ``step()`` (clipping, scaling, skipping)
    sees averaged gradients. The result has the interface of ``DistributedDataParallel`` (which it is on
    torch.distributed): ``.module``, ``no_sync()``, and state_dict keys with the prefix ``module.``. There gradients are
    views of DDP's buckets, which the next backward pass overwrites: clone those that you keep over ``zero_grad()``.

    Move the model to ``unidist.device()`` first, and freeze parameters before wrapping.

    Args:
        model: has at least one parameter that requires grad; the same architecture on every rank. Parameters and
            buffers are overwritten with those of the group's first rank.
        sync_bn: batch statistics over all ranks: BatchNorm layers are replaced, on the CPU too.
        find_unused_parameters: allow parameters that take no part in a backward pass. A parameter that is unused on
            this rank counts as zero in the mean; one that is unused on all ranks keeps its ``.grad``.
        broadcast_buffers: broadcast the first rank's buffers during each backward pass that averages, so that after a
            step all ranks have the same, and evaluate the model that is saved. Evaluation broadcasts nothing.
        bucket_cap_mb: bucket size in MiB.
        compression: send gradients in half precision. Horovod does not sum bfloat16: there ``bf16`` rounds the
            gradients and sends them in float32.
        static_graph: DDP's option: the graph never changes; of no effect on Horovod.
        group: the ranks that train this model together.

    Raises:
        ValueError: no parameter requires grad, one is lazy, on the meta device or a DTensor, the model is wrapped
            already, or an option has another value than those named above.
        UnidistError: from ``backward()`` (on torch.distributed from the next forward pass), when parameters got no
            gradient and ``find_unused_parameters`` is off; names them. From a forward pass that records gradients, when
            parameters have been converted to another dtype or device, or replaced, since the model was wrapped.
        MismatchError: on every rank, when the ranks' models differ, also in memory format; names the first difference.
    """
    _check_options(compression, bucket_cap_mb)
    _check_model(model, "wrap_model")
    if replica_of(model) is not None:
        raise ValueError(f"wrap_model: this {type(model).__name__} is data-parallel already, by unidist.replicate.")
    _check_same(model, group, layout=True)
    if sync_bn:
        convert_batch_norm(model, group)
    options = replace(
        _options(bucket_cap_mb, compression, group),
        find_unused_parameters=find_unused_parameters,
        broadcast_buffers=broadcast_buffers,
        static_graph=static_graph,
    )
    wrapped = _wrap(model, options, group)
    if current().topology.world_size > 1:
        of_world(_Models).wrapped.add(wrapped)
    return wrapped


def replicate(
    model: N,
    *,
    bucket_cap_mb: float = 25,
    compression: Literal["fp16", "bf16"] | None = None,
    group: Group | None = None,
) -> N:
    """Make a model data-parallel in place: after ``backward()``, each ``.grad`` is the mean over the ranks. Collective.

    The model stays the object that it is: attributes, state_dict keys, references to it and to its parts, calls of its
    parts. Only its parameters are watched, as by Horovod's ``DistributedOptimizer``; the optimizer is a plain one. A
    copy (``copy.deepcopy``, ``torch.load``) is not data-parallel, and neither are parameters that the model gets later:
    call it again. ``wrap_model`` also names parameters that should be used and are not.

    Every backward pass that reaches the model averages all its gradients, so every rank must make equally many, except
    inside ``no_sync`` and ``join``. A parameter that is unused on a rank counts as zero, and if it is unused on all
    ranks its ``.grad`` is zeros. Buffers are broadcast once, now, and stay each rank's own. Of several models, those
    that the backward pass of any rank reaches are averaged on all ranks, at its end.

    Args:
        model: has at least one parameter that requires grad; the same architecture on every rank, on
            ``unidist.device()``. Parameters and buffers are overwritten with those of the group's first rank.
        bucket_cap_mb: bucket size in MiB.
        compression: send gradients in half precision, see ``wrap_model``.
        group: the ranks that train the model together.

    Returns:
        The model itself. Another call replaces the options of the first.

    Raises:
        ValueError: no parameter requires grad, one is lazy, on the meta device or a DTensor, the model is wrapped
            already, or another replicated model has one of its parameters; also a bad option.
        UnidistError: from ``backward()``, when a parameter requires grad that did not when ``replicate`` was called;
            from an optimizer's ``step()``, when parameters have been replaced since.
        MismatchError: on every rank, when the ranks' models differ, also in memory format; names the first difference.
    """
    _check_options(compression, bucket_cap_mb)
    _check_model(model, "replicate")
    inner = _inside(model)
    own = set(inner.parameters())
    before = _replicas.get(inner)
    models = of_world(_Models)
    others = {replica for replica in models.parts.values() if replica is not before}
    if not all(own.isdisjoint(replica.params) for replica in others):
        raise ValueError(
            f"replicate: this {type(model).__name__} shares parameters with a model that is replicated already: "
            "replicate the one that contains the other."
        )
    if before is not None:
        before.close()
    _check_same(inner, group, layout=True)
    options = _options(bucket_cap_mb, compression, group)
    replica = _replicas[inner] = Replica(inner, options, _reducer(inner, options, group), models.replicated)
    models.trained[inner] = TrainedParameters(inner)
    _check_steps()
    for part in list(inner.modules()):
        if next(part.parameters(recurse=False), None) is not None:
            models.parts[part] = replica
    # A backward pass may reach several models in another order on another rank; whether there are several, too, may
    # depend on when a rank frees one.
    together = [replica, *(other for other in others if other.options.ranks == replica.options.ranks)]
    overlap = all_reduce(torch.tensor(len(together)), "max", group).item() == 1
    for each in together:
        each.set_overlap(overlap)
    return model


@cache
def _check_steps() -> None:
    """Let the steps of all optimizers raise from now on where parameters of a replicated model have been replaced."""
    register_optimizer_step_pre_hook(_check_replaced)


def _check_replaced(*_: Any) -> None:
    # Not before a forward pass: a hook of the model would be copied with it. A conversion is none: buckets follow it.
    if is_initialized() and any(trained.replaced() for trained in of_world(_Models).trained.values()):
        raise replaced_parameters("replicate")


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Return a block in which gradients are accumulated on this rank alone, and not averaged.

    The first step outside averages the sum. For gradient accumulation: the forward and backward passes of all
    micro-batches but the last are inside. Not collective.

    Of a wrapped model the forward pass decides, as with ``DistributedDataParallel``: a backward pass inside averages
    all the same if its forward pass was outside (there is a warning), and one outside does not if its forward pass was
    inside. Of a model that was given to ``replicate`` the backward pass decides: there, forward passes inside and the
    last backward pass outside (Accelerate's ``trigger_sync_in_backward``) average.

    Args:
        model: the result of ``wrap_model``, or a model that was given to ``replicate``.

    Raises:
        ValueError: the model is neither.
    """
    if is_wrapped(model):
        with model.no_sync():  # type: ignore[operator]
            yield
        return
    replica = replica_of(model)
    if replica is None:
        raise ValueError(
            f"no_sync({type(model).__name__}): pass what wrap_model returned, or the model that was given to replicate."
        )
    before, replica.sync = replica.sync, False
    try:
        yield
    finally:
        replica.sync = before


def replica_of(model: object) -> Replica | None:
    """Return what averages a model that was given to ``replicate``; None for another."""
    return _replicas.get(_inside(model)) if isinstance(model, nn.Module) else None


def _inside(model: nn.Module) -> nn.Module:
    """Return the model that ``torch.compile`` was given, or the model itself."""
    if isinstance(getattr(model, "_orig_mod", None), nn.Module):
        return model._orig_mod  # type: ignore[return-value]
    return model


@overload
def unwrap(model: WrappedModel[M]) -> M: ...
@overload
def unwrap(model: M) -> M: ...
def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside the result of ``wrap_model`` (and ``torch.compile``); a plain model is returned as it is.

    Not collective. The keys of its state_dict have no prefix ``module.``.
    """
    while True:
        if (inner := _inside(model)) is not model:
            model = inner
        elif is_wrapped(model):
            model = model.module  # type: ignore[assignment]
        else:
            return model


def is_wrapped(model: object) -> bool:
    """Return whether a model is ``wrap_model``'s result, or a ``DistributedDataParallel`` of the user's own."""
    return hasattr(model, "require_backward_grad_sync") and isinstance(getattr(model, "module", None), nn.Module)


def assert_in_sync(model: nn.Module, group: Group | None = None) -> None:
    """Check that every rank has the same parameters, bit for bit. Collective.

    For example before an evaluation: it detects a model that was trained without ``wrap_model``. Buffers are not
    compared; between two steps they may differ.

    Args:
        model: wrapped or not, the same architecture on every rank.
        group: the ranks that compare.

    Raises:
        MismatchError: on every rank; names the first parameter that differs, and the ranks that differ from the first.
        ValueError: a parameter is a DTensor.
    """
    _check_module(model, "assert_in_sync")
    _refuse_sharded(unwrap(model))
    named = list(unwrap(model).named_parameters())
    shapes = [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in named]
    if first_difference([*map(str, digests(p for _, p in named)), *shapes], group) is None:
        return
    difference = first_difference([f"{n!r} {tuple(p.shape)} {p.dtype} {digest(p)}" for n, p in named], group)
    if difference is None:
        return
    ranks = current().ranks(group)
    others = [rank for rank, value in zip(ranks, difference.values) if value != difference.values[0]]
    name = next(str(value).split(" (")[0] for value in difference.values if value is not None)
    cause = "was the model trained without unidist.wrap_model, or changed on some ranks only?"
    wrapped = next((each.trained for each in of_world(_Models).wrapped if unwrap(each) is unwrap(model)), None)
    if wrapped is not None and (wrapped.converted() or wrapped.replaced()):
        cause = str(replaced_parameters("wrap_model"))
    raise MismatchError(
        f"parameter {name} of rank {ranks[0]} differs on rank{'s' * (len(others) > 1)} "
        f"{', '.join(map(str, others))}: {cause}"
    )


def global_mean(loss_sum: Tensor, count: float | Tensor, group: Group | None = None) -> Tensor:
    """Return the loss whose gradient, averaged over the ranks, is that of the mean over all samples. Collective.

    The mean of the ranks' means gives a rank with few samples (or tokens) the same weight as one with many. This is
    ``loss_sum * size / total``, where ``total`` is the sum of the ranks' counts: its average over the ``size`` ranks,
    which is what a wrapped model computes of gradients, is the sum of all losses over the sum of all counts.

    Args:
        loss_sum: 0-d, the sum of this rank's losses (``reduction="sum"``).
        count: number of samples, 0 or more; with gradient accumulation, this rank's number for the whole step, in each
            of its backward passes.
        group: the ranks that train together.

    Returns:
        A 0-d tensor with a gradient; 0 if no rank has any sample. Its mean over the ranks is the loss of the global
        batch.

    Raises:
        ValueError: on every rank, if a rank's count is negative or not finite.
    """
    mine = float(count)
    total = all_reduce(
        torch.tensor(mine if 0 <= mine < math.inf else math.nan, dtype=torch.float64), "sum", group
    ).item()
    if math.isnan(total):
        raise ValueError(f"global_mean(count={mine}): a count is negative or not finite, on this rank or on another.")
    return loss_sum * (len(current().ranks(group)) / total if total else 0.0)


def broadcast_model_state(model: nn.Module, src: int = 0, group: Group | None = None) -> None:
    """Give every rank the parameters and buffers of rank ``src``. Collective.

    For a model that is not wrapped, or weights that only rank ``src`` has loaded; ``wrap_model`` itself broadcasts rank
    0's.

    Args:
        model: wrapped or not, the same architecture on every rank.
        src: a global rank of the group.
        group: the ranks that take part.

    Raises:
        MismatchError: on every rank, when the models differ; names the first difference.
    """
    _check_module(model, "broadcast_model_state")
    model = unwrap(model)
    _check_same(model, group)
    broadcast_tensors_([*model.parameters(), *model.buffers()], src, group)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, src: int = 0, group: Group | None = None) -> None:
    """Give every rank the optimizer state of rank ``src``: hyperparameters and per-parameter state. Collective.

    For state that only rank ``src`` has loaded. No step is taken and no weight changes; an optimizer without state
    remains without.

    Args:
        optimizer: the same parameter groups on every rank.
        src: a global rank of the group.
        group: the ranks that take part.

    Raises:
        MismatchError: on every rank, when the parameter groups differ in size.
    """
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"broadcast_optimizer_state takes a torch.optim.Optimizer, not {type(optimizer).__name__}: pass that; "
            "a model goes to broadcast_model_state."
        )
    difference = first_difference([len(entry["params"]) for entry in optimizer.param_groups], group)
    if difference is not None:
        what = f"the optimizer's parameter group {difference.position} has {{}} parameters"
        _same_everywhere([value or 0 for value in difference.values], what, group)
    state = optimizer.state_dict()
    # The structure contains everything but the data of the tensors.
    structure = broadcast_object(map_leaves(_describe, state), src, group)
    if current().topology.rank != src:
        state = map_leaves(lambda leaf: leaf.empty(optimizer) if isinstance(leaf, _Described) else leaf, structure)
    broadcast_tensors_([leaf for _, leaf in walk(state) if isinstance(leaf, Tensor)], src, group)
    if current().topology.rank == src:
        return
    optimizer.load_state_dict(state)
    params = [param for entry in optimizer.param_groups for param in entry["params"]]
    ids = [id_ for entry in state["param_groups"] for id_ in entry["params"]]
    for id_, param in zip(ids, params):
        # load_state_dict has converted what is not of the parameter's dtype.
        own = optimizer.state.get(param)
        if not isinstance(own, dict):  # an optimizer may load its state in a way of its own
            continue
        for name, value in state["state"].get(id_, {}).items():
            loaded = own.get(name)
            if isinstance(value, Tensor) and isinstance(loaded, Tensor) and value.dtype != loaded.dtype:
                own[name] = value.to(loaded.device)


# ---------------------------------------------------------------------------------------------
class _Described:
    """A tensor without its data."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype
        self.on_cpu = tensor.device.type == "cpu"

    def empty(self, optimizer: torch.optim.Optimizer) -> Tensor:
        params = (param for group in optimizer.param_groups for param in group["params"])
        device = torch.device("cpu") if self.on_cpu else next(params).device
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def _describe(leaf: Any) -> Any:
    return _Described(leaf) if isinstance(leaf, Tensor) else leaf


def _check_options(compression: str | None, bucket_cap_mb: float) -> None:
    if compression is not None and compression not in _COMPRESSION:
        raise ValueError(f"compression={compression!r} is unknown: use 'fp16', 'bf16' or None.")
    if bucket_cap_mb <= 0:
        raise ValueError(f"bucket_cap_mb={bucket_cap_mb} must be above 0 MiB.")


def _check_module(model: object, call: str) -> None:
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(
            f"{call} takes a torch.nn.Module, not {kind}: pass the model itself, not its class, its "
            "state_dict() or its optimizer."
        )


def _check_model(model: nn.Module, call: str) -> None:
    _check_module(model, call)
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(f"{call}: no parameter of this model requires grad, so there is nothing to average.")
    if is_wrapped(model):
        raise ValueError(f"{call}: this {type(model).__name__} is wrapped already: pass its .module.")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(
                f"{call}: {name!r} has no shape yet, as it is of a lazy module: run one forward pass before {call}, on "
                "every rank."
            )
        if tensor.is_meta:
            raise ValueError(
                f"{call}: {name!r} is on the meta device and has no data: move the model with "
                f"model.to_empty(device=unidist.device()), initialise it, and then call {call}."
            )
    _refuse_sharded(model)


def _wrap(model: M, options: ModelOptions, group: Group | None) -> Wrapper[M]:
    """Wrap it by DDP where the backend has a process group of torch. Collective."""
    backend = current()
    process_group = backend.process_group(group, next(model.parameters()).device.type)
    if process_group is None:
        return DataParallel(model, options, _reducer(model, options, group))
    from unidist.gradients.ddp import wrap_in_ddp

    return wrap_in_ddp(model, options, process_group, GradientReducer(current, None, group))


def _reducer(model: nn.Module, options: ModelOptions, group: Group | None) -> GradientReducer | None:
    """Return what reduces the gradients of a model, which starts with the first rank's weights; None in a world of one
    rank. Collective.
    """
    if current().name == "single":
        return None
    reducer = GradientReducer(current, options.compression, group)
    broadcast_tensors_([*model.parameters(), *model.buffers()], reducer.ranks[0], group)
    return reducer


def _options(bucket_cap_mb: float, compression: str | None, group: Group | None) -> ModelOptions:
    return ModelOptions(
        broadcast_buffers=False,
        bucket_cap_mb=bucket_cap_mb,
        compression=_COMPRESSION[compression] if compression else None,
        ranks=current().ranks(group),
        in_join=in_join,
    )


def _refuse_sharded(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if hasattr(param, "device_mesh") and hasattr(param, "placements"):
            raise ValueError(
                f"parameter {name!r} is a DTensor, of which each rank has a shard: wrap_model, replicate and "
                "assert_in_sync take full tensors. FSDP2 and tensor parallelism reduce gradients themselves: train "
                "without wrap_model."
            )


def _check_same(model: nn.Module, group: Group | None, *, layout: bool = False) -> None:
    """Raise on every rank if the ranks' parameters and buffers differ; with ``layout``, in memory format too."""
    mine = [
        *(
            f"parameter {name} {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}"
            + f" strides={p.stride()}" * layout
            for name, p in model.named_parameters()
        ),
        *(f"buffer {name} {tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers()),
    ]
    difference = first_difference(mine, group)
    if difference is not None:
        entries = ["nothing more" if value is None else value for value in difference.values]
        _same_everywhere(entries, f"the models differ at entry {difference.position}, which is {{}}", group)


def _same_everywhere(values: Sequence[T], what: str, group: Group | None) -> None:
    for rank, value in zip(current().ranks(group), values):
        if value != values[0]:
            first = current().ranks(group)[0]
            raise MismatchError(
                f"{what.format(values[0])} on rank {first}, but {value} on rank {rank}: they must be the same on "
                "every rank."
            )
