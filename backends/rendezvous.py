"""Rendezvous: a key-value store that all processes of a launch can reach.

Launchers differ in how rank 0's address gets to the other ranks (``Launcher.rendezvous``).
"""

from __future__ import annotations

import errno
import json
import os
import queue
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from http.client import HTTPException
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from unidist import settings
from unidist.backends.base import START_TIMEOUT, Start
from unidist.backends.mpi import launch as mpi
from unidist.errors import BackendError, LaunchError, UnidistError
from unidist.launch import membership
from unidist.launch.topology import Launch, Slot, Topology, exported_row, locate
from unidist.network import addresses, open_files
from unidist.network.addresses import Host, create_server, listen_address, source_address, this_host

T = TypeVar("T")
#: How much longer the others wait for rank 0 to say who has not come.
_LONGER = timedelta(seconds=2)
#: Seconds between two looks whether another worker of an elastic run is lost.
_LOOK_S = 0.1
#: One store for all calls of ``init`` in a process: the address may be usable only once.
_stores: dict[tuple[Launch, str | None], dist.Store] = {}
#: Connects to the launcher's server without the proxies of the environment.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Rendezvous(NamedTuple):
    """What a rendezvous gives."""

    #: For this call of ``init``.
    store: dist.Store
    topology: Topology
    #: Of all ranks, in rank order.
    hosts: list[Host]

    def exchange(self, key: str, value: str, timeout: timedelta) -> list[str]:
        """Return every rank's ``value``, in rank order. Collective; a key can be used once. Raises as ``exchange``."""
        names = [host.name for host in self.hosts]
        return exchange(dist.PrefixStore(key, self.store), self.topology.rank, names, value, timeout)

    @property
    def address(self) -> str:
        """On which this process listens for the others."""
        return listen_address(self.hosts[self.topology.rank], self.hosts)


def join(start: Start) -> Rendezvous:
    """Rendezvous with the other ranks. Collective.

    Raises:
        BackendError: not all ranks came in time, or two processes have the same rank.
    """
    launch = start.launch
    timeout = start.start_timeout
    try:
        base = _base_store(launch, start.init_method, timeout)
        base.set_timeout(timeout)
        store = dist.PrefixStore(f"unidist/{start.attempt}", base)
        in_time(partial(_claim_rank, store, launch), timeout)
        texts = exchange(
            dist.PrefixStore("host", store), launch.rank, [""] * launch.world_size, json.dumps(own_row(launch)), timeout
        )
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
    """Return what ``world_of`` needs of each rank."""
    host = this_host()
    return Slot(launch.host or host.id, launch.local_rank, launch.node_rank), host


def world_of(store: dist.Store, launch: Launch, rows: Sequence[tuple[Slot, Host]]) -> Rendezvous:
    """Return what follows from the rows of all ranks, in rank order."""
    return Rendezvous(store, locate(launch, [slot for slot, _ in rows]), [host for _, host in rows])


def exchange(store: dist.Store, rank: int, hosts: Sequence[str], value: str, timeout: timedelta) -> list[str]:
    """Return every rank's ``value``, in rank order. Collective; once for a store.

    Args:
        store: without other keys.
        rank: this rank.
        hosts: the name of each rank's host, or empty.
        value: of this rank.
        timeout: for all ranks to come.

    Raises:
        BackendError: some did not, and it names them; or rank 0 cannot use the store.
    """
    keys = [str(other) for other in range(len(hosts))]

    def missing() -> list[int]:
        return [other for other, key in enumerate(keys) if not store.check([key])]

    def meet() -> list[Any]:
        store.set(keys[rank], value)
        # Rank 0 publishes one list, so that the store has requests in proportion to the ranks.
        if rank == 0:
            late: list[int] = []
            try:
                store.wait(keys, timeout)
            except RuntimeError:
                late = missing()
            store.set("all", json.dumps(late or [store.get(key).decode() for key in keys]))
        try:
            store.wait(["all"], timeout + _LONGER)
        except RuntimeError:
            return missing() or [0]
        found: list[Any] = json.loads(store.get("all"))
        return found

    found: list[Any] = [0]  # whose process has the store
    try:
        found = in_time(meet, timeout + 2 * _LONGER)
    except (RuntimeError, TimeoutError) as error:
        if rank == 0:
            raise BackendError(
                f"rank 0 of {len(hosts)} cannot use the key-value store: {error}. "
                "Has torchrun, or the process that has the store, ended?"
            ) from error
    if isinstance(found[0], str):
        return found
    if rank in found:
        raise BackendError(
            f"rank {rank} of {len(hosts)} came after the {timeout.total_seconds():.0f} s for which rank 0 waited for "
            "it. UNIDIST_TIMEOUT is how long ranks wait, in seconds."
        )
    named = ", ".join(f"{other} (host {hosts[other]})" if hosts[other] else str(other) for other in found[:8])
    more = f", ... ({len(found)} in all)" if len(found) > 8 else ""
    raise BackendError(
        f"rank {rank} of {len(hosts)} did not meet ranks {named}{more} within {timeout.total_seconds():.0f} s. Have "
        "they stopped or ended, or not reached this call? UNIDIST_TIMEOUT is how long ranks wait, in seconds."
    )


def in_time(call: Callable[[], T], timeout: timedelta) -> T:
    """Return the result of a call, made in a thread: torch's stores wait for ever for a server that has stopped.

    Raises:
        TimeoutError: there is none.
        BackendError: another worker of an elastic run is lost meanwhile.
    """
    done: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put((call(), None))
        except BaseException as error:
            done.put((None, error))

    threading.Thread(target=run, name="unidist-start", daemon=True).start()
    member, end = membership.current(), time.monotonic() + timeout.total_seconds()
    while True:
        left = max(0.0, end - time.monotonic())
        try:
            result, error = done.get(timeout=left if member is None else min(left, _LOOK_S))
            break
        except queue.Empty:
            if member is not None and (why := member.lost()):
                raise BackendError(why) from None
            if left == 0.0:
                raise TimeoutError("the key-value store, which rank 0 or torchrun serves, does not answer") from None
    if error is not None:
        raise error
    return cast(T, result)


def open_on_free_port(address: str, timeout: timedelta = START_TIMEOUT) -> dist.TCPStore:
    """Open a store that this process serves; ``.port`` is its port.

    Args:
        address: the address of this host on which it listens.
        timeout: of requests to the store.
    """
    return serve(address, create_server(address), timeout)


def serve(address: str, listening: socket.socket, timeout: timedelta = START_TIMEOUT) -> dist.TCPStore:
    """Open a store that this process serves on a socket that listens at an address."""
    return dist.TCPStore(
        address,
        listening.getsockname()[1],
        is_master=True,
        timeout=timeout,
        multi_tenant=True,  # torch's env:// in this process takes it over
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
        # It goes on without files for new connections; before torch 2.8 it takes no socket.
        use_libuv=torch.__version__ >= "2.8",
    )


# ---------------------------------------------------------------------------------------------
def _claim_rank(store: dist.Store, launch: Launch) -> None:
    if store.add(f"claim/{launch.rank}", 1) != 1:
        raise BackendError(
            f"two processes are rank {launch.rank} of {launch.world_size} ({launch.launcher.name}): "
            "give each process its own rank, or each job its own address (MASTER_PORT, file://). A worker that is "
            "started by spawn runs the script again: put what trains under if __name__ == '__main__'."
        )


def _base_store(launch: Launch, init_method: str | None, timeout: timedelta) -> dist.Store:
    key = (launch, init_method)
    if key not in _stores:
        if os.environ.get(settings.ELASTIC):  # the stores of earlier generations are closed
            _stores.clear()
        _stores[key] = _open(launch, init_method, timeout)
    return _stores[key]


def _open(launch: Launch, init_method: str | None, timeout: timedelta) -> dist.Store:
    if init_method is not None:
        url = urlsplit(init_method)
        if url.scheme == "env":
            return _at_master(launch, timeout)
        if url.scheme == "tcp" and url.hostname and url.port:
            return _at(url.hostname, url.port, launch, timeout)
        meeting = dist.rendezvous(init_method, launch.rank, launch.world_size, timeout=timeout)
        store: dist.Store = in_time(partial(next, meeting), timeout)[0]
        return store
    if launch.launcher.name in ("none", "arguments"):
        return dist.HashStore()
    # Where unidist has exported torchrun's variables, the ranks have met before.
    way = "master" if exported_row(os.environ) else launch.launcher.rendezvous
    return {"horovod": _at_horovod, "mpi": _at_mpi}.get(way, _at_master)(launch, timeout)


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
        store = _connect(addr, port, timeout)
        return dist.PrefixStore(f"restart/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return _at(addr, port, launch, timeout)


def _at(addr: str, port: int, launch: Launch, timeout: timedelta) -> dist.Store:
    """Return the store at a host and port, which rank 0 serves: on the address that is meant, where that is clear."""
    if launch.rank != 0:
        return _connect(addr, port, timeout)
    meant = addresses.own_address(addr, alone=launch.num_nodes == 1 or launch.local_size == launch.world_size)
    try:
        if meant is not None:
            return serve(meant, create_server(meant, port=port), timeout)
        return dist.TCPStore(addr, port, is_master=True, timeout=timeout, wait_for_workers=False, multi_tenant=True)
    except (OSError, dist.DistNetworkError) as error:
        if "EADDRINUSE" in str(error) or (isinstance(error, OSError) and error.errno == errno.EADDRINUSE):
            raise BackendError(
                f"port {port} of {addr} is in use: set MASTER_PORT to a free one on every rank."
            ) from error
        raise


def _connect(address: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """Return a client of rank 0's store; torch's constructor tries for longer than its timeout."""
    try:
        if membership.current() is not None:  # the store of a generation that is over is closed: do not try again
            socket.create_connection((address, port), timeout.total_seconds()).close()
        return in_time(partial(dist.TCPStore, address, port, is_master=False, timeout=timeout), timeout)
    except (TimeoutError, ConnectionError) as error:
        raise TimeoutError(f"no key-value store of rank 0 or torchrun answers at {address}:{port}") from error


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
    return _connect(host, int(port), timeout)


def _address_for_horovodrun(server: str) -> str:
    """Return this host's address in the network of horovodrun's server, through which the hosts reach each other."""
    if source_address(server) == server:  # horovodrun is on this host
        return server
    return listen_address(this_host(), [Host("", "of horovodrun", (server,))])


def _ask(request: urllib.request.Request, timeout: timedelta) -> str:
    """Return the response of horovodrun's server, which is requested until there is one."""
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
    world = mpi.world(launch, timeout)
    store, endpoint = None, None
    with mpi.watchdog(timeout, "all ranks to come to MPI's first collective calls"):
        hosts = world.allgather(this_host())
        if launch.rank == 0:
            address = listen_address(hosts[0], hosts)
            store = open_on_free_port(address, timeout)
            endpoint = (address, store.port)
        host, port = world.bcast(endpoint, root=0)
    return store or _connect(host, port, timeout)
