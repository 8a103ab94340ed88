"""The drop-in leaves torch's default process group to the script; its sockets; hosts of several sizes."""

import json
import re
import textwrap
from pathlib import Path

import pytest
import torch

from tests.support.worlds import load, run_world


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
import os, resource, torch, unidist.hvd as hvd

def sockets():
    names = [os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
    return sum(os.path.exists(name) and os.readlink(name).startswith("socket") for name in names)

# Too few, where the hard limit permits more.
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 6, 4096))
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


def test_sockets_of_rank_0_and_a_low_soft_limit() -> None:
    """Two for each other rank, the store's and the control channel's, and of each of three gloo groups those that its
    calls need.
    """
    size = 8
    result = run_world("horovodrun", size, ["-c", SOCKETS], backend="gloo")
    assert result.returncode == 0, result.output
    found = {int(rank): int(count) for rank, count in re.findall(r"SOCKETS (\d+) (\d+)", result.output)}
    assert len(found) == size, result.output
    lazy = "lazy_init" in str(torch.distributed.distributed_c10d.ProcessGroupGloo.create_device.__doc__)
    assert found[0] <= (2 * size + 18 if lazy else 5 * size + 8), found


def test_too_few_open_files(tmp_path: Path) -> None:
    """The error says what the limit is, what is needed, and how to get it."""
    script = tmp_path / "limit.py"
    code = """
        import os, resource, torch, unidist.hvd as hvd
        limit = len(os.listdir("/proc/self/fd")) + 3
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        hvd.init()
        hvd.barrier()
        """
    script.write_text(textwrap.dedent(code))
    result = run_world("torchrun", 2, [str(script)], backend="gloo")
    assert result.returncode != 0 and result.seconds < 60 * load()
    message = (
        r"Too many open files.*may open \d+ files \(hard limit \d+\), and a rank of 2 may need 522: .*ulimit -n 522"
    )
    assert re.search(message, result.output), result.output
