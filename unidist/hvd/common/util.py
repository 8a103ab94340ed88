"""The helpers of ``horovod.common.util`` that scripts use."""

from __future__ import annotations

import functools
import itertools
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, TypeVar

import torch

from unidist.hvd.basics import ccl_built, ddl_built, gloo_built, mpi_built, nccl_built

__all__ = [
    "ccl_built",
    "check_extension",
    "ddl_built",
    "env",
    "extension_available",
    "get_average_backwards_compatibility_fun",
    "gloo_built",
    "gpu_available",
    "in_thread",
    "is_iterable",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "split_list",
]
T = TypeVar("T")
#: Horovod's decorator for functions that are computed once.
_cache = functools.cache


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Do nothing: nothing was compiled that could be missing."""


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether this is the drop-in for a framework: ``torch`` it is."""
    return ext_base_name == "torch"


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether a CUDA device is visible."""
    return torch.cuda.is_available()


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Give environment variables other values inside; None leaves one as it is."""
    given = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether Adasum can combine so many ranks."""
    return num_rank > 0 and num_rank.bit_count() == 1


def split_list(l: list[T], n: int) -> list[list[T]]:  # noqa: E741 - a name that callers use
    """Return ``n`` consecutive parts whose lengths differ by 1 at most, the longer ones first."""
    size, longer = divmod(len(l), n)
    starts = [part * size + min(part, longer) for part in range(n + 1)]
    return [l[a:b] for a, b in itertools.pairwise(starts)]


def is_iterable(x: Any) -> bool:
    """Return whether ``iter`` takes it."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[int | None, Any], int]:
    """Return a function that makes one reduction of ``op`` and the deprecated ``average``.

    Args:
        reduce_ops: has ``Average`` and ``Sum``.
    """

    def reduction(op: int | None, average: Any) -> int:
        if op is not None:
            if average is not None:
                raise ValueError("The op parameter supersedes average. Please provide only one of them.")
            return op
        if average is None:
            return int(reduce_ops.Average)
        warnings.warn("Parameter `average` has been replaced with `op`.", DeprecationWarning, stacklevel=4)
        return int(reduce_ops.Average if average else reduce_ops.Sum)

    return reduction


def in_thread(
    target: Callable[..., object],
    args: tuple[Any, ...] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Start a thread that calls ``target(*args)``; ``silent`` ignores what it raises. As in ``horovod.runner``."""

    def run() -> None:
        with suppress(BaseException) if silent else nullcontext():
            target(*args)

    thread = threading.Thread(target=run, name=name, daemon=daemon)
    thread.start()
    return thread
