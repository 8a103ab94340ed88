"""A function of many items, called in several processes: its results in the order of the items."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
#: With no more items, this process does the work.
FEW = 4


def results_in_order(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    died: Callable[[Item, int], Result],
    processes: int | None = None,
) -> Iterator[Result]:
    """``map(function, items)`` in several processes; in this one if there are few items.

    Args:
        died: the result for an item whose process died, by the item and the process's exit code (negative: a signal).
        processes: the largest number of them; by default that of the cores that this process may use.
    """
    processes = len(os.sched_getaffinity(0)) if processes is None else processes
    remaining = iter(items)
    first = list(islice(remaining, FEW + 1))
    if len(first) <= FEW or processes == 1:
        yield from map(function, chain(first, remaining))
        return
    team = _Team(function, died)
    try:
        yield from team.results(chain(first, remaining), processes)
    finally:
        team.end()


class _Team(Generic[Item, Result]):
    def __init__(self, function: Callable[[Item], Result], died: Callable[[Item, int], Result]) -> None:
        self._function, self._died = function, died
        self._workers: dict[Connection, _Worker] = {}
        #: The numbers and the items on which workers are at work.
        self._busy: dict[Connection, tuple[int, Item]] = {}

    def results(self, items: Iterable[Item], processes: int) -> Iterator[Result]:
        numbered = enumerate(items)
        done: dict[int, Result] = {}
        following = 0
        while True:
            for number, item in islice(numbered, processes - len(self._busy)):
                self._start(number, item)
            if not self._busy:
                return
            for connection in wait(list(self._busy)):
                assert isinstance(connection, Connection)
                number, result = self._finish(connection)
                done[number] = result
            while following in done:
                yield done.pop(following)
                following += 1

    def _start(self, number: int, item: Item) -> None:
        connection = next((each for each in self._workers if each not in self._busy), None)
        if connection is None:
            worker = _Worker(self._function, list(self._workers))
            connection = worker.connection
            self._workers[connection] = worker
        self._busy[connection] = number, item
        connection.send(item)

    def _finish(self, connection: Connection) -> tuple[int, Result]:
        number, item = self._busy.pop(connection)
        try:
            return number, connection.recv()
        except (EOFError, OSError):
            return number, self._died(item, self._workers.pop(connection).end())

    def end(self) -> None:
        for worker in self._workers.values():
            worker.process.terminate()
        for worker in self._workers.values():
            worker.end()


class _Worker:
    """A process that calls the function on what it receives; a copy of this one, so that it imports nothing again."""

    def __init__(self, function: Callable[[Item], Result], others: list[Connection]) -> None:
        context = get_context("fork")
        self.connection, theirs = context.Pipe()
        # If it kept these open, it would not see that this process has ended.
        unused = [*others, self.connection]
        self.process = context.Process(target=_serve, args=(function, theirs, unused), daemon=True)
        with warnings.catch_warnings():
            # Python warns of threads, as that of a progress bar; the copy calls nothing that needs their locks.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        theirs.close()

    def end(self) -> int:
        """Wait for its end; its exit code."""
        self.connection.close()
        self.process.join()
        return self.process.exitcode or 0


def _serve(function: Callable[[Item], Result], connection: Connection, unused: list[Connection]) -> None:
    for each in unused:
        each.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that waits for the results ends this one
    status = 1
    try:
        while True:
            connection.send(function(connection.recv()))
    except EOFError:
        status = 0
    finally:
        os._exit(status)  # not flushing, as a copied thread may have held a stream's lock
