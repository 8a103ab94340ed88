"""An operation that has been submitted."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from unidist.diagnosis.watch import locations
from unidist.hvd.errors import HorovodInternalError
from unidist.hvd.messages import Name, Signature

#: The id of the process set of all ranks.
GLOBAL_SET = 0


class Operation:
    """One of Horovod's operations on this rank, from its submission to its result.

    Args:
        name: unique among the pending operations of the process set; a number for one without a name.
        signature: what is the same on all ranks.
        inputs: this rank's tensors.
        outputs: where results of the inputs' shapes go; None where outputs are allocated when their shapes are known.
        value: the numbers of a small tensor, if they are sent with the request.
        splits: of ``alltoall``: the rows for each rank.
        set_id: the process set.
        to_result: makes of what was computed what ``synchronize`` returns.
        result: what ``synchronize`` returns, where it is known before.
    """

    __slots__ = (
        "_done_lock", "_line", "done", "error", "executed", "inputs", "inputs_ready", "name", "outputs", "result",
        "set_id", "signature", "splits", "started", "to_result", "value",
    )  # fmt: skip

    def __init__(
        self,
        name: Name,
        signature: Signature,
        inputs: Sequence[Tensor] = (),
        outputs: Sequence[Tensor] | None = None,
        value: bytes = b"",
        set_id: int = GLOBAL_SET,
        to_result: Callable[[Any], Any] | None = None,
        result: Any = None,
        splits: tuple[int, ...] = (),
    ) -> None:
        self.name = name
        self.signature = signature
        self.inputs = inputs
        self.outputs = outputs
        self.value = value
        self.splits = splits
        self.set_id = set_id
        self.to_result = to_result
        self.result = result
        self.error: Exception | None = None
        #: Recorded on the caller's stream: the kernels before it compute the inputs.
        self.inputs_ready: torch.cuda.Event | None = None
        if signature.device == "cuda":
            self.inputs_ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.inputs_ready.record()
        self.done = False
        self._line = locations.users_line(sys._getframe(1))
        #: Time of ``time.monotonic()``.
        self.started = time.monotonic()
        #: How many operations of its process set had been executed when it was submitted.
        self.executed = 0
        self._done_lock = threading.Lock()
        self._done_lock.acquire()

    def finish(self, result: Any = None, error: Exception | None = None) -> None:
        """Wake up those who wait, with what was computed or with an error. No-op for one that is done."""
        if self.done:
            return
        if result is not None:
            self.result = result
        self.error, self.done = error, True
        with suppress(RuntimeError):  # another thread has finished it at the same time
            self._done_lock.release()

    def fail(self, reason: str) -> HorovodInternalError:
        """Finish with an error, which says where the operation was submitted; return that error."""
        error = HorovodInternalError(f"{reason} (called at {locations.show(*self._line)})")
        self.finish(error=error)
        return error

    def wait(self) -> Any:
        """Wait for the result."""
        if not self.done:
            self._done_lock.acquire()
            with suppress(RuntimeError):  # for others that wait
                self._done_lock.release()
        error = self.error
        if error is not None:
            try:
                raise error
            finally:  # else the traceback would keep the tensors
                del self, error
        return self.result if self.to_result is None else self.to_result(self.result)
