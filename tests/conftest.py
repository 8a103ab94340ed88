"""Unit tests and tests that start worlds; ``contract``, ``gpu``, ``hvd`` and ``process_group`` run inside one, on every
rank.

``support`` has what is not a test, ``programs`` what tests run.
"""

import gc
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import pytest
from filelock import FileLock
from hypothesis import settings

from tests.support import slurm
from tests.support.worlds import IN_WORLD, LEGACY, PROJECTS, run_world, shown
from unidist.launchers import table

# A shell starts what is in its background with SIGINT ignored, and so would be the jobs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Ray's workers would yield to all other tests.
os.environ.setdefault("RAY_worker_niceness", "0")

# The same examples in each run: what fails is the change. ``--hypothesis-profile=random`` draws others.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("random", derandomize=False, deadline=None)
settings.load_profile("same")

#: What starts worlds, here and in the product.
STARTERS = ("tests.support.worlds.run", "unidist.launchers.world.run", "unidist.run.spawn.start_processes")
# What runs inside a world is collected only there.
collect_ignore = [] if IN_WORLD in os.environ else ["gpu", "hvd", "process_group"]


#: The files that take longest, which begin first, or one worker would be left with them.
LONGEST = (
    "ray", "contract", "hvd", "bench", "matrix", "hosts", "mpi", "launch", "install", "interop", "elastic", "faults",
    "spark", "checkpoint", "migrate_worlds", "abort", "parity", "doctor", "docs", "compare_worlds", "c10d",
)  # fmt: skip
#: What only `make test-all` runs.
VARIANTS = tuple(line for line in Path(__file__).with_name("variants.txt").read_text().split("\n") if "::" in line)


#: What variants.txt and needs.txt name, and no file has, where all files are collected: see test_shape.py.
stale: list[str] = []


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """``pytest`` alone runs what `make test` does."""
    option = config.option
    if config.args_source is config.ArgsSource.TESTPATHS and not (option.markexpr or option.keyword):
        option.markexpr = "not variant"
        if option.numprocesses is None and not option.usepdb and not hasattr(config, "workerinput"):
            option.numprocesses, option.dist, option.loadscopereorder = 3, "loadfile", False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    names = {item.nodeid.removeprefix("tests/"): item for item in items}
    if config.args_source is config.ArgsSource.TESTPATHS and not config.getoption("lf", False):
        files = tuple({name.split("::")[0] for name in names})  # the others need what is not installed
        listed = [line for line in (*VARIANTS, *(name for _, name in NEEDED)) if line.startswith(files)]
        stale.extend(line for line in listed if not any(name.startswith(line) for name in names))
    for name, item in names.items():
        if name.startswith(VARIANTS):
            item.add_marker(pytest.mark.variant)
    if IN_WORLD not in os.environ:
        order = {f"test_{name}.py": number for number, name in enumerate(LONGEST)}
        items.sort(key=lambda item: order.get(item.path.relative_to(Path(__file__).parent).as_posix(), len(order)))


def pytest_collection_finish() -> None:
    """The garbage collector, which tests call, need not look at all that there is before the first one."""
    gc.collect()
    gc.freeze()


#: Why it is not here, or None, for what tests/needs.txt names.
NEEDS: dict[str, Callable[[], str | None]] = {
    "horovod": lambda: table.missing("horovodrun"),
    "openmpi": lambda: table.missing("openmpi"),
    "mpich": lambda: table.missing("mpich"),
    "root": lambda: None if os.geteuid() == 0 else "only root can be another user: run it as root",
    "make": lambda: None if shutil.which("make") else "make is not on PATH: apt-get install make",
    "ssh": lambda: None if shutil.which("ssh") else "ssh is not on PATH: apt-get install openssh-client",
    "peers": lambda: (
        None if find_spec("accelerate") else "other libraries are not installed: pip install -e '.[bench]'"
    ),
}
NEEDED = [
    line.split(maxsplit=1)
    for line in Path(__file__).with_name("needs.txt").read_text().splitlines()
    if not line.startswith("#")
]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs something that is not installed."""
    for need, name in NEEDED:
        if item.nodeid.removeprefix("tests/").startswith(name) and (why := NEEDS[need]()):
            pytest.skip(why)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test that is marked as a unit starts no world, nor do its fixtures."""

    def refuse(*args: object, **options: object) -> NoReturn:
        raise AssertionError(f"{item.nodeid} is marked unit, and would start a world")

    with pytest.MonkeyPatch.context() as patch:
        if item.get_closest_marker("unit"):
            for name in STARTERS:
                patch.setattr(name, refuse)
        return (yield)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # a worker of pytest-xdist
        session.config.workeroutput["shown"] = shown


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    for title, lines in getattr(node, "workeroutput", {}).get("shown", {}).items():
        shown.setdefault(title, []).extend(lines)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [each.longrepr for each in terminalreporter.stats.get("skipped", [])]
    for reason, count in Counter(str(each[2]).removeprefix("Skipped: ") for each in reports).items():
        shown.setdefault("skipped", []).append(f"{count:4}  {reason}")
    for title, lines in shown.items():
        terminalreporter.section(title)
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def srun_env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which ``srun`` reaches a Slurm of this test run's own."""
    if why := slurm.missing():
        pytest.skip(why)
    with slurm.slurm(tmp_path_factory.mktemp("slurm")) as env:
        yield env


@pytest.fixture(scope="session")
def legacy_under_horovod(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the legacy scripts and projects save under Horovod, at 2 ranks: once for all workers of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "legacy"
    with FileLock(f"{directory}.lock"):
        if not (directory / "done").exists():
            directory.mkdir(exist_ok=True)
            argv = ["tests/programs/run_legacy.py", str(directory), *map(str, [*PROJECTS, *LEGACY])]
            result = run_world("horovodrun", 2, argv, backend="horovod")
            assert result.returncode == 0, result.output
            (directory / "done").touch()
    return directory
