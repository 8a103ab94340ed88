#!/usr/bin/env python3
"""digits_horovod.py as ``unidist migrate`` writes it, on unidist's own calls.

    torchrun --nproc-per-node 2 examples/digits_migrated.py

It runs under horovodrun and mpirun, too.
"""

import argparse

import unidist
import torch
import torch.nn.functional as F
from digits import load_data, make_model
from torch.utils.data import DataLoader, Subset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--save", default="digits.pt")
    args = parser.parse_args()

    unidist.init()
    rank, world_size = unidist.rank(), unidist.world_size()
    torch.manual_seed(0)
    train_set, test_set = load_data()
    batch_size = 60 // world_size
    train = unidist.shard_loader(DataLoader(train_set, batch_size, shuffle=True))
    # DistributedSampler would count some samples twice.
    test = DataLoader(Subset(test_set, range(rank, len(test_set), world_size)), batch_size)

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    unidist.replicate(model)

    for epoch in range(args.epochs):
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
        counts = unidist.all_reduce(counts)
        if rank == 0:
            correct, seen = counts.tolist()
            print(f"epoch {epoch + 1}/{args.epochs}  accuracy {correct}/{seen} = {correct / seen:.4f}", flush=True)

    if rank == 0:
        torch.save(model.state_dict(), args.save)
    unidist.barrier()
    unidist.shutdown()


if __name__ == "__main__":
    main()
