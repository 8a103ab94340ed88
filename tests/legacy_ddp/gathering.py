import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel


def gather_predictions(scores, world_size):
    gathered = [torch.zeros_like(scores) for _ in range(world_size)]
    dist.all_gather(gathered, scores)
    return torch.cat(gathered, dim=0)


@torch.no_grad()
def concat_all_gather(tensor):
    """As in MoCo."""
    tensors_gather = [torch.ones_like(tensor) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(tensors_gather, tensor, async_op=False)
    output = torch.cat(tensors_gather, dim=0)
    return output


def contrastive(z):
    world_size = dist.get_world_size()
    parts = [torch.zeros_like(z) for _ in range(world_size)]
    dist.all_gather(parts, z)
    parts[dist.get_rank()] = z
    every = torch.cat(parts)
    return (every @ every.t()).pow(2).mean()


def main(path):
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend="gloo", rank=rank, world_size=world_size)
    torch.manual_seed(10 + rank)
    model = DistributedDataParallel(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = contrastive(model(torch.randn(4, 4)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        scores = model(torch.randn(2, 4))
    everything = gather_predictions(scores, world_size)
    keys = concat_all_gather(scores[:1])
    names = [None] * world_size
    dist.all_gather_object(names, {"rank": rank, "mean": scores.mean().item()})
    settings = [{"seed": 7 + rank}, rank]
    dist.broadcast_object_list(settings, src=0)
    start = torch.tensor([float(rank) + 1])
    dist.broadcast(start, 1)
    total = torch.tensor(rank + 1)
    dist.reduce(total, dst=0, op=dist.ReduceOp.SUM)
    if rank == 0:
        values = torch.tensor([each["mean"] for each in names] + [float(settings[0]["seed"]), float(settings[1])])
        results = {"everything": everything, "keys": keys, "values": values, "start": start, "total": total}
        torch.save({**results, **model.module.state_dict()}, path)
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1])
