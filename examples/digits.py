#!/usr/bin/env python3
"""Train a small CNN on scikit-learn's handwritten digits, on any launcher and backend.

    torchrun --nproc-per-node 2 examples/digits.py

or: python examples/digits.py, horovodrun -np 2 python examples/digits.py, mpirun -np 2 python examples/digits.py, ...
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unidist


def load_data() -> tuple[TensorDataset, TensorDataset]:
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.get_default_dtype()).unsqueeze(1)[order] / 16
    labels = torch.tensor(digits.target)[order]
    return TensorDataset(images[:1440], labels[:1440]), TensorDataset(images[1440:], labels[1440:])


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader) -> tuple[int, int]:
    """Number of samples that were classified correctly and number of samples, over all ranks."""
    device = unidist.device()
    correct, seen = 0, 0
    for images, labels in loader:
        correct += (model(images.to(device)).argmax(1).cpu() == labels).sum().item()
        seen += len(labels)
    return unidist.allreduce_metric((correct, seen), op="sum")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small CNN on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=60, help="samples a step, over all ranks (default 60)")
    parser.add_argument("--save", default="digits.pt", help="where rank 0 saves the model (default digits.pt)")
    args = parser.parse_args()

    unidist.init(seed=0)
    device = unidist.device()
    train_set, test_set = load_data()
    batch_size = args.batch_size // unidist.world_size()
    train = unidist.shard_loader(DataLoader(train_set, batch_size, shuffle=True))
    test = unidist.shard_loader(DataLoader(test_set, batch_size), pad=False)

    model = unidist.wrap_model(make_model().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    for epoch in range(args.epochs):
        for images, labels in train:
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        loss = unidist.allreduce_metric(loss.item())
        correct, seen = evaluate(model, test)
        if unidist.is_main():
            print(
                f"epoch {epoch + 1}/{args.epochs}  loss {loss:.4f}  accuracy {correct}/{seen} = {correct / seen:.4f}",
                flush=True,
            )

    if unidist.is_main():
        torch.save(model.module.state_dict(), args.save)
        print(f"{unidist.world_size()} ranks on {unidist.backend_name()}: saved {args.save}")


if __name__ == "__main__":
    main()
