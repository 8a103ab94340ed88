#!/usr/bin/env python3
"""Train on handwritten digits in one process: where the tutorial "From one GPU to many" begins.

    python examples/one_gpu.py

It writes a log and checkpoints to the folder --out, and goes on from there.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from digits import load_data, make_model
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    model.eval()
    correct, seen = 0, 0
    for images, labels in loader:
        predicted = model(images.to(device)).argmax(1).cpu()
        correct += (predicted == labels).sum().item()
        seen += len(labels)
    model.train()
    return correct / seen


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=60, help="samples a step (default 60)")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--amp", action="store_true", help="train in bfloat16")
    parser.add_argument("--out", type=Path, default=Path("run"), help="folder of the log and the checkpoints")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_set, valid_set = load_data()
    train = DataLoader(train_set, args.batch_size, shuffle=True)
    valid = DataLoader(valid_set, args.batch_size)

    model = make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(train))
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp)

    first, best = 0, 0.0
    args.out.mkdir(exist_ok=True)
    if (args.out / "last.pt").exists():
        state = torch.load(args.out / "last.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        scaler.load_state_dict(state["scaler"])
        first, best = state["epoch"], state["best"]

    for epoch in range(first, args.epochs):
        total, seen = 0.0, 0
        for images, labels in tqdm(train, desc=f"epoch {epoch + 1}/{args.epochs}"):
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
            total, seen = total + loss.item() * len(labels), seen + len(labels)

        line = {
            "epoch": epoch + 1,
            "loss": round(total / seen, 4),
            "accuracy": round(evaluate(model, valid, device), 4),
        }
        print(line)
        with open(args.out / "log.jsonl", "a") as log:
            log.write(json.dumps(line) + "\n")
        if line["accuracy"] > best:
            best = line["accuracy"]
            torch.save(model.state_dict(), args.out / "best.pt")
        torch.save(
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
                "scaler": scaler.state_dict(),
                "epoch": epoch + 1,
                "best": best,
            },
            args.out / "last.pt",
        )


if __name__ == "__main__":
    main()
