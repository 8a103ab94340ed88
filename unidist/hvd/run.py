"""``horovod.run``: a function in several processes of this host."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unidist.hvd import names
from unidist.hvd.functions import dumps
from unidist.run.spawn import start


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    hosts: str | None = None,
    np: int | None = None,
    **options: Any,
) -> list[Any]:
    """Call ``func(*args, **kwargs)`` in processes of this host, each a rank of one world.

    ``func`` calls ``hvd.init()`` itself; before that, ``hvd.rank()`` raises ``ValueError``. It and what it returns must
    pickle, or be taken by cloudpickle if that is installed.

    Args:
        func: what each rank runs.
        args, kwargs: what it is called with.
        num_proc: number of processes.
        hosts: None, or this host alone, as ``localhost:2``.
        np: deprecated name of ``num_proc``.
        options: the others of ``horovod.run``; those that are set are refused, but for ``verbose``, ``use_gloo`` and
            ``use_mpi``.

    Returns:
        What each rank returned, in rank order.

    Raises:
        NotImplementedError: ``hosts`` names another host, or an option is set that has no meaning here.
        torch.multiprocessing.ProcessRaisedException: ``func`` failed in one process; the others were ended.
    """
    given = {part.split(":")[0] for part in (hosts or "localhost").split(",")}
    if given - {"localhost", "127.0.0.1"}:
        raise NotImplementedError(
            f"run(hosts={hosts!r}) starts processes on this host only: start a script with torchrun on each host."
        )
    refused = [
        name
        for name, value in options.items()
        if value and name not in ("verbose", "use_gloo", "use_mpi", "disable_cache")
    ]
    if refused:
        raise NotImplementedError(f"run({refused[0]}={options[refused[0]]!r}) has no meaning here: leave it out.")
    count = num_proc if np is None else np
    return start(_call, count, (names.is_installed(), dumps((func, tuple(args), dict(kwargs or {})))))


def _call(with_alias: bool, payload: bytes) -> Any:
    if with_alias:
        sys.path.insert(0, names.directory())
        names.export_variables()
    func, args, kwargs = pickle.loads(payload)
    return func(*args, **kwargs)
