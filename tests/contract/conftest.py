"""The contract suite runs on every rank of a world.

``tests/test_contract.py`` starts worlds of processes; where none runs, each test makes a world of threads.
"""

import gc
import os
from collections.abc import Iterator

import pytest
import torch

import unidist.testing
from tests.support.worlds import IN_WORLD

SIZES = (1, 2, 3, 8)

if IN_WORLD not in os.environ:

    def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if not item.get_closest_marker("processes")]

    def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
        metafunc.fixturenames.append("world_size")
        sizes = SIZES[:-1] if "workers" in metafunc.fixturenames else SIZES  # each rank starts its loader's processes
        metafunc.parametrize("world_size", sizes, ids=lambda size: f"{size} ranks")

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
        arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

        def call() -> None:
            if "tmp_path" in arguments:  # as processes have it: a directory of each rank's own
                path = arguments["tmp_path"] / str(unidist.rank())
                path.mkdir()
                pyfuncitem.obj(**{**arguments, "tmp_path": path})
            else:
                pyfuncitem.obj(**arguments)

        torch.manual_seed(0)
        with unidist.testing.world(pyfuncitem.callspec.params["world_size"], timeout=60) as world:
            world.run(call)
        return True


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is dropped must go without the garbage collector, which does not know when memory of a GPU runs out."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
