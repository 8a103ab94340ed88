"""Addresses, not names: which one a process listens on, and worlds over hosts whose names say nothing."""

import json
import re
import socket
from collections.abc import Iterator

import pytest

from tests.support import hosts as machines
from tests.support.worlds import PYTHON, ROOT, environment, free_port
from unidist.errors import BackendError
from unidist.network import addresses
from unidist.network.addresses import LOOPBACK, Host, create_server, interface_of, listen_address, this_host


def other(*found: str, id: str = "other") -> Host:
    return Host(id, "other", found)


@pytest.mark.unit
def test_this_host() -> None:
    host = this_host()
    assert host == this_host() and host.name == socket.gethostname() and host.id
    assert not [address for address in host.addresses if address.startswith(("127.", "169.254.", "::1", "fe80:"))]
    assert [":" in address for address in host.addresses] == sorted(":" in address for address in host.addresses)
    assert interface_of(LOOPBACK) == "lo"
    for address in (LOOPBACK, *host.addresses):
        with create_server(address) as server, socket.create_connection((address, server.getsockname()[1]), 5):
            assert server.getsockname()[0] == address


@pytest.mark.unit
def test_all_ranks_on_one_host_meet_on_loopback() -> None:
    host = this_host()
    assert listen_address(host, [host] * 3, {}) == LOOPBACK
    # Names and variables do not count.
    assert listen_address(host, [host._replace(name="else")], {"GLOO_SOCKET_IFNAME": "ib7"}) == LOOPBACK


@pytest.mark.unit
def test_errors_of_addresses() -> None:
    host = this_host()
    with pytest.raises(BackendError, match=r"no route to a host .*of no network.*set GLOO_SOCKET_IFNAME"):
        listen_address(host, [host, other()], {})
    for variable in addresses.INTERFACES:
        with pytest.raises(BackendError, match=rf"{variable}=ib7: host .* has no such network interface"):
            listen_address(host, [other("10.1.2.3")], {variable: "ib7"})
    with pytest.raises(BackendError, match="no route"):  # the same address on both, as docker0 has
        listen_address(host, [other(*host.addresses)], {})


# ------------------------------------------------------------------------------------ hosts of their own
@pytest.fixture(scope="module")
def two_hosts() -> Iterator[list[str]]:
    if why := machines.missing():
        pytest.skip(why)
    with machines.hosts(2) as names:
        yield names


CHOICE = """
import json, sys
from unidist.network.addresses import Host, listen_address, this_host
rows = json.loads(sys.argv[1])
print("ROW", json.dumps(this_host()))
for env in json.loads(sys.argv[2]):
    print("CHOSEN", listen_address(this_host(), [Host(*row) for row in rows], env))
"""
#: Variables, and the network whose address is chosen.
CHOICES: list[tuple[dict[str, str], str]] = [
    ({}, "10.77.0."),
    ({"GLOO_SOCKET_IFNAME": "net0"}, "10.77.0."),
    ({"HOROVOD_GLOO_IFACE": "own0", "GLOO_SOCKET_IFNAME": "net0"}, "10.78."),
    ({"NCCL_SOCKET_IFNAME": "own"}, "10.78."),
    ({"NCCL_SOCKET_IFNAME": "=net0"}, "10.77.0."),
    ({"NCCL_SOCKET_IFNAME": "^docker,lo,own"}, "10.77.0."),
]


def run_on(hosts: list[str], argv: list[str], env: list[dict[str, str]]) -> list[str]:
    """The output of each process, one for each environment, on the hosts in turn."""
    running = [
        machines.start(hosts[i % len(hosts)], [PYTHON, *argv], environment("python", each), str(ROOT))
        for i, each in enumerate(env)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * len(running), outputs
    return outputs


def test_which_address_is_chosen(two_hosts: list[str]) -> None:
    rows = [json.loads(text.split("ROW")[1]) for text in run_on(two_hosts, ["-c", CHOICE, "[]", "[]"], [{}, {}])]
    assert rows[0][0] != rows[1][0] and rows[0][1] == rows[1][1] == machines.NAME  # ids differ, names do not
    assert all({f"10.77.0.{i + 1}", f"fd77::{i + 1}", "172.17.0.1"} <= set(row[2]) for i, row in enumerate(rows))
    given = json.dumps([env for env, _ in CHOICES])
    for i, output in enumerate(run_on(two_hosts, ["-c", CHOICE, json.dumps(rows), given], [{}, {}])):
        chosen = re.findall(r"CHOSEN (\S+)", output)
        assert [address.startswith(network) for address, (_, network) in zip(chosen, CHOICES)] == [True] * len(CHOICES)
        assert chosen[0] == f"10.77.0.{i + 1}"
    for row in rows:  # a network of IPv6 alone
        row[2] = [address for address in row[2] if not address.startswith("10.77.")]
    for i, output in enumerate(run_on(two_hosts, ["-c", CHOICE, json.dumps(rows), "[{}]"], [{}, {}])):
        assert f"CHOSEN fd77::{i + 1}" in output


@pytest.mark.parametrize(("how", "master"), [("default", "10.77.0.1"), ("hvd", "fd77::1")])
def test_a_world_over_hosts_with_equal_names_that_do_not_resolve(two_hosts: list[str], how: str, master: str) -> None:
    ranks = 4
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": master, "MASTER_PORT": str(free_port()), "UNIDIST_TIMEOUT": "60"}
    outputs = run_on(
        two_hosts, ["tests/programs/on_hosts.py", how], [{**common, "RANK": str(rank)} for rank in range(ranks)]
    )
    places = [json.loads(output.split("SLOT")[1].splitlines()[0]) for output in outputs]
    assert places == [[rank // 2, 2, rank % 2, 2, f"10.77.0.{rank % 2 + 1}"] for rank in range(ranks)]
