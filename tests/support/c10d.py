"""PyTorch's own test class for process groups, in one world: ``python -m tests.support.c10d LIBRARY LABEL DIRECTORY``.

The class starts a world for each test; this one gives every test a process group of its own in the same processes.
LIBRARY is the backend of the groups, LABEL the name by which the class chooses the tests that apply. Rank 0 appends all
ranks' outcomes to a file in DIRECTORY, so that another world can continue where one has died.
"""

import importlib
import json
import os
import sys
import tempfile
import threading
import traceback
import unittest
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from unidist.backends import rendezvous
from unidist.backends.base import Start
from unidist.backends.mpi import launch as mpi
from unidist.launch.topology import detect

#: Seconds that one test may take on all ranks together.
LIMIT = 120
TIMEOUT = timedelta(seconds=60)


def load(label: str, size: int, directory: Path) -> Any:
    os.environ.update(BACKEND=label, WORLD_SIZE=str(size), TEMP_DIR=str(directory), MASTER_ADDR="127.0.0.1")
    for name in ("barrier", "test_dir", "init_dir"):
        (directory / name).mkdir(exist_ok=True)
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_distributed import DistTestCases

    for feature in ("ddp", "subgroup", "plugin"):
        DistTestCases.backend_feature[feature] |= {"mpi", "mpi4py"}
    return importlib.import_module("torch.testing._internal.distributed.distributed_test")


def run(case: Any, name: str) -> str:
    """passed, skipped: why, or failed: how."""
    from torch.testing._internal.common_distributed import TEST_SKIPS

    reasons = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
    test = getattr(case, name)
    if getattr(test, "__unittest_skip__", False):
        return f"skipped: {test.__unittest_skip_why__}"
    try:
        test()
    except unittest.SkipTest as reason:
        return f"skipped: {reason}"
    except SystemExit as reason:
        return f"skipped: {reasons.get(reason.code, reason.code)}"
    except Exception:
        return f"failed: {traceback.format_exc()}"
    return "passed"


def main(library: str, label: str, directory: Path, wanted: set[str]) -> None:
    launch = detect(os.environ)
    rank, size = launch.rank, launch.world_size
    mpi.world(launch)
    if library == "mpi4py":
        from unidist.backends.mpi import process_group

        process_group.register()
    world = rendezvous.join(Start(launch))
    suite = load(label, size, directory)
    for names in (suite.PROFILING_SUPPORTED_BACKENDS, suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS):
        names.append("mpi4py")

    class Cases(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc,name-defined]
        pass

    from torch.testing._internal import common_utils

    outcomes = directory / "outcomes.jsonl"
    done = {json.loads(line)["name"] for line in outcomes.read_text().splitlines()} if outcomes.exists() else set()
    names = unittest.TestLoader().getTestCaseNames(Cases)
    for index, name in enumerate(sorted(names, key=lambda name: "timeout" in name)):
        if name in done or (wanted and name not in wanted):
            continue
        if rank == 0:
            print(f"C10D {name}", flush=True)
        alarm = threading.Timer(LIMIT, lambda: os._exit(3))
        alarm.start()
        timeout = timedelta(seconds=suite.CUSTOM_PG_TIMEOUT.get(name, TIMEOUT.total_seconds()))
        dist.init_process_group(
            library,
            store=dist.PrefixStore(f"{os.getppid()}/{name}", world.store),
            rank=rank,
            world_size=size,
            timeout=timeout,
        )
        suite.Barrier.barrier_id = 1000 * index
        case = Cases(name)
        case.rank = rank
        case.file_name = tempfile.mktemp(dir=directory)
        common_utils.set_rng_seed(1234)
        outcome = run(case, name)
        # The others may have fared otherwise.
        limit = timedelta(seconds=LIMIT)
        outcomes_of_all = world.exchange(f"outcome/{name}", outcome, limit)
        if dist.is_initialized():
            dist.destroy_process_group()
        alarm.cancel()
        if rank == 0:
            with outcomes.open("a") as file:
                file.write(json.dumps({"name": name, "outcomes": outcomes_of_all}) + "\n")
        if library != "gloo" and "timeout" in name and not outcomes_of_all[0].startswith("skipped"):
            # It has broken its group on purpose, and the job is about to end: with the first rank that exits, so none
            # exits before rank 0 has written.
            world.exchange(f"written/{name}", "", limit)
            os._exit(4)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), set(sys.argv[4:]))
    sys.stdout.flush()
    sys.stderr.flush()
