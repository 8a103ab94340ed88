"""Metrics that accumulate on each rank, and are reduced over all ranks when they are computed."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from unidist.backends.base import Group
from unidist.collectives.metric_reduction import allreduce_metric
from unidist.collectives.operations import all_gather_object
from unidist.context import current
from unidist.tree import map_leaves

M = TypeVar("M")


class Metric:
    """Totals of this rank. ``update`` is local and does not wait for the device; ``compute`` is collective.

    Args:
        group: the ranks that ``compute`` combines; default: the world.
    """

    def __init__(self, group: Group | None = None) -> None:
        self.group = group
        self.reset()

    def reset(self) -> None:
        """Set the totals back to zero."""
        self._totals: dict[torch.device, list[Tensor | float]] = {}

    def _add(self, *amounts: Tensor | float) -> None:
        # Totals per device, so that no update waits for a GPU.
        device = next((amount.device for amount in amounts if isinstance(amount, Tensor)), torch.device("cpu"))
        before = self._totals.get(device, [0.0] * len(amounts))
        self._totals[device] = [total + amount for total, amount in zip(before, amounts)]

    def _reduce(self, length: int) -> list[float]:
        """Return the totals over all ranks, in one collective."""
        mine = [0.0] * length
        for row in self._totals.values():
            mine = [total + float(amount) for total, amount in zip(mine, row)]
        return allreduce_metric(mine, op="sum", group=self.group)


def _doubles(value: object, call: str) -> Tensor:
    return value.detach().double() if isinstance(value, Tensor) else _tensor(value, call, torch.float64)


def _tensor(value: object, call: str, dtype: torch.dtype | None = None) -> Tensor:
    try:
        return torch.as_tensor(value, dtype=dtype).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{call} takes tensors and numbers, not {type(value).__name__}: {error}") from error


class Mean(Metric):
    """The weighted mean of all values of all ranks.

    ::

        mean_loss = unidist.Mean()
        for inputs, targets in loader:
            ...
            mean_loss.update(loss, len(inputs))
        loss = mean_loss.compute()
    """

    def update(self, value: float | Tensor, weight: float | Tensor = 1.0) -> None:
        """Add a value, or each element of a tensor or an array, with a weight, such as the number of samples it is the
        mean of.

        A value of weight 0 does not count, whatever it is.

        Raises:
            ValueError: the weights have a shape that cannot be expanded to that of the values.
        """
        if isinstance(value, (int, float)) and isinstance(weight, (int, float)):
            self._add(value * weight if weight else 0.0, weight)
            return
        values, weights = _doubles(value, "Mean.update"), _doubles(weight, "Mean.update")
        device = values.device if isinstance(value, Tensor) else weights.device
        weights = weights.to(device)
        if values.dim():
            try:
                weights = weights.expand_as(values)
            except RuntimeError:
                raise ValueError(
                    f"Mean.update: weights of shape {tuple(weights.shape)} do not fit values of shape "
                    f"{tuple(values.shape)}: reshape one of them."
                ) from None
        products = torch.where(weights == 0, 0.0, values.to(device) * weights)
        self._add(products.sum(), weights.expand_as(products).sum())

    def compute(self) -> float:
        """Return the mean over all ranks; nan without any weight, or if a value was nan. Collective."""
        total, weight = self._reduce(2)
        return total / weight if weight else float("nan")


class Sum(Metric):
    """The sum of all values of all ranks, in float64; for exact integers use ``allreduce_metric(n, op="sum")``."""

    def update(self, value: float | Tensor) -> None:
        """Add a value, or each element of a tensor or an array."""
        self._add(value if isinstance(value, (int, float)) else _doubles(value, "Sum.update").sum())

    def compute(self) -> float:
        """Return the sum over all ranks; 0 without any value. Collective."""
        return self._reduce(1)[0]


class Accuracy(Metric):
    """The fraction of correct predictions over all ranks.

    Args:
        top_k: a prediction is correct if the target is among the ``top_k`` highest scores.
        ignore_index: targets of this value do not count, as in ``torch.nn.functional.cross_entropy``.
        group: the ranks that ``compute`` combines; default: the world.
    """

    def __init__(self, top_k: int = 1, ignore_index: int | None = None, group: Group | None = None) -> None:
        super().__init__(group)
        if top_k < 1:
            raise ValueError(f"Accuracy(top_k={top_k}) must be 1 or more.")
        self.top_k = top_k
        self.ignore_index = ignore_index

    def update(self, output: Tensor, target: Tensor) -> None:
        """Add a batch of predictions.

        Args:
            output: scores of shape ``(N, C, ...)`` with 2 classes or more, or predicted classes of the shape of
                ``target``.
            target: classes of shape ``(N, ...)``, integers or bool. With one score per sample, pass ``scores >
                threshold``.

        Raises:
            ValueError: the shapes do not fit, or there are fewer classes than ``top_k``.
        """
        output = _tensor(output, "Accuracy.update")
        target = _tensor(target, "Accuracy.update").to(output.device)
        classes = not (output.dtype.is_floating_point or target.dtype.is_floating_point)
        fits = output.dim() == target.dim() + 1 and output.shape[:1] + output.shape[2:] == target.shape
        if output.shape == target.shape and classes and self.top_k == 1:
            correct = output == target
        elif fits and output.shape[1] >= max(2, self.top_k) and not target.dtype.is_floating_point:
            correct = (output.topk(self.top_k, dim=1).indices == target.unsqueeze(1)).any(1)
        else:
            raise ValueError(
                f"Accuracy(top_k={self.top_k}) takes (N, C, ...) scores of 2 classes or more with (N, ...) classes, "
                "or classes of "
                f"one shape, not {output.dtype} {tuple(output.shape)} with {target.dtype} {tuple(target.shape)}."
            )
        counted = torch.ones_like(correct) if self.ignore_index is None else target != self.ignore_index
        self._add((correct & counted).sum().double(), counted.sum().double())

    def compute(self) -> float:
        """Return the accuracy, from 0 to 1; nan without any prediction. Collective."""
        correct, counted = self._reduce(2)
        return correct / counted if counted else float("nan")


def wrap_metric(metric: M, group: Group | None = None) -> M:
    """Make a torchmetrics metric, or a collection of them, compute over all ranks, on any backend.

    Not collective itself; afterwards ``metric.compute()`` is. A rank without samples contributes nothing.
    What ``metric(...)`` returns for a batch stays this rank's own, as in torchmetrics.

    Args:
        metric: it is changed.
        group: the ranks that ``compute`` combines; default: the world.

    Returns:
        The metric that was passed.

    Raises:
        TypeError: not a torchmetrics ``Metric`` or ``MetricCollection``.
    """
    if hasattr(metric, "items") and hasattr(metric, "compute"):
        for _, part in metric.items(keep_base=True, copy_state=False):
            wrap_metric(part, group)
        return metric
    if not hasattr(metric, "dist_sync_fn"):
        raise TypeError(
            f"wrap_metric takes a torchmetrics metric, not {type(metric).__name__}: unidist.Mean and the like need no "
            "wrapping."
        )
    own: Any = metric
    own.dist_sync_fn, own.process_group = _gather, group or own.process_group
    own.distributed_available_fn = _has_peers
    sync = type(own)._sync_dist
    if (sync.__module__, sync.__qualname__) == ("torchmetrics.metric", "Metric._sync_dist"):  # else it has its own way
        own._sync_dist = partial(_sync, own)
    for child in own.modules() if hasattr(own, "modules") else ():
        if child is not own and hasattr(child, "dist_sync_fn"):
            wrap_metric(child, group)
    return metric


def _gather(tensor: Tensor, group: Group | None = None) -> list[Tensor]:
    """torchmetrics' ``dist_sync_fn``: every rank's tensor, of any shapes."""
    return [part.to(tensor.device) for part in all_gather_object(tensor.detach().cpu(), group)]


def _sync(metric: Any, gather: object = None, process_group: Group | None = None) -> None:
    """torchmetrics' ``Metric._sync_dist`` in one collective: that gathers each tensor of a list on its own, where the
    ranks may have lists of different lengths, and has float32 in place of an empty one.
    """
    own = {name: getattr(metric, name) for name in metric._reductions}
    states = all_gather_object(map_leaves(_on_cpu, own), process_group or metric.process_group)
    for name, reduction in metric._reductions.items():
        parts = [state[name] for state in states]
        if isinstance(own[name], list):
            device = own[name][0].device if own[name] else metric.device
            whole: Any = [tensor.to(device) for part in parts for tensor in part]
        else:
            whole = torch.stack(parts).to(own[name].device)
        is_kept = reduction is None or (isinstance(whole, list) and not whole)
        setattr(metric, name, whole if is_kept else reduction(whole))


def _on_cpu(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf


def _has_peers() -> bool:
    return current().topology.world_size > 1
