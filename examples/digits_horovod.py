#!/usr/bin/env python3
"""The training of digits.py in raw Horovod, for comparison.

    horovodrun -np 2 python examples/digits_horovod.py

It runs where horovodrun or mpirun starts it, and evaluates by hand.
"""

import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from digits import load_data, make_model
from torch.utils.data import DataLoader, DistributedSampler, Subset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--save", default="digits.pt")
    args = parser.parse_args()

    hvd.init()
    rank, world_size = hvd.rank(), hvd.size()
    torch.manual_seed(0)
    train_set, test_set = load_data()
    batch_size = 60 // world_size
    sampler = DistributedSampler(train_set, world_size, rank, shuffle=True, seed=0)
    train = DataLoader(train_set, batch_size, sampler=sampler)
    # DistributedSampler would count some samples twice.
    test = DataLoader(Subset(test_set, range(rank, len(test_set), world_size)), batch_size)

    model = make_model()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

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
                correct = (model(images).argmax(1) == labels).sum()
                counts += torch.tensor([correct, len(labels)])
        counts = hvd.allreduce(counts, op=hvd.Sum, name="counts")
        if rank == 0:
            correct, seen = counts.tolist()
            print(f"epoch {epoch + 1}/{args.epochs}  accuracy {correct}/{seen} = {correct / seen:.4f}", flush=True)

    if rank == 0:
        torch.save(model.state_dict(), args.save)
    hvd.barrier()
    hvd.shutdown()


if __name__ == "__main__":
    main()
