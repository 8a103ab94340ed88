"""A worker of an elastic job on Ray: ``python -m unidist.hvd -m unidist.ray.elastic_rank ADDRESS EXCHANGE``."""

from __future__ import annotations

import os
import sys
import traceback

import ray
from ray import cloudpickle

from unidist import context
from unidist.ray import ray_logger
from unidist.ray.elastic import NAMESPACE


def main(address: str, name: str) -> None:
    """Call the function that the actor has, and give it the result."""
    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    exchange = ray_logger.exchange = ray.get_actor(name)
    try:
        result = cloudpickle.loads(ray.get(exchange.function.remote()))()
        ray.get(exchange.put.remote(int(os.environ["RANK"]), cloudpickle.dumps(result)))
    except Exception:
        ray.get(exchange.fail.remote(traceback.format_exc()))
        raise
    context.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
