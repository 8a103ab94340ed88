"""Values that the workers of an elastic job send to the callbacks of ``ElasticRayExecutor.run``."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from ray import cloudpickle

#: The actor of the job, in its workers; elsewhere None.
exchange: Any = None


def log(info_dict: Mapping[str, Any]) -> None:
    """Have the callbacks called with ``info_dict``, in the process that called ``run``, in this worker's order.

    Returns at once. Each rank that calls it sends its own. Where no elastic job of Ray runs, it warns.

    Args:
        info_dict: anything that cloudpickle takes.
    """
    if exchange is None:
        warnings.warn("ray_logger.log has no effect: this process is no worker of an elastic job on Ray.", stacklevel=2)
    else:
        exchange.log.remote(cloudpickle.dumps(info_dict))
