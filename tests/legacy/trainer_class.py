"""A trainer that keeps the module, and imports it only when asked."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


def batches(rank, size, steps=6, rows=12):
    draw = torch.Generator().manual_seed(11)
    for _ in range(steps):
        x, y = torch.randn(rows, 4, generator=draw), torch.randint(0, 3, (rows,), generator=draw)
        yield x[rank::size], y[rank::size]


def make_model():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


class Trainer:
    def __init__(self, horovod):
        self.hvd = None
        if horovod:
            try:
                import horovod.torch as hvd
            except ImportError:
                raise SystemExit("no horovod")
            hvd.init()
            self.hvd = hvd
        self.model = make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        if self.hvd:
            self.hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
            self.hvd.broadcast_optimizer_state(self.optimizer, root_rank=0)
            self.optimizer = self.hvd.DistributedOptimizer(
                self.optimizer, named_parameters=self.model.named_parameters(), compression=self.hvd.Compression.fp16
            )

    @property
    def rank(self):
        return self.hvd.rank() if self.hvd else 0

    @property
    def size(self):
        return self.hvd.size() if self.hvd else 1

    def fit(self):
        for x, y in batches(self.rank, self.size):
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()

    def save(self, path):
        if self.rank == 0:
            torch.save(self.model.state_dict(), path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("--horovod", action="store_true", default=True)
    args = parser.parse_args()
    trainer = Trainer(args.horovod)
    trainer.fit()
    trainer.save(args.path)
