"""A function of many items, called in several processes: its results in the order of the items."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from itertools import chain, islice
from multiprocessing import get_context
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
#: With no more items, this process does the work.
FEW = 4
#: What the processes call: copies of this one have it.
_function: Callable[[Any], Any]


def results_in_order(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    died: Callable[[Item], Result],
    processes: int | None = None,
) -> Iterator[Result]:
    """Yield ``map(function, items)`` in several processes; in this one if there are few items.

    Args:
        died: the result for an item whose process died.
        processes: the largest number of them; by default that of the cores that this process may use.
    """
    global _function
    processes = len(os.sched_getaffinity(0)) if processes is None else processes
    remaining = iter(items)
    first = list(islice(remaining, FEW + 1))
    if len(first) <= FEW or processes == 1:
        yield from map(function, chain(first, remaining))
        return
    _function = function
    pool = _pool(processes)
    started: deque[tuple[Item, Future[Result]]] = deque()
    try:
        for item in chain(first, remaining):
            try:
                future = pool.submit(_call, item)
            except BrokenProcessPool:
                yield from _finished(started, died)
                pool = _pool(processes)
                future = pool.submit(_call, item)
            started.append((item, future))
            if len(started) > 2 * processes:
                yield _result(*started.popleft(), died)
        yield from _finished(started, died)
    finally:
        pool.shutdown(cancel_futures=True)


def _pool(processes: int) -> ProcessPoolExecutor:
    """Processes that are copies of this one, so that they import nothing again."""
    return ProcessPoolExecutor(processes, get_context("fork"), signal.signal, (signal.SIGINT, signal.SIG_IGN))


def _call(item: Any) -> Any:
    return _function(item)


def _finished(started: deque[tuple[Item, Future[Result]]], died: Callable[[Item], Result]) -> Iterator[Result]:
    while started:
        yield _result(*started.popleft(), died)


def _result(item: Item, future: Future[Result], died: Callable[[Item], Result]) -> Result:
    """Return the result of an item; if a process died, perhaps that of another item, it is tried again alone."""
    with suppress(BrokenProcessPool):
        return future.result()
    with _pool(1) as pool, suppress(BrokenProcessPool):
        again: Result = pool.submit(_call, item).result()
        return again
    return died(item)
