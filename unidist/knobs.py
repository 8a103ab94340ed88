"""Every ``UNIDIST_*`` environment variable, in one place.

===================  ==========================================================================
UNIDIST_BACKEND      engine for ``init("auto")``: ``single``, ``gloo``, ``nccl``, ``mpi``, ``horovod``
UNIDIST_LAUNCHER     launcher whose variables are read, whatever else is set; ``none`` reads none
UNIDIST_TIMEOUT      seconds after which a start-up or a collective without its peers fails
UNIDIST_CACHE        folder for built wheels (default ``$XDG_CACHE_HOME/unidist``)
UNIDIST_HVD_SCRIPT   set by ``python -m unidist.hvd``: its script, for the processes that the script spawns
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
CACHE = "UNIDIST_CACHE"
HVD_SCRIPT = "UNIDIST_HVD_SCRIPT"


def backend(env: Mapping[str, str]) -> str:
    """Name of the wanted engine, ``auto`` when unset."""
    return env.get(BACKEND) or "auto"


def timeout(env: Mapping[str, str]) -> timedelta | None:
    """The wanted timeout, or None when unset."""
    text = env.get(TIMEOUT)
    if not text:
        return None
    try:
        seconds = float(text)
        if not 0 < seconds < 1e9:
            raise ValueError
    except ValueError:
        raise LaunchError(f"{TIMEOUT}={text!r} is not a number of seconds above 0: correct or unset it.") from None
    return timedelta(seconds=seconds)


def cache_dir(env: Mapping[str, str]) -> Path:
    """Folder for what is expensive to make again."""
    if env.get(CACHE):
        return Path(env[CACHE]).expanduser()
    return Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "unidist"


# ------------------------------------------------------------------------------------ Horovod's own
def horovod_number(env: Mapping[str, str], name: str, default: float, *, whole: bool = False) -> Any:
    """A variable of Horovod's that the drop-in heeds, at least 0."""
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


def horovod_flag(env: Mapping[str, str], name: str) -> bool:
    """Whether a switch of Horovod's that the drop-in heeds is on."""
    return env.get(name, "0").strip().lower() not in ("", "0", "false")
