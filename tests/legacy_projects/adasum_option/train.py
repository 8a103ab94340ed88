"""Horovod's example of ImageNet, in short: Adasum by a flag, learning rates by it, too."""

import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from data import batches
from metrics import Metric
from net import make_model

parser = argparse.ArgumentParser()
parser.add_argument("output")
parser.add_argument("--use-adasum", action="store_true", default=False)
parser.add_argument("--batches-per-allreduce", type=int, default=1)
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
args = parser.parse_args()

hvd.init()
torch.manual_seed(42)
model = make_model()
lr_scaler = args.batches_per_allreduce * hvd.size() if not args.use_adasum else 1
if args.use_adasum and hvd.nccl_built():
    lr_scaler = args.batches_per_allreduce * hvd.local_size()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * lr_scaler, momentum=0.9)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    backward_passes_per_step=args.batches_per_allreduce,
    op=hvd.Adasum if args.use_adasum else hvd.Average,
    gradient_predivide_factor=args.gradient_predivide_factor,
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)


def train(epoch):
    model.train()
    train_loss = Metric("train_loss")
    for data, target in batches(hvd.rank(), hvd.size()):
        optimizer.zero_grad()
        for i in range(0, len(data), 3):
            output = model(data[i : i + 3])
            loss = F.cross_entropy(output, target[i : i + 3])
            train_loss.update(loss)
            loss.div_(len(data) / 3)
            loss.backward()
            if args.batches_per_allreduce == 1 and i == 0:
                break
        optimizer.step()
    return train_loss.avg


for epoch in range(2):
    train(epoch)
if hvd.rank() == 0:
    torch.save(model.state_dict(), args.output)
