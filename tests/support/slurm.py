"""A real Slurm on this machine, for as long as the tests need it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.support.worlds import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun")


def missing() -> str | None:
    """What this machine lacks for a Slurm of its own, or None."""
    absent = [name for name in PROGRAMS if not shutil.which(name)]
    if absent:
        return f"{', '.join(absent)} not installed (apt-get install slurm-wlm munge)"
    return None if os.geteuid() == 0 else "slurmd must run as root"


@contextmanager
def slurm(directory: Path, nodes: Mapping[str, tuple[str, list[str]]] | None = None) -> Iterator[dict[str, str]]:
    """Start munged, slurmctld and a slurmd on each node; yields the environment for srun. Ends them all.

    Args:
        directory: for its files.
        nodes: of each node its address and what comes before a command that runs there. The controller is on the
            first. Default: this host.
    """
    nodes = nodes or {socket.gethostname(): ("127.0.0.1", [])}
    first = next(iter(nodes))
    rows = "\n".join(
        f"NodeName={name} NodeAddr={address} CPUs={os.cpu_count()} RealMemory=2000 State=UNKNOWN"
        for name, (address, _) in nodes.items()
    )
    conf = directory / "slurm.conf"
    conf.write_text(
        f"""
        ClusterName=test
        SlurmctldHost={first}({nodes[first][0]})
        SlurmctldPort={free_port()}
        SlurmdPort={free_port()}
        SlurmUser=root
        SlurmdUser=root
        AuthType=auth/munge
        AuthInfo=socket={directory}/munge.socket
        CredType=cred/munge
        ProctrackType=proctrack/linuxproc
        TaskPlugin=task/none
        SelectType=select/cons_tres
        SelectTypeParameters=CR_Core
        MpiDefault=none
        ReturnToService=2
        StateSaveLocation={directory}/state
        SlurmdSpoolDir={directory}/spool-%n
        SlurmctldPidFile={directory}/slurmctld.pid
        SlurmdPidFile={directory}/slurmd-%n.pid
        SlurmctldLogFile={directory}/slurmctld.log
        SlurmdLogFile={directory}/slurmd-%n.log
        PartitionName=all Nodes={",".join(nodes)} Default=YES MaxTime=INFINITE State=UP
        {rows}
        """
    )
    for name in ("state", *(f"spool-{name}" for name in nodes)):
        (directory / name).mkdir()
    env = {**os.environ, "SLURM_CONF": str(conf)}
    running: list[subprocess.Popen[bytes]] = []
    try:
        running.append(_munged(directory))
        daemons = [[*nodes[first][1], "slurmctld", "-D"]]
        daemons += [[*there, "slurmd", "-D", "-N", name] for name, (_, there) in nodes.items()]
        for daemon in daemons:
            running.append(subprocess.Popen(daemon, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        _wait_until_idle([*nodes[first][1], "sinfo", "-h", "-o", "%T"], env, directory)
        yield {"SLURM_CONF": str(conf)}
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            process.wait(timeout=30)


def _munged(directory: Path) -> subprocess.Popen[bytes]:
    key = directory / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    # --force: a temporary directory is not as guarded as /etc/munge.
    names = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    options = [f"--{option}={directory}/munge.{name}" for option, name in names.items()]
    return subprocess.Popen(["munged", "--foreground", "--force", *options], stderr=subprocess.DEVNULL)


def _wait_until_idle(sinfo: list[str], env: dict[str, str], directory: Path) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        state = subprocess.run(sinfo, env=env, capture_output=True, text=True).stdout.strip()
        if state == "idle":
            return
        time.sleep(0.2)
    logs = "\n".join(path.read_text()[-2000:] for path in directory.glob("*.log"))
    raise TimeoutError(f"the node did not become idle, but {state!r}:\n{logs}")
