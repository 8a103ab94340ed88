"""Start a backend as a legacy script does, and let unidist join it: ``adopt.py horovod|torch``."""

import sys

import torch

import unidist

if sys.argv[1] == "horovod":
    import horovod.torch as hvd

    hvd.init()
    running = hvd.is_initialized
else:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    running = dist.is_initialized
other = "gloo" if sys.argv[1] == "horovod" else "nccl"
if sys.argv[1] != "horovod":
    try:
        unidist.init(other)
    except unidist.BackendError as error:
        assert "already initialised" in str(error), error
    else:
        raise AssertionError("another backend was accepted")
unidist.init()
size = unidist.world_size()
assert size == 2, size
assert unidist.all_reduce(torch.tensor(unidist.rank())).item() == 1
model = unidist.wrap_model(torch.nn.Linear(1, 1, bias=False))
model(torch.tensor([[float(unidist.rank())]])).sum().backward()
assert model.module.weight.grad.item() == 0.5
unidist.shutdown()
assert running(), "unidist stopped a backend that it had not started"
print(f"adopted {sys.argv[1]}", flush=True)
