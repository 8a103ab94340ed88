"""A real Slurm on this machine, for as long as the tests need it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
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
def slurm(directory: Path) -> Iterator[dict[str, str]]:
    """Start munged, slurmctld and slurmd; yields the environment for srun. Ends them all."""
    host = socket.gethostname()
    conf = directory / "slurm.conf"
    conf.write_text(
        f"""
        ClusterName=test
        SlurmctldHost={host}(127.0.0.1)
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
        SlurmdSpoolDir={directory}/spool
        SlurmctldPidFile={directory}/slurmctld.pid
        SlurmdPidFile={directory}/slurmd.pid
        SlurmctldLogFile={directory}/slurmctld.log
        SlurmdLogFile={directory}/slurmd.log
        NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} RealMemory=2000 State=UNKNOWN
        PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
        """
    )
    for name in ("state", "spool"):
        (directory / name).mkdir()
    env = {**os.environ, "SLURM_CONF": str(conf)}
    running: list[subprocess.Popen[bytes]] = []
    try:
        running.append(_munged(directory))
        for program in ("slurmctld", "slurmd"):
            running.append(
                subprocess.Popen([program, "-D"], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
        _wait_until_idle(env, directory)
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


def _wait_until_idle(env: dict[str, str], directory: Path) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        state = subprocess.run(["sinfo", "-h", "-o", "%T"], env=env, capture_output=True, text=True).stdout.strip()
        if state == "idle":
            return
        time.sleep(0.2)
    logs = "\n".join(path.read_text()[-2000:] for path in directory.glob("*.log"))
    raise TimeoutError(f"the node did not become idle, but {state!r}:\n{logs}")
