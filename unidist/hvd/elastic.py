"""Where ``hvd.elastic`` would be: it is not there yet, and says so."""

from __future__ import annotations

from typing import Any


class ElasticMissingError(AttributeError, NotImplementedError):
    """``hvd.elastic`` has no such name: ``hasattr(hvd.elastic, "run")`` is False."""


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise ElasticMissingError(
        f"hvd.elastic.{name}: elastic training is not part of unidist.hvd yet. Restarting works: save with "
        "unidist.save_checkpoint, and start the script with torchrun --max-restarts."
    )
