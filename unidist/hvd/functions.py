"""Broadcasting models, optimizers and objects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from unidist.collectives.operations import unpickled
from unidist.hvd.mpi_ops import allgather, broadcast_, broadcast_async_, rank, synchronize
from unidist.hvd.optimizer import _DistributedOptimizer, with_first_state
from unidist.hvd.process_sets import ProcessSet, global_process_set
from unidist.training import model as models

try:  # it takes lambdas and what a script defines
    from cloudpickle import dumps as dumps
except ImportError:
    from pickle import dumps as dumps


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrite tensors, in place, with those of rank ``root_rank``. Collective.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` as a list or dict, or a list of tensors. Entries
            that are None, on every rank, are left out.
        root_rank: a global rank.

    Raises:
        ValueError: ``params`` is neither a dict nor a list.
    """
    if isinstance(params, dict):
        named: Iterable[tuple[str | None, Any]] = sorted(params.items())
    elif isinstance(params, list):
        named = [entry if isinstance(entry, tuple) else (None, entry) for entry in params]
    else:
        raise ValueError(
            f"broadcast_parameters takes a dict or a list, not {type(params)}: pass list(...) of an iterator."
        )
    handles = [broadcast_async_(tensor, root_rank, name) for name, tensor in named if tensor is not None]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give every rank the optimizer state of rank ``root_rank``: hyperparameters and per-parameter state. Collective.

    An optimizer without state takes a step with zero gradients first, and the gradients stay zeros, as with Horovod:
    Adam's step count then begins at 1, and weight decay changes weights. If the root's has state, no rank takes that
    step, with which Horovod lets the weights of the other ranks drift from the root's.
    ``unidist.broadcast_optimizer_state`` never takes one.

    Args:
        optimizer: wrapped or not, the same parameter groups on every rank.
        root_rank: a global rank.
        model: its sparse embeddings get sparse gradients if the optimizer is ``SGD``; ``SparseAdam`` has no others.

    Raises:
        ValueError: the optimizer is ``LBFGS``.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state: broadcast_object(optimizer.state_dict()) can.")
    is_new = not optimizer.state_dict()["state"]
    if is_new:
        _zero_gradients(optimizer, model)
    steps = broadcast_object(is_new, root_rank) and is_new
    if steps:
        plain = super(_DistributedOptimizer, optimizer) if isinstance(optimizer, _DistributedOptimizer) else optimizer
        plain.step()  # type: ignore[union-attr]  # a DistributedOptimizer's own would reduce gradients
    models.broadcast_optimizer_state(optimizer, root_rank)
    if steps:
        with_first_state[optimizer] = optimizer.state


def _zero_gradients(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
    sparse = {
        layer.weight
        for layer in (model.modules() if model is not None else ())
        if isinstance(layer, torch.nn.Embedding) and layer.sparse and isinstance(optimizer, torch.optim.SGD)
    }
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if param.requires_grad:
            zeros = torch.zeros_like(param)
            is_sparse = param in sparse or isinstance(optimizer, torch.optim.SparseAdam)
            param.grad = zeros.to_sparse() if is_sparse else zeros


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the object of rank ``root_rank`` on every rank; anything that pickle (or cloudpickle, if installed) takes.
    Collective.

    Args:
        obj: looked at on the root only.
        root_rank: a global rank.
        name: by which ranks match operations that run at the same time.
        process_set: the ranks that take part.
    """
    is_root = rank() == root_rank
    data = _bytes(obj) if is_root else torch.empty(0, dtype=torch.uint8)
    length = broadcast_(torch.tensor([len(data)]), root_rank, name and f"{name}.sz", process_set)
    if not is_root:
        data = torch.empty(int(length), dtype=torch.uint8)
    broadcast_(data, root_rank, name and f"{name}.t", process_set)
    return obj if is_root else unpickled(data)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return every rank's object, in rank order; anything that pickle (or cloudpickle, if installed) takes. Collective.

    Args:
        obj: this rank's.
        name: by which ranks match operations that run at the same time.
    """
    data = _bytes(obj)
    lengths = allgather(torch.tensor([len(data)]), name and f"{name}.sz")
    whole = allgather(data, name and f"{name}.t")
    return [unpickled(part) for part in torch.split(whole, lengths.tolist())]


def _bytes(obj: Any) -> Tensor:
    return torch.frombuffer(bytearray(dumps(obj)), dtype=torch.uint8)
