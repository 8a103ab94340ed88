"""How the driver starts the agent of a host: as a child, by ssh, by srun or by a command of the user."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from unidist.network.addresses import this_host

#: Kubeflow's MPI operator has a program of its own in place of ssh.
KUBEXEC = "/etc/mpi/kubexec.sh"
#: What the agent is made of, each after what it imports.
_MODULES = ("unidist.errors", "unidist.network.open_files", "unidist.network.addresses", "unidist.run.agent")
#: Reads the number of bytes of a program, and the program, and no byte more.
_BOOTSTRAP = (
    'import os,sys;n=int(os.read(0,8));b=b"";exec("while len(b)<n: b+=os.read(0,n-len(b)) or sys.exit(1)");exec(b)'
)
_PROGRAM = """
import sys, types
for name, source in {sources}:
    parts = name.split(".")
    for package in (".".join(parts[:i]) for i in range(1, len(parts))):
        sys.modules.setdefault(package, types.ModuleType(package)).__path__ = []
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
module.main()
"""


@dataclass(frozen=True)
class Ssh:
    """Options of ssh, and what is used in its place."""

    port: int | None = None
    identity_file: str | None = None
    connect_timeout: int = 30
    #: A command that takes a host and a line for its shell.
    instead: Sequence[str] = ()


def program() -> bytes:
    """Return the agent's source, with its length before it, as the agent's Python reads it."""
    sources = []
    for name in _MODULES:
        spec = find_spec(name)
        assert spec is not None and spec.origin is not None
        sources.append((name, Path(spec.origin).read_text()))
    source = _PROGRAM.format(sources=json.dumps(sources)).encode()
    return b"%-8d" % len(source) + source


def command(host: str, env: Mapping[str, str], ssh: Ssh) -> list[str]:
    """Return the command that starts a Python on a host, which reads ``program()``."""
    if is_this_host(host):
        return [sys.executable, "-I", "-S", "-c", _BOOTSTRAP]
    # The Python of this process where the host has it, else the first one on PATH.
    find = f'exec "$(command -v {shlex.quote(sys.executable)} || command -v python3 || echo python3)" -I -S -c "$0"'
    remote = ["sh", "-c", find, _BOOTSTRAP]
    if ssh.instead:
        return [*ssh.instead, host, shlex.join(remote)]
    if env.get("SLURM_JOB_ID") and env.get("SLURM_JOB_NODELIST"):
        return ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap", "--cpu-bind=none", *remote]
    if os.path.exists(KUBEXEC):
        return [KUBEXEC, host, shlex.join(remote)]
    options = ["-o", "BatchMode=yes", "-o", "LogLevel=ERROR"]
    options += ["-o", f"ConnectTimeout={max(1, ssh.connect_timeout)}"]
    if ssh.port is not None:
        options += ["-p", str(ssh.port)]
    if ssh.identity_file is not None:
        options += ["-i", ssh.identity_file]
    return ["ssh", *options, host, shlex.join(remote)]


def is_this_host(host: str) -> bool:
    """Return whether it is a name or address of the host that this process is on."""
    if host in ("localhost", socket.gethostname()):
        return True
    with suppress(OSError):
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
        return any(address.startswith("127.") or address == "::1" for address in found) or bool(
            found & set(this_host().addresses)
        )
    return False
