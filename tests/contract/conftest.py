"""Fixtures of the contract suite."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is dropped must go without the garbage collector, which does not know when memory of a GPU runs out."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
