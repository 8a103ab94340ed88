"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

from torch import Tensor

from unidist.training import batch_norm


class SyncBatchNorm(batch_norm.SyncBatchNorm):
    """BatchNorm of 1, 2 or 3 dimensions whose training statistics are those of all ranks' samples; on any device.

    Args:
        num_features: channels C of an input of shape ``(N, C, ...)``.
        eps: added to the variance.
        momentum: of the running statistics; None averages all batches.
        affine: whether there are a weight and a bias.
        track_running_stats: whether evaluation takes running statistics.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-05,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
