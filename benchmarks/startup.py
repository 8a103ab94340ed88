"""How long until work can begin: the import, and ``init()`` up to the end of the first collective, by launcher.

As a program (``python -m benchmarks.startup raw-torch|raw-horovod|unidist``) it is one rank of the latter.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence

from benchmarks.measure import OURS, Case
from unidist.launchers.process import run as run_commands
from unidist.launchers.table import HOROVODRUN, TORCHRUN, missing, unavailable
from unidist.launchers.world import environment, run_world

#: Which launchers start a backend here, and what its users would call without us.
PAIRS = [
    ("torchrun", "gloo"),
    ("horovodrun", "gloo"),
    ("openmpi", "gloo"),
    ("horovodrun", "horovod"),
    ("torchrun", "horovod"),
]
RAW = {"gloo": ("torchrun", "raw-torch"), "horovod": ("horovodrun", "raw-horovod")}
HERE = "worlds of its own"


def cases(rounds: int, quick: bool, ranks: Sequence[int], backends: Collection[str]) -> Iterator[Case]:
    """Yield the import, then each launcher and backend by number of ranks: ``ranks``, or how it grows."""
    yield Case("startup", HERE, "import", _imports(2 * rounds))
    if "gloo" in backends:
        yield Case("startup", HERE, "2 hosts of 2 ranks: unidist run, from command to prompt", _commands(rounds))
    pairs = [pair for pair in PAIRS if pair[1] in backends and not unavailable(*pair, max(ranks, default=2))]
    for size in ranks or ((2, 4) if quick else (2, 4, 8, 16)):
        samples: dict[tuple[str, str], list[float]] = {}
        worlds_of = [*pairs, *(RAW[backend] for backend in dict.fromkeys(backend for _, backend in pairs))]
        for turn in range(1 if quick else rounds):
            for launcher, backend in random.Random(turn).sample(worlds_of, len(worlds_of)):
                samples.setdefault((launcher, backend), []).append(first_collective(launcher, backend, size))
        for launcher, backend in pairs:
            figures = {OURS: samples[launcher, backend], "raw": samples[RAW[backend]]}
            yield Case("startup", HERE, f"{size} ranks: {backend} under {launcher}", figures)


def first_collective(launcher: str, backend: str, ranks: int) -> float:
    """Return the seconds from the last rank's entry into ``init()`` to the last one's end of the first collective."""
    raw = backend.startswith("raw-")
    argv = ["-m", "benchmarks.startup", backend if raw else "unidist"]
    result = run_world(launcher, None if raw else backend, ranks, argv, timeout=300)
    times = [json.loads(line.split("STARTUP ")[1]) for line in result.output.splitlines() if "STARTUP" in line]
    if result.returncode or len(times) != ranks:
        raise RuntimeError(f"{backend} under {launcher} did not start {ranks} ranks:\n{result.output}")
    return float(max(end for _, end in times) - max(start for start, _ in times))


def _commands(rounds: int) -> dict[str, list[float]]:
    """Seconds that a whole job takes whose ranks make one collective call; this host is two, by two names."""
    program, hosts = ["-m", "benchmarks.startup"], ["-H", "localhost:2,127.0.0.1:2"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        store = ["--master-addr", "127.0.0.1", "--master-port", str(probe.getsockname()[1])]
    two = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "2", *store]
    jobs = {
        OURS: [[sys.executable, "-m", "unidist", "run", *hosts, sys.executable, *program, "raw-torch"]],
        "raw": [[*two, "--node-rank", str(node), *program, "raw-torch"] for node in range(2)],
    }
    if not missing("horovodrun"):
        run = [*HOROVODRUN, "--gloo", "-np", "4", *hosts, sys.executable, *program, "raw-horovod"]
        jobs["horovod"] = [run]
    samples: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(rounds):
        for name in random.Random(turn).sample(list(jobs), len(jobs)):
            result = run_commands(jobs[name], environment(os.environ, 4), timeout=120)
            if result.returncode:
                raise RuntimeError(f"{name} did not start 4 ranks:\n{result.output}")
            samples[name].append(result.seconds)
    return samples


def _imports(rounds: int) -> dict[str, list[float]]:
    code = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"
    modules = {OURS: "unidist", "raw": "torch.distributed"}
    samples: dict[str, list[float]] = {name: [] for name in modules}
    for _ in range(rounds):
        for name, module in modules.items():
            done = subprocess.run(
                [sys.executable, "-c", code.format(module)], capture_output=True, text=True, check=True
            )
            samples[name].append(float(done.stdout))
    return samples


def _rank(what: str) -> None:
    import torch

    if what == "raw-torch":
        import torch.distributed as dist

        start = time.time()
        dist.init_process_group("gloo")
        dist.all_reduce(torch.zeros(1))
    elif what == "raw-horovod":
        import horovod.torch as hvd

        start = time.time()
        hvd.init()
        hvd.allreduce(torch.zeros(1))
    else:
        import unidist

        if os.environ.get("UNIDIST_BACKEND") == "horovod":
            import horovod.torch  # noqa: F401  # as the raw script: imports are not counted
        start = time.time()
        unidist.init()
        unidist.all_reduce(torch.zeros(1))
    # One write, so that the ranks' lines stay whole.
    sys.stdout.write(f"STARTUP {json.dumps([start, time.time()])}\n")
    sys.stdout.flush()
    if what == "raw-torch":
        os._exit(0)  # a bare gloo process may abort while the interpreter ends


if __name__ == "__main__":
    _rank(sys.argv[1])
