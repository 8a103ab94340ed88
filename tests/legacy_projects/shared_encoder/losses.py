import torch.nn.functional as F


def contrast(twins, x):
    return F.mse_loss(twins.encode(x), twins.encode(x.flip(0)).neg())


def reconstruct(twins, x):
    return F.mse_loss(twins.decode(twins.encode(x)), x) + sum(p.abs().sum() for p in twins.decoder.parameters()) * 1e-3
