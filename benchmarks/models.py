"""The models whose training step is measured, each with a batch for one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Workload(NamedTuple):
    """A model and what one step feeds it."""

    make: Callable[[], nn.Module]
    #: Makes inputs and class labels.
    batch: Callable[[], tuple[Tensor, Tensor]]


def many_small() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(100) for layer in (nn.Linear(64, 64), nn.ReLU())))


def twelve_big() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(1024, 1024), nn.ReLU())))


class Transformer(nn.Module):
    """Four encoder layers over characters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(128, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.head(self.layers(self.embed(tokens)))
        return hidden.flatten(0, 1)


class Block(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, inside: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(inside, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out))
        self.short = nn.Conv2d(inside, out, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.second(self.first(images)) + self.short(images))


def resnet() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    blocks = [Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)]
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def _vectors(width: int) -> tuple[Tensor, Tensor]:
    return torch.randn(32, width), torch.randint(0, width, (32,))


WORKLOADS = {
    "many small layers": Workload(many_small, lambda: _vectors(64)),
    "12 big layers": Workload(twelve_big, lambda: _vectors(1024)),
    "small transformer": Workload(
        Transformer, lambda: (torch.randint(0, 256, (8, 64)), torch.randint(0, 256, (8 * 64,)))
    ),
    "small ResNet": Workload(resnet, lambda: (torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,)))),
}
