"""Training code on several ranks in one process, for tests: each rank is a thread, and they take turns."""

from __future__ import annotations

import copy
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch

from unidist import context
from unidist import world as process_world
from unidist.backends.threads import Ranks
from unidist.diagnosis.spans import spans
from unidist.errors import UnidistError

P = ParamSpec("P")
T = TypeVar("T")
#: What a process has one of, and here each rank; how it begins.
_OF_A_PROCESS: dict[tuple[Any, str], Callable[[Any], Any]] = {
    (context, "_world"): lambda _: None,
    (context, "_attempts"): lambda _: 0,
    (context, "_last"): lambda _: {},
    (process_world, "_hook"): lambda _: None,
    (process_world, "_hook_before"): lambda before: before,
    (sys, "excepthook"): lambda hook: hook,
    (spans, "on"): lambda _: False,
    (spans, "_add"): lambda _: None,
    (spans, "_numbers"): lambda numbers: type(numbers)(),
}
#: The same, which begins in each run as the caller's.
_OF_A_CALLER: dict[tuple[Any, str], Callable[[Any], Any]] = {
    (warnings, "filters"): list,
    (warnings, "showwarning"): lambda show: show,
    (warnings, "_showwarnmsg_impl"): lambda show: show,
}
#: Seconds in which ranks that have failed must end.
_GRACE_S = 5.0


@contextmanager
def world(size: int, *, timeout: float = 300.0) -> Iterator[ThreadWorld]:
    """Start a world of ``size`` ranks in this process, on the backend ``threads``, for tests of training code. ::

        def test_training():
            with unidist.testing.world(4) as world:
                losses = world.run(train, epochs=1)
            assert len(set(losses)) == 1

    Args:
        size: the number of ranks.
        timeout: seconds that one ``run`` may take.
    """
    if size < 1:
        raise ValueError(f"unidist.testing.world({size}): a world has at least one rank.")
    if Ranks.running is not None:
        raise UnidistError("unidist.testing.world inside another one: a process has one at a time.")
    threads = ThreadWorld(size, timeout)
    try:
        yield threads
    finally:
        threads.close()


class ThreadWorld:
    """What ``world`` yields; see there."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self._timeout = timeout
        self._begin()

    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Call a function on every rank, and return the results in rank order.

        The ranks are initialized: the first ``unidist.init()`` inside has no effect, but for its ``seed`` and a
        ``backend`` that it names. They take turns: one runs until it waits for the others. Each has its own random
        states (of Python, NumPy and torch's CPU generator) and warning filters, which begin as the caller's; what else
        a process has one of, they share. Arguments are the same objects on all ranks: make models inside.

        Raises:
            CollectiveError: a rank waits for one that has ended, or that does not go on within the timeout.
            TimeoutError: no rank waits, and one does not end.
            Exception: what the first rank that failed has raised, with its traceback; the others are ended. The next
                run begins with new ranks.
        """
        results: dict[int, T] = {}

        def call(rank: int) -> None:
            if not context.is_initialized():
                context.init("threads")
                context._running().arguments.clear()  # those of the first init() count
            results[rank] = function(*args, **kwargs)

        ranks = self._ranks
        self._states.inherit()
        try:
            ranks.start(call)
            if not ranks.all_ended.wait(self._timeout):
                ranks.give_up(f"the run did not end within {self._timeout:g} s")
        except BaseException:  # Ctrl-C
            ranks.give_up("the run was interrupted")
            raise
        finally:
            ranks.all_ended.wait(_GRACE_S)
            self._states.load(None)
            if ranks.failure:
                self.close()
                self._begin()
        for rank, error in ranks.ended.items():
            if error is not None:
                if isinstance(error, Exception) and hasattr(error, "add_note"):  # Python 3.11
                    error.add_note(f"(rank {rank} of {self.size})")
                raise error
        if ranks.lost is not None:
            raise TimeoutError(
                f"rank {ranks.lost} of {self.size} did not end within {self._timeout:g} s; it was at "
                f"{ranks.lost_place}. Pass a longer timeout to unidist.testing.world if it needs one."
            )
        return [results[rank] for rank in range(self.size)]

    def close(self) -> None:
        """Let all ranks leave the world."""
        try:
            for rank in range(self.size):
                self._states.load(rank)
                context.leave()
        finally:
            self._states.load(None)
            Ranks.running = None

    def _begin(self) -> None:
        self._states = _States(self.size)
        self._ranks = Ranks.running = Ranks(self.size, self._states.load)


class _State:
    """What one rank has of its own."""

    def __init__(self, values: dict[tuple[Any, str], Any]) -> None:
        self.values = values
        self.python, self.torch, self.numpy = random.getstate(), torch.get_rng_state(), _generator()

    def load(self) -> None:
        for (owner, name), value in self.values.items():
            setattr(owner, name, value)
        random.setstate(self.python)
        torch.set_rng_state(self.torch)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_bit_generator(self.numpy)


class _States:
    """The states of the ranks and, by None, the caller's; one is loaded."""

    def __init__(self, size: int) -> None:
        self._states: dict[int | None, _State] = {rank: _State(_first_values(_OF_A_PROCESS)) for rank in range(size)}
        self._loaded: int | None = None

    def load(self, rank: int | None) -> None:
        """Let a rank go on where it was."""
        if rank != self._loaded:
            keys = (*_OF_A_PROCESS, *_OF_A_CALLER)
            self._states[self._loaded] = _State({(owner, name): getattr(owner, name) for owner, name in keys})
            self._states[rank].load()
            self._loaded = rank

    def inherit(self) -> None:
        """Give each rank the caller's random states and warning filters."""
        for rank, state in self._states.items():
            if rank is not None:
                self._states[rank] = new = _State({**state.values, **_first_values(_OF_A_CALLER)})
                new.numpy = copy.deepcopy(new.numpy)


def _first_values(made: dict[tuple[Any, str], Callable[[Any], Any]]) -> dict[tuple[Any, str], Any]:
    return {(owner, name): make(getattr(owner, name)) for (owner, name), make in made.items()}


def _generator() -> Any:
    """NumPy's global bit generator, if NumPy is loaded."""
    return sys.modules["numpy"].random.get_bit_generator() if "numpy" in sys.modules else None
