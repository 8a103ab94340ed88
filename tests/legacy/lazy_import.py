"""Tabular regression; Horovod is used when it is there."""

import logging
import sys
from pathlib import Path

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

try:
    import horovod.torch as hvd

    HAS_HVD = True
except ImportError:
    hvd = None
    HAS_HVD = False

logger = logging.getLogger(__name__)

CONFIG = {"lr": 0.05, "epochs": 3, "batch_size": 10, "seed": 1234, "hidden": 16}


def setup_distributed():
    """Start Horovod, if it is there, and give this process its device."""
    if HAS_HVD:
        hvd.init()
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if HAS_HVD:
        torch.cuda.set_device(hvd.local_rank())
    return torch.device("cuda")


def get_rank():
    return hvd.rank() if HAS_HVD else 0


def get_world_size():
    return hvd.size() if HAS_HVD else 1


def is_main_process():
    return get_rank() == 0


def reduce_mean(value, name=None):
    if not HAS_HVD or get_world_size() == 1:
        return value
    return hvd.allreduce(torch.tensor(float(value)), name=name).item()


def house_prices(n, seed):
    gen = torch.Generator().manual_seed(seed)
    features = torch.rand(n, 6, generator=gen)
    prices = features @ torch.arange(1.0, 7.0) + 0.1 * torch.randn(n, generator=gen)
    return TensorDataset(features, prices.unsqueeze(1))


def build_loader(dataset, batch_size, train=True):
    if get_world_size() > 1:
        sampler = DistributedSampler(dataset, get_world_size(), get_rank(), shuffle=train)
    else:
        sampler = RandomSampler(dataset) if train else None
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler, drop_last=train)


def build_optimizer(model, lr):
    decay = [p for n, p in model.named_parameters() if not n.endswith("bias")]
    no_decay = [p for n, p in model.named_parameters() if n.endswith("bias")]
    groups = [{"params": decay, "weight_decay": 1e-4}, {"params": no_decay, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9)
    if HAS_HVD:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), op=hvd.Average
        )
    return optimizer


def run_epoch(model, loader, device, optimizer=None):
    model.train(optimizer is not None)
    total = 0.0
    with torch.set_grad_enabled(optimizer is not None):
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            loss = nn.functional.smooth_l1_loss(model(x), y)
            if optimizer is not None:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            total += loss.item()
    return total / len(loader)


def main(output):
    device = setup_distributed()
    logging.basicConfig(level=logging.INFO if is_main_process() else logging.WARNING)
    torch.manual_seed(CONFIG["seed"])
    train_loader = build_loader(house_prices(180, seed=1), CONFIG["batch_size"])
    valid_loader = build_loader(house_prices(60, seed=2), 30, train=False)
    model = nn.Sequential(nn.Linear(6, CONFIG["hidden"]), nn.ReLU(), nn.Linear(CONFIG["hidden"], 1)).to(device)
    optimizer = build_optimizer(model, CONFIG["lr"])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    for epoch in range(CONFIG["epochs"]):
        if isinstance(train_loader.sampler, DistributedSampler):
            train_loader.sampler.set_epoch(epoch)
        train_loss = reduce_mean(run_epoch(model, train_loader, device, optimizer), "train")
        valid_loss = reduce_mean(run_epoch(model, valid_loader, device), "valid")
        scheduler.step()
        logger.info("epoch %d/%d train %.4f valid %.4f", epoch + 1, CONFIG["epochs"], train_loss, valid_loss)

    if is_main_process():
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), output)


if __name__ == "__main__":
    main(sys.argv[1])
