"""One suite for Horovod itself and for the drop-in: the backend that the world was started with says which."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.hvd.api import hvd
from tests.support.in_world import counts
from tests.support.worlds import IN_WORLD


@pytest.fixture(scope="session", autouse=True)
def world() -> Iterator[None]:
    with pytest.raises(ValueError, match="init"):
        hvd.rank()
    hvd.init()
    torch.manual_seed(0)
    verdict = Path(os.environ[IN_WORLD]) / f"{hvd.rank()}.json"
    yield
    hvd.barrier()
    hvd.shutdown()
    assert not hvd.is_initialized()
    verdict.write_text(json.dumps(counts))


@pytest.fixture
def rank() -> int:
    return int(hvd.rank())


@pytest.fixture
def size() -> int:
    return int(hvd.size())


@pytest.fixture(autouse=True)
def in_step(world: None) -> Iterator[None]:
    """Unnamed operations are counted by Horovod, each rank for itself: tests begin and end together."""
    yield
    hvd.barrier()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # Horovod's own calls still pass what it deprecates.
        item.add_marker(pytest.mark.filterwarnings("ignore:Parameter .average.:DeprecationWarning"))
