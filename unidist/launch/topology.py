"""Which launcher started this process, and where the process stands in the world.

A launcher is a row of variable names. ``detect`` reads a mapping and nothing else: it opens,
imports and writes nothing. Two launchers' variables may be set at once (torchrun inside an
``salloc``, mpirun under Slurm): the first row that matches wins, so the rows are ordered from the
launcher that must have been started last to the one that surrounds it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from unidist import settings
from unidist.errors import LaunchError


@dataclass(frozen=True)
class Launcher:
    """The variables that one launcher sets for each process. An empty name: it does not say."""

    name: str
    rank: str
    world_size: str
    local_rank: str = ""
    local_size: str = ""
    node_rank: str = ""
    num_nodes: str = ""
    #: The launcher's name of the process's host.
    host: str = ""
    #: The row matches when all of these are set: ``NAME``, or ``NAME=value`` where it must have that value.
    marks: tuple[str, ...] = ()
    #: How its processes find each other: ``master`` (MASTER_ADDR and MASTER_PORT), ``horovod`` (the
    #: launcher's key-value server), ``mpi`` (one broadcast) or ``slurm`` (first node of the step).
    rendezvous: str = "master"
    #: The MPI library that it belongs to: ``openmpi``, ``mpich`` or none.
    mpi: str = ""
    #: The backend that ``init("auto")`` picks under it where that is installed; empty: by device.
    backend: str = ""

    @property
    def place(self) -> list[str]:
        """The variables that say which process of how many this is, and where."""
        names = (self.rank, self.world_size, self.local_rank, self.local_size, self.node_rank, self.num_nodes)
        return [name for name in names if name]

    def started(self, env: Mapping[str, str]) -> bool:
        """Return whether its marks are in the environment."""
        return all(
            env.get(name) and value in ("", env[name]) for name, _, value in (m.partition("=") for m in self.marks)
        )


def _torch_like(name: str, mark: str) -> Launcher:
    return Launcher(
        name,
        rank="RANK",
        world_size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_size="LOCAL_WORLD_SIZE",
        node_rank="GROUP_RANK",
        num_nodes="GROUP_WORLD_SIZE",
        marks=(mark,),
    )


def _openmpi(name: str, *marks: str, backend: str = "") -> Launcher:
    # OMPI_COMM_WORLD_NODE_RANK is a rank within the node, not the rank of the node.
    return Launcher(
        name,
        rank="OMPI_COMM_WORLD_RANK",
        world_size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        marks=("OMPI_COMM_WORLD_RANK", *marks),
        rendezvous="mpi",
        mpi="openmpi",
        backend=backend,
    )


RUN_ID = "TORCHELASTIC_RUN_ID"
#: Begins the value of TORCHELASTIC_RUN_ID where unidist, and not torchrun, has set torchrun's variables
#: (``torchrun_env.export``, ``unidist run``); the launcher's name follows.
EXPORTED = "unidist."

LAUNCHERS: tuple[Launcher, ...] = (
    # unidist.spawn() names itself, so this row is found by name and matches nothing else.
    _torch_like("spawn", mark=settings.LAUNCHER),
    _torch_like("torchrun", mark=RUN_ID),
    _torch_like("unidist-run", mark=f"{RUN_ID}={EXPORTED}unidist-run"),
    _torch_like("spark", mark=f"{RUN_ID}={EXPORTED}spark"),
    Launcher(
        "horovodrun",
        rank="HOROVOD_RANK",
        world_size="HOROVOD_SIZE",
        local_rank="HOROVOD_LOCAL_RANK",
        local_size="HOROVOD_LOCAL_SIZE",
        # HOROVOD_CROSS_RANK and HOROVOD_CROSS_SIZE count the hosts that have this local rank, and no others.
        host="HOROVOD_HOSTNAME",
        marks=("HOROVOD_RANK", "HOROVOD_GLOO_RENDEZVOUS_ADDR"),
        rendezvous="horovod",
        backend="horovod",
    ),
    # horovodrun --mpi replaces itself by an mpirun with these options, which become variables
    # (horovod/runner/mpi_run.py). Its lines for MPICH and Intel MPI have no option of the kind.
    _openmpi(
        "horovodrun-mpi",
        "OMPI_MCA_pml=ob1",
        "OMPI_MCA_btl=^openib",
        "OMPI_MCA_btl_tcp_if_include",
        "NCCL_SOCKET_IFNAME",
        backend="horovod",
    ),
    _openmpi("openmpi"),
    Launcher(
        "mpich",
        rank="PMI_RANK",
        world_size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
        marks=("PMI_RANK", "MPI_LOCALRANKID"),
        rendezvous="mpi",
        mpi="mpich",
    ),
    Launcher(
        "jsrun",
        rank="JSM_NAMESPACE_RANK",
        world_size="JSM_NAMESPACE_SIZE",
        local_rank="JSM_NAMESPACE_LOCAL_RANK",
        local_size="JSM_NAMESPACE_LOCAL_SIZE",
        marks=("JSM_NAMESPACE_RANK",),
        rendezvous="mpi",
        mpi="openmpi",
    ),
    # unidist.ray, and Ray Train. Ray sets RAY_JOB_ID in all its processes.
    Launcher(
        "ray",
        rank="RANK",
        world_size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_size="LOCAL_WORLD_SIZE",
        node_rank="NODE_RANK",
        marks=("RANK", "RAY_JOB_ID"),
    ),
    # Variables set by hand, by Kubernetes' PyTorchJob, by DeepSpeed's launcher, ...
    _torch_like("env", mark="RANK"),
    # A batch script and a shell inside salloc have SLURM_PROCID too, but only srun sets the step's size.
    Launcher(
        "slurm",
        rank="SLURM_PROCID",
        world_size="SLURM_STEP_NUM_TASKS",
        local_rank="SLURM_LOCALID",
        node_rank="SLURM_NODEID",
        num_nodes="SLURM_STEP_NUM_NODES",
        marks=("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        rendezvous="slurm",
    ),
    Launcher("pmi", rank="PMI_RANK", world_size="PMI_SIZE", marks=("PMI_RANK",), rendezvous="mpi", mpi="mpich"),
    # PMIx publishes the size through its library only, so it has to be given by hand.
    Launcher("pmix", rank="PMIX_RANK", world_size="WORLD_SIZE", marks=("PMIX_RANK",), rendezvous="mpi"),
)

NONE = Launcher("none", rank="", world_size="")
#: What ``init(rank=..., world_size=...)`` makes of its arguments.
EXPLICIT = Launcher("arguments", rank="rank=", world_size="world_size=")


@dataclass(frozen=True)
class Launch:
    """What a launcher declared about this process. None: it did not say."""

    launcher: Launcher
    rank: int
    world_size: int
    local_rank: int | None = None
    local_size: int | None = None
    node_rank: int | None = None
    num_nodes: int | None = None
    #: Where rank 0 listens, if the environment says so.
    master_addr: str | None = None
    master_port: int | None = None
    host: str | None = None

    @property
    def evidence(self) -> str:
        """The declaration as a user sees it, for messages."""
        if self.launcher is NONE:
            return "no launcher's variables are set"
        row = self.launcher
        values = "".join(f" {mark}" for mark in row.marks if "=" in mark)
        return f"{row.rank.rstrip('=')}={self.rank} {row.world_size.rstrip('=')}={self.world_size}{values}"


class Slot(NamedTuple):
    """What a rank knows about where it runs, for ``locate``. None: the launcher did not say."""

    #: Equal for the ranks of one host, and for no others.
    host: str
    local_rank: int | None = None
    node_rank: int | None = None


@dataclass(frozen=True)
class Topology:
    """Where this process stands. Ranks count from 0; a node is one host, or one agent of the launcher."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int
    launcher: str
    #: This process among those of its local rank, of which each node has one or, with fewer processes, none.
    cross_rank: int
    cross_size: int
    #: Whether all nodes have as many processes.
    homogeneous: bool


def detect(env: Mapping[str, str]) -> Launch:
    """Read this process's rank, world size and node from its environment.

    Args:
        env: a mapping such as ``os.environ``; it is only read.

    Returns:
        The launcher's declaration; rank 0 of 1 by launcher ``none`` when no launcher left variables.

    Raises:
        LaunchError: a variable is missing, not a number, or contradicts another.
    """
    row = _launcher(env)
    if row is NONE:
        return Launch(NONE, rank=0, world_size=1, local_rank=0, local_size=1, node_rank=0, num_nodes=1)
    rank = _number(env, row, row.rank, minimum=0)
    size = _number(env, row, row.world_size, minimum=1)
    _below(row, row.rank, rank, row.world_size, size)
    local_rank = _optional(env, row, row.local_rank, minimum=0)
    local_size = _optional(env, row, row.local_size, minimum=1)
    node_rank = _optional(env, row, row.node_rank, minimum=0)
    num_nodes = _optional(env, row, row.num_nodes, minimum=1)
    _below(row, row.local_rank, local_rank, row.local_size, local_size)
    _below(row, row.node_rank, node_rank, row.num_nodes, num_nodes)
    for name, value in ((row.local_size, local_size), (row.num_nodes, num_nodes)):
        if value is not None and value > size:
            raise LaunchError(
                f"{name}={value} is larger than {row.world_size}={size} ({row.name}): stale variables of another "
                f"launch? Unset them, or {_force(row)}."
            )
    addr, port = master(env, row)
    host = env.get(row.host) or None
    launch = Launch(row, rank, size, local_rank, local_size, node_rank, num_nodes, addr, port, host)
    if row.name == "env" and not env.get(settings.LAUNCHER):
        _refuse_smaller_world(env, launch)
    return launch


def exported_row(env: Mapping[str, str]) -> Launcher | None:
    """Return the launcher of a process for which unidist has set torchrun's variables; None elsewhere."""
    said = env.get(RUN_ID, "")
    return next((row for row in LAUNCHERS if said == EXPORTED + row.name), None)


def allocated_tasks(env: Mapping[str, str]) -> int:
    """Return the tasks of the Slurm allocation that this process, started by no launcher, is alone in; 0 elsewhere."""
    text = env.get("SLURM_NTASKS", "")
    alone = not env.get(settings.LAUNCHER) and _launcher(env) is NONE
    return int(text) if alone and re.fullmatch("[0-9]{1,9}", text) else 0


def locate(launch: Launch, slots: Sequence[Slot]) -> Topology:
    """Complete a declaration by the slots of all ranks, in rank order.

    What the launcher declared stands; what it left out follows from who shares a host with whom.
    """
    rank, size = launch.rank, launch.world_size
    by_host = Counter[str]()
    local_ranks = []
    for slot in slots:
        local_ranks.append(by_host[slot.host] if slot.local_rank is None else slot.local_rank)
        by_host[slot.host] += 1
    # Two nodes of a launcher may be on one host.
    nodes = [slot.host if launch.node_rank is None else slot.node_rank for slot in slots]
    across = list(dict.fromkeys(node for node, local in zip(nodes, local_ranks) if local == local_ranks[rank]))
    different = list(dict.fromkeys(nodes))

    def known(declared: int | None, derived: int) -> int:
        return derived if declared is None else declared

    return Topology(
        rank=rank,
        world_size=size,
        local_rank=local_ranks[rank],
        local_size=known(launch.local_size, by_host[slots[rank].host]),
        node_rank=known(launch.node_rank, different.index(nodes[rank])),
        num_nodes=known(launch.num_nodes, len(different)),
        launcher=launch.launcher.name,
        cross_rank=across.index(nodes[rank]),
        cross_size=len(across),
        homogeneous=len(set(Counter(nodes).values())) == 1,
    )


# ---------------------------------------------------------------------------------------------
def _launcher(env: Mapping[str, str]) -> Launcher:
    forced = env.get(settings.LAUNCHER)
    if forced == "none":
        return NONE
    if forced:
        for row in LAUNCHERS:
            if row.name == forced:
                return row
        names = ", ".join(["none", *(row.name for row in LAUNCHERS)])
        raise LaunchError(f"{settings.LAUNCHER}={forced!r} is not a known launcher: use one of {names}.")
    if exported := exported_row(env):
        return exported
    for row in LAUNCHERS:
        if row.started(env):
            return row
    if env.get("WORLD_SIZE"):
        raise LaunchError(
            f"WORLD_SIZE={env['WORLD_SIZE']!r} is set but RANK is not: set both (each process its own RANK), "
            f"or unset WORLD_SIZE, or {settings.LAUNCHER}=none for one process."
        )
    return NONE


def _force(row: Launcher) -> str:
    return f"set {settings.LAUNCHER}=none to ignore {row.name}'s variables"


def _number(env: Mapping[str, str], row: Launcher, name: str, *, minimum: int) -> int:
    text = env.get(name, "")
    if not text:
        raise LaunchError(
            f"{name} is not set, but the other variables say that {row.name} started this process: set {name}, or "
            f"{_force(row)}."
        )
    # int() would also take "1_0", " 1 " and other scripts' digits.
    if not re.fullmatch(r"-?[0-9]{1,9}", text) or int(text) < minimum:
        raise LaunchError(
            f"{name}={text!r} is not an integer from {minimum} up ({row.name}): correct it, or {_force(row)}."
        )
    return int(text)


def _optional(env: Mapping[str, str], row: Launcher, name: str, *, minimum: int) -> int | None:
    return _number(env, row, name, minimum=minimum) if name and env.get(name) else None


def _below(row: Launcher, name: str, value: int | None, size_name: str, size: int | None) -> None:
    if value is not None and size is not None and value >= size:
        raise LaunchError(
            f"{name}={value} is not below {size_name}={size} ({row.name}): ranks count from 0; correct them, or "
            f"{_force(row)}."
        )


def master(env: Mapping[str, str], row: Launcher) -> tuple[str | None, int | None]:
    """Return rank 0's address and port, where the variables have them.

    Raises:
        LaunchError: MASTER_PORT is not a TCP port, or SLURM_STEP_NODELIST not a node list.
    """
    addr = env.get("MASTER_ADDR") or None
    text = env.get("MASTER_PORT", "")
    port = tcp_port(text)
    if text and port is None:
        raise LaunchError(f"MASTER_PORT={text!r} is not a TCP port: use a free one from 1024 to 65535.")
    if row.rendezvous == "slurm":
        nodes = env.get("SLURM_STEP_NODELIST", "")
        addr = addr or (first_host(nodes) if nodes else None)
        port = port or _slurm_port(env)
    return addr, port


def tcp_port(text: str) -> int | None:
    """Return the number of a TCP port; None if the text is none."""
    return int(text) if re.fullmatch("[0-9]{1,5}", text) and 0 < int(text) < 65536 else None


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list: ``gpu[03-07,9],login1`` gives ``gpu03``."""
    first = re.sub(r"\[(\w*)[^\]]*\]", r"\1", nodelist).split(",")[0]
    if not re.fullmatch(r"[\w.-]+", first):
        raise LaunchError(f"SLURM_STEP_NODELIST={nodelist!r} is not a node list: set MASTER_ADDR to rank 0's host.")
    return first


def _slurm_port(env: Mapping[str, str]) -> int:
    first = re.split("[^0-9]", env.get("SLURM_STEP_RESV_PORTS", ""))[0]  # of 12001-12003, say
    if (reserved := tcp_port(first)) is not None:
        return reserved
    digits = [re.sub(r"\D", "", env.get(name, "")) or "0" for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    job, step = (int(text[-9:]) for text in digits)
    # The private ports 49152-65535 are what the kernel hands to clients; stay below them.
    return 20000 + (job * 64 + step) % 12000


def _refuse_smaller_world(env: Mapping[str, str], launch: Launch) -> None:
    """RANK and WORLD_SIZE left over in a shell would turn an srun or mpiexec of N processes into N worlds of one."""
    for row in LAUNCHERS[LAUNCHERS.index(launch.launcher) + 1 :]:
        size = env.get(row.world_size, "") if row.started(env) else ""
        if re.fullmatch("[0-9]{1,9}", size) and launch.world_size < int(size):
            raise LaunchError(
                f"RANK={launch.rank} WORLD_SIZE={launch.world_size} are set, but {row.world_size}={size}: unset RANK "
                f"and WORLD_SIZE, or set {settings.LAUNCHER}={row.name} to follow the launcher or "
                f"{settings.LAUNCHER}=env to follow them."
            )
