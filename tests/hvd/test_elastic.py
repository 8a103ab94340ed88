"""States and the sampler in a world that stays; tests/test_elastic.py has those that change."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import unidist
from tests.hvd.api import REAL, hvd


def new_state(rank: int, **more: Any) -> Any:
    """Another one on each rank."""
    torch.manual_seed(rank)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1), momentum=0.5)
    return hvd.elastic.TorchState(model, optimizer, epoch=rank, **more)


def test_sampler(rank: int, size: int) -> None:
    sampler = hvd.elastic.ElasticSampler(range(10), shuffle=False)
    assert list(sampler) == [i % 10 for i in range(rank, len(sampler) * size, size)]
    sampler.record_batch(0, 1)
    state = sampler.state_dict()
    assert state == {"epoch": 0, "processed_num": size}
    sampler.load_state_dict(state)
    assert next(iter(sampler)) == size + rank and len(sampler) == -(-(10 - size) // size)
    sampler.set_epoch(1)
    assert next(iter(sampler)) == rank and sampler.state_dict() == {"epoch": 1, "processed_num": 0}
    shuffled = hvd.elastic.ElasticSampler(range(50), shuffle=True, seed=3)
    everyone = [index for part in hvd.allgather_object(list(shuffled)) for index in part]
    assert set(everyone) == set(range(50)) and everyone != sorted(everyone)
    shuffled.load_state_dict({"epoch": 0, "processed_num": 50})
    assert len(shuffled) == 0 and list(shuffled) == []


def test_state(rank: int, size: int) -> None:
    state = new_state(rank)
    state.sync()
    assert state.epoch == 0 and state.optimizer.param_groups[0]["lr"] == 0.1
    weights = state.model.weight.detach().clone()
    assert all(torch.equal(weights, other) for other in hvd.allgather_object(weights))
    state.epoch = 5
    state.commit()
    state.model.weight.data.zero_()
    state.epoch = 6
    state.optimizer.param_groups[0]["lr"] = 9.0
    state.restore()
    assert state.epoch == 5 and torch.equal(state.model.weight, weights)
    assert state.optimizer.param_groups[0]["lr"] == 0.1


def test_run(rank: int, size: int) -> None:
    called = []

    @hvd.elastic.run
    def train(state: Any, argument: int, *, keyword: int) -> int:
        called.append(state.epoch)
        state.check_host_updates()
        return argument + keyword

    assert train.__name__ == "train"
    if os.environ.get("UNIDIST_BACKEND") == "mpi":
        with pytest.raises(unidist.BackendError, match="MPI ends the job when a process of it dies"):
            train(new_state(rank), 2, keyword=3)
        return
    assert train(new_state(rank), 2, keyword=3) == 5 and called == [0]


@pytest.mark.skipif(REAL, reason="Horovod keeps references, steps new optimizers, and pickles schedulers")
def test_what_is_better(rank: int, size: int) -> None:
    state = new_state(rank, losses=[1.0])
    state.scheduler = None
    scheduler = torch.optim.lr_scheduler.StepLR(state.optimizer, step_size=1)
    state = hvd.elastic.TorchState(state.model, state.optimizer, scheduler=scheduler, losses=[1.0])
    state.commit()
    state.losses.append(2.0)
    state.model.weight.grad = torch.ones(2, 2)
    state.restore()
    assert state.losses == [1.0] and state.model.weight.grad is None and state.scheduler is scheduler
    state.sync()
    assert not state.optimizer.state  # no step was taken
    with pytest.raises(TypeError, match="attribute 'generator' cannot be copied"):
        hvd.elastic.TorchState(generator=(i for i in range(2))).save()
