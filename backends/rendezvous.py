"""Rendezvous: a key-value store that all processes of a launch can reach.

Launchers differ in how rank 0's address gets to the other ranks (``Launcher.rendezvous``).
"""

from __future__ import annotations

import os
import socket
import time
import urllib.request
from datetime import timedelta
from http.client import HTTPException

import torch.distributed as dist

from unidist.backends.base import Start
from unidist.backends.mpi import launch as mpi
from unidist.errors import BackendError, LaunchError, UnidistError
from unidist.topology import Launch, Topology, complete, locate

START_TIMEOUT = timedelta(seconds=300)
LOOPBACK = "127.0.0.1"
#: One store for all calls of ``init`` in a process: the address may be usable only once.
_stores: dict[tuple[Launch, str | None], dist.Store] = {}
#: Connects to the launcher's server without the proxies of the environment.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def join(start: Start) -> tuple[dist.Store, Topology]:
    """Rendezvous with the other ranks. Collective.

    Returns:
        A store for this call of ``init``, and the topology, whose missing parts are derived from the ranks' host names.

    Raises:
        BackendError: not all ranks came in time, or two processes have the same rank.
    """
    launch = start.launch
    timeout = start.timeout or START_TIMEOUT
    try:
        base = _base_store(launch, start.init_method, timeout)
        base.set_timeout(timeout)
        store = dist.PrefixStore(f"unidist/{start.session}", base)
        _claim_rank(store, launch)
        hosts = [] if complete(launch) else _exchange_hosts(store, launch)
    except UnidistError:
        raise
    except Exception as error:
        raise BackendError(
            f"rank {launch.rank} of {launch.world_size} ({launch.launcher.name}) did not meet the other ranks within "
            f"{timeout.total_seconds():.0f} s: {error}. Is every rank running, and can it reach rank 0?"
        ) from error
    return store, locate(launch, hosts)


def exchange(store: dist.Store, key: str, launch: Launch, value: str) -> list[str]:
    """Every rank's ``value``, in rank order. Collective; a key can be used once."""
    store.set(f"{key}/{launch.rank}", value)
    return [store.get(f"{key}/{rank}").decode() for rank in range(launch.world_size)]


def local_address(towards: str) -> str:
    """The address of the interface through which this host reaches another one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))  # a datagram socket sends nothing when it connects
        address: str = probe.getsockname()[0]
        return address


def open_on_free_port(timeout: timedelta = START_TIMEOUT, address: str | None = None) -> dist.TCPStore:
    """A store that this process serves; ``.port`` is its port.

    Args:
        timeout: of requests to the store.
        address: the address of this host on which it listens. Default: all.
    """
    if address is None:
        return dist.TCPStore("0.0.0.0", 0, is_master=True, timeout=timeout, wait_for_workers=False)
    listening = socket.create_server((address, 0), backlog=socket.SOMAXCONN)
    return dist.TCPStore(
        address,
        listening.getsockname()[1],
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
        use_libuv=False,  # torch 2.6's takes no socket
    )


# ---------------------------------------------------------------------------------------------
def _claim_rank(store: dist.Store, launch: Launch) -> None:
    if store.add(f"claim/{launch.rank}", 1) != 1:
        raise BackendError(
            f"two processes are rank {launch.rank} of {launch.world_size} ({launch.launcher.name}): "
            "give each process its own rank, or each job its own address (MASTER_PORT, file://)."
        )


def _exchange_hosts(store: dist.Store, launch: Launch) -> list[str]:
    return exchange(store, "host", launch, socket.gethostname())


def _base_store(launch: Launch, init_method: str | None, timeout: timedelta) -> dist.Store:
    key = (launch, init_method)
    if key not in _stores:
        _stores[key] = _open(launch, init_method, timeout)
    return _stores[key]


def _open(launch: Launch, init_method: str | None, timeout: timedelta) -> dist.Store:
    if init_method is not None:
        url = init_method
        if url.startswith("env://"):
            _require_master(launch)
        store: dist.Store = next(dist.rendezvous(url, launch.rank, launch.world_size, timeout=timeout))[0]
        return store
    if launch.launcher.name in ("none", "arguments"):
        return dist.HashStore()
    return {"master": _at_master, "slurm": _at_master, "horovod": _at_horovod, "mpi": _at_mpi}[
        launch.launcher.rendezvous
    ](launch, timeout)


def _require_master(launch: Launch) -> tuple[str, int]:
    if launch.master_addr is None or launch.master_port is None:
        missing = "MASTER_ADDR" if launch.master_addr is None else "MASTER_PORT"
        raise LaunchError(
            f"{missing} is not set ({launch.launcher.name}, {launch.evidence}): set MASTER_ADDR to rank 0's host and "
            "MASTER_PORT to a free port of it, the same for every rank, or start the script with torchrun."
        )
    return launch.master_addr, launch.master_port


def _at_master(launch: Launch, timeout: timedelta) -> dist.Store:
    addr, port = _require_master(launch)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun's agent is the server, and counts its restarts.
        store = dist.TCPStore(addr, port, is_master=False, timeout=timeout)
        return dist.PrefixStore(f"restart/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    try:
        return dist.TCPStore(
            addr, port, is_master=launch.rank == 0, timeout=timeout, wait_for_workers=False, multi_tenant=True
        )
    except dist.DistNetworkError as error:
        if launch.rank == 0 and "EADDRINUSE" in str(error):
            raise BackendError(
                f"port {port} of {addr} is in use: set MASTER_PORT to a free one on every rank."
            ) from error
        raise


def _at_horovod(launch: Launch, timeout: timedelta) -> dist.Store:
    """Publish rank 0's address through the key-value server of horovodrun."""
    server = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
    url = f"http://{server}:{os.environ['HOROVOD_GLOO_RENDEZVOUS_PORT']}/unidist/store"
    if launch.rank == 0:
        if launch.num_nodes == 1:
            host, store = LOOPBACK, open_on_free_port(timeout, LOOPBACK)
        else:
            host, store = _reachable_address(server), open_on_free_port(timeout)
        _ask(urllib.request.Request(url, data=f"{host}:{store.port}".encode(), method="PUT"), timeout)
        return store
    host, port = _ask(urllib.request.Request(url), timeout).rsplit(":", 1)
    return dist.TCPStore(host, int(port), is_master=False, timeout=timeout)


def _reachable_address(server: str) -> str:
    address = local_address(server)
    # Rank 0 is on the launcher's host: the others reach it at the launcher's address.
    return server if address.startswith("127.") else address


def _ask(request: urllib.request.Request, timeout: timedelta) -> str:
    """The response of horovodrun's server, which is requested until there is one."""
    end = time.monotonic() + timeout.total_seconds()
    pause = 0.005
    while True:
        try:
            with _direct.open(request, timeout=30) as response:
                text: str = response.read().decode()
                return text
        except (OSError, HTTPException) as error:
            if time.monotonic() > end:
                what = "accepted" if request.data else "had"
                raise TimeoutError(f"{request.full_url} never {what} rank 0's address: {error}") from error
        time.sleep(pause)
        pause = min(2 * pause, 0.2)  # short at first, then without a load on the launcher


def _at_mpi(launch: Launch, timeout: timedelta) -> dist.Store:
    """Broadcast rank 0's address by MPI, unless MASTER_ADDR and MASTER_PORT are set."""
    if launch.master_addr is not None and launch.master_port is not None:
        return _at_master(launch, timeout)
    world = mpi.world(launch)
    alone = len(set(world.allgather(socket.gethostname()))) == 1
    store, address = None, None
    if launch.rank == 0:
        store = open_on_free_port(timeout, LOOPBACK if alone else None)
        address = (LOOPBACK if alone else socket.getfqdn(), store.port)
    host, port = world.bcast(address, root=0)
    return store or dist.TCPStore(host, port, is_master=False, timeout=timeout)
