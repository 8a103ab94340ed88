"""Training functions in the processes of a Ray cluster: ``RayExecutor``, by Horovod's names, without Horovod."""

try:
    import ray as _ray  # noqa: F401
except ImportError as error:
    raise ImportError(
        "unidist.ray needs Ray, which is not installed: pip install 'ray[default]' cloudpickle"
    ) from error

from unidist.ray import ray_logger
from unidist.ray.elastic import ElasticRayExecutor
from unidist.ray.runner import RayExecutor
from unidist.ray.worker import BaseHorovodWorker

__all__ = ["BaseHorovodWorker", "ElasticRayExecutor", "RayExecutor", "ray_logger"]
