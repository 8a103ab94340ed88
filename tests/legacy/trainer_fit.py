"""A configurable trainer: callbacks, clipping, early stopping, checkpoints that can be loaded again."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, dataclass
from typing import Any, Callable

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class TrainerConfig:
    epochs: int = 3
    batch_size: int = 12
    lr: float = 0.01
    max_grad_norm: float = 0.5
    patience: int = 5
    seed: int = 3
    checkpoint: str | None = None


class Trainer:
    def __init__(self, model: nn.Module, train_set: Dataset, valid_set: Dataset, config: TrainerConfig, hvd=hvd):
        self.hvd = hvd
        self.config = config
        self.device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
        self.model = model.to(self.device)
        self.criterion = nn.CrossEntropyLoss()
        self.train_sampler, self.train_loader = self._loader(train_set, shuffle=True)
        self.valid_sampler, self.valid_loader = self._loader(valid_set, shuffle=False)
        self.optimizer = self._distribute(torch.optim.Adam(self.model.parameters(), lr=config.lr))
        self.callbacks: list[Callable[[Trainer, dict[str, float]], None]] = []
        self.start_epoch = 0
        self.global_step = 0

    @property
    def is_chief(self) -> bool:
        return self.hvd.rank() == 0

    def _loader(self, dataset: Dataset, shuffle: bool) -> tuple[DistributedSampler, DataLoader]:
        sampler = DistributedSampler(
            dataset,
            num_replicas=self.hvd.size(),
            rank=self.hvd.rank(),
            shuffle=shuffle,
            seed=self.config.seed,
        )
        return sampler, DataLoader(dataset, batch_size=self.config.batch_size, sampler=sampler)

    def _distribute(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        self.hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        self.hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        return self.hvd.DistributedOptimizer(optimizer, named_parameters=self.model.named_parameters())

    def fit(self) -> None:
        best, bad_epochs = float("inf"), 0
        for epoch in range(self.start_epoch, self.config.epochs):
            logs = {"epoch": epoch, "train_loss": self.train_epoch(epoch), **self.evaluate()}
            for callback in self.callbacks:
                callback(self, logs)
            self.save_checkpoint(epoch)
            if logs["valid_loss"] < best:
                best, bad_epochs = logs["valid_loss"], 0
            else:
                bad_epochs += 1
            if bad_epochs > self.config.patience:
                break

    def train_epoch(self, epoch: int) -> float:
        self.model.train()
        self.train_sampler.set_epoch(epoch)
        losses = []
        for inputs, labels in self.train_loader:
            losses.append(self.train_step(inputs.to(self.device), labels.to(self.device)))
            self.global_step += 1
        return self._average(sum(losses) / len(losses), "train_loss")

    def train_step(self, inputs: Tensor, labels: Tensor) -> float:
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(inputs), labels)
        loss.backward()
        # Gradients must be complete before they are clipped.
        self.optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        with self.optimizer.skip_synchronize():
            self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        self.model.eval()
        loss, hits, seen = 0.0, 0, 0
        for inputs, labels in self.valid_loader:
            inputs, labels = inputs.to(self.device), labels.to(self.device)
            logits = self.model(inputs)
            loss += self.criterion(logits, labels).item() * len(labels)
            hits += int((logits.argmax(-1) == labels).sum())
            seen += len(labels)
        totals = self.hvd.allreduce(torch.tensor([loss, hits, seen]), name="valid", op=self.hvd.Sum)
        return {"valid_loss": (totals[0] / totals[2]).item(), "valid_acc": (totals[1] / totals[2]).item()}

    def _average(self, value: float, name: str) -> float:
        return self.hvd.allreduce(torch.tensor(value), name=name).item()

    def save_checkpoint(self, epoch: int) -> None:
        if not self.is_chief or not self.config.checkpoint:
            return
        state: dict[str, Any] = {
            "epoch": epoch,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "config": asdict(self.config),
        }
        temporary = self.config.checkpoint + ".tmp"
        torch.save(state, temporary)
        os.replace(temporary, self.config.checkpoint)

    def load_checkpoint(self, path: str) -> None:
        """Rank 0 reads the file, the others get its content."""
        if self.is_chief:
            state = torch.load(path, map_location=self.device)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.start_epoch = state["epoch"] + 1
        self.start_epoch = self.hvd.broadcast_object(self.start_epoch, root_rank=0, name="start_epoch")
        self.hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        self.hvd.broadcast_optimizer_state(self.optimizer, root_rank=0)


def print_logs(trainer: Trainer, logs: dict[str, float]) -> None:
    if trainer.is_chief:
        print(" ".join(f"{name}={value:.4g}" for name, value in logs.items()))


def spirals(count: int, seed: int) -> TensorDataset:
    gen = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count,), generator=gen)
    radius = torch.rand(count, generator=gen)
    angle = radius * 4 + labels * 2.09
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), labels)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("weights")
    parser.add_argument("--resume")
    args = parser.parse_args()
    hvd.init()
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())
    config = TrainerConfig(checkpoint=args.weights + ".last")
    torch.manual_seed(config.seed)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    trainer = Trainer(model, spirals(180, 1), spirals(60, 2), config)
    trainer.callbacks.append(print_logs)
    if args.resume:
        trainer.load_checkpoint(args.resume)
    trainer.fit()
    if trainer.is_chief:
        torch.save(trainer.model.state_dict(), args.weights)


if __name__ == "__main__":
    main()
