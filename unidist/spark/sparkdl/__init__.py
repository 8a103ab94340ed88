"""Databricks' ``sparkdl.HorovodRunner`` on ``unidist.spark.run``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TextIO, cast

from unidist.hvd import alias
from unidist.hvd import run as run_here
from unidist.spark.runner import run
from unidist.spark.sparkdl.horovod import MARK


class HorovodRunner:
    """Runs a function in several processes that train together.

    Args:
        np: above 0: that many processes in tasks of Spark; below 0: ``-np`` processes on the driver's host, without
            Spark; 0: as many as ``spark.default.parallelism``.
        driver_log_verbosity: of what is printed in tasks of Spark, ``log_callback_only`` shows the messages of
            ``log_to_driver`` on the driver, and ``all`` shows all.

    Raises:
        ValueError: another ``driver_log_verbosity``.
    """

    def __init__(self, *, np: int, driver_log_verbosity: str = "log_callback_only") -> None:
        if driver_log_verbosity not in ("log_callback_only", "all"):
            raise ValueError(
                f"HorovodRunner(driver_log_verbosity={driver_log_verbosity!r}): use 'log_callback_only' or 'all'."
            )
        self.num_processor = np
        self._shows_all = driver_log_verbosity == "all"

    def run(self, main: Callable[..., Any], **kwargs: Any) -> Any:
        """Call ``main(**kwargs)`` in each process.

        Returns:
            What it returned on rank 0.

        Raises:
            UnidistError: as ``unidist.spark.run``.
            torch.multiprocessing.ProcessRaisedException: ``main`` failed in a process of this host.
        """
        if self.num_processor < 0:
            alias.install()
            return run_here(main, kwargs=kwargs, num_proc=-self.num_processor)[0]
        shown = None if self._shows_all else cast(TextIO, _Messages())
        found = run(main, kwargs=kwargs, num_proc=self.num_processor or None, stdout=shown, verbose=self._shows_all)
        return found[0]


class _Messages:
    """A stream that shows only what is for the driver."""

    def write(self, text: str) -> None:
        sys.stdout.write("".join(line for line in text.splitlines(keepends=True) if MARK in line))

    def flush(self) -> None:
        sys.stdout.flush()
