#!/usr/bin/env python3
"""Train a small character language model on a text file, with gradient accumulation.

    torchrun --nproc-per-node 2 examples/charlm.py

The text is this repository's LICENSE unless --text names another file.
"""

import argparse
import contextlib
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import unidist

CONTEXT = 32


class CharModel(nn.Module):
    """Predicts each next character of ``(batch, CONTEXT)`` codes."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 32)
        self.memory = nn.GRU(32, 64, batch_first=True)
        self.head = nn.Linear(64, vocabulary)

    def forward(self, codes: Tensor) -> Tensor:
        return self.head(self.memory(self.embed(codes))[0])


def windows(codes: Tensor) -> TensorDataset:
    """Pieces of CONTEXT characters with the characters that follow each."""
    pieces = codes.unfold(0, CONTEXT + 1, CONTEXT // 2)
    return TensorDataset(pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous())


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader) -> float:
    """Mean loss per character over all ranks, in nats."""
    total, count = 0.0, 0
    for inputs, targets in loader:
        loss = F.cross_entropy(model(inputs.to(unidist.device())).transpose(1, 2).cpu(), targets, reduction="sum")
        total, count = total + loss.item(), count + targets.numel()
    return unidist.allreduce_metric(total / max(1, count), weight=count)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small character language model.")
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "LICENSE")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per step (default 2)")
    parser.add_argument("--save", default="charlm.pt")
    args = parser.parse_args()

    unidist.init(seed=0)
    # Rank 0 reads the file; the others need not have it.
    text = unidist.broadcast_object(args.text.read_text() if unidist.is_main() else "")
    letters = sorted(set(text))
    codes = torch.tensor([letters.index(letter) for letter in text])
    split = len(codes) * 9 // 10
    train = unidist.shard_loader(DataLoader(windows(codes[:split]), 8, shuffle=True, drop_last=True))
    test = unidist.shard_loader(DataLoader(windows(codes[split:]), 8), pad=False)

    model = unidist.wrap_model(CharModel(len(letters)).to(unidist.device()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for epoch in range(args.epochs):
        for micro, (inputs, targets) in enumerate(train):
            place = micro % args.accumulate
            window = min(args.accumulate, len(train) - (micro - place))  # the epoch's last one may be short
            steps_now = place == window - 1
            with contextlib.nullcontext() if steps_now else model.no_sync():
                output = model(inputs.to(unidist.device())).transpose(1, 2)
                loss = F.cross_entropy(output, targets.to(unidist.device())) / window
                loss.backward()
            if steps_now:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        loss = evaluate(model.module, test)
        if unidist.is_main():
            print(f"epoch {epoch + 1}/{args.epochs}  bits per character {loss / math.log(2):.3f}", flush=True)

    if unidist.is_main():
        torch.save({"letters": letters, "model": model.module.state_dict()}, args.save)
        print(f"{unidist.world_size()} ranks on {unidist.backend_name()}: saved {args.save}")


if __name__ == "__main__":
    main()
