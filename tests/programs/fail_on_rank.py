"""Train until one rank fails in the middle: ``fail_on_rank.py RANK raise|exit|leave|sleep``."""

import sys
import time

import torch
from torch import nn

import unidist

unidist.init()
rank, how = int(sys.argv[1]), sys.argv[2]
model = unidist.wrap_model(nn.Linear(4, 1))
for step in range(100_000):
    if step == 5 and unidist.rank() == rank:
        if how == "exit":
            sys.exit(3)
        if how == "leave":
            sys.exit()
        if how == "sleep":
            time.sleep(600)
        raise RuntimeError(f"rank {rank} fails on purpose")
    model(torch.ones(2, 4)).sum().backward()
print("trained to the end")
