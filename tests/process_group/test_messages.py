"""Messages from rank to rank."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

import unidist
from tests.process_group.values import DTYPES, SHAPES, mine, same, value

RANK_PAIRS_NEED = "messages need two ranks"


@pytest.fixture(autouse=True)
def _two_ranks() -> None:
    if unidist.world_size() < 2:
        pytest.skip(RANK_PAIRS_NEED)


def right() -> int:
    return (unidist.rank() + 1) % unidist.world_size()


def left() -> int:
    return (unidist.rank() - 1) % unidist.world_size()


@pytest.mark.parametrize("dtype", DTYPES)
def test_send_and_receive(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        if unidist.rank() == 0:
            dist.send(mine(shape, dtype), 1)
        elif unidist.rank() == 1:
            place = torch.empty(shape, dtype=dtype)
            assert dist.recv(place, 0) == 0
            assert same(place, value(0, shape, dtype))


@pytest.mark.parametrize("numel", [1, 100, 300_000])
def test_everybody_sends_before_anybody_receives(numel: int) -> None:
    sent = dist.isend(mine((numel,)), right())
    place = torch.empty(numel)
    received = dist.irecv(place, left())
    assert sent is not None and received is not None
    received.wait()
    sent.wait()
    assert sent.is_completed() and received.is_success()
    assert torch.equal(place, value(left(), (numel,), torch.float32))


def test_a_large_message_goes_while_nobody_waits() -> None:
    """The receiver answers beside MPI; the sender's thread alone must have moved the message."""
    store = dist.distributed_c10d._get_default_store()
    if unidist.rank() == 0:
        work = dist.isend(torch.ones(4_000_000), 1)
        store.wait(["large message came"])
        assert work is not None
        work.wait()
    elif unidist.rank() == 1:
        place = torch.zeros(4_000_000)
        dist.recv(place, 0)
        assert place.sum() == 4_000_000
        store.set("large message came", "")
    unidist.barrier()
    store.delete_key("large message came")


def test_from_any_source() -> None:
    size = unidist.world_size()
    if unidist.rank() == 0:
        came = {}
        for _ in range(size - 1):
            place = torch.empty(3)
            came[dist.recv(place)] = place
        assert sorted(came) == list(range(1, size))
        assert all(torch.equal(place, value(rank, (3,), torch.float32)) for rank, place in came.items())
    else:
        dist.send(mine((3,)), 0)
    unidist.barrier()


def test_tags_choose_among_messages() -> None:
    if unidist.rank() == 0:
        works = [dist.isend(torch.full((2,), float(tag)), 1, tag=tag) for tag in (7, 3)]
        for work in works:
            assert work is not None and work.wait()
    elif unidist.rank() == 1:
        for tag in (3, 7):
            place = torch.empty(2)
            dist.recv(place, 0, tag=tag)
            assert place.tolist() == [tag, tag]


def test_many_messages_keep_their_order() -> None:
    """Also those that are posted while another is waited for."""
    places = [torch.empty(1 + 1000 * (i % 7)) for i in range(200)]
    received = [dist.irecv(place, left()) for place in places]
    sent = [dist.isend(torch.full_like(place, float(i)), right()) for i, place in enumerate(places)]
    for work in [*sent, *received]:
        assert work is not None and work.wait()
    assert all(bool((place == i).all()) for i, place in enumerate(places))


def test_batches() -> None:
    place = torch.empty(3, 2)
    ops = [dist.P2POp(dist.isend, mine((3, 2)), right()), dist.P2POp(dist.irecv, place, left())]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert torch.equal(place, value(left(), (3, 2), torch.float32))


def test_a_tensor_that_is_not_contiguous() -> None:
    place = torch.empty(50, 40).t()
    work = dist.isend(mine((50, 40)).t(), right())
    dist.recv(place, left())
    assert work is not None and work.wait()
    assert torch.equal(place, value(left(), (50, 40), torch.float32).t())


def test_futures_of_messages() -> None:
    place = torch.empty(100_000)
    received = dist.irecv(place, left())
    sent = dist.isend(mine((100_000,)), right())
    assert received is not None and sent is not None
    total = received.get_future().then(lambda future: future.value()[0].sum().item())
    assert total.wait() == value(left(), (100_000,), torch.float32).sum().item()
    sent.get_future().wait()


def test_collectives_go_beside_messages() -> None:
    """An open receive does not stop them."""
    place = torch.empty(2)
    received = dist.irecv(place, left())
    for numel in (3, 50_000):
        tensor = torch.ones(numel)
        dist.all_reduce(tensor)
        assert bool((tensor == unidist.world_size()).all())
    sent = dist.isend(mine((2,)), right())
    assert received is not None and sent is not None
    received.wait()
    sent.wait()
    assert torch.equal(place, value(left(), (2,), torch.float32))


def test_a_message_of_another_size_is_an_error() -> None:
    if unidist.rank() == 0:
        dist.send(torch.ones(2), 1)
    elif unidist.rank() == 1:
        with pytest.raises(dist.DistBackendError, match=r"recv, message .* rank 0 sent 8 bytes, where 12"):
            dist.recv(torch.ones(3), 0)
    unidist.barrier()


def test_a_longer_message_is_an_error_of_its_own() -> None:
    if unidist.rank() == 0:
        dist.send(torch.ones(10), 1)
        dist.send(torch.ones(3), 1)
    elif unidist.rank() == 1:
        with pytest.raises(dist.DistBackendError, match=r"[Tt]runcated"):
            dist.recv(torch.ones(5), 0)
        place = torch.zeros(3)
        dist.recv(place, 0)
        assert place.tolist() == [1, 1, 1]
    unidist.barrier()


def test_threads_exchange_messages_on_one_group() -> None:
    failed: list[Exception] = []

    def exchange(tag: int) -> None:
        try:
            for numel in (1, 100, 100_000) * 10:
                place = torch.empty(numel)
                received = dist.irecv(place, left(), tag=tag)
                sent = dist.isend(torch.full((numel,), float(tag * 100 + unidist.rank())), right(), tag=tag)
                assert received is not None and sent is not None
                received.wait()
                sent.wait()
                assert bool((place == tag * 100 + left()).all())
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=exchange, args=(tag,)) for tag in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed[0]
    unidist.barrier()


def test_a_callback_may_receive() -> None:
    if unidist.rank() == 0:
        dist.send(torch.ones(2), 1)
        dist.send(torch.full((2,), 2.0), 1)
    elif unidist.rank() == 1:
        second = torch.empty(2)
        work = dist.irecv(torch.empty(2), 0)
        assert work is not None
        assert work.get_future().then(lambda _: dist.recv(second, 0)).wait() == 0
        assert second.tolist() == [2, 2]
    unidist.barrier()


def test_what_was_sent_outlives_its_group() -> None:
    """The memory that a late receiver reads is not used again before."""
    group = dist.new_group()
    if unidist.rank() == 0:
        dist.isend(torch.full((5_000_000,), 7.0), 1, group=group)
        dist.destroy_process_group(group)
        junk = [torch.full((5_000_000,), -3.0) for _ in range(3)]
        assert len(junk) == 3
    elif unidist.rank() == 1:
        time.sleep(1)
        place = torch.empty(5_000_000)
        dist.recv(place, 0, group=group)
        assert bool((place == 7).all())
        dist.destroy_process_group(group)
    unidist.barrier()


def test_a_receive_of_a_destroyed_group_is_taken_back() -> None:
    group = dist.new_group()
    work = dist.irecv(torch.empty(2), left(), group=group)
    unidist.barrier()
    dist.destroy_process_group(group)
    assert work is not None
    with pytest.raises(dist.DistBackendError, match="group was destroyed"):
        work.wait()


def test_a_rank_that_has_left_is_missed_only_by_those_who_need_it() -> None:
    if unidist.world_size() < 3:
        pytest.skip("a bystander needs three ranks")
    group = dist.new_group([0, 1, 2])
    place = torch.empty(2)
    if unidist.rank() == 2:
        dist.send(torch.ones(2), 0, group=group)
        dist.destroy_process_group(group)
    elif unidist.rank() == 1:
        time.sleep(4)
        dist.send(torch.ones(2), 0, group=group)
    elif unidist.rank() == 0:
        assert dist.recv(place, 2, group=group) == 2
        assert dist.recv(place, 1, group=group) == 1
    if unidist.rank() < 2:
        dist.destroy_process_group(group)
    unidist.barrier()
