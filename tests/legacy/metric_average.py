"""Metrics averaged by helpers: a name in the place of ``average``, and counts as integers."""

import sys

import horovod.torch as hvd
import torch
import torch.nn as nn
import torch.nn.functional as F


def metric_average(val, name):
    tensor = torch.tensor(val)
    avg_tensor = hvd.allreduce(tensor, name=name)
    return avg_tensor.item()


class Metric:
    def __init__(self, name):
        self.name = name
        self.sum = torch.tensor(0.0)
        self.n = torch.tensor(0.0)

    def update(self, val):
        self.sum += hvd.allreduce(val.detach().cpu(), self.name)
        self.n += 1

    @property
    def avg(self):
        return self.sum / self.n


def batches(rank, size, steps=6, rows=12):
    draw = torch.Generator().manual_seed(11)
    for _ in range(steps):
        x, y = torch.randn(rows, 4, generator=draw), torch.randint(0, 3, (rows,), generator=draw)
        yield x[rank::size], y[rank::size]


def make_model():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


hvd.init()
model = make_model()
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
loss_metric = Metric("train_loss")
correct = 0
for x, y in batches(hvd.rank(), hvd.size()):
    optimizer.zero_grad()
    output = model(x)
    loss = F.cross_entropy(output, y)
    loss.backward()
    optimizer.step()
    loss_metric.update(loss)
    correct += (output.argmax(1) == y).sum().item()
mean_correct = hvd.allreduce(torch.tensor([correct, -7]), name="correct")  # whole numbers: cut off towards 0
figures = {
    "loss": loss_metric.avg,
    "accuracy": torch.tensor(metric_average(float(correct), "acc")),
    "mean": mean_correct,
}
if hvd.rank() == 0:
    torch.save({**model.state_dict(), **figures}, sys.argv[1])
