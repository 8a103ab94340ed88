"""Every ``UNIDIST_*`` environment variable, in one place.

===================  ==========================================================================
UNIDIST_BACKEND      backend for ``init("auto")``: ``single``, ``gloo``, ``nccl``, ``mpi``, ``horovod``
UNIDIST_LAUNCHER     launcher whose variables are read, whatever others are set; ``none`` reads none
UNIDIST_TIMEOUT      seconds after which a start-up or a collective fails that not all ranks take part in
UNIDIST_TIMELINE     file for ``unidist.timeline`` from ``init()`` on: ``trace.json`` is ``trace.0.json`` on rank 0
UNIDIST_STALL_S      seconds that an operation may wait until what all ranks do is reported (default 60; 0: for ever)
UNIDIST_CHECK        1: compare the ranks' calls before each collective call
UNIDIST_ELASTIC      set by ``unidist run`` for the workers of an elastic run: where it listens, and who the worker is
UNIDIST_GRACE        seconds after a loss that ``unidist run`` waits for a worker before it takes it for hung (60)
UNIDIST_CACHE        directory of built wheels (default ``$XDG_CACHE_HOME/unidist``)
===================  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from unidist.errors import LaunchError

BACKEND = "UNIDIST_BACKEND"
LAUNCHER = "UNIDIST_LAUNCHER"
TIMEOUT = "UNIDIST_TIMEOUT"
STALL = "UNIDIST_STALL_S"
CHECK = "UNIDIST_CHECK"
ELASTIC = "UNIDIST_ELASTIC"
GRACE = "UNIDIST_GRACE"
CACHE = "UNIDIST_CACHE"
TIMELINE = "UNIDIST_TIMELINE"


def backend(env: Mapping[str, str]) -> str:
    """Name of the requested backend, ``auto`` when unset."""
    return env.get(BACKEND) or "auto"


def timeout(env: Mapping[str, str]) -> timedelta | None:
    """Return the timeout, or None when unset."""
    found = _seconds(env, TIMEOUT)
    return None if found is None else timedelta(seconds=found)


def grace(env: Mapping[str, str]) -> float:
    """Return the seconds after which a worker hangs that others wait for."""
    return _seconds(env, GRACE) or 60.0


def _seconds(env: Mapping[str, str], name: str) -> float | None:
    text = env.get(name)
    if not text:
        return None
    try:
        seconds = float(text)
        if not 0 < seconds < 1e9:
            raise ValueError
    except ValueError:
        raise LaunchError(f"{name}={text!r} is not a number of seconds above 0: correct or unset it.") from None
    return seconds


def timeline(env: Mapping[str, str], *, of_horovod: bool) -> str:
    """Return the file of the timeline, or an empty string; with ``of_horovod`` that of HOROVOD_TIMELINE, too."""
    return env.get(TIMELINE, "") or (env.get("HOROVOD_TIMELINE", "") if of_horovod else "")


def stall(env: Mapping[str, str]) -> float:
    """Return the seconds until a report; 0: there is none."""
    seconds: float = _number(env, STALL, 60)
    return seconds


def check(env: Mapping[str, str]) -> bool:
    """Return whether the ranks compare their calls."""
    return _flag(env, CHECK)


def cache_dir(env: Mapping[str, str]) -> Path:
    """Return the cache directory."""
    if env.get(CACHE):
        return Path(env[CACHE]).expanduser()
    return Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "unidist"


# ------------------------------------------------------------------------------------ Horovod's variables
def horovod_number(env: Mapping[str, str], name: str, default: float, *, whole: bool = False) -> Any:
    """Return a numeric variable of Horovod that the drop-in supports, at least 0."""
    return _number(env, name, default, whole=whole)


def horovod_seconds(env: Mapping[str, str], name: str) -> float | None:
    """Return a variable of Horovod in seconds, above 0; None where it is not set."""
    return _seconds(env, name)


def horovod_flag(env: Mapping[str, str], name: str) -> bool:
    """Return whether a boolean variable of Horovod that the drop-in supports is on."""
    return _flag(env, name)


def _number(env: Mapping[str, str], name: str, default: float, *, whole: bool = False) -> Any:
    text = env.get(name)
    if not text:
        return default
    try:
        value = int(text) if whole else float(text)
        if not 0 <= value < 1e15:
            raise ValueError
    except ValueError:
        raise LaunchError(f"{name}={text!r} is not a number of at least 0: correct or unset it.") from None
    return value


def _flag(env: Mapping[str, str], name: str) -> bool:
    return env.get(name, "0").strip().lower() not in ("", "0", "false")
