"""What must not disturb the drop-in's control plane. Horovod itself hangs, or is not interrupted, in most of it."""

from __future__ import annotations

import ctypes
import math
import signal
import threading
import time
from typing import Any

import pytest
import torch

from tests.hvd.api import REAL, hvd

pytestmark = pytest.mark.skipif(REAL, reason="the drop-in's own promises")


def test_factors_that_are_not_a_number(size: int) -> None:
    for _ in range(3):
        result = hvd.allreduce(torch.ones(2000), name="nan", op=hvd.Sum, prescale_factor=math.nan)
        assert result.isnan().all()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size


def test_a_signature_that_changes(size: int) -> None:
    """An operation that has an id is submitted in another way, and in the first again."""
    for turn in range(8):
        length = 3000 if turn % 3 else 4000
        assert hvd.allreduce(torch.ones(length), name="changes", op=hvd.Sum).shape == (length,)
        assert hvd.allreduce(torch.ones(1), name="changes", op=hvd.Max).item() == 1
        handle = hvd.allreduce_async(torch.ones(1), name="changes", op=hvd.Max)
        assert hvd.synchronize(handle).item() == 1


@pytest.mark.skipif("hvd.size() < 3", reason="two ranks of three wait for each other")
def test_a_process_set_that_is_removed_while_a_rank_waits_in_it(rank: int, size: int) -> None:
    process_set = hvd.add_process_set([0, 1])
    handle = None
    if rank == 1:
        handle = hvd.allreduce_async(torch.ones(4), name="in vain", process_set=process_set)
    hvd.barrier()
    hvd.remove_process_set(process_set)
    if handle is not None:
        with pytest.raises(hvd.HorovodInternalError, match=r"allreduce.in vain: process set \d+ has been removed"):
            hvd.synchronize(handle)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size


def test_a_rank_that_keeps_pythons_lock_for_long(rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``json.load`` does. Of another host nobody can see whether a rank is stopped or busy."""
    from unidist.hvd.session import current_session
    from unidist.network.processes import Process

    control = current_session()._control
    monkeypatch.setattr(control, "_options", control._options._replace(deadline=1.0))
    monkeypatch.setattr(Process, "state", lambda self: "")
    for slow in {0, size - 1}:
        hvd.barrier()
        if rank == slow:
            ctypes.PyDLL(None).usleep(3_500_000)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size


def test_threads_that_submit_at_the_same_time(rank: int, size: int) -> None:
    found: dict[int, list[float]] = {}

    def work(thread: int) -> None:
        found[thread] = []
        for i in range(100):
            values = [
                hvd.allreduce_async(torch.full((50,), float(i)), name=f"thread{thread}.{i}.{j}", op=hvd.Sum)
                for j in range(5)
            ]
            found[thread] += [hvd.synchronize(handle)[0].item() for handle in values]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(values == [float(i * size) for i in range(100) for _ in range(5)] for values in found.values())
    assert len(found) == 4


class Interrupt(Exception):
    pass


def test_a_wait_that_is_interrupted_can_be_repeated(rank: int, size: int) -> None:
    """Signal handlers that raise, as Ctrl-C does, in the middle of calls of one rank."""
    interrupts = kept = 0
    waiting = False

    def interrupt(*_: Any) -> None:
        nonlocal interrupts, waiting
        if waiting:
            waiting = False
            interrupts += 1
            raise Interrupt

    def wait(handle: int) -> Any:
        nonlocal waiting
        while True:
            try:
                waiting = True
                result = hvd.synchronize(handle)
                waiting = False
            except Interrupt:
                continue
            return result

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    try:
        for i in range(30):
            handles = [hvd.allreduce_async(torch.full((3000,), float(i)), name=f"i.{j}", op=hvd.Sum) for j in range(4)]
            if rank == size - 1:
                time.sleep(0.01)  # the others are interrupted while they wait
            for result in map(wait, handles):
                # None: interrupted at the very end, when the handle had been used.
                assert result is None or result[0].item() == i * size
                kept += result is not None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert (interrupts > 0 or rank == size - 1) and kept > 60
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
