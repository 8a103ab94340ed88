"""Data-parallel models: one wrapper with DDP's behaviour on every engine."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from unidist.backends.base import Group, ModelOptions
from unidist.batch_norm import convert_batch_norm
from unidist.collectives import all_gather_object, broadcast, broadcast_object
from unidist.context import current
from unidist.errors import MismatchError
from unidist.tree import map_leaves, walk

_COMPRESSION = {"fp16": torch.float16, "bf16": torch.bfloat16}
T = TypeVar("T")


def wrap_model(
    model: nn.Module,
    *,
    sync_bn: bool = False,
    find_unused_parameters: bool = False,
    broadcast_buffers: bool = True,
    bucket_cap_mb: float = 25,
    compression: Literal["fp16", "bf16"] | None = None,
    static_graph: bool = False,
    group: Group | None = None,
) -> nn.Module:
    """Make a model data-parallel: after ``backward()``, each ``.grad`` is the mean over the ranks. Collective.

    The optimizer stays a plain one, and everything between ``backward()`` and ``step()`` (clipping,
    scaling, skipping) sees the averaged gradients. The result has the face of
    ``DistributedDataParallel`` (which it is on the torch engines): ``.module``, ``no_sync()``, and
    state_dict keys that begin with ``module.``.

    Move the model to ``unidist.device()`` first, and freeze parameters before wrapping.

    Args:
        model: at least one parameter that requires grad; the same architecture on every rank. Its
            parameters and buffers become those of the group's first rank.
        sync_bn: normalise over the batches of all ranks: BatchNorm layers are replaced, on CPU too.
        find_unused_parameters: let parameters take no part in a backward pass. One that is unused on this
            rank counts as zero in the mean; one that is unused on all ranks keeps its ``.grad``.
        broadcast_buffers: buffers follow the first rank's once a step: before each forward pass that records gradients
            outside ``no_sync()`` on the torch engines, during its backward pass on Horovod.
        bucket_cap_mb: size in MiB of the pieces in which gradients travel while backward runs.
        compression: send gradients in half precision. Horovod adds up no bfloat16: there ``bf16`` rounds
            the gradients and sends them in float32.
        static_graph: promise DDP that the graph never changes; of no effect on Horovod.
        group: the ranks that train this model together.

    Raises:
        ValueError: no parameter requires grad, the model is wrapped already, or an option has no such value.
        UnidistError: from ``backward()`` (on the torch engines from the next forward pass), when parameters got no
            gradient and ``find_unused_parameters`` is off; names them.
        MismatchError: on every rank, when the ranks' models differ; names the first difference.
    """
    if compression is not None and compression not in _COMPRESSION:
        raise ValueError(f"compression={compression!r} is unknown: use 'fp16', 'bf16' or None.")
    if bucket_cap_mb <= 0:
        raise ValueError(f"bucket_cap_mb={bucket_cap_mb} must be above 0 MiB.")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("wrap_model: no parameter of this model requires grad, so there is nothing to average.")
    if hasattr(model, "require_backward_grad_sync"):
        raise ValueError(f"wrap_model: this {type(model).__name__} is wrapped already: pass its .module.")
    _check_same(model, group)
    if sync_bn:
        model = convert_batch_norm(model, group)
    options = ModelOptions(
        find_unused_parameters=find_unused_parameters,
        broadcast_buffers=broadcast_buffers,
        bucket_cap_mb=bucket_cap_mb,
        compression=_COMPRESSION[compression] if compression else None,
        static_graph=static_graph,
    )
    return current().wrap_model(model, options, group)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, src: int = 0, group: Group | None = None) -> None:
    """Give every rank the optimizer state of rank ``src``: hyperparameters and per-parameter state. Collective.

    For state that only rank ``src`` has loaded. No step is taken and no weight changes; an optimizer that
    has taken no step yet stays without state.

    Args:
        optimizer: the same parameter groups on every rank.
        src: a global rank of the group.
        group: the ranks that take part.

    Raises:
        MismatchError: on every rank, when the parameter groups differ in size.
    """
    counts = all_gather_object([len(entry["params"]) for entry in optimizer.param_groups], group)
    _same_everywhere(counts, "the optimizer's parameter groups have {} parameters", group)
    state = optimizer.state_dict()
    tensors = [leaf for _, leaf in walk(state) if isinstance(leaf, Tensor)]
    # The frame carries everything but the numbers of the tensors, which follow one by one.
    frame = broadcast_object(map_leaves(_describe, state), src, group)
    is_src = current().topology.rank == src
    sent = iter(tensors)

    def receive(leaf: Any) -> Any:
        if not isinstance(leaf, _Described):
            return leaf
        local = next(sent) if is_src else leaf.empty(optimizer)
        return broadcast(local, src, group)

    optimizer.load_state_dict(map_leaves(receive, frame))


# ---------------------------------------------------------------------------------------------
class _Described:
    """Stands for a tensor: all but its numbers."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype
        self.on_cpu = tensor.device.type == "cpu"

    def empty(self, optimizer: torch.optim.Optimizer) -> Tensor:
        device = torch.device("cpu") if self.on_cpu else optimizer.param_groups[0]["params"][0].device
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def _describe(leaf: Any) -> Any:
    return _Described(leaf) if isinstance(leaf, Tensor) else leaf


def _check_same(model: nn.Module, group: Group | None) -> None:
    """Raise on every rank if the ranks' parameters and buffers differ."""
    mine = [
        *(f"parameter {name} {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}" for name, p in model.named_parameters()),
        *(f"buffer {name} {tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers()),
    ]  # fmt: skip
    everyone = all_gather_object(mine, group)
    for index in range(max(map(len, everyone))):
        entries = [entry[index] if index < len(entry) else "nothing more" for entry in everyone]
        _same_everywhere(entries, f"the models differ at entry {index}, which is {{}}", group)


def _same_everywhere(values: list[T], what: str, group: Group | None) -> None:
    for rank, value in zip(current().ranks(group), values):
        if value != values[0]:
            first = current().ranks(group)[0]
            raise MismatchError(
                f"{what.format(values[0])} on rank {first}, but {value} on rank {rank}: build the same on every rank."
            )
