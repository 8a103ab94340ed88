"""An operation under way: what torch.distributed asks of it, and what its thread does with it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_lock = threading.Lock()


class Owner(Protocol):
    """The group of an operation."""

    #: Seconds that an operation may take.
    timeout: float
    #: Who speaks, for errors.
    place: str

    def check(self) -> None:
        """Raise if the group is closed or broken."""

    def overdue(self, work: Work) -> None:
        """Break the group: ``work`` did not end within its timeout."""


class Work(dist.Work):
    """One operation, from its submission to its end."""

    def __init__(
        self, owner: Owner, name: str, outputs: list[Tensor], finish: Callable[[], object] | None = None
    ) -> None:
        super().__init__()
        self.owner = owner
        self.name = name
        self.sequence = 0
        #: Seconds that it may take; ``timeout`` is a property of torch.
        self.limit = owner.timeout
        #: Since when it should be going on.
        self.since = float("inf")
        #: The profiler's record of it.
        self.record: Any = None
        self._outputs = outputs
        self._finish = finish
        self._gate: threading.Lock | None = None
        self._done = False
        self._error: Exception | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._outward: torch.futures.Future[Any] | None = None

    def __str__(self) -> str:
        return f"{self.owner.place}: {self.name}, operation {self.sequence},"

    # -------------------------------------------------------------------------------- what c10d asks
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return when the operation is done.

        Args:
            timeout: how long to wait. Default: until the timeout of the operation, whose end breaks the group.

        Raises:
            DistBackendError: it failed, or is not done in time.
        """
        if not self._done:
            if timeout > timedelta(0):
                # Who says so may wait for longer than the group would.
                self.limit = max(self.limit, time.monotonic() - self.since + timeout.total_seconds())
                if not self.join(timeout.total_seconds()):
                    raise dist.DistBackendError(
                        f"{self} was not done {timeout.total_seconds():g} s after wait() was called."
                    )
            elif not self.join(self.since + self.limit - time.monotonic()):
                self.owner.overdue(self)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether the operation is done, well or badly."""
        return self._done

    def is_success(self) -> bool:
        """Whether it is done, and well."""
        return self._done and self._error is None

    def exception(self) -> Exception | None:
        """Why it failed."""
        return self._error

    def synchronize(self) -> None:
        """As ``wait``: when an operation of this engine is done, its results are there."""
        self.wait()

    def result(self) -> list[Tensor]:
        """The tensors that the operation fills."""
        return self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of ``result``, which fails as the operation does."""
        with _lock:
            if self._outward is None:
                self._future = torch.futures.Future()
                # A callback that raises fails its future for those who wait in C++ as well; set_exception() would not.
                self._outward = self._future.then(_open)
            done, outward = self._done, self._outward
        if done:
            self._settle()
        return outward

    # -------------------------------------------------------------------------------- what the threads ask
    def hand_over(self) -> None:
        """From here on another thread brings the operation to its end."""
        self._gate = threading.Lock()
        self._gate.acquire()

    def end(self, error: Exception | None = None) -> None:
        """Complete the results, and tell those who wait. The first end counts."""
        if error is None and self._finish is not None and not self._done:
            try:
                with torch.inference_mode():  # the results may be tensors of that mode
                    self._finish()
            except Exception as failure:
                error = failure
        if error is not None and not isinstance(error, dist.DistBackendError):
            error = dist.DistBackendError(f"{self} failed: {error}")
        with _lock:
            if self._done:
                return
            self._done, self._error, self._finish = True, error, None
        if self.record is not None:
            torch.autograd._record_function_with_args_exit(self.record)
        if self._gate is not None:
            self._gate.release()
        self._settle()

    def join(self, seconds: float) -> bool:
        """Wait for the end, and tell whether it came."""
        if self._done or self._gate is None:
            return True
        if not self._gate.acquire(timeout=max(0.0, min(seconds, threading.TIMEOUT_MAX))):
            return False
        self._gate.release()
        return True

    def _settle(self) -> None:
        with _lock:
            future, self._future = self._future, None
        if future is not None:
            # Not the operation itself: it holds its futures, and the collector does not see through them.
            future.set_result((self._outputs, self._error))


def _open(future: torch.futures.Future[Any]) -> list[Tensor]:
    outputs, error = future.value()
    if error is not None:
        raise error
    return outputs  # type: ignore[no-any-return]
