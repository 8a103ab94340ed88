"""The pytest plugin of a suite that runs in a world, on every rank; see ``tests.support.worlds.run_suite``."""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import unidist
from tests.support.worlds import BESIDE, IN_WORLD
from unidist import context

# pytest removes old temporary directories at its end: ranks that share a parent would remove each other's.
os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.mkdtemp(prefix="rank-", dir=os.environ[IN_WORLD])

counts = {"passed": 0, "skipped": 0}


@pytest.fixture(scope="session", autouse=True)
def world() -> Iterator[None]:
    if os.environ.get(BESIDE):
        context.init_beside_default_group("auto")
        assert not torch.distributed.is_initialized()
    else:
        unidist.init(timeout=60, device=os.environ.get("UNIDIST_TEST_DEVICE"))
    torch.manual_seed(0)
    outcome = Path(os.environ[IN_WORLD]) / f"{unidist.rank()}.json"
    yield
    unidist.shutdown()
    outcome.write_text(json.dumps(counts))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        # The first failure on any rank ends the world: the other ranks would wait for this one.
        rank = unidist.rank() if unidist.is_initialized() else "?"
        print(f"\nrank {rank}: {report.nodeid}\n{report.longreprtext}", file=sys.stderr, flush=True)
        os._exit(1)
    if report.when == "call" or report.skipped:
        counts[report.outcome] += 1
