"""What a job opens to other users of its host, and to other hosts."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence

import psutil
import pytest

from tests.support.worlds import PYTHON, ROOT, environment, free_port
from unidist.network import addresses
from unidist.network.rendezvous_server import RendezvousServer

TRUST = str(ROOT / "tests/programs/trust.py")


def ranks(*argv: str, size: int = 2) -> list[subprocess.CompletedProcess[str]]:
    """Processes with plain variables, at 127.0.0.1."""
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    running = [
        subprocess.Popen(
            [PYTHON, *argv], env=environment("env", {**shared, "RANK": str(rank)}), cwd=ROOT,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=240) for process in running]
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *output)
        for process, output in zip(running, outputs)
    ]


def test_a_job_on_one_host_listens_there_only_and_its_secret_is_in_no_store() -> None:
    results = ranks(TRUST)
    assert [result.returncode for result in results] == [0, 0], results
    for result in results:
        found = json.loads(result.stdout.splitlines()[-1])
        assert found["keys"] > 10 and found["leaking"] == []
        assert found["listening"] == ["127.0.0.1"]


def test_ranks_of_different_versions_are_an_error_that_names_them() -> None:
    for result in ranks(TRUST, "9.8.7"):
        assert result.returncode == 1
        assert "different versions of unidist" in result.stderr and "9.8.7 on rank 1. Install" in result.stderr


@pytest.mark.unit
def test_the_address_that_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    own = addresses.Host("", "here", ("10.1.2.3", "10.4.5.6", "fd00::7"))
    monkeypatch.setattr(addresses, "this_host", lambda: own)
    names = {
        "debian": ["127.0.1.1"], "one": ["10.1.2.3"], "two": ["10.1.2.3", "10.4.5.6"], "service": ["10.96.0.1"],
        "both": ["127.0.1.1", "10.1.2.3"], "localhost": ["127.0.0.1", "::1"],
    }  # fmt: skip

    def getaddrinfo(host: str, port: object, type: int) -> Sequence[tuple[object, ...]]:
        if host == "unknown":
            raise socket.gaierror
        return [(0, 0, 0, "", (found, 0)) for found in names.get(host, [host])]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    for alone in (True, False):
        meant = {name: addresses.own_address(name, alone=alone) for name in [*names, "unknown", "127.0.0.1", "fd00::7"]}
        assert meant == {
            "debian": "127.0.1.1" if alone else None, "one": "10.1.2.3", "two": None, "service": None, "both": None,
            "localhost": "127.0.0.1", "unknown": None, "127.0.0.1": "127.0.0.1", "fd00::7": "fd00::7",
        }  # fmt: skip


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and iproute2")
def test_a_host_without_loopback_is_named() -> None:
    code = "from unidist.network.addresses import *; create_server(listen_address(this_host(), []))"
    done = subprocess.run(["unshare", "--net", PYTHON, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "the loopback interface is down. Start it: ip link set lo up." in done.stderr


# ------------------------------------------------------------------------------------ Horovod's key-value server
@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    server = RendezvousServer("127.0.0.1", 2)
    yield server
    server.stop()


def request(server: RendezvousServer, method: str, key: str, body: bytes | None = None) -> tuple[int, bytes]:
    link = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    try:
        link.request(method, key, body)
        answer = link.getresponse()
        return answer.status, answer.read()
    finally:
        link.close()


@pytest.mark.unit
def test_what_horovods_server_takes_is_limited(server: RendezvousServer) -> None:
    assert request(server, "PUT", "/global/0", b"here") == (200, b"")
    assert request(server, "GET", "/global/0") == (200, b"here") and request(server, "GET", "/global/1")[0] == 404
    before = psutil.Process().memory_info().rss
    for length in ("-1", "x", "999999999999", str(2**30)):
        with socket.create_connection(("127.0.0.1", server.server_port)) as link:
            link.sendall(f"PUT /global/9 HTTP/1.1\r\nContent-Length: {length}\r\n\r\n".encode())
            assert b" 413 " in link.recv(100)
    stored = 0
    while request(server, "PUT", f"/global/{stored}", bytes(65_000))[0] == 200:
        stored += 1
    assert 1000 < stored < 2000 and psutil.Process().memory_info().rss - before < 2 * stored * 65_000
    assert request(server, "DELETE", "/global/5")[0] == 200  # there is room for another one
    assert request(server, "PUT", "/global/9999", bytes(65_000))[0] == 200


@pytest.mark.unit
def test_idle_connections_do_not_keep_horovods_ranks_out(server: RendezvousServer) -> None:
    idle = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(400)]
    for link in idle[:100]:
        link.sendall(b"PUT /global/0 HTTP/1.1\r\nContent-Length: 100\r\n\r\n")
    began = time.monotonic()
    assert request(server, "PUT", "/global/0", b"here")[0] == 200 and time.monotonic() - began < 5
    assert len(server._open) <= 262
    for link in idle:
        link.close()
