"""Which ranks run on which host: ``-H``, host files and schedulers' allocations."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv6Address
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from unidist.errors import LaunchError

#: An IPv6 address in brackets, or a name or IPv4 address, which no option of ssh looks like; then the slots.
_WITH_SLOTS = re.compile(r"(?:\[([\w:.%]+)\]|(\w[\w.-]*))(?::(\w+))?")
_EXAMPLE = "write host:slots, such as a:4,b:4 or [fd00::1]:2"


@dataclass(frozen=True)
class HostSlots:
    """A host, and how many ranks it takes."""

    name: str
    slots: int


@dataclass(frozen=True)
class Placement:
    """A host, and the ranks that run on it: ``first`` and those that follow."""

    name: str
    first: int
    count: int


class Place(NamedTuple):
    """Where a rank runs."""

    host: str
    local_rank: int


def rank_variables(places: Sequence[Place]) -> list[dict[str, str]]:
    """Return the variables of each rank, torchrun's and horovodrun's.

    Args:
        places: those of all ranks, in rank order. Where a local rank is missing on a host, LOCAL_WORLD_SIZE is empty.
    """
    nodes = list(dict.fromkeys(place.host for place in places))
    found = []
    for rank, place in enumerate(places):
        local_ranks = [other.local_rank for other in places if other.host == place.host]
        # The hosts that have this local rank.
        across = list(dict.fromkeys(other.host for other in places if other.local_rank == place.local_rank))
        values = {
            "RANK": rank,
            "WORLD_SIZE": len(places),
            "LOCAL_RANK": place.local_rank,
            "LOCAL_WORLD_SIZE": len(local_ranks) if max(local_ranks) < len(local_ranks) else "",
            "GROUP_RANK": nodes.index(place.host),
            "GROUP_WORLD_SIZE": len(nodes),
            "HOROVOD_HOSTNAME": place.host,
            "HOROVOD_RANK": rank,
            "HOROVOD_SIZE": len(places),
            "HOROVOD_LOCAL_RANK": place.local_rank,
            "HOROVOD_LOCAL_SIZE": len(local_ranks),
            "HOROVOD_CROSS_RANK": across.index(place.host),
            "HOROVOD_CROSS_SIZE": len(across),
        }
        found.append({name: str(value) for name, value in values.items()})
    return found


def worker_variables(
    hosts: Sequence[str], gpus: Sequence[Sequence[str]], store: tuple[str, int]
) -> list[dict[str, str]]:
    """Return the variables of each rank, for processes that Ray or Spark has placed.

    Args:
        hosts: those of all ranks, in the order of ``rank_order``.
        gpus: what each rank was given, by the GPUs' numbers on its host. The ranks of a host see all of them.
        store: where another process serves torch's key-value store.
    """
    by_host: dict[str, list[Sequence[str]]] = {}
    places = []
    for host, own in zip(hosts, gpus):
        places.append(Place(host, len(by_host.setdefault(host, []))))
        by_host[host].append(own)
    found = []
    for host, values in zip(hosts, rank_variables(places)):
        visible = ",".join(shared_gpus(by_host[host]))
        values |= {"MASTER_ADDR": store[0], "MASTER_PORT": str(store[1]), "NODE_RANK": values["GROUP_RANK"]}
        # To torch this says: rank 0 connects to the store, and does not serve it.
        values |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        found.append(values | ({"CUDA_VISIBLE_DEVICES": visible} if visible else {}))
    return found


def rank_order(hosts: Sequence[str]) -> list[int]:
    """Return the workers in rank order, by their hosts: those of a host are together, as the hosts come first."""
    return sorted(range(len(hosts)), key=lambda worker: hosts.index(hosts[worker]))


def shared_gpus(gpus: Sequence[Sequence[str]]) -> list[str]:
    """Return the GPUs of a host, which all its ranks see: the first one of local rank n is at place n."""
    return list(dict.fromkeys(gpu for each in zip_longest(*gpus) for gpu in each if gpu is not None))


def parse_hosts(text: str) -> list[HostSlots]:
    """Return what ``-H`` gives: ``a:4,b:4``. A host without slots has one; equal hosts are added up.

    Raises:
        LaunchError: a part of it names no host, or has no slots.
    """
    return _merged(_parse_host(part.strip(), f"-H {text}") for part in text.split(",") if part.strip())


def discovered_hosts(text: str, slots: int) -> list[HostSlots]:
    """Return what a discovery script prints: a host in each line, ``a:4``, or ``a`` with the default number of slots.

    Raises:
        LaunchError: a line names no host.
    """
    lines = [line.strip() for line in text.splitlines()]
    return _merged(_parse_host(line, "--host-discovery-script", str(slots)) for line in lines if line)


def read_hostfile(path: str) -> list[HostSlots]:
    """Return the hosts of a file with a host in each line: ``name``, ``name slots=4`` or ``name:4``.

    Other words of a line, such as ``max_slots=8``, empty lines and what follows ``#`` are left out.

    Raises:
        LaunchError: there is no such file, no host in it, or a line that names none.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"the host file {path} cannot be read: {error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        words = line.split("#")[0].replace(" =", "=").replace("= ", "=").split()
        if not words:
            continue
        host = _parse_host(words[0], f"{path}:{number}")
        for word in words[1:]:
            name, _, value = word.partition("=")
            if name == "slots":
                host = HostSlots(host.name, _slots(value, f"{path}:{number}"))
        found.append(host)
    if not found:
        raise LaunchError(f"the host file {path} names no host: write one in each line, such as 'a slots=4'.")
    return _merged(found)


def allocated_hosts(env: Mapping[str, str]) -> list[HostSlots]:
    """Return the hosts of the Slurm or LSF allocation that this process is in; empty outside of one."""
    if nodes := env.get("SLURM_JOB_NODELIST"):
        names = _expand_nodelist(nodes)
        return [HostSlots(name, slots) for name, slots in zip(names, _slurm_tasks(env, len(names)))]
    if words := env.get("LSB_MCPU_HOSTS", "").split():  # host, slots, host, slots, ...
        return _merged(HostSlots(name, _slots(slots, "LSB_MCPU_HOSTS")) for name, slots in zip(words[::2], words[1::2]))
    return []


def place(hosts: Sequence[HostSlots], num_proc: int) -> list[Placement]:
    """Fill the hosts in their order. Hosts that get no rank are left out.

    Raises:
        LaunchError: there are fewer slots than ranks.
    """
    total = sum(host.slots for host in hosts)
    if num_proc > total:
        named = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        raise LaunchError(
            f"{num_proc} ranks were asked for, and the hosts have {total} slots ({named}): add hosts or slots, such as "
            f"-H {hosts[0].name}:{num_proc}, or start fewer ranks."
        )
    found: list[Placement] = []
    first = 0
    for host in hosts:
        count = min(host.slots, num_proc - first)
        if count:
            found.append(Placement(host.name, first, count))
            first += count
    return found


# ---------------------------------------------------------------------------------------------
def _parse_host(text: str, where: str, slots: str = "1") -> HostSlots:
    with suppress(ValueError):
        return HostSlots(str(IPv6Address(text)), int(slots))
    match = _WITH_SLOTS.fullmatch(text)
    if match is None:
        raise LaunchError(f"{where}: {text!r} is not a host: {_EXAMPLE}.")
    return HostSlots(match[1] or match[2], _slots(match[3] or slots, where))


def _slots(text: str, where: str) -> int:
    if not re.fullmatch("[0-9]{1,6}", text) or int(text) < 1:
        raise LaunchError(f"{where}: {text!r} is not a number of slots from 1 up: {_EXAMPLE}.")
    return int(text)


def _merged(hosts: Iterable[HostSlots]) -> list[HostSlots]:
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return [HostSlots(name, count) for name, count in slots.items()]


def _expand_nodelist(nodes: str) -> list[str]:
    if not re.search(r"[\[\],]", nodes):
        return [nodes]
    with suppress(OSError, subprocess.CalledProcessError):
        command = ["scontrol", "show", "hostnames", nodes]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    raise LaunchError(f"SLURM_JOB_NODELIST={nodes!r} cannot be expanded without scontrol: name the hosts by -H.")


def _slurm_tasks(env: Mapping[str, str], nodes: int) -> list[int]:
    """Return the tasks of each node, of ``SLURM_TASKS_PER_NODE``: ``2(x3),1`` stands for 2, 2, 2 and 1."""
    text = env.get("SLURM_TASKS_PER_NODE", "1")
    tasks: list[int] = []
    for part in text.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        tasks += [_slots(count, "SLURM_TASKS_PER_NODE")] * _slots(times or "1", "SLURM_TASKS_PER_NODE")
    return tasks if len(tasks) == nodes else [tasks[0]] * nodes
