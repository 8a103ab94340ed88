"""Through a Ray client (``ray://``): workers of a fixed and of a changing number, and what they log."""

from typing import Any

import torch
from ray.util.client.ray_client_helpers import ray_start_client_server

import unidist
from tests.support.ray_start import start_cluster
from unidist.ray import ElasticRayExecutor, RayExecutor, ray_logger


def train() -> tuple[int, float]:
    unidist.init("gloo")
    ray_logger.log(unidist.rank())
    return unidist.rank(), unidist.all_reduce(torch.ones(1)).item()


if __name__ == "__main__":
    # Before the client's server has threads: of the processes that it forks, one of fifty aborts.
    nodes = start_cluster()
    with ray_start_client_server(ray_init_kwargs={"address": nodes.address}) as client:
        assert client.is_connected()
        fixed = RayExecutor(num_workers=2)
        fixed.start()
        assert fixed.run(train) == [(0, 2), (1, 2)]
        fixed.shutdown()
        elastic = ElasticRayExecutor(ElasticRayExecutor.create_settings(min_num_proc=2, timeout_s=120))
        logged: list[Any] = []
        assert elastic.run(train, callbacks=[logged.append]) == [(0, 2), (1, 2)]
        assert sorted(logged) == [0, 1], logged
    nodes.shutdown()
    print("DONE")
