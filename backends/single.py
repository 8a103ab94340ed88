"""A world of one process, with the full contract."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unidist.backends.base import Backend, Group, Op, Start, Wait
from unidist.backends.device import default_device
from unidist.launch.topology import Slot, locate


class SingleBackend(Backend):
    """A world of one rank, in which reductions leave tensors as they are."""

    device_types = frozenset({"cpu", "cuda", "mps", "xpu", "meta"})
    works_in_forks = True

    @classmethod
    def start(cls, name: str, start: Start) -> SingleBackend:
        launch = start.launch
        slots = [Slot("", launch.local_rank, launch.node_rank)] * launch.world_size
        return cls(name, locate(launch, slots), default_device(start.device, 0))

    def shutdown(self) -> None:
        pass

    def quiesce(self) -> None:
        pass

    def world_size(self) -> int:
        return 1

    def new_group(self, ranks: tuple[int, ...]) -> Group:
        return Group(ranks, None)

    def start_all_reduce(
        self, tensor: torch.Tensor, op: Op, group: Group | None = None, *, call: str = "all_reduce"
    ) -> Wait:
        return lambda: None

    def start_broadcast(self, tensor: torch.Tensor, src: int, group: Group | None = None) -> Wait:
        return lambda: None

    def all_gather(self, tensor: torch.Tensor, sizes: Sequence[int], group: Group | None = None) -> torch.Tensor:
        return tensor.clone()

    def all_to_all(
        self, tensor: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: Group | None = None
    ) -> torch.Tensor:
        return tensor.clone()

    def reduce_scatter(self, tensor: torch.Tensor, op: Op, group: Group | None = None) -> torch.Tensor:
        return tensor.clone()
