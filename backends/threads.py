"""Ranks as threads of one process: what ``unidist.testing`` runs, and the example of a backend.

``Ranks`` is the library, in whose memory the ranks meet; ``ThreadsBackend`` makes a backend of it.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from unidist.backends.base import Backend, Group, Op, Start, Wait
from unidist.backends.reductions import reduced
from unidist.diagnosis.watch import locations
from unidist.diagnosis.watch.rank_state import RankState
from unidist.diagnosis.watch.report import explanation
from unidist.errors import BackendError
from unidist.launch.topology import Launch, Launcher, Slot, locate
from unidist.network.processes import Process

T = TypeVar("T")
_LAUNCHER = Launcher("threads", rank="", world_size="")
_this_process = cache(Process.current)


class Ranks:
    """The threads. One runs at a time, until it waits for others or ends: a run does not depend on timing, and ranks
    that would wait for ever are found at once.

    Args:
        size: the number of ranks.
        go_on: called with a rank, in its thread, whenever it is its turn again.
    """

    #: Those of this process.
    running: Ranks | None = None

    def __init__(self, size: int, go_on: Callable[[int], None]) -> None:
        self.size = size
        #: The rank that runs.
        self.turn: int | None = None
        self.backends = [ThreadsBackend(self, rank) for rank in range(size)]
        #: The threads' identifiers.
        self.threads: dict[int, int] = {}
        #: Operations that not all of their ranks have completed, by their ranks and number.
        self.operations: dict[tuple[tuple[int, ...], int], _Operation] = {}
        #: The ranks that have ended, in this order, and their errors.
        self.ended: dict[int, BaseException | None] = {}
        #: Why no rank waits any more; empty: they do.
        self.failure = ""
        #: The rank that was given up, and where it was.
        self.lost: int | None = None
        self.lost_place = ""
        self.all_ended = threading.Event()
        self._go_on = go_on
        self._lock = threading.RLock()
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        #: What the ranks that do not run wait for.
        self._until: dict[int, Callable[[], bool]] = {}

    def start(self, call: Callable[[int], object]) -> None:
        """Call a function with each rank, in a thread of its own."""
        self.ended.clear()
        self.all_ended.clear()
        self._until = {rank: lambda: True for rank in range(self.size)}
        for rank in range(self.size):
            thread = threading.Thread(target=self._run, args=(rank, call), name=f"rank {rank}", daemon=True)
            thread.start()
            self.threads[rank] = thread.ident or 0
        self._pass_on(self.size - 1)

    def wait(self, rank: int, until: Callable[[], bool]) -> None:
        """Let others run until a condition holds, or nobody may wait any more."""
        if until() or rank == self.lost:
            return
        self._until[rank] = until
        self._pass_on(rank)
        self._take_turn(rank)

    def give_up(self, reason: str) -> None:
        """End the rank that runs as soon as it runs Python's code again, and let the others fail now. Any thread."""
        with self._lock:
            if self.turn is not None:
                self.lost, self.failure = self.turn, reason
                self.lost_place = locations.location_of(self.threads[self.turn])
                end = ctypes.pythonapi.PyThreadState_SetAsyncExc
                end(ctypes.c_ulong(self.threads[self.turn]), ctypes.py_object(SystemExit))
                self._pass_on(self.turn)

    def _run(self, rank: int, call: Callable[[int], object]) -> None:
        self._take_turn(rank)
        error: BaseException | None = None
        try:
            call(rank)
        except BaseException as raised:
            error = raised
        with self._lock:
            if rank != self.lost:
                self.ended[rank] = error
                if error is not None and not self.failure:
                    self.failure = f"rank {rank} has failed"
                self._pass_on(rank)

    def _take_turn(self, rank: int) -> None:
        self._turns[rank].acquire()
        self._go_on(rank)

    def _pass_on(self, rank: int) -> None:
        """Let the next rank run that can."""
        with self._lock:
            waiting = sorted(self._until, key=lambda each: (each <= rank, each))
            ready = [each for each in waiting if self.failure or self._until[each]()]
            if waiting and not ready:
                self.failure, ready = "the ranks wait for each other", waiting
            self.turn = ready[0] if ready else None
            if self.turn is None:
                self.all_ended.set()
            else:
                del self._until[self.turn]
                self._turns[self.turn].release()


class _Operation:
    """A collective operation: what its ranks have given, and the result when all have."""

    def __init__(self, call: Hashable) -> None:
        self.call = call
        self.given: dict[int, Any] = {}
        self.result: Any = None
        #: How many ranks have not got the result.
        self.left = 0
        #: Why there will be none.
        self.error = ""


class ThreadsBackend(Backend):
    """One rank, which is a thread."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        launch = Launch(_LAUNCHER, rank, ranks.size)
        super().__init__(_LAUNCHER.name, locate(launch, [Slot("")] * ranks.size), torch.device("cpu"))
        self.watch = self  # it knows the other ranks
        self._ranks = ranks
        self._numbers = Counter[tuple[int, ...]]()
        self._aborted = ""

    @classmethod
    def start(cls, name: str, start: Start) -> ThreadsBackend:
        return _of_this_rank()

    @classmethod
    def adopt(cls, start: Start) -> ThreadsBackend | None:
        return None if Ranks.running is None or Ranks.running.turn is None else _of_this_rank()

    def shutdown(self) -> None:
        pass

    def quiesce(self) -> None:
        pass

    def abort(self) -> None:
        self._aborted = "aborted"

    def new_group(self, ranks: tuple[int, ...]) -> Group:
        return Group(ranks, None)

    def start_all_reduce(self, tensor: Tensor, op: Op, group: Group | None = None, *, call: str = "all_reduce") -> Wait:
        return self._start_in_place(call, f"all_reduce {op}", tensor, lambda given: reduced(given, op), group)

    def start_broadcast(self, tensor: Tensor, src: int, group: Group | None = None) -> Wait:
        index = self.ranks(group).index(src)
        return self._start_in_place(
            "broadcast", f"broadcast from {src}", tensor, lambda given: given[index].clone(), group
        )

    def all_gather(self, tensor: Tensor, sizes: Sequence[int], group: Group | None = None) -> Tensor:
        with self.errors_of("all_gather", tensor, group):
            return self._start(("all_gather", *sizes, tensor.dtype), tensor, torch.cat, group)().clone()

    def all_to_all(
        self, tensor: Tensor, send: Sequence[int], receive: Sequence[int], group: Group | None = None
    ) -> Tensor:
        def exchanged(given: list[tuple[Tensor, ...]]) -> list[Tensor]:
            return [torch.cat(parts) for parts in zip(*given)]

        with self.errors_of("all_to_all", tensor, group):
            parts = torch.split(tensor, list(send))
            return self._start(("all_to_all", tensor.dtype), parts, exchanged, group)()[self._index(group)]

    def reduce_scatter(self, tensor: Tensor, op: Op, group: Group | None = None) -> Tensor:
        signature = ("reduce_scatter", op, tensor.dtype, tensor.numel())
        with self.errors_of("reduce_scatter", tensor, group):
            whole = self._start(signature, tensor, lambda given: reduced(given, op), group)()
            return whole.view(len(self.ranks(group)), -1)[self._index(group)].clone()

    # -------------------------------------------------------------------------------- operations
    def _index(self, group: Group | None) -> int:
        return self.ranks(group).index(self.topology.rank)

    def _start_in_place(
        self, call: str, signature: str, tensor: Tensor, combine: Callable[[list[Tensor]], Tensor], group: Group | None
    ) -> Wait:
        span = self.began(call, tensor, group)
        result = self._start((signature, tensor.dtype, tensor.numel()), tensor, combine, group)

        def wait() -> None:
            with self.errors_of(call, tensor, group, span):
                tensor.copy_(result())

        return wait

    def _start(
        self, call: Hashable, mine: Any, combine: Callable[[list[Any]], T], group: Group | None
    ) -> Callable[[], T]:
        """Give this rank's part to the next operation of a group; what is returned waits for the result.

        Args:
            call: the same on all ranks of the group.
            mine: this rank's part.
            combine: makes the result, which shares no memory with the parts, of all of them, in rank order.
            group: the ranks that take part.
        """
        ranks, rank = self.ranks(group), self.topology.rank
        self._numbers[ranks] += 1
        key = ranks, self._numbers[ranks]
        operation = self._ranks.operations.setdefault(key, _Operation(call))
        operation.given[rank] = mine
        if call != operation.call:
            operation.error = "the ranks have made different calls"
        elif len(operation.given) == len(ranks) and not operation.error:
            operation.result = combine([operation.given[each] for each in ranks])
            operation.left = len(ranks)

        def reason() -> str:
            """Return why it cannot complete; empty: it can."""
            absent = [each for each in ranks if each in self._ranks.ended and each not in operation.given]
            ended = f"rank {absent[0]} has ended" if absent else ""
            return operation.error or self._aborted or ended

        def wait() -> T:
            self._ranks.wait(rank, lambda: bool(operation.left or reason()))
            if not operation.left:
                raise RuntimeError(reason() or self._ranks.failure)
            operation.left -= 1
            if not operation.left:
                del self._ranks.operations[key]
            result: T = operation.result
            return result

        return wait

    # -------------------------------------------------------------------------------- errors
    def explain(self, call: str, error: BaseException) -> tuple[str, str]:
        """See ``Watcher``."""
        return explanation(call, self.state(), [each.state() for each in self._ranks.backends])

    def state(self) -> RankState:
        """Return what this rank does. Any thread."""
        rank, process = self.topology.rank, _this_process()
        state = RankState(rank, process.host.name, process.pid, operations=tuple(self.operations()))
        if rank not in self._ranks.ended:
            return replace(state, place=locations.location_of(self._ranks.threads[rank]))
        error = self._ranks.ended[rank]
        if error is None:
            after = f", after {state.last_done}" if state.last_done else ""
            return replace(state, silence=f"has ended without an exception{after}")
        text = f"{type(error).__name__}: {error}, at {locations.location_in(error.__traceback__)}"
        return replace(state, silence="has ended", error=text, follows=self.follows(error, None))


def _of_this_rank() -> ThreadsBackend:
    ranks = Ranks.running
    if ranks is None or ranks.turn is None:
        raise BackendError("the backend 'threads' runs inside unidist.testing.world(...) only: call its run().")
    return ranks.backends[ranks.turn]
