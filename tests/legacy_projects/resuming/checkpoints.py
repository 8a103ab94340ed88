import horovod.torch as hvd
import torch


def is_root():
    return hvd.rank() == 0


def restore(model):
    epoch = 0
    if is_root():
        with torch.no_grad():
            model[2].bias.add_(1.0)  # as if it were loaded
        epoch = 3
    epoch = hvd.broadcast(torch.tensor(epoch), root_rank=0, name="epoch").item()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return epoch
