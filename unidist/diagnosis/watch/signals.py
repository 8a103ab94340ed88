"""SIGUSR1: a wish for a report that reaches a process whose main thread is in a call of C++."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from contextlib import suppress

#: How long faulthandler may take to write a stack.
_PIECES_S = 0.1


class ReportSignal:
    """While it is open, SIGUSR1 writes to ``pipe``.

    Python's own handlers run in the main thread, between two of its instructions. faulthandler's runs at once, in C;
    that it writes a stack is the signal here.
    """

    def __init__(self) -> None:
        self.pipe, self._writer = os.pipe()
        for end in (self.pipe, self._writer):
            os.set_blocking(end, False)
        faulthandler.register(signal.SIGUSR1, file=self._writer, all_threads=False)

    @classmethod
    def open(cls) -> ReportSignal | None:
        """Take SIGUSR1; None where it has another use already, or does not exist."""
        if not hasattr(faulthandler, "register") or signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
            return None
        return cls()

    def clear(self) -> None:
        """Read what has been written, which comes in pieces."""
        time.sleep(_PIECES_S)
        with suppress(BlockingIOError):
            while os.read(self.pipe, 2**16):
                pass

    def close(self) -> None:
        """Restore the signal's default action, unless the user has installed a handler since."""
        if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
            faulthandler.unregister(signal.SIGUSR1)
        os.close(self._writer)
        os.close(self.pipe)
