import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def reduce_tensor(tensor, world_size):
    rt = tensor.clone()
    dist.all_reduce(rt, op=dist.ReduceOp.SUM)
    rt /= world_size
    return rt


class AverageMeter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean() * 100.0


def validate(loader, model, world_size):
    top1 = AverageMeter()
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            acc = reduce_tensor(accuracy(model(x), y), world_size)
            top1.update(acc.item(), x.size(0))
    model.train()
    return top1.sum / top1.count


def main():
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend=backend, init_method="env://")
    local_rank = int(os.environ["LOCAL_RANK"])
    world_size = dist.get_world_size()
    device = torch.device(f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")

    torch.manual_seed(1)
    x, y = torch.randn(54, 6), torch.randint(0, 3, (54,))
    train_set, val_set = TensorDataset(x[:40], y[:40]), TensorDataset(x[40:], y[40:])
    train_sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=4, shuffle=False, sampler=train_sampler, drop_last=False)
    val_sampler = DistributedSampler(val_set, shuffle=False)
    val_loader = DataLoader(val_set, batch_size=4, sampler=val_sampler)

    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    best = 0
    for epoch in range(3):
        train_sampler.set_epoch(epoch)
        for inputs, labels in train_loader:
            inputs, labels = inputs.to(device), labels.to(device)
            loss = F.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            reduced_loss = reduce_tensor(loss.data, world_size)
        best = max(best, validate(val_loader, model, world_size))
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {reduced_loss.item():.4f} best {best:.2f}")
    result = {"best": torch.tensor(best), "loss": reduced_loss, **model.module.state_dict()}
    if dist.get_rank() == 0:
        torch.save(result, sys.argv[1])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
