"""``horovod.common.elastic``: states with Horovod's arguments, and the loop around a training."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from unidist import elastic
from unidist.elastic.training import train
from unidist.hvd.errors import HorovodInternalError

__all__ = ["ObjectState", "State", "run_fn"]


class State(elastic.State):
    """The base of states: a subclass says how to save, restore and synchronize.

    Args:
        bcast_object: broadcasts an object from rank 0; kept for subclasses.
        get_rank: returns this process's rank; of no effect.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        super().__init__()
        self._bcast_object = bcast_object


class ObjectState(elastic.ObjectState):
    """Python objects, as attributes of the state.

    Args:
        bcast_object, get_rank: of no effect.
        kwargs: the names and values of the attributes.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(**kwargs)


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """Return ``func`` in the loop of ``hvd.elastic.run``.

    Args:
        func: its first argument is a state.
        reset: begins the world of the next generation.
    """

    @functools.wraps(func)
    def wrapper(state: Any, *args: Any, **kwargs: Any) -> Any:
        return train(state, functools.partial(func, state, *args, **kwargs), reset, HorovodInternalError)

    return wrapper
