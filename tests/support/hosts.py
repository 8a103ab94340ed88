"""Hosts of their own on this machine: network namespaces that are joined by a bridge."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

#: The name of every host: equal, and nothing resolves it.
NAME = "worker-of-no-zone"
#: The interfaces of host number i: the network that they share, one that each has for itself, and one that has the
#: same address on all, as docker0 has.
INTERFACES = {"net0": ("10.77.0.{}/24", "fd77::{}/64"), "own0": ("10.78.{}.1/24",), "docker0": ("172.17.0.1/16",)}


def missing() -> str:
    """Why there can be none here; empty if there can."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "hostname"))):
        return "network namespaces need root, and the programs ip, unshare and hostname"
    probe = f"unidist-probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode != 0:
        return "this machine permits no network namespace"
    _ip("netns", "del", probe)
    return ""


@contextmanager
def hosts(count: int) -> Iterator[list[str]]:
    """The names of the namespaces."""
    tag = f"unidist-{os.getpid()}"
    bridge, names = f"{tag}-bridge", [f"{tag}-{i}" for i in range(count)]
    try:
        for name in (bridge, *names):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", bridge, "link", "add", "br0", "type", "bridge")
        _ip("-n", bridge, "link", "set", "br0", "up")
        for i, name in enumerate(names):
            # docker0 and own0 first: the kernel's order is not the one that counts.
            for interface, addresses in reversed(INTERFACES.items()):
                kind = ["veth", "peer", "name", f"port{i}", "netns", bridge] if interface == "net0" else ["bridge"]
                _ip("-n", name, "link", "add", interface, "type", *kind)
                for address in addresses:
                    _ip(
                        "-n",
                        name,
                        "addr",
                        "add",
                        address.format(i + 1),
                        "dev",
                        interface,
                        *["nodad"] * (":" in address),
                    )
                _ip("-n", name, "link", "set", interface, "up")
            _ip("-n", bridge, "link", "set", f"port{i}", "master", "br0", "up")
        yield names
    finally:
        for name in (*names, bridge):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def start(host: str, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> subprocess.Popen[str]:
    """Start a program on a host."""
    shell = f'hostname {NAME} && exec "$@"'
    return subprocess.Popen(
        ["ip", "netns", "exec", host, "unshare", "--uts", "sh", "-c", shell, "sh", *argv],
        env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
