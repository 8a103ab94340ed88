#!/usr/bin/env python3
"""The training of digits.py in raw torch.distributed, for comparison.

    torchrun --nproc-per-node 2 examples/digits_ddp.py

It runs under torchrun alone, and evaluates by hand.
"""

import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from digits import load_data, make_model
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--save", default="digits.pt")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train_set, test_set = load_data()
    batch_size = 60 // world_size
    sampler = DistributedSampler(train_set, world_size, rank, shuffle=True, seed=0)
    train = DataLoader(train_set, batch_size, sampler=sampler)
    # DistributedSampler would count some samples twice.
    test = DataLoader(Subset(test_set, range(rank, len(test_set), world_size)), batch_size)

    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in train:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        counts = torch.zeros(2, dtype=torch.int64)
        with torch.no_grad():
            for images, labels in test:
                correct = (model.module(images).argmax(1) == labels).sum()
                counts += torch.tensor([correct, len(labels)])
        dist.all_reduce(counts)
        if rank == 0:
            correct, seen = counts.tolist()
            print(f"epoch {epoch + 1}/{args.epochs}  accuracy {correct}/{seen} = {correct / seen:.4f}", flush=True)

    if rank == 0:
        torch.save(model.module.state_dict(), args.save)
    dist.barrier()
    dist.destroy_process_group()
    # A thread of gloo that still frees a tensor while the interpreter ends aborts the process (pytorch issue 117762).
    time.sleep(0.1)


if __name__ == "__main__":
    main()
