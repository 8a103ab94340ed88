"""``horovod.torch.elastic``: training that goes on when workers are lost, leave or come, on ``unidist.elastic``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unidist import context
from unidist.hvd import gradients
from unidist.hvd.basics import init, shutdown
from unidist.hvd.common.elastic import run_fn
from unidist.hvd.elastic.sampler import ElasticSampler
from unidist.hvd.elastic.state import TorchState
from unidist.hvd.session import open_session

__all__ = ["ElasticSampler", "TorchState", "init", "run", "run_fn", "shutdown"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that trains: it is called again each time that the workers have changed.

    As ``unidist.elastic.run``. Optimizers of ``DistributedOptimizer`` that were made before it go on in each new world;
    process sets must be made again, by a reset callback.

    Args:
        func: its first argument is a state, such as ``TorchState``. Called by every rank, after ``hvd.init``.
    """
    return run_fn(func, _join)


def _join() -> None:
    context.rejoin()
    open_session()
    gradients.rejoin()
