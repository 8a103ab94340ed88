"""torchrun's variables under every launcher, for libraries that find their world by them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from itertools import count

import torch

from unidist import settings
from unidist.backends import rendezvous
from unidist.backends.base import Start
from unidist.backends.mpi import launch as mpi
from unidist.errors import UnidistError
from unidist.launch import scripts
from unidist.launch.topology import EXPORTED, LAUNCHERS, NONE, RUN_ID, Launch, Topology, detect, exported_row
from unidist.network.addresses import Host, listen_address, this_host

USAGE = "usage: python -m unidist [-m] SCRIPT [ARGUMENT ...]"
#: ``Start.attempt`` of the ranks' meeting before the script; ``init`` counts from 0.
_BEFORE_INIT = -1
#: Keeps rank 0's store to the end of the process.
_exported: list[Callable[[], None]] = []


def run(argv: list[str]) -> None:
    """Run a script or module as ``__main__``, with torchrun's variables if a launcher started this process.

    Collective: the ranks meet before the script begins.

    Args:
        argv: ``SCRIPT ARGUMENT ...`` or ``-m MODULE ARGUMENT ...``.

    Raises:
        SystemExit: the ranks did not meet, or there is no such script, or it raised it.
    """
    try:
        _export_at_start()
    except UnidistError as error:
        sys.exit(f"unidist: {error}")
    try:
        scripts.run(argv, USAGE)
    except BaseException as error:
        if not mpi.is_started() or (isinstance(error, SystemExit) and not error.code):
            raise
        # At its exit this process would wait in MPI_Finalize for ranks that wait for it.
        _end_job(error)


def _end_job(error: BaseException) -> None:
    status = 1
    if not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
    elif isinstance(error.code, int):
        status = error.code
    else:
        print(error.code, file=sys.stderr)
    mpi.abort(status)


def _export_at_start() -> None:
    launch = detect(os.environ)
    if launch.launcher is NONE:
        return
    if _are_set(launch):
        os.environ.update(_for_accelerate())
        return
    timeout = settings.timeout(os.environ)
    start = Start(launch, timeout=timeout, attempt=_BEFORE_INIT)
    world = rendezvous.join(start)
    number = count()

    def exchange(text: str) -> list[str]:
        return world.exchange(f"torchrun_env/{next(number)}", text, start.start_timeout)

    _exported.append(export(launch, world.topology, exchange))


def export(launch: Launch, topology: Topology, exchange: Callable[[str], list[str]]) -> Callable[[], None]:
    """Set torchrun's variables in ``os.environ``. Collective.

    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and
    TORCHELASTIC_RUN_ID, except where they are set by torchrun or by an earlier call, and ACCELERATE_USE_CPU where there
    is no accelerator. At MASTER_ADDR and MASTER_PORT torch's ``env://`` meets: where the launcher does not give them,
    rank 0's process serves a store there.

    Args:
        launch: what the launcher declared.
        topology: the world.
        exchange: gives every rank's text, in rank order. Collective.

    Returns:
        A function that takes the variables back, and closes the store.
    """
    store = None
    values = _for_accelerate()
    if not _are_set(launch):
        address, port = launch.master_addr, launch.master_port
        if address is None or port is None:
            rows = map(json.loads, exchange(json.dumps(this_host())))
            hosts = [Host(id, name, tuple(addresses)) for id, name, addresses in rows]
            if topology.rank == 0:
                address = listen_address(hosts[0], hosts)
                store = rendezvous.open_on_free_port(address)
                port = store.port
            address, port = json.loads(exchange(json.dumps((address, port)))[0])
        name = launch.launcher.name if launch.launcher in LAUNCHERS else "env"
        values |= {
            "RANK": str(topology.rank),
            "WORLD_SIZE": str(topology.world_size),
            "LOCAL_RANK": str(topology.local_rank),
            "LOCAL_WORLD_SIZE": str(topology.local_size),
            "GROUP_RANK": str(topology.node_rank),
            "GROUP_WORLD_SIZE": str(topology.num_nodes),
            "MASTER_ADDR": str(address),
            "MASTER_PORT": str(port),
            RUN_ID: EXPORTED + name,
        }
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)

    def take_back() -> None:
        nonlocal store
        store = None
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    return take_back


def _are_set(launch: Launch) -> bool:
    """Return whether torchrun's variables are there, by torchrun or by ``export``."""
    return launch.launcher.name == "torchrun" or exported_row(os.environ) is not None


def _for_accelerate() -> dict[str, str]:
    """Without it, Accelerate on CPUs makes a world of one process."""
    use_cpu = "ACCELERATE_USE_CPU" not in os.environ and not torch.accelerator.is_available()
    return {"ACCELERATE_USE_CPU": "true"} if use_cpu else {}
