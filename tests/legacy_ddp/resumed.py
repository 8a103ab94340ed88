import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x, use_left):
        h = self.body(x).relu()
        return self.left(h) if use_left else self.right(h)


def is_main_process():
    return not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0


def unwrap(model):
    return model.module if isinstance(model, DDP) else model


def main(path):
    dist.init_process_group(backend="gloo")
    torch.manual_seed(2)
    model = DDP(TwoHeads(), find_unused_parameters=True, static_graph=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    directory = [tempfile.mkdtemp() if is_main_process() else None]
    dist.broadcast_object_list(directory, src=0)
    checkpoint = os.path.join(directory[0], "model.pt")
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    for step in range(6):
        if step == 3:
            if is_main_process():
                torch.save({"model": unwrap(model).state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)
            dist.barrier()
            state = torch.load(checkpoint, map_location="cpu")
            unwrap(model).load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        optimizer.zero_grad()
        model(x[2 * step : 2 * step + 2], step % 2 == 0).pow(2).mean().backward()
        optimizer.step()
    if is_main_process():
        torch.save(model.state_dict(), path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
