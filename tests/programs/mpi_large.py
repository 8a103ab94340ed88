"""Messages and results of more than 2**31 bytes, on two ranks."""

import sys

import torch
import torch.distributed as dist

import unidist

NBYTES = 2**31 + 2**20 + 5

unidist.init("mpi")
rank = unidist.rank()
tensor = torch.full((NBYTES,), rank + 1, dtype=torch.uint8)


def check(what: str, value: int, place: torch.Tensor = tensor) -> None:
    assert {int(end) for part in place.split(2**27) for end in part.aminmax()} == {value}, what
    if rank == 0:
        sys.stdout.write(f"{what} of {place.nbytes} bytes\n")


dist.all_reduce(tensor)
check("all_reduce", 3)
tensor.fill_(rank + 1)
dist.broadcast(tensor, 1)
check("broadcast", 2)
tensor.fill_(rank + 4)
if rank == 0:
    dist.send(tensor, 1)
else:
    assert dist.recv(tensor) == 0  # from any rank
    check("recv", 4)
half = torch.full((NBYTES // 2 + 1,), 7, dtype=torch.uint8)
whole = torch.empty(2 * half.numel(), dtype=torch.uint8)
getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(whole, half)
check("all_gather", 7, whole)
unidist.shutdown()
sys.stdout.write("all done\n")
