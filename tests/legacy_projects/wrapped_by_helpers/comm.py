import torch

try:
    import horovod.torch as hvd
except ImportError:
    hvd = None


def setup():
    if hvd is not None:
        hvd.init()


def where():
    return hvd.rank() if hvd is not None else 0


def size_of_world():
    return hvd.size() if hvd is not None else 1


def mean(value, name):
    if hvd is None:
        return value
    return hvd.allreduce(torch.tensor(value), name=name).item()


def distribute(model, optimizer):
    if hvd is None:
        return optimizer
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
