"""Starting the processes of a world from Python, on this host."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch.multiprocessing.spawn import spawn as start_processes

from unidist import context, knobs


def spawn(fn: Callable[..., object], nprocs: int, args: tuple[Any, ...] = (), backend: str = "auto") -> None:
    """Run ``fn(*args)`` in ``nprocs`` new processes of this host, each in a world of that size.

    ``init(backend)`` is called in each before ``fn``, so that ``fn`` may call ``unidist.rank()`` and the like (and
    ``unidist.init()``, as it would under a launcher). Returns when all have ended. As with
    ``torch.multiprocessing.spawn``, ``fn`` and ``args`` must pickle, and the script needs
    ``if __name__ == "__main__":`` around the call.

    Args:
        fn: a function of a module, called with ``args`` alone.
        nprocs: number of processes, at least 1.
        args: arguments of ``fn``.
        backend: as for ``init``.

    Raises:
        ValueError: ``nprocs`` below 1.
        torch.multiprocessing.ProcessRaisedException: ``fn`` failed in one process; the others were ended.
    """
    if nprocs < 1:
        raise ValueError(f"spawn(nprocs={nprocs}) needs at least 1 process.")
    from unidist.backends import rendezvous

    store = rendezvous.open_on_free_port(
        address=rendezvous.LOOPBACK
    )  # the children's meeting point, for as long as they run
    start_processes(_run, args=(nprocs, store.port, fn, args, backend), nprocs=nprocs)  # type: ignore[no-untyped-call]


def _run(index: int, nprocs: int, port: int, fn: Callable[..., object], args: tuple[Any, ...], backend: str) -> None:
    os.environ.update(
        {
            knobs.LAUNCHER: "spawn",
            "RANK": str(index),
            "WORLD_SIZE": str(nprocs),
            "LOCAL_RANK": str(index),
            "LOCAL_WORLD_SIZE": str(nprocs),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            # torch's own name for: the parent listens there, do not.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
    )
    context.init(backend)
    try:
        fn(*args)
    finally:
        context.shutdown()
