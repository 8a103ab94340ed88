#!/usr/bin/env python3
"""Train on handwritten digits as long runs do: accumulation, clipping, AMP, a schedule, and checkpoints to go on from.

    torchrun --nproc-per-node 2 examples/digits_resume.py

Kill it and start it again with the same options, under this launcher or another, with any number of ranks that divides
the batch: it goes on in the middle of the epoch. It begins anew when the folder --checkpoints is gone. Losses are those
of an unbroken run but for dropout's random numbers, on another number of ranks, and bfloat16's rounding (--dropout 0
--no-amp).
"""

import argparse
import contextlib
import math

import torch
import torch.nn.functional as F
from digits import load_data
from torch import nn
from torch.utils.data import DataLoader

import unidist


def make_model(dropout: float) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 128),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    accuracy = unidist.Accuracy()
    for images, labels in loader:
        accuracy.update(model(images.to(unidist.device())), labels)
    model.train()
    return accuracy.compute()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on handwritten digits, with checkpoints to go on from.")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=60, help="samples a step, over all ranks and micro-batches")
    parser.add_argument(
        "--accumulate",
        type=int,
        default=2,
        choices=range(1, 1000),
        metavar="N",
        help="micro-batches a step (default 2)",
    )
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--amp", action=argparse.BooleanOptionalAction, default=True, help="train in bfloat16")
    parser.add_argument("--checkpoints", default="checkpoints", help="folder (default checkpoints)")
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints (default 10)")
    parser.add_argument("--max-steps", type=int, help="stop after so many steps")
    args = parser.parse_args()

    unidist.init(seed=0)
    micro_batch, rest = divmod(args.batch_size, unidist.world_size() * args.accumulate)
    if rest or not micro_batch:
        parser.error(
            f"--batch-size {args.batch_size} must be a multiple of ranks x --accumulate = {unidist.world_size()} x "
            f"{args.accumulate}"
        )
    device = unidist.device()
    train_set, test_set = load_data()
    train = unidist.shard_loader(DataLoader(train_set, micro_batch, shuffle=True, drop_last=True))
    test = unidist.shard_loader(DataLoader(test_set, 64), pad=False)

    model = unidist.wrap_model(make_model(args.dropout).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    steps = args.epochs * math.ceil(len(train) / args.accumulate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=steps)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp)
    run = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler, "train": train}

    step = 0
    latest = unidist.latest_checkpoint(args.checkpoints)
    if latest:
        step = unidist.load_checkpoint(latest, **run)["step"]
        unidist.print(f"going on from {latest} in epoch {train.epoch}")

    while train.epoch < args.epochs and step != args.max_steps:
        epoch, loss_meter = train.epoch, unidist.Mean()
        for micro, (images, labels) in enumerate(train):
            place = micro % args.accumulate
            window = min(args.accumulate, len(train) - (micro - place))  # the epoch's last one may be short
            last = place == window - 1
            with contextlib.nullcontext() if last else model.no_sync():
                with torch.autocast(device.type, torch.bfloat16, enabled=args.amp):
                    loss = F.cross_entropy(model(images.to(device)), labels.to(device))
                scaler.scale(loss / window).backward()
            loss_meter.update(loss, len(labels))
            if not last:
                continue
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            schedule.step()
            step += 1
            if step % args.every == 0 or step in (steps, args.max_steps):
                mean = loss_meter.compute()
                unidist.save_checkpoint(f"{args.checkpoints}/step-{step}.pt", keep_last=3, **run, step=step)
                unidist.print(f"step {step}/{steps}  epoch {epoch}  loss {mean:.6f}")
                loss_meter.reset()
            if step == args.max_steps:
                break
    unidist.print(f"{unidist.world_size()} ranks on {unidist.backend_name()}: accuracy {evaluate(model, test):.4f}")


if __name__ == "__main__":
    main()
