"""Operations under way: order, waiting, futures, groups."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import unidist
from tests.process_group.values import all_ranks, combined, mine


def test_operations_end_in_their_order() -> None:
    ended: list[int] = []
    tensors = [mine((3 if i % 2 else 30_000,)) for i in range(40)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for i, work in enumerate(works):
        assert work is not None
        work.get_future().add_done_callback(lambda _, i=i: ended.append(i))
    assert works[-1] is not None and works[-1].wait()
    for work in works:
        assert work is not None and work.wait() and work.is_completed() and work.is_success()
        work.get_future().wait()
    end = time.monotonic() + 10
    while len(ended) < 40 and time.monotonic() < end:  # the last callback may still be running
        time.sleep(0.001)
    assert sorted(ended) == list(range(40))
    assert all(torch.equal(tensor, combined(all_ranks(tuple(tensor.shape)), "sum")) for tensor in tensors)


def test_wait_with_a_timeout() -> None:
    if unidist.rank() == 0:
        work = dist.barrier(async_op=True)
        if unidist.world_size() > 1:
            start = time.monotonic()
            with pytest.raises(dist.DistBackendError, match=r"barrier, operation \d+, was not done 0.2 s after wait"):
                work.wait(timedelta(seconds=0.2))
            assert 0.2 <= time.monotonic() - start < 5
            assert not work.is_completed()
        for other in range(1, unidist.world_size()):
            dist.send(torch.ones(1), other)
    else:
        dist.recv(torch.empty(1), 0)
        work = dist.barrier(async_op=True)
    assert work.wait(timedelta(seconds=30))


def test_operations_in_a_queue_have_time_from_their_turn_on() -> None:
    """All three together take longer than the timeout of one."""
    group = dist.new_group(timeout=timedelta(seconds=4))
    works = []
    for _ in range(3):
        if unidist.rank() != 0:
            time.sleep(1.5)
        works.append(dist.all_reduce(torch.ones(50_000), group=group, async_op=True))
    for work in works:
        assert work is not None and work.wait()
    dist.destroy_process_group(group)


def test_a_short_wait_for_a_message_leaves_no_clock_running() -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    neighbour = unidist.rank() ^ 1
    if neighbour < unidist.world_size():
        work = dist.irecv(torch.empty(2), neighbour, group=group)
        assert work is not None
        with pytest.raises(dist.DistBackendError, match=r"message 1, was not done 0.05 s"):
            work.wait(timedelta(seconds=0.05))
        time.sleep(2)
        dist.send(torch.ones(2), neighbour, group=group)
        work.wait(timedelta(seconds=30))
    unidist.barrier()
    dist.destroy_process_group(group)


def test_a_callback_may_submit_and_wait() -> None:
    """As communication hooks do that reduce twice."""

    def again(future: torch.futures.Future[Any]) -> float:
        tensor = future.value()[0]
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.get_future().wait()  # in C++
        dist.all_reduce(tensor)
        return tensor[0].item()

    size = unidist.world_size()
    for numel in (3, 50_000, 3):
        work = dist.all_reduce(torch.ones(numel), async_op=True)
        assert work is not None
        # One at a time: what callbacks and the program submit side by side would differ in order from rank to rank.
        assert work.get_future().then(again).wait() == size**3


def test_power_sgd() -> None:
    """A hook of torch's own that waits inside its callbacks."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    torch.manual_seed(0)
    model = unidist.wrap_model(torch.nn.Sequential(torch.nn.Linear(200, 100), torch.nn.Linear(100, 5)))
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(5):
        optimizer.zero_grad()
        model(mine((4, 200))).pow(2).sum().backward()
        optimizer.step()
    unidist.assert_in_sync(model)


def test_groups_work_beside_each_other() -> None:
    """Each pair of neighbours has a group, and no order of them suits all ranks."""
    rank, size = unidist.rank(), unidist.world_size()
    if size < 3:
        pytest.skip("pairs that overlap need three ranks")
    pairs = [(i, (i + 1) % size) for i in range(size)]
    groups = [dist.new_group(sorted(pair)) for pair in pairs]
    mine_first = [rank, (rank - 1) % size]
    for numel in (2, 100_000):
        tensors = {i: torch.full((numel,), float(rank)) for i in mine_first}
        works = {i: dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in mine_first}
        for i, work in works.items():
            assert work is not None and work.wait()
            assert tensors[i][0].item() == sum(pairs[i])
    for i, group in enumerate(groups):
        if rank in pairs[i]:
            dist.destroy_process_group(group)


def test_a_group_counts_its_own_ranks() -> None:
    rank, size = unidist.rank(), unidist.world_size()
    if size < 2:
        pytest.skip("a group without rank 0 needs two ranks")
    members = list(range(1, size))
    group = dist.new_group(members)
    if rank in members:
        assert dist.get_rank(group) == rank - 1 and dist.get_world_size(group) == size - 1
        tensor = torch.full((2,), float(rank))
        dist.broadcast(tensor, size - 1, group=group)
        assert tensor.tolist() == [size - 1] * 2
        found: list[Any] = [None] * (size - 1)
        dist.all_gather_object(found, rank, group=group)
        assert found == members
        dist.destroy_process_group(group)
    unidist.barrier()


def test_gloo_beside_it() -> None:
    group = dist.new_group(backend="gloo")
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [unidist.world_size() ** 2] * 3
    dist.destroy_process_group(group)


def test_a_destroyed_group_refuses() -> None:
    group = dist.new_group()
    unidist.barrier()
    dist.destroy_process_group(group)
    with pytest.raises((dist.DistBackendError, ValueError), match=r"destroyed|not registered|Invalid"):
        group.allreduce([torch.ones(1)]).wait()


def test_monitored_barrier_names_who_is_missing() -> None:
    rank, size = unidist.rank(), unidist.world_size()
    group: Any = dist.group.WORLD
    group.monitored_barrier(timedelta(seconds=20))
    if size > 1 and rank == 0:
        with pytest.raises(dist.DistBackendError, match=r"timed out in monitoredBarrier .* rank 1 did not come"):
            group.monitored_barrier(timedelta(seconds=0.2))
        everyone_else = ", ".join(map(str, range(1, size)))
        with pytest.raises(dist.DistBackendError, match=f"ranks? {everyone_else} did not come"):
            group.monitored_barrier(timedelta(seconds=0.2), wait_all_ranks=True)
    unidist.barrier()


def test_the_profiler_sees_operations() -> None:
    with torch.profiler.profile() as profile:
        for numel in (3, 50_000):
            dist.all_reduce(torch.ones(numel))
        dist.broadcast(torch.ones(3), 0)
    names = [event.name for event in profile.events()]
    assert names.count("mpi4py:all_reduce") == 2 and names.count("mpi4py:broadcast") == 1


def test_works_leave_no_memory_behind() -> None:
    """Neither those that were waited for nor those whose future was."""
    import gc
    import weakref

    for numel in (3, 50_000):
        tensor = torch.ones(numel)
        gone = weakref.ref(tensor)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.get_future().wait()
        work.wait()
        del tensor, work
        # The thread lets go of the last operation a moment later.
        end = time.monotonic() + 5
        while gone() is not None and time.monotonic() < end:
            gc.collect()
            time.sleep(0.01)
        assert gone() is None
