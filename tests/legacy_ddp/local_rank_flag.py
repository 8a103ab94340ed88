"""Started by torch.distributed.launch, which passed --local_rank."""

import argparse
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("--local_rank", "--local-rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    parser.add_argument("--dist-backend", default="gloo")
    parser.add_argument("--seed", type=int, default=5)
    return parser.parse_args()


def set_seed(args):
    random.seed(args.seed)
    torch.manual_seed(args.seed)


def main():
    args = parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(args.local_rank)
    dist.init_process_group(backend=args.dist_backend, init_method="env://")
    args.world_size = dist.get_world_size()
    args.rank = dist.get_rank()
    set_seed(args)
    if args.local_rank == 0:
        print("data is there")
    dist.barrier()
    model = nn.GRU(4, 6, batch_first=True)
    model = DDP(model, find_unused_parameters=False, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(args.rank)
    losses = []
    for step in range(4):
        x = torch.randn(2, 3, 4, generator=generator)
        loss = model(x)[0].pow(2).mean()
        loss.backward()
        optimizer.step()
        model.zero_grad()
        logged = loss.detach().clone()
        dist.all_reduce(logged)
        losses.append(logged.item() / args.world_size)
    if args.rank == 0:
        torch.save({"losses": torch.tensor(losses), **model.module.state_dict()}, args.path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
