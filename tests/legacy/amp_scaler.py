"""Mixed precision: autocast, a gradient scaler and clipping, with Horovod."""

import argparse
import contextlib

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import horovod.torch as hvd


def parse_args():
    parser = argparse.ArgumentParser(description="mixed precision training")
    parser.add_argument("save_path")
    parser.add_argument("--epochs", default=2, type=int)
    parser.add_argument("--batch-size", default=16, type=int)
    parser.add_argument("--lr", default=0.05, type=float)
    parser.add_argument("--clip", default=1.0, type=float)
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    return parser.parse_args()


class ConvNet(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.features = nn.Conv1d(2, 8, kernel_size=5, stride=2)
        self.classifier = nn.Linear(8, classes)

    def forward(self, x):
        x = F.gelu(self.features(x))
        return self.classifier(x.mean(dim=2))


def make_dataset(n, seed):
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (n,), generator=g)
    t = torch.linspace(0, 6.28, 24)
    waves = torch.sin((labels.view(-1, 1, 1) + 1) * t + torch.rand(n, 2, 1, generator=g))
    return TensorDataset(waves + 0.1 * torch.randn(n, 2, 24, generator=g), labels)


def autocast(device, args):
    if not args.bf16:
        return contextlib.nullcontext()
    return torch.amp.autocast(device.type, dtype=torch.bfloat16)


def backward_and_step(loss, model, optimizer, scaler, clip):
    scaler.scale(loss).backward()
    # All workers' gradients have to be in before they are unscaled.
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()
    return norm


def train(epoch, model, loader, sampler, optimizer, scaler, device, args):
    model.train()
    sampler.set_epoch(epoch)
    for step, (waves, labels) in enumerate(loader):
        waves, labels = waves.to(device), labels.to(device)
        optimizer.zero_grad()
        with autocast(device, args):
            loss = F.cross_entropy(model(waves), labels)
        norm = backward_and_step(loss, model, optimizer, scaler, args.clip)
        if step % 4 == 0 and hvd.rank() == 0:
            print(f"epoch {epoch} step {step} loss {loss.item():.4f} norm {norm:.3f} scale {scaler.get_scale():.0f}")


def test(model, loader, device, args):
    model.eval()
    correct = torch.tensor(0.0)
    total = torch.tensor(0.0)
    with torch.no_grad(), autocast(device, args):
        for waves, labels in loader:
            predicted = model(waves.to(device)).argmax(1).cpu()
            correct += (predicted == labels).sum()
            total += len(labels)
    correct = hvd.allreduce(correct, op=hvd.Sum, name="correct")
    total = hvd.allreduce(total, op=hvd.Sum, name="total")
    return (correct / total).item()


def main():
    args = parse_args()
    hvd.init()
    torch.manual_seed(0)
    if torch.cuda.is_available():
        device = torch.device("cuda", hvd.local_rank())
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")

    loaders, samplers = {}, {}
    for split, count, seed in (("train", 192, 1), ("test", 96, 2)):
        dataset = make_dataset(count, seed)
        samplers[split] = DistributedSampler(
            dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=(split == "train")
        )
        loaders[split] = DataLoader(dataset, batch_size=args.batch_size, sampler=samplers[split])

    model = ConvNet().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**12, growth_interval=5)

    for epoch in range(args.epochs):
        train(epoch, model, loaders["train"], samplers["train"], optimizer, scaler, device, args)
        accuracy = test(model, loaders["test"], device, args)
        if hvd.rank() == 0:
            print(f"epoch {epoch} accuracy {accuracy:.3f}")

    if hvd.rank() == 0:
        torch.save(model.state_dict(), args.save_path)


if __name__ == "__main__":
    main()
