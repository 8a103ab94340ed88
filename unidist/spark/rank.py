"""The process of a rank: ``python -m unidist.hvd -m unidist.spark.rank PIPE``.

It reads the function, and the last commit of an elastic training, from its standard input, which its task closes when
the rank has to end. It writes to the pipe its commits, and what the function returned, or the traceback.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
import traceback
from typing import Any, BinaryIO

import cloudpickle
import torch

from unidist import context
from unidist.elastic import host_memory
from unidist.spark.barrier import COMMIT, FAILED, HEAD, RETURNED

#: Seconds in which the driver ends the job when the function has raised.
_END_S = 30.0


def main(pipe: int) -> None:
    """Run the function and report its outcome; the process exits with 1 if it raised."""
    stdin = os.fdopen(os.dup(0), "rb")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    kind, message = _read(stdin)
    if kind == COMMIT:
        host_memory.store_in(_CommitsOnDriver(pipe, message))
        _, message = _read(stdin)
    threading.Thread(target=_end_with_the_task, args=(stdin,), name="unidist-spark", daemon=True).start()
    try:
        fn, args, kwargs = cloudpickle.loads(message)
        data = cloudpickle.dumps(fn(*args, **kwargs))
        context.shutdown()
    except BaseException:
        _report(pipe, FAILED, traceback.format_exc().encode())
        # The others fail when this process ends. Its task ends it when the driver knows why.
        time.sleep(_END_S)
        sys.exit(1)
    _report(pipe, RETURNED, data)


class _CommitsOnDriver:
    """See ``host_memory.Storage``.

    Args:
        pipe: to the task.
        last: the last commit of the processes before, if any.
    """

    def __init__(self, pipe: int, last: bytes) -> None:
        self._pipe = pipe
        self._last = last

    def write(self, commit: int, state: Any) -> None:
        """Send it to the driver."""
        buffer = io.BytesIO()
        torch.save((commit, state), buffer)
        _report(self._pipe, COMMIT, buffer.getbuffer())

    def read(self) -> tuple[int, Any] | None:
        """Return the last commit of the processes before; on rank 0 only."""
        if not self._last:
            return None
        device = context.current().device
        found: tuple[int, Any] = torch.load(io.BytesIO(self._last), map_location=device, weights_only=False)
        return found

    def clear(self) -> None:
        """Do nothing: the driver drops it at the end."""


def _read(stream: BinaryIO) -> tuple[int, bytes]:
    kind, length = HEAD.unpack(stream.read(HEAD.size))
    return kind, stream.read(length)


def _report(pipe: int, kind: int, data: bytes | memoryview) -> None:
    with os.fdopen(pipe, "wb", closefd=False) as file:
        file.write(HEAD.pack(kind, len(data)))
        file.write(data)


def _end_with_the_task(stdin: BinaryIO) -> None:
    stdin.read()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv.pop()))
