import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def build_model(distributed=True):
    torch.manual_seed(9)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    if distributed:
        model = DistributedDataParallel(model, broadcast_buffers=True)
    return model


def build_loader(dataset, batch_size):
    sampler = DistributedSampler(dataset, shuffle=True, seed=3)
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
    return loader, sampler
