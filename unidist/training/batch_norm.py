"""Batch normalisation over the batches of all ranks, on every backend and device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized

from unidist.backends.base import Group
from unidist.collectives.operations import all_reduce
from unidist.context import current


class SyncBatchNorm(_BatchNorm):
    """BatchNorm of 1, 2 or 3 dimensions with the statistics of all ranks' samples in training.

    Input of shape ``(N, C, ...)``; N may differ between ranks, 0 included. In training mode ``forward``
    and ``backward`` are collective over ``group``. The ranks' means and variances are combined by the
    formula of Chan, Golub and LeVeque (1979), which avoids cancellation.
    """

    group: Group | None = None

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm takes (N, C, ...), not shape {tuple(input.shape)}.")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training:
            local = self.running_mean is None  # this batch's own statistics
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, local, 0.0, self.eps
            )
        mean, var, count = self._statistics(input)
        if self.track_running_stats:
            self._track(mean.detach(), var.detach(), count.detach())
        shape = [1, -1] + [1] * (input.dim() - 2)
        scale = torch.rsqrt(var + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        shift = -mean * scale
        if self.bias is not None:
            shift = shift + self.bias
        return (input * scale.view(shape) + shift.view(shape)).to(input.dtype)

    def _statistics(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and biased variance of each channel over all ranks, and the number of values."""
        backend = current()
        ranks = backend.ranks(self.group)
        rows = input.transpose(0, 1).reshape(input.shape[1], -1).to(torch.promote_types(input.dtype, torch.float32))
        n = rows.shape[1]
        mean = rows.mean(1) if n else rows.sum(1)
        var = rows.var(1, unbiased=False) if n else rows.sum(1)
        mine = torch.cat([mean, var, mean.new_tensor([n])])
        # A row per rank, zeros on the others: the sum is a gather with gradients.
        table = F.pad(mine.unsqueeze(0), (0, 0, ranks.index(backend.topology.rank), 0))
        table = all_reduce(F.pad(table, (0, 0, 0, len(ranks) - table.shape[0])), "sum", self.group)
        means, variances, counts = torch.split(table, [len(mean), len(var), 1], dim=1)
        count = counts.sum()
        total_mean = (counts * means).sum(0) / count
        total_var = (counts * (variances + (means - total_mean) ** 2)).sum(0) / count
        return total_mean, total_var, count

    def _track(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = self.momentum
        weight = 1.0 / float(self.num_batches_tracked) if momentum is None else momentum
        unbiased = var * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), weight)


def convert_batch_norm(module: nn.Module, group: Group | None) -> None:
    """Make each BatchNorm inside ``module`` a ``SyncBatchNorm``: the layers stay the objects that they are.

    Raises:
        ValueError: a layer has a ``forward`` of its own or a parametrization, which would be lost.
    """
    layers = [each for each in module.modules() if isinstance(each, _BatchNorm) and not isinstance(each, SyncBatchNorm)]
    for layer in layers:
        own = "forward" in vars(layer) or not type(layer).forward.__module__.startswith("torch.nn.")
        if own or is_parametrized(layer):
            raise ValueError(
                f"sync_bn=True: {type(layer).__name__} is a BatchNorm with a forward of its own or a parametrization, "
                "which SyncBatchNorm does not have: use a plain BatchNorm and do the rest in a module after it, or "
                "leave out sync_bn."
            )
    for layer in layers:
        layer.__class__ = SyncBatchNorm
        layer.group = group  # type: ignore[assignment]
