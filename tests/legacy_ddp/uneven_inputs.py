import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main(path):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.randn(4, 3) for _ in range(5 + rank)]
    with model.join():
        for batch in batches:
            optimizer.zero_grad()
            model(batch).pow(2).mean().backward()
            optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
