"""The limit of open files: each connection to another rank is one."""

from __future__ import annotations

import errno
import os
import resource
from contextlib import suppress

#: The system's message at the limit.
EXHAUSTED = os.strerror(errno.EMFILE)
#: Files of the script, its libraries and its workers.
_OTHERS = 512


def needed(world_size: int) -> int:
    """The open files of rank 0, which has most: at the worst three gloo groups that are connected to all ranks, the
    store and the drop-in's control channel.
    """
    return 5 * world_size + _OTHERS


def allow(world_size: int) -> None:
    """Raise this process's soft limit as far as a world of this size needs, and the hard limit permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = needed(world_size) if hard == resource.RLIM_INFINITY else min(needed(world_size), hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # not permitted
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def advice(world_size: int) -> str:
    """What to do at the limit, as the end of an error message."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f" This process may open {soft} files (hard limit {hard}), and a rank of {world_size} may need "
        f"{needed(world_size)}: raise the limit with 'ulimit -n {needed(world_size)}' before the launcher starts, on "
        "every host."
    )
