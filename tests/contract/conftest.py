"""The contract suite runs on every rank of a world.

``tests/test_contract.py`` starts worlds of processes. Where none runs, each test makes a world of its own: this
process, or threads.
"""

import gc
import os
from collections.abc import Iterator

import pytest
import torch

import unidist.testing
from tests.support.worlds import IN_WORLD

SIZES = ("single", 1, 2, 3, 8)

if IN_WORLD not in os.environ:

    def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
        sizes = SIZES[:-1] if "workers" in metafunc.fixturenames else SIZES  # each rank starts its loader's processes
        if metafunc.definition.get_closest_marker("processes"):
            sizes = SIZES[:1]
        metafunc.fixturenames.append("size")
        metafunc.parametrize("size", sizes, ids=lambda size: size if size == "single" else f"{size} threads")

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

        size = pyfuncitem.callspec.params["size"]
        torch.manual_seed(0)
        if size == "single":
            unidist.init("single", timeout=60)
            try:
                call()
            finally:
                unidist.shutdown()
        else:
            with unidist.testing.world(size, timeout=60) as world:
                world.run(call)
        return True


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is dropped must go without the garbage collector, which does not know when memory of a GPU runs out."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
