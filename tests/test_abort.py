"""A rank that has stopped, and the others, which wait for it in a library: ``Backend.abort`` frees them."""

import re
import subprocess
import time

import pytest

from tests.support.worlds import PYTHON, ROOT, environment, free_port

RANKS = 3


@pytest.mark.parametrize("what", ["all_reduce", "start_all_reduce", "backward", "first_call", "default_group"])
def test_abort_frees_the_ranks_that_wait_for_a_stopped_one(what: str) -> None:
    """Their calls raise, no other socket is touched, and their processes end."""
    env = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    # Started without a launcher, which would wait for the stopped process.
    ranks = [
        subprocess.Popen(
            [PYTHON, "tests/programs/stopped_rank.py", what],
            cwd=ROOT, env=environment("python", {**env, "RANK": str(rank)}), stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    stopped = ranks[-1]
    try:
        for rank, process in enumerate(ranks[:-1]):
            output, _ = process.communicate(timeout=90)
            ended = time.time()
            assert process.returncode == 0, output
            # DDP's backward pass calls no code of this package.
            error = "RuntimeError" if what == "backward" else "CollectiveError"
            found = re.search(rf"raised {error} at ([\d.]+)", output)
            aborted = re.search(r"aborts at ([\d.]+)", output)
            assert found and aborted and f"rank {rank} is refused" in output, output
            assert float(found[1]) - float(aborted[1]) < 3, output
            left = float(re.findall(r"leaves at ([\d.]+)", output)[0])
            assert ended - left < 15, output
        assert stopped.poll() is None  # it was there all the time
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
