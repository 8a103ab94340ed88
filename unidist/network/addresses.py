"""Which address of this host the other ranks connect to. Nothing here resolves a host name.

The ranks exchange what ``this_host`` returns; ``listen_address`` needs nothing else. Names of hosts are for messages
only: they may not resolve, and different hosts may have the same one.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from ipaddress import ip_address
from typing import NamedTuple

from unidist.errors import BackendError

LOOPBACK = "127.0.0.1"
#: Variables that name network interfaces; the first that is set counts.
INTERFACES = ("HOROVOD_GLOO_IFACE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class Host(NamedTuple):
    """The host of a rank, as the other ranks see it."""

    #: Equal for processes that reach each other by the loopback interface, and for no others.
    id: str
    #: Its name, for messages.
    name: str
    #: Its addresses, without loopback and link-local ones: IPv4 first, then in the order of the interfaces.
    addresses: tuple[str, ...]


def interface_names(nics: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return the names of network interfaces: one, several or none."""
    return (nics,) if isinstance(nics, str) else tuple(sorted(nics or ()))


def this_host() -> Host:
    """Return the host of this process."""
    every = [ip_address(address) for addresses in _addresses().values() for address in addresses]
    usable = sorted({ip: None for ip in every if not ip.is_link_local}, key=lambda ip: ip.version)
    return Host(host_id(), socket.gethostname(), tuple(map(str, usable)))


def host_id() -> str:
    """Return what is equal for processes that reach each other by the loopback interface, and for no others: on Linux
    the boot id and the network namespace.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:  # not Linux
        return f"{socket.gethostname()} {sorted(address for each in _addresses().values() for address in each)}"


def listen_address(own: Host, ranks: Iterable[Host], env: Mapping[str, str] = os.environ) -> str:
    """Return the address on which a process of ``own`` listens for the other ranks.

    The loopback address where all ranks are on one host. Else an address of the interfaces that HOROVOD_GLOO_IFACE,
    GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME name; of several addresses the one from which this host sends to the
    largest number of other hosts, by the kernel's routing table.

    Args:
        own: this process's host.
        ranks: the hosts of all ranks, or of the others.
        env: the environment.

    Raises:
        BackendError: this host has no address in a network with another one, or no interface of the name that is set.
    """
    others = list({host.id: host for host in ranks if host.id != own.id}.values())
    if not others:
        return LOOPBACK
    named = _named_interfaces(env)
    candidates = own.addresses if named is None else [address for each in named.values() for address in each]
    # Both hosts may have a bridge of their own with the same address, such as docker0.
    reached = Counter(
        source
        for other in others
        for source in {source_address(address) for address in other.addresses if address not in own.addresses}
        if source in candidates and source not in other.addresses
    )
    if reached:
        return max(candidates, key=lambda address: reached[address])  # the first of several
    if named is not None:
        return next(iter(candidates))
    raise BackendError(
        f"host {own.name} has the addresses {', '.join(own.addresses) or 'of no network'}, and no route to a host with "
        f"the addresses {', '.join(others[0].addresses) or 'of no network'} ({others[0].name}): set {INTERFACES[1]} to "
        "the network interface that the hosts have in common."
    )


def source_address(towards: str) -> str | None:
    """Return the address from which this host sends to another one, by the kernel's routing table; None: no route."""
    with suppress(OSError), socket.socket(_family(towards), socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))  # a datagram socket sends nothing when it connects
        address: str = probe.getsockname()[0]
        return address
    return None


def interface_of(address: str) -> str:
    """Return the network interface that has an address of this host."""
    return next(name for name, addresses in _addresses(loopback=True).items() if address in addresses)


def own_address(host: str, *, alone: bool) -> str | None:
    """Return the one address of this host that a name or address means to all ranks; None if it may be several.

    Args:
        host: the value of MASTER_ADDR, say.
        alone: whether all ranks are on this host. Else a name that means a loopback address here (Debian's 127.0.1.1)
            means another one elsewhere.
    """
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        return None
    is_loopback = [ip_address(address).is_loopback for address in found]
    if all(is_loopback) and (alone or host == "localhost" or found == [host]):
        return found[0]
    own = [address for address in dict.fromkeys(found) if address in this_host().addresses]
    return own[0] if len(own) == 1 and not any(is_loopback) else None


def create_server(address: str, backlog: int = socket.SOMAXCONN, port: int = 0) -> socket.socket:
    """Return a socket that listens on a port of one address alone, by default a free one, IPv4 or IPv6.

    Raises:
        BackendError: the loopback interface is down.
        OSError: it cannot.
    """
    if ip_address(address).is_loopback and source_address(address) is None:
        raise BackendError(
            f"host {socket.gethostname()} does not reach its own address {address}: the loopback interface is down. "
            "Start it: ip link set lo up."
        )
    return socket.create_server((address, port), family=_family(address), backlog=backlog)


# ---------------------------------------------------------------------------------------------
def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET if ip_address(address).version == 4 else socket.AF_INET6


def _named_interfaces(env: Mapping[str, str]) -> dict[str, list[str]] | None:
    """Return the addresses of the interfaces that a variable names; None where none is set."""
    variable = next((name for name in INTERFACES if env.get(name)), None)
    if variable is None:
        return None
    names = env[variable].lstrip("^=").split(",")
    excluded, exact = env[variable].startswith("^"), variable != INTERFACES[2] or "=" in env[variable][:2]

    def matches(interface: str) -> bool:
        # NCCL's variable has beginnings of names, after "^" of those to leave out, and names after "=".
        return any(interface == name if exact else interface.startswith(name) for name in names) is not excluded

    found = _addresses()
    named = {interface: addresses for interface, addresses in found.items() if matches(interface)}
    if not named:
        raise BackendError(
            f"{variable}={env[variable]}: host {socket.gethostname()} has no such network interface with an address "
            f"that other hosts could reach; it has {', '.join(found) or 'none'}. Correct or unset the variable."
        )
    return named


def _addresses(loopback: bool = False) -> dict[str, list[str]]:
    """Return the addresses of each network interface that is up, in the kernel's order."""
    found: dict[str, list[str]] = {}
    for name, address in _interface_addresses():
        ip = ip_address(address)
        # An IPv6 link-local address means nothing without the interface.
        if (loopback or not ip.is_loopback) and not (ip.version == 6 and ip.is_link_local):
            found.setdefault(name, []).append(address)
    return found


class _InterfaceAddress(ctypes.Structure):
    """C's ``struct ifaddrs``, as far as it is read here."""


_InterfaceAddress._fields_ = [
    ("next", ctypes.POINTER(_InterfaceAddress)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]
_IFF_UP = 1


def _interface_addresses() -> Iterator[tuple[str, str]]:
    """C's ``getifaddrs``: the interface and the address, of those that are up."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_InterfaceAddress)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        return
    try:
        entry = first
        while entry:
            each = entry.contents
            if each.address and each.flags & _IFF_UP:
                head = ctypes.string_at(each.address, 2)  # a BSD has the length first
                family = int.from_bytes(head, sys.byteorder) if sys.platform == "linux" else head[1]
                if family == socket.AF_INET:
                    yield each.name.decode(), socket.inet_ntop(family, ctypes.string_at(each.address + 4, 4))
                elif family == socket.AF_INET6:
                    yield each.name.decode(), socket.inet_ntop(family, ctypes.string_at(each.address + 8, 16))
            entry = each.next
    finally:
        libc.freeifaddrs(first)
