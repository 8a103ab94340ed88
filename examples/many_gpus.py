#!/usr/bin/env python3
"""Train on handwritten digits on any number of ranks: where the tutorial "From one GPU to many" ends.

    torchrun --nproc-per-node 2 examples/many_gpus.py

or: python examples/many_gpus.py, or any other launcher. It goes on from its last checkpoint.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from digits import load_data, make_model
from torch import nn
from torch.utils.data import DataLoader

import unidist


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    model.eval()
    accuracy = unidist.Accuracy()
    for images, labels in loader:
        accuracy.update(model(images.to(device)), labels)
    model.train()
    return accuracy.compute()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=60, help="samples a step, over all ranks (default 60)")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--amp", action="store_true", help="train in bfloat16")
    parser.add_argument("--out", type=Path, default=Path("run"), help="folder of the log and the checkpoints")
    args = parser.parse_args()

    unidist.init(seed=0)
    device = unidist.device()
    train_set, valid_set = load_data()
    batch_size = args.batch_size // unidist.world_size()
    train = unidist.shard_loader(DataLoader(train_set, batch_size, shuffle=True))
    valid = unidist.shard_loader(DataLoader(valid_set, batch_size), pad=False)

    model = unidist.wrap_model(make_model().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(train))
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp)

    run = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler, "train": train}
    best = 0.0
    if unidist.is_main():
        args.out.mkdir(exist_ok=True)
    last = unidist.latest_checkpoint(args.out, "last-*.pt")
    if last:
        best = unidist.load_checkpoint(last, **run)["best"]

    while train.epoch < args.epochs:
        epoch, mean_loss = train.epoch, unidist.Mean()
        for images, labels in unidist.progress(train, desc=f"epoch {epoch + 1}/{args.epochs}"):
            images, labels = images.to(device), labels.to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=args.amp):
                loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            mean_loss.update(loss, len(labels))

        line = {
            "epoch": epoch + 1,
            "loss": round(mean_loss.compute(), 4),
            "accuracy": round(evaluate(model, valid, device), 4),
        }
        unidist.print(line)
        if unidist.is_main():
            with open(args.out / "log.jsonl", "a") as log:
                log.write(json.dumps(line) + "\n")
        if line["accuracy"] > best:
            best = line["accuracy"]
            if unidist.is_main():
                torch.save(unidist.unwrap(model).state_dict(), args.out / "best.pt")
        unidist.save_checkpoint(args.out / f"last-{epoch + 1}.pt", keep_last=1, **run, best=best)


if __name__ == "__main__":
    main()
