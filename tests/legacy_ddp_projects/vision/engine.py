import torch
import utils


def train_one_epoch(model, criterion, optimizer, data_loader, epoch):
    model.train()
    logger = utils.MetricLogger()
    for x, y in data_loader:
        loss = criterion(model(x), y)
        reduced = utils.reduce_dict({"loss": loss.detach(), "twice": 2 * loss.detach()})
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logger.update(loss=reduced["loss"].item(), own=loss.item())
    logger.synchronize_between_processes()
    print("Averaged stats:", {name: meter.global_avg for name, meter in logger.meters.items()})
    return logger


@torch.no_grad()
def evaluate(model, data_loader):
    model.eval()
    logger = utils.MetricLogger()
    for x, y in data_loader:
        logger.update(acc=(model(x).argmax(1) == y).float().mean().item())
    logger.synchronize_between_processes()
    return logger.meters["acc"].global_avg
