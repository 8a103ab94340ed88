"""Trains a model on a mesh of 2 x 2 ranks, tensor parallelism beside FSDP2, and the same model on each rank alone.

torchrun --nproc-per-node 4 tests/programs/mesh.py DIRECTORY
"""

import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torchmetrics
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

import unidist

BATCH = 8


class Training:
    """A model, its optimizer, and its data, which the ranks of a group divide among them."""

    def __init__(self, seed: int, group: unidist.Group, mesh: DeviceMesh | None = None) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))
        if mesh is not None:
            parallelize_module(self.model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            fully_shard(self.model, mesh=mesh["dp"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        data = TensorDataset(torch.linspace(-1, 1, 240).view(40, 6), torch.arange(40) % 2)
        self.loader = unidist.shard_loader(DataLoader(data, BATCH // group.size(), shuffle=True), group=group)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "train": self.loader}
        self.batches: Iterator[Any] | None = None
        self.seen: list[float] = []
        self.loss, self.mean = unidist.Mean(group), unidist.wrap_metric(torchmetrics.MeanMetric(), group)

    def run(self, steps: int) -> list[torch.Tensor]:
        """The weights after so many steps, and the loss over all samples."""
        self.batches = self.batches or iter(self.loader)
        for inputs, targets in islice(self.batches, steps):
            loss = nn.functional.cross_entropy(self.model(inputs), targets)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.seen += inputs[:, 0].tolist()
            self.loss.update(loss, len(inputs))
            self.mean.update(loss.detach(), len(inputs))
        weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in self.model.parameters()]
        metrics = torch.tensor([self.loss.compute(), self.mean.compute()])
        self.loss.reset()
        self.mean.reset()
        return [*(weight.detach().clone() for weight in weights), metrics]


def main() -> None:
    unidist.init("gloo")
    mesh, other = (init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")) for shape in ((2, 2), (4, 1)))
    dp = unidist.new_group(mesh["dp"])
    assert dp.ranks == ((0, 2) if unidist.rank() % 2 == 0 else (1, 3))
    alone = [unidist.new_group([rank]) for rank in range(4)][unidist.rank()]

    one = Training(1, alone)
    middle, end = one.run(3), one.run(2)
    ours = Training(1, dp, mesh)
    torch.testing.assert_close(ours.run(3), middle)
    first, second, third, fourth = map(set, unidist.all_gather_object(ours.seen))
    assert first == second and third == fourth and first | third == set(one.seen[:24]) and len(first | third) == 24
    path = f"{sys.argv[1]}/step-3"
    unidist.save_checkpoint(path, **ours.state)

    for resumed in (Training(2, dp, mesh), Training(3, unidist.new_group(other["dp"]), other), Training(4, alone)):
        assert unidist.load_checkpoint(path, **resumed.state) == {}
        torch.testing.assert_close(resumed.run(2), end)
        assert next(resumed.batches, None) is None
    unidist.print("the same as in one process")
    unidist.shutdown()


if __name__ == "__main__":
    main()
