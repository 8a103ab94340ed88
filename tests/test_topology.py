"""``detect`` is a pure function of a mapping."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unidist.errors import LaunchError
from unidist.launch.topology import LAUNCHERS, Launch, Slot, Topology, detect, first_host, locate
from unidist.launchers.table import COMMANDS
from unidist.launchers.world import OUTER

pytestmark = pytest.mark.unit

SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "4",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "29500",
}
HOROVODRUN = {
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "2",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "0",
    "HOROVOD_CROSS_SIZE": "1",
    "HOROVOD_HOSTNAME": "a",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "OMPI_COMM_WORLD_NODE_RANK": "0",
    "PMIX_RANK": "1",
}
HOROVODRUN_MPI = {
    **OPENMPI,
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "^openib",
    "OMPI_MCA_btl_tcp_if_include": "eth0",
    "NCCL_SOCKET_IFNAME": "eth0",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
JSRUN = {
    "JSM_NAMESPACE_RANK": "2",
    "JSM_NAMESPACE_SIZE": "6",
    "JSM_NAMESPACE_LOCAL_RANK": "2",
    "JSM_NAMESPACE_LOCAL_SIZE": "6",
    "PMIX_RANK": "2",
}
BY_HAND = {"RANK": "0", "WORLD_SIZE": "3"}


#: What each sets in a rank: rank, size, local rank, local size, node, nodes.
EACH: list[tuple[dict[str, str], str, tuple[Any, ...]]] = [
    ({}, "none", (0, 1, 0, 1, 0, 1)),
    (TORCHRUN, "torchrun", (5, 8, 1, 4, 1, 2)),
    ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "unidist.spark"}, "spark", (5, 8, 1, 4, 1, 2)),
    (HOROVODRUN, "horovodrun", (1, 2, 1, 2, None, None)),
    (OPENMPI, "openmpi", (1, 6, 0, 3, None, None)),
    (HOROVODRUN_MPI, "horovodrun-mpi", (1, 6, 0, 3, None, None)),
    (MPICH, "mpich", (1, 2, 1, 2, None, None)),
    (JSRUN, "jsrun", (2, 6, 2, 6, None, None)),
    (SLURM, "slurm", (3, 4, 1, None, 1, 2)),
    ({**BY_HAND, "LOCAL_RANK": "0", "NODE_RANK": "0", "RAY_JOB_ID": "01000000"}, "ray", (0, 3, 0, None, 0, None)),
    (BY_HAND, "env", (0, 3, None, None, None, None)),
    ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "pmi", (1, 2, None, None, None, None)),
    ({"PMIX_RANK": "1", "WORLD_SIZE": "4"}, "pmix", (1, 4, None, None, None, None)),
]


@pytest.mark.parametrize(("env", "launcher", "numbers"), EACH)
def test_each_launcher(env: dict[str, str], launcher: str, numbers: tuple[Any, ...]) -> None:
    found = detect(env)
    assert found.launcher.name == launcher
    assert (
        found.rank,
        found.world_size,
        found.local_rank,
        found.local_size,
        found.node_rank,
        found.num_nodes,
    ) == numbers


def test_a_launcher_is_tested_and_documented() -> None:
    page = (Path(__file__).parents[1] / "docs/launchers.md").read_text()
    for row in LAUNCHERS:
        known = row.name in COMMANDS or row.name in [name for _, name, _ in EACH]
        variables = (row.rank, row.world_size, row.local_rank, row.local_size, row.node_rank, row.num_nodes)
        assert all(OUTER.fullmatch(name) for name in variables if name), f"OUTER of unidist/launchers: {variables}"
        assert known, f"{row.name} is no row of unidist/launchers/table.py, and none of EACH above"
    order = ", ".join(row.name for row in LAUNCHERS)
    assert f"The order is {order}." in " ".join(page.split()), "docs/launchers.md has another order of launchers"


@pytest.mark.parametrize(
    ("env", "launcher"),
    [
        ({**SLURM, **TORCHRUN}, "torchrun"),  # srun, one torchrun per node
        ({**OPENMPI, **TORCHRUN}, "torchrun"),  # mpirun, one torchrun per node
        ({**HOROVODRUN, **TORCHRUN}, "torchrun"),
        ({**SLURM, **HOROVODRUN}, "horovodrun"),
        ({**HOROVODRUN, **TORCHRUN, "TORCHELASTIC_RUN_ID": "unidist.unidist-run"}, "unidist-run"),
        ({**OPENMPI, **TORCHRUN, "TORCHELASTIC_RUN_ID": "unidist.openmpi"}, "openmpi"),  # python -m unidist
        ({**SLURM, **OPENMPI}, "openmpi"),  # mpirun in an allocation
        ({**SLURM, **HOROVODRUN_MPI}, "horovodrun-mpi"),
        ({**HOROVODRUN_MPI, "OMPI_MCA_pml": "ucx"}, "openmpi"),  # a user's own mpirun
        ({k: v for k, v in HOROVODRUN_MPI.items() if k != "NCCL_SOCKET_IFNAME"}, "openmpi"),
        ({**SLURM, **MPICH}, "mpich"),
        ({**SLURM, "PMI_RANK": "3", "PMI_SIZE": "4"}, "slurm"),  # srun --mpi=pmi2
        ({**SLURM, "PMIX_RANK": "3"}, "slurm"),  # srun --mpi=pmix
        ({**BY_HAND, **OPENMPI}, "openmpi"),  # stale in the shell
        ({**SLURM, "RANK": "6", "WORLD_SIZE": "8"}, "env"),  # a task that starts 2 processes and numbers them
        ({k: v for k, v in SLURM.items() if "STEP" not in k}, "none"),  # the batch script itself
        ({**TORCHRUN, "UNIDIST_LAUNCHER": "none"}, "none"),
        ({**TORCHRUN, **SLURM, "UNIDIST_LAUNCHER": "slurm"}, "slurm"),
        ({**SLURM, **BY_HAND, "UNIDIST_LAUNCHER": "env"}, "env"),
    ],
)
def test_order_of_launchers(env: dict[str, str], launcher: str) -> None:
    assert detect(env).launcher.name == launcher


@pytest.mark.parametrize("env", [HOROVODRUN, OPENMPI, SLURM, {**TORCHRUN, "TORCHELASTIC_RUN_ID": ""}])
def test_torchruns_variables_set_by_unidist_are_not_torchruns(env: dict[str, str]) -> None:
    launch = detect(env)
    exported = {**dict.fromkeys(TORCHRUN, "9"), **env, "MASTER_ADDR": "host0", "MASTER_PORT": "9"}
    found = detect({**exported, "TORCHELASTIC_RUN_ID": f"unidist.{launch.launcher.name}"})
    assert (found.launcher, found.rank, found.world_size) == (launch.launcher, launch.rank, launch.world_size)
    assert found.master_addr == "host0" and found.master_port == 9
    assert detect({**exported, **TORCHRUN}).launcher.name == "torchrun"  # one that was started inside
    assert detect({**exported, **TORCHRUN, "TORCHELASTIC_RUN_ID": "unidist.own"}).launcher.name == "torchrun"


def test_smaller_world_in_a_larger_one_is_refused() -> None:
    for env, outer in ((SLURM, "SLURM_STEP_NUM_TASKS=4"), ({"PMI_RANK": "1", "PMI_SIZE": "4"}, "PMI_SIZE=4")):
        with pytest.raises(LaunchError, match=f"RANK=0 WORLD_SIZE=1 are set, but {outer}: unset"):
            detect({**env, "RANK": "0", "WORLD_SIZE": "1"})
        assert detect({**env, "RANK": "0", "WORLD_SIZE": "4"}).launcher.name == "env"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({**TORCHRUN, "RANK": "abc"}, "RANK='abc'"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK='-1'"),
        ({**TORCHRUN, "RANK": "1_0"}, "RANK='1_0'"),
        ({**TORCHRUN, "RANK": "٣"}, "RANK='٣'"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
        ({**TORCHRUN, "WORLD_SIZE": "5"}, "RANK=5 is not below WORLD_SIZE=5"),
        ({**TORCHRUN, "WORLD_SIZE": ""}, "WORLD_SIZE is not set"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "LOCAL_RANK=4 is not below LOCAL_WORLD_SIZE=4"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9 is larger than WORLD_SIZE=8"),
        ({**TORCHRUN, "GROUP_RANK": "2"}, "GROUP_RANK=2 is not below GROUP_WORLD_SIZE=2"),
        ({**TORCHRUN, "MASTER_PORT": "http"}, "MASTER_PORT='http'"),
        ({**TORCHRUN, "MASTER_PORT": "65536"}, "not a TCP port"),
        ({**TORCHRUN, "MASTER_PORT": "²"}, "MASTER_PORT='²' is not a TCP port"),
        ({**OPENMPI, "OMPI_COMM_WORLD_SIZE": "1"}, "OMPI_COMM_WORLD_RANK=1 is not below"),
        ({**SLURM, "SLURM_PROCID": "x"}, "SLURM_PROCID='x'"),
        ({"PMIX_RANK": "1"}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, "RANK is not"),
        ({"UNIDIST_LAUNCHER": "slrum"}, "not a known launcher"),
    ],
)
def test_nonsense(env: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        detect(env)
    assert message in str(caught.value)


FIELDS = ("rank", "world_size", "local_rank", "local_size", "node_rank", "num_nodes")
NAMES = sorted(
    {getattr(row, field) for row in LAUNCHERS for field in FIELDS} - {""}
    | {mark for row in LAUNCHERS for mark in row.marks}
    | {"MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_RESV_PORTS"}
)
VALUES = st.one_of(
    st.integers(-2, 10).map(str),
    st.sampled_from(["", "none", "slurm", "env", "a[1-2]", "[", "0x1", "1.5", " 1", "1e3", "99999999999999999999"]),
    st.text(max_size=6),
)


@settings(max_examples=500)
@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=14))
def test_any_environment_gives_a_place_or_one_clear_error(env: dict[str, str]) -> None:
    before = dict(env)
    try:
        launch = detect(env)
    except LaunchError as error:
        # It names a variable that can be set, and its value where it has one.
        named = [name for name in NAMES if name in str(error)]
        assert named and str(error).endswith(".")
    else:
        check(launch)
    assert env == before


def check(launch: Launch) -> None:
    assert 0 <= launch.rank < launch.world_size
    for rank, size in ((launch.local_rank, launch.local_size), (launch.node_rank, launch.num_nodes)):
        assert rank is None or rank >= 0
        assert size is None or 1 <= size <= launch.world_size
        assert rank is None or size is None or rank < size
    assert launch.master_port is None or 1 <= launch.master_port <= 65535
    if launch.launcher.name == "none":
        assert (launch.rank, launch.world_size) == (0, 1)


@given(st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_locate_completes_from_hosts(nodes: int, per_node: int, round_robin: bool) -> None:
    """Whichever way a launcher lays ranks over nodes, the hosts tell who is where."""
    size = nodes * per_node
    hosts = [f"host{r % nodes if round_robin else r // per_node}" for r in range(size)]
    row = next(row for row in LAUNCHERS if row.name == "openmpi")
    places = [locate(Launch(row, rank, size), [Slot(host) for host in hosts]) for rank in range(size)]
    assert all((p.cross_rank, p.cross_size) == (p.node_rank, p.num_nodes) for p in places)
    assert {(p.node_rank, p.local_rank) for p in places} == {(n, i) for n in range(nodes) for i in range(per_node)}
    assert all(p.num_nodes == nodes and p.local_size == per_node for p in places)
    assert all(hosts[a.rank] == hosts[b.rank] for a in places for b in places if a.node_rank == b.node_rank)


def test_locate_keeps_what_was_declared() -> None:
    row = next(row for row in LAUNCHERS if row.name == "torchrun")
    launch = Launch(row, 1, 2, local_rank=0, local_size=1, node_rank=1, num_nodes=2)
    places = [Slot("same", 0, node) for node in range(2)]
    assert locate(launch, places) == Topology(1, 2, 0, 1, 1, 2, "torchrun", 1, 2, True)


@pytest.mark.parametrize("declared", [True, False])
def test_across_uneven_nodes(declared: bool) -> None:
    """Ranks of one local rank are counted on the nodes that have it, as Horovod counts them."""
    row = next(row for row in LAUNCHERS if row.name == "horovodrun")
    sizes = {"a": 1, "b": 3, "c": 2}  # 2 is the mean
    at = [(host, local) for host, size in sizes.items() for local in range(size)]
    places = [Slot(host, local if declared else None) for host, local in at]
    found = [locate(Launch(row, rank, 6, *(at[rank][1], sizes[at[rank][0]]) * declared), places) for rank in range(6)]
    assert [(t.local_rank, t.local_size) for t in found] == [(0, 1), (0, 3), (1, 3), (2, 3), (0, 2), (1, 2)]
    assert [(t.node_rank, t.num_nodes) for t in found] == [(0, 3), (1, 3), (1, 3), (1, 3), (2, 3), (2, 3)]
    assert [(t.cross_rank, t.cross_size) for t in found] == [(0, 3), (1, 3), (0, 2), (0, 1), (2, 3), (1, 2)]
    assert not any(t.homogeneous for t in found)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("vm", "vm"),
        ("a1,a2", "a1"),
        ("gpu[03-07,9],login1", "gpu03"),
        ("gpu[3,5]", "gpu3"),
        ("r[1-2]n[01-04]", "r1n01"),
        ("n[1-3]-ib", "n1-ib"),
    ],
)
def test_first_host(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def test_slurm_meets_at_the_first_node() -> None:
    launch = detect(SLURM)
    assert launch.master_addr == "gpu07" and launch.master_port is not None and 20000 <= launch.master_port < 32000
    assert detect({**SLURM, "MASTER_ADDR": "x", "MASTER_PORT": "5"}).master_addr == "x"
    assert detect({**SLURM, "SLURM_STEP_RESV_PORTS": "12001-12003"}).master_port == 12001
    for no_port in ("0", "123456"):
        assert detect({**SLURM, "SLURM_STEP_RESV_PORTS": no_port}).master_port == launch.master_port
    assert detect({**SLURM, "SLURM_STEP_ID": "1"}).master_port != launch.master_port
