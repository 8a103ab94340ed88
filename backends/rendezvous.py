"""Rendezvous: a key-value store that all processes of a launch can reach.

Launchers differ in how rank 0's address gets to the other ranks (``Launcher.rendezvous``).
"""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections.abc import Sequence
from datetime import timedelta
from http.client import HTTPException
from typing import NamedTuple

import torch.distributed as dist

from unidist import open_files
from unidist.backends import addresses
from unidist.backends.addresses import Host, create_server, listen_address, source_address, this_host
from unidist.backends.base import Start
from unidist.backends.mpi import launch as mpi
from unidist.errors import BackendError, LaunchError, UnidistError
from unidist.topology import Launch, Slot, Topology, locate

START_TIMEOUT = timedelta(seconds=300)
#: One store for all calls of ``init`` in a process: the address may be usable only once.
_stores: dict[tuple[Launch, str | None], dist.Store] = {}
#: Connects to the launcher's server without the proxies of the environment.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class World(NamedTuple):
    """What a rendezvous gives."""

    #: For this call of ``init``.
    store: dist.Store
    topology: Topology
    #: Of all ranks, in rank order.
    hosts: list[Host]

    @property
    def address(self) -> str:
        """On which this process listens for the others."""
        return listen_address(self.hosts[self.topology.rank], self.hosts)


def join(start: Start) -> World:
    """Rendezvous with the other ranks. Collective.

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
        texts = exchange(store, "host", launch, json.dumps(own_row(launch)))
        rows = [(Slot(*slot), Host(id, name, tuple(found))) for slot, (id, name, found) in map(json.loads, texts)]
        return world_of(store, launch, rows)
    except UnidistError:
        raise
    except Exception as error:
        hint = " Is every rank running, and can it reach rank 0?"
        if open_files.EXHAUSTED in str(error):
            hint = open_files.advice(launch.world_size)
        raise BackendError(
            f"rank {launch.rank} of {launch.world_size} ({launch.launcher.name}) did not meet the other ranks within "
            f"{timeout.total_seconds():.0f} s: {error}.{hint}"
        ) from error


def own_row(launch: Launch) -> tuple[Slot, Host]:
    """What ``world_of`` needs of each rank."""
    host = this_host()
    return Slot(launch.host or host.id, launch.local_rank, launch.node_rank), host


def world_of(store: dist.Store, launch: Launch, rows: Sequence[tuple[Slot, Host]]) -> World:
    """What follows from the rows of all ranks, in rank order."""
    return World(store, locate(launch, [slot for slot, _ in rows]), [host for _, host in rows])


def exchange(store: dist.Store, key: str, launch: Launch, value: str) -> list[str]:
    """Every rank's ``value``, in rank order. Collective; a key can be used once."""
    store.set(f"{key}/{launch.rank}", value)
    # Rank 0 publishes one list, so that the store has requests in proportion to the ranks.
    if launch.rank == 0:
        values = [store.get(f"{key}/{rank}").decode() for rank in range(launch.world_size)]
        store.set(f"{key}/all", json.dumps(values))
    found: list[str] = json.loads(store.get(f"{key}/all"))
    return found


def open_on_free_port(address: str, timeout: timedelta = START_TIMEOUT) -> dist.TCPStore:
    """A store that this process serves; ``.port`` is its port.

    Args:
        address: the address of this host on which it listens.
        timeout: of requests to the store.
    """
    listening = create_server(address)
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
        host = addresses.LOOPBACK if launch.local_size == launch.world_size else _address_for_horovodrun(server)
        store = open_on_free_port(host, timeout)
        _ask(urllib.request.Request(url, data=f"{host}:{store.port}".encode(), method="PUT"), timeout)
        return store
    host, port = _ask(urllib.request.Request(url), timeout).rsplit(":", 1)
    return dist.TCPStore(host, int(port), is_master=False, timeout=timeout)


def _address_for_horovodrun(server: str) -> str:
    """This host's address in the network of horovodrun's server, through which the hosts reach each other."""
    if source_address(server) == server:  # horovodrun is on this host
        return server
    return listen_address(this_host(), [Host("", "of horovodrun", (server,))])


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
            if open_files.EXHAUSTED in str(error):
                raise
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
    hosts = world.allgather(this_host())
    store, endpoint = None, None
    if launch.rank == 0:
        address = listen_address(hosts[0], hosts)
        store = open_on_free_port(address, timeout)
        endpoint = (address, store.port)
    host, port = world.bcast(endpoint, root=0)
    return store or dist.TCPStore(host, port, is_master=False, timeout=timeout)
