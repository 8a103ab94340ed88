"""The drop-in leaves torch's default process group to the script; its sockets; hosts of several sizes."""

import json
import re

import pytest

from tests.support.worlds import run_world


@pytest.mark.parametrize(
    ("launcher", "backend", "when"),
    [
        ("torchrun", "gloo", "first"),
        ("torchrun", "gloo", "later"),
        # Their processes have no MASTER_ADDR.
        ("horovodrun", "gloo", "never"),
        ("openmpi", "gloo", "never"),
        ("openmpi", "mpi", "never"),
    ],
)
def test_the_drop_in_beside_a_scripts_own_group(launcher: str, backend: str, when: str) -> None:
    result = run_world(launcher, 2, ["tests/programs/beside_torch.py", when], backend=backend)
    assert result.returncode == 0 and result.output.count("BESIDE") == 2, result.output


@pytest.mark.parametrize(("module", "backend"), [("horovod.torch", "horovod"), ("unidist.hvd", "gloo")])
def test_across_hosts_of_several_sizes(module: str, backend: str) -> None:
    """Ranks of one local rank are counted on the hosts that have it, by Horovod and by the drop-in; nodes are all."""
    argv = ["tests/programs/uneven_hosts.py", module]
    result = run_world("horovodrun 2 hosts", 3, argv, backend=backend)
    assert result.returncode == 0, result.output
    places = json.loads(re.findall(r"PLACES (\[.*\])", result.output)[0])
    # rank, local rank and size, cross rank and size, node and nodes
    assert places == [[0, 0, 1, 0, 2, 0, 2], [1, 0, 2, 1, 2, 1, 2], [2, 1, 2, 0, 1, 1, 2]]


SOCKETS = """
import os, sys, torch, unidist.hvd as hvd
def sockets():
    names = [os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
    return sum(os.path.exists(name) and os.readlink(name).startswith("socket") for name in names)
before = sockets()
hvd.init()
model = torch.nn.Linear(200, 200)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), 0)
hvd.broadcast_optimizer_state(optimizer, 0)
for _ in range(2):
    model(torch.ones(1, 200)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
hvd.allreduce(torch.ones(10**4))
hvd.allgather(torch.ones(10**4))
print("SOCKETS", hvd.rank(), sockets() - before, flush=True)
hvd.barrier()
"""


def test_sockets_of_rank_0() -> None:
    """At most 3 N + 1, of which the control channel and the store, where rank 0 serves it, have 2 N."""
    size = 8
    result = run_world("horovodrun", size, ["-c", SOCKETS], backend="gloo")
    assert result.returncode == 0, result.output
    found = {int(rank): int(count) for rank, count in re.findall(r"SOCKETS (\d+) (\d+)", result.output)}
    assert len(found) == size and max(found.values()) == found[0] <= 3 * size + 1, found


def test_too_few_open_files() -> None:
    """The error says what the limit is, and what is needed."""
    argv = [
        "-c",
        "import os; os.execlp('sh', 'sh', '-c', 'ulimit -n 40; exec \"$0\" -c \"$1\"', *__import__('sys').argv[1:])",
    ]
    import sys

    result = run_world("torchrun", 2, [*argv, sys.executable, SOCKETS], backend="gloo")
    print(result.output)
