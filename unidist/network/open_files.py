"""The limit of open files: each connection to another process is one."""

from __future__ import annotations

import errno
import os
import resource
from contextlib import suppress

#: The system's message at the limit.
EXHAUSTED = os.strerror(errno.EMFILE)
#: Files of the script, its libraries and its workers; of the driver of `unidist run`; of an agent.
_OTHERS, _OF_DRIVER, _OF_AGENT = 512, 32, 16


def of_rank(world_size: int) -> int:
    """Return the open files of rank 0, which has most: at the worst three gloo groups that are connected to all ranks,
    the store and the drop-in's control channel.
    """
    return 5 * world_size + _OTHERS


def of_driver(ranks: int, hosts: int, *, output_files: bool, elastic: bool) -> int:
    """Return the open files of the driver: the pipes of each agent, and of each rank a connection to the store, its
    two output files and a worker's own connection.
    """
    return _OF_DRIVER + 3 * hosts + ranks * (1 + 2 * output_files + elastic)


def of_agent(ranks: int) -> int:
    """Return the open files of an agent: two pipes of each rank."""
    return _OF_AGENT + 2 * ranks


def hard_limit() -> int:
    """Return how many files this process may open at most; a very large number without a limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return 2**31 if hard == resource.RLIM_INFINITY else hard


def raise_limit(files: int) -> None:
    """Raise this process's soft limit to so many files, as far as the hard limit permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(files, hard_limit())
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # not permitted
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def advice(world_size: int) -> str:
    """Return what to do at the limit, as the end of an error message."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = of_rank(world_size)
    return (
        f" This process may open {soft} files (hard limit {hard}), and a rank of {world_size} may need {wanted}: raise "
        f"the limit with 'ulimit -n {wanted}' before the launcher starts, on every host."
    )
