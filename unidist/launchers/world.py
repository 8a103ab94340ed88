"""One world on this host, from its environment to its end."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence

from unidist import settings
from unidist.launch.topology import LAUNCHERS
from unidist.launchers.process import Result, run
from unidist.launchers.table import command_line

#: The variables by which a launcher, or a user in its stead, describes another world: those of the place, and what is
#: set beside them.
OUTER = re.compile(
    "|".join(sorted({name for row in LAUNCHERS for name in row.place})) + "|"
    r"(LOCAL|GROUP|ROLE|TORCHELASTIC|MASTER|OMPI_COMM|PMI|PMIX|JSM_NAMESPACE)_.*|MPI_LOCAL.*|"
    r"HOROVOD_(LOCAL_.*|CROSS_.*|GLOO_RENDEZVOUS_.*|CONTROLLER|CPU_OPERATIONS|HOSTNAME)|"
    r"UNIDIST_(LAUNCHER|ELASTIC)|SLURM_(STEP_.*|NTASKS)"
)


def usable_cores() -> int:
    """Return the cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment(env: Mapping[str, str], ranks: int, backend: str | None = None) -> dict[str, str]:
    """Return ``env`` with what worlds on one host need: root may start MPI, ranks share cores and know their backend.

    What an outer launcher, or a user in its stead, has set is left out: the ranks must see their own launcher.
    """
    defaults = {
        "OMP_NUM_THREADS": str(max(1, usable_cores() // ranks)),
        "PYTHONUNBUFFERED": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    kept = {name: value for name, value in env.items() if name != settings.BACKEND and not OUTER.fullmatch(name)}
    return {**defaults, **kept, **({settings.BACKEND: backend} if backend else {})}


def run_world(
    launcher: str,
    backend: str | None,
    ranks: int,
    argv: Sequence[str],
    *,
    timeout: float,
    extra: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] = lambda line: None,
) -> Result:
    """Run ``python *argv`` in ``ranks`` processes, and wait for their end.

    Args:
        launcher: a name of ``table.COMMANDS``.
        backend: what ``init()`` starts in the ranks. None: their own business.
        extra: environment variables beside this process's.
        timeout, on_line: as for ``process.run``.

    Raises:
        TimeoutError: the world did not end in time.
    """
    env = {**environment(os.environ, ranks, backend), **(extra or {})}
    return run([command_line(launcher, ranks, argv)], env, timeout=timeout, on_line=on_line)
