"""The drop-in's calls in the world of ``unidist.init()``; a second world too, where the backend can start twice."""

import torch

import unidist
import unidist.hvd as hvd

for _ in range(2):
    assert not hvd.is_initialized()
    unidist.init()
    assert hvd.is_initialized()
    if hvd.rank() == 1:  # asking is not collective
        assert hvd.size() == 2 and hvd.global_process_set.ranks == [0, 1]
    total = unidist.all_reduce(torch.tensor([1.0 + hvd.rank()]))
    mean = hvd.synchronize(hvd.allreduce_async(total * unidist.rank()))
    assert mean.item() == 1.5, mean
    model = torch.nn.Linear(1, 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    model(torch.ones(1, 1) * hvd.rank()).sum().backward()
    optimizer.step()
    assert model.weight.grad is not None and model.weight.grad.item() == 0.5
    unidist.assert_in_sync(model)
    backend = unidist.backend_name()
    unidist.shutdown()
    if backend == "mpi":
        break
print("MIXED", flush=True)
