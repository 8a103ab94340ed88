"""Hosts of their own on this machine: network namespaces that are joined by a bridge, each with its own name,
/etc/hosts and ssh server.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

#: The name of every host without an ssh server: equal, and nothing resolves it.
NAME = "worker-of-no-zone"
_numbers = itertools.count()
#: The names of those with one. /etc/hosts has them, and each host's own at 127.0.1.1, as Debian's installer writes it.
NAMES = ("alpha", "beta", "gamma", "delta", "epsilon")
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


def missing_ssh() -> str:
    """The same for hosts with an ssh server."""
    if not all(map(shutil.which, ("sshd", "ssh", "ssh-keygen"))):
        return "sshd, ssh or ssh-keygen is not installed (apt-get install openssh-server openssh-client)"
    return missing()


@contextmanager
def hosts(count: int) -> Iterator[list[str]]:
    """The names of the namespaces."""
    tag = f"unidist-{os.getpid()}-{next(_numbers)}"
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
                    nodad = ["nodad"] * (":" in address)
                    _ip("-n", name, "addr", "add", address.format(i + 1), "dev", interface, *nodad)
                _ip("-n", name, "link", "set", interface, "up")
            _ip("-n", bridge, "link", "set", f"port{i}", "master", "br0", "up")
        yield names
    finally:
        for name in (*names, bridge):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@contextmanager
def ssh_hosts(count: int, directory: Path) -> Iterator[list[str]]:
    """Namespaces whose hosts have the first of ``NAMES``, and reach each other by ssh without a password."""
    with hosts(count) as namespaces:
        key = directory / "key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        Path("/run/sshd").mkdir(exist_ok=True)
        servers = []
        try:
            for i, namespace in enumerate(namespaces):
                _write_etc(Path("/etc/netns") / namespace, i, count, key)
                servers.append(start(namespace, ["/usr/sbin/sshd", "-D", "-e"], os.environ, "/", NAMES[i]))
            for i, namespace in enumerate(namespaces):
                _wait_for_ssh(namespace, NAMES[(i + 1) % count])
            yield namespaces
        finally:
            for server in servers:
                server.terminate()
            for namespace in namespaces:
                shutil.rmtree(Path("/etc/netns") / namespace, ignore_errors=True)
            for server in servers:
                server.communicate(timeout=30)


def start(host: str, argv: Sequence[str], env: Mapping[str, str], cwd: str, name: str = NAME) -> subprocess.Popen[str]:
    """Start a program on a host."""
    return subprocess.Popen(
        [*on(host, name), *argv], env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def on(host: str, name: str) -> list[str]:
    """What comes before a command that runs on a host. Unlike `ip netns exec`, it leaves /sys as it is, for Slurm."""
    etc = (Path("/etc/netns") / host).glob("*")
    shell = "".join(f"mount --bind {path} /etc/{path.name} && " for path in etc)
    unshare = ["unshare", "--uts", "--mount", "sh", "-c", f'{shell}hostname {name} && exec "$@"', "sh"]
    return ["nsenter", f"--net=/run/netns/{host}", *unshare]


def set_link(host: str, state: str) -> None:
    """Set the network that the hosts share ``up`` or ``down`` on one of them."""
    _ip("-n", host, "link", "set", "net0", state)


@contextmanager
def firewall(host: str, port: int) -> Iterator[None]:
    """Inside, a host drops TCP (protocol 6) that comes from others, to and from all ports but one and that of ssh."""
    rules = [
        f"pref {10 + i} ipproto 6 {kind} {each}" for i, each in enumerate((port, 22)) for kind in ("sport", "dport")
    ]
    rules = [f"{rule} lookup local" for rule in rules] + ["pref 20 iif net0 ipproto 6 blackhole"]
    _ip("-n", host, "rule", "add", "pref", "100", "lookup", "local")
    _ip("-n", host, "rule", "del", "pref", "0")
    try:
        for rule in rules:
            _ip("-n", host, "rule", "add", *rule.split())
        yield
    finally:
        _ip("-n", host, "rule", "add", "pref", "0", "lookup", "local")
        for rule in [*rules, "pref 100 lookup local"]:
            subprocess.run(["ip", "-n", host, "rule", "del", *rule.split()], capture_output=True)


def command_lines(pattern: str) -> dict[int, str]:
    """The processes of this machine in whose command line a regular expression is found, with these lines."""
    lines = {each.pid: " ".join(each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"])}
    return {pid: line for pid, line in lines.items() if re.search(pattern, line)}


def processes(host: str, pattern: str = ".") -> list[int]:
    """The processes of a host, in whose command line a regular expression is found."""
    pids = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True, check=True).stdout.split()
    return sorted(set(map(int, pids)) & set(command_lines(pattern)))


def signal_all(host: str, number: int) -> None:
    """Send a signal to every process of a host."""
    for pid in processes(host):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _write_etc(etc: Path, number: int, count: int, key: Path) -> None:
    """What a host has in place of this machine's /etc."""
    shutil.rmtree(etc, ignore_errors=True)
    (etc / "ssh").mkdir(parents=True)
    lines = [f"10.77.0.{i + 1} {NAMES[i]}" for i in range(count) if i != number]
    (etc / "hosts").write_text("\n".join(["127.0.0.1 localhost", f"127.0.1.1 {NAMES[number]}", *lines, ""]))
    (etc / "ssh/ssh_config").write_text(
        f"Host *\n IdentityFile {key}\n UserKnownHostsFile /dev/null\n StrictHostKeyChecking no\n LogLevel ERROR\n"
    )
    (etc / "ssh/sshd_config").write_text(
        f"HostKey {key}\nAuthorizedKeysFile {key}.pub\nPermitRootLogin prohibit-password\nStrictModes no\nUsePAM no\n"
        "PidFile none\n"
    )


def _wait_for_ssh(namespace: str, name: str) -> None:
    end = time.monotonic() + 30
    while subprocess.run(["ip", "netns", "exec", namespace, "ssh", name, "true"], capture_output=True).returncode:
        assert time.monotonic() < end, f"the ssh server of {name} does not answer"
        time.sleep(0.1)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
