"""Ray in place of ssh: ``python -m unidist.ray.shell ADDRESS CPUS GPUS HOST COMMAND``.

The command runs on a node, in an actor that reserves the CPUs and GPUs of the node's workers; its standard input and
output are those of this process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from unidist.errors import LaunchError
from unidist.ray.elastic import host_name, slots

_CHUNK = 1 << 16


class Shell:
    """A command on another node."""

    def __init__(self, command: str) -> None:
        self._process = subprocess.Popen(
            ["sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )

    def write(self, data: bytes) -> None:
        """Write to its standard input; nothing closes it."""
        assert self._process.stdin
        if data:
            self._process.stdin.write(data)
        else:
            self._process.stdin.close()

    def read(self) -> bytes:
        """Read of its standard output; empty at the end."""
        assert self._process.stdout
        return os.read(self._process.stdout.fileno(), _CHUNK)

    def wait(self) -> int:
        """Wait for its end; return its status."""
        return self._process.wait()


def main(address: str, cpus: str, gpus: str, host: str, command: str) -> None:
    """Run a command on a node, and exit with its status."""
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    node = next((each for each in ray.nodes() if host_name(each) == host and each["Alive"]), None)
    if node is None:
        raise LaunchError(f"the node {host} has left the cluster")
    resources = {"CPU": float(cpus), "GPU": float(gpus)}
    count = slots(node, resources)
    shell = (
        ray.remote(Shell)
        .options(
            num_cpus=count * resources["CPU"],
            num_gpus=count * resources["GPU"],
            max_concurrency=3,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        )
        .remote(command)
    )

    def feed() -> None:
        data = b"-"
        while data:
            data = os.read(0, _CHUNK)
            ray.get(shell.write.remote(data))

    threading.Thread(target=feed, name="unidist-ray", daemon=True).start()
    while data := ray.get(shell.read.remote()):
        while data:
            data = data[os.write(1, data) :]
    os._exit(ray.get(shell.wait.remote()))


if __name__ == "__main__":
    main(*sys.argv[1:])
