"""The process of a rank: ``python -m unidist.hvd -m unidist.spark.rank PIPE``.

It reads the function from its standard input, which its task closes when the rank has to end, and writes to the pipe
what the function returned, or the traceback.
"""

from __future__ import annotations

import os
import signal
import struct
import sys
import threading
import time
import traceback
from typing import BinaryIO

import cloudpickle

from unidist import context

#: Before the outcome: whether the function returned, and the number of bytes that follow. Before the function: the
#: same, where the first is of no meaning.
HEAD = struct.Struct("<?Q")
#: Seconds in which the driver ends the job when the function has raised.
_END_S = 30.0


def main(pipe: int) -> None:
    """Run the function and report its outcome; the process exits with 1 if it raised."""
    stdin = os.fdopen(os.dup(0), "rb")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    payload = stdin.read(HEAD.unpack(stdin.read(HEAD.size))[1])
    threading.Thread(target=_end_with_the_task, args=(stdin,), name="unidist-spark", daemon=True).start()
    try:
        fn, args, kwargs = cloudpickle.loads(payload)
        data = cloudpickle.dumps(fn(*args, **kwargs))
        context.shutdown()
    except BaseException:
        _report(pipe, False, traceback.format_exc().encode())
        # The others fail when this process ends. Its task ends it when the driver knows why.
        time.sleep(_END_S)
        sys.exit(1)
    _report(pipe, True, data)


def _report(pipe: int, returned: bool, data: bytes) -> None:
    with os.fdopen(pipe, "wb") as file:
        file.write(HEAD.pack(returned, len(data)) + data)


def _end_with_the_task(stdin: BinaryIO) -> None:
    stdin.read()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv.pop()))
