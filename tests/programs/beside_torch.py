"""The drop-in and a script's own process group side by side: ``beside_torch.py first | later | never``."""

import copy
import sys

import torch
import torch.distributed as dist

import unidist
import unidist.hvd as hvd

when = sys.argv[1]


def train_with_ddp() -> None:
    dist.init_process_group("gloo")
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [dist.get_world_size()] * 3
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2, bias=False))
    model(torch.full((1, 3), float(dist.get_rank()))).sum().backward()
    grad = next(model.parameters()).grad
    assert grad is not None and torch.allclose(grad, torch.full((2, 3), (dist.get_world_size() - 1) / 2))


def check_drop_in() -> None:
    for numel in (1, 3000):  # in the negotiation, and by the backend
        assert hvd.allreduce(torch.ones(numel), op=hvd.Sum)[0].item() == hvd.size()
    model = torch.nn.Linear(3, 2, bias=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.0), model.named_parameters())
    model(torch.full((1, 3), float(hvd.rank()))).sum().backward()
    optimizer.step()
    assert torch.allclose(model.weight.grad, torch.full((2, 3), (hvd.size() - 1) / 2))
    hvd.barrier()


if when == "first":
    train_with_ddp()
hvd.init()
assert dist.is_initialized() == (when == "first")
check_drop_in()
try:  # DDP finds its ranks again in the default group only
    copy.deepcopy(unidist.wrap_model(torch.nn.Linear(3, 2)))
except RuntimeError as error:
    assert "the model inside, .module" in str(error)
else:
    raise SystemExit("copied")
if when == "later":
    train_with_ddp()
    check_drop_in()
if when != "never":
    dist.destroy_process_group()
    check_drop_in()
hvd.shutdown()
assert not dist.is_initialized()
hvd.init()
check_drop_in()
assert not dist.is_initialized()
print("BESIDE", flush=True)
