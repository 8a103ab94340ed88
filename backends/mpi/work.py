"""A pending operation: the ``Work`` that torch.distributed waits for, completed by the threads of ``progress``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from unidist.backends.mpi.channel import Channel

_lock = threading.Lock()


class Work(dist.Work):
    """One operation, from its submission to its completion."""

    def __init__(
        self, owner: Channel, name: str, outputs: list[Tensor], finish: Callable[[], object] | None = None
    ) -> None:
        super().__init__()
        self.owner = owner
        self.name = name
        self.sequence = 0
        #: Seconds that it may take; the name ``timeout`` is taken by torch.
        self.limit = owner.timeout
        #: Time of ``time.monotonic()`` at which it became the first in its queue.
        self.started_at = float("inf")
        #: The profiler's record of it.
        self.record: Any = None
        self._outputs = outputs
        self._finish = finish
        self._done_lock: threading.Lock | None = None
        self._done = False
        self._error: Exception | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._user_future: torch.futures.Future[Any] | None = None

    def __str__(self) -> str:
        return f"{self.owner.label}: {self.name}, operation {self.sequence},"

    # -------------------------------------------------------------------------------- the interface of c10d
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return when the operation is done.

        Args:
            timeout: how long to wait. Default: until the operation's own timeout, which fails the group.

        Raises:
            DistBackendError: it failed, or is not done in time.
        """
        if not self._done:
            if timeout > timedelta(0):
                # A caller may wait for longer than the group's timeout.
                self.limit = max(self.limit, time.monotonic() - self.started_at + timeout.total_seconds())
                if not self.wait_until_done(timeout.total_seconds()):
                    raise dist.DistBackendError(
                        f"{self} was not done {timeout.total_seconds():g} s after wait() was called."
                    )
            elif not self.wait_until_done(self.started_at + self.limit - time.monotonic()):
                self.owner.timed_out(self)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Return whether the operation is done, with or without an error."""
        return self._done

    def is_success(self) -> bool:
        """Return whether it is done without an error."""
        return self._done and self._error is None

    def exception(self) -> Exception | None:
        """Return the error with which it failed, or None."""
        return self._error

    def synchronize(self) -> None:
        """As ``wait``: an operation on MPI is done when its outputs are written."""
        self.wait()

    def result(self) -> list[Tensor]:
        """Return the tensors that the operation writes."""
        return self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of ``result``, which fails as the operation does."""
        with _lock:
            if self._user_future is None:
                self._future = torch.futures.Future()
                # A callback that raises fails its future for those who wait in C++ as well; set_exception() would not.
                self._user_future = self._future.then(_unpack)
            done, outward = self._done, self._user_future
        if done:
            self._resolve_future()
        return outward

    # -------------------------------------------------------------------------------- for the threads
    def move_to_thread(self) -> None:
        """Let another thread complete the operation from here on."""
        self._done_lock = threading.Lock()
        self._done_lock.acquire()

    def complete(self, error: Exception | None = None) -> None:
        """Write the outputs back, and wake up those who wait. A second call has no effect."""
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
        if self._done_lock is not None:
            self._done_lock.release()
        self._resolve_future()

    def wait_until_done(self, seconds: float) -> bool:
        """Wait at most so long; whether the operation is done."""
        if self._done or self._done_lock is None:
            return True
        if not self._done_lock.acquire(timeout=max(0.0, min(seconds, threading.TIMEOUT_MAX))):
            return False
        self._done_lock.release()
        return True

    def _resolve_future(self) -> None:
        with _lock:
            future, self._future = self._future, None
        if future is not None:
            # Not the operation itself: it refers to its futures, and the garbage collector does not see through those.
            future.set_result((self._outputs, self._error))


def _unpack(future: torch.futures.Future[Any]) -> list[Tensor]:
    outputs, error = future.value()
    if error is not None:
        raise error
    return outputs  # type: ignore[no-any-return]
