"""Whether the hosts can connect to each other, before gloo tries it, which says nothing of a firewall for minutes."""

from __future__ import annotations

import errno
import json
import os
import selectors
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from datetime import timedelta

from unidist.backends.rendezvous import Rendezvous
from unidist.errors import BackendError
from unidist.network.addresses import INTERFACES, create_server
from unidist.network.connection import Selector

#: The longest time in seconds for a connection.
_CONNECT_S = 10.0


def require(world: Rendezvous, timeout: timedelta) -> None:
    """Require that the first rank of each host can connect to that of every other host. Collective.

    Raises:
        BackendError: one cannot. It names both.
    """
    firsts = {host.id: rank for rank, host in reversed(list(enumerate(world.hosts)))}.values()
    if len(firsts) == 1:
        return
    rank, failed = world.topology.rank, {}
    with ExitStack() as stack:
        server = stack.enter_context(create_server(world.address)) if rank in firsts else None
        endpoint = server.getsockname()[:2] if server else None
        found = world.exchange("endpoints", json.dumps(endpoint), timeout)
        if server is not None:
            endpoints = {other: tuple(json.loads(found[other])) for other in firsts if other != rank}
            errors = _connect(server, endpoints, min(_CONNECT_S, timeout.total_seconds()))
            failed = {other: (*endpoints[other], error) for other, error in errors.items()}
        rows = [json.loads(text) for text in world.exchange("unreachable", json.dumps(failed), timeout)]
    every = [(own, int(other), *row) for own, others in enumerate(rows) for other, row in others.items()]
    if every:
        own, other, address, port, error = every[0]
        raise BackendError(
            f"rank {own} on host {world.hosts[own].name} cannot connect to rank {other} on host "
            f"{world.hosts[other].name} at {address}, port {port}: {error} (pairs of hosts: {len(every)}). Is there a "
            "firewall? Ranks listen on any port: allow all TCP between the hosts, or name an interface of a network "
            f"where it is allowed in {INTERFACES[1]}."
        )


def _connect(server: socket.socket, endpoints: Mapping[int, tuple[str, int]], seconds: float) -> dict[int, str]:
    """Connect to all at the same time, and accept who connects; return why not, by rank."""
    end = time.monotonic() + seconds
    errors: dict[int, str] = {}
    with ExitStack() as stack:
        selector = stack.enter_context(Selector())
        server.setblocking(False)
        selector.register(server, selectors.EVENT_READ)
        for other, endpoint in endpoints.items():
            link = stack.enter_context(socket.socket(server.family))
            link.setblocking(False)
            if (code := link.connect_ex(endpoint)) in (0, errno.EINPROGRESS):
                selector.register(link, selectors.EVENT_WRITE, other)
                errors[other] = f"no answer within {seconds:g} s"
            else:
                errors[other] = os.strerror(code)
        while len(selector.get_map()) > 1 and (left := end - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                link = key.fileobj  # type: ignore[assignment]
                if link is server:
                    with suppress(OSError):
                        server.accept()[0].close()
                    continue
                selector.unregister(link)
                code = link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                link.close()
                if code:
                    errors[key.data] = os.strerror(code)
                else:
                    del errors[key.data]
    return errors
