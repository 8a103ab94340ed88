"""The helpers of ``horovod.common.util`` that scripts use."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from unidist.hvd.basics import ccl_built, ddl_built, gloo_built, mpi_built, nccl_built

__all__ = [
    "ccl_built",
    "check_extension",
    "ddl_built",
    "env",
    "extension_available",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "split_list",
]
T = TypeVar("T")


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """No-op: nothing was compiled that could be missing."""


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether this is the drop-in for a framework: ``torch`` it is."""
    return ext_base_name == "torch"


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether a CUDA device is visible."""
    return torch.cuda.is_available()


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Inside, environment variables have other values; None leaves one as it is."""
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
    """Whether Adasum can combine so many ranks."""
    return num_rank > 0 and num_rank.bit_count() == 1


def split_list(l: list[T], n: int) -> list[list[T]]:  # noqa: E741 - a name that callers use
    """``n`` consecutive parts whose lengths differ by 1 at most, the longer ones first."""
    size, longer = divmod(len(l), n)
    starts = [part * size + min(part, longer) for part in range(n + 1)]
    return [l[a:b] for a, b in itertools.pairwise(starts)]


def is_iterable(x: Any) -> bool:
    """Whether ``iter`` takes it."""
    try:
        iter(x)
    except TypeError:
        return False
    return True
