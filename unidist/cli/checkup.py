"""The checks of the doctor: each reads one thing of this machine and yields its findings."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import psutil
import torch
import torch.distributed as dist

import unidist
from unidist import settings
from unidist.cli.build_horovod import CONTROLLERS_CODE
from unidist.cli.toolchain import last_line
from unidist.context import BACKENDS
from unidist.errors import UnidistError
from unidist.launch.topology import LAUNCHERS, NONE, detect, tcp_port
from unidist.launchers.process import output_of
from unidist.launchers.table import COMMANDS, missing
from unidist.launchers.world import environment, usable_cores

State = Literal["ok", "none", "warning", "error"]
#: Where torchrun listens without --master-port.
_TORCHRUN_PORT = 29500


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    #: What was looked at.
    subject: str
    #: ``ok``, ``none`` (not installed, which is no fault), ``warning`` (works, with a pitfall) or ``error``.
    state: State
    text: str
    remedy: str = ""


def findings(env: Mapping[str, str]) -> Iterator[Finding]:
    """Yield everything that can be determined without starting a world, in the order of the report."""
    yield software()
    yield from horovod()
    yield from mpi(env)
    yield gpus(env)
    yield from launchers()
    yield from here(env)
    yield from network(env)
    yield from limits(env)


# ------------------------------------------------------------------------------------- software
def software() -> Finding:
    backends = [name for name in ("gloo", "nccl", "mpi") if dist.is_available() and dist.is_backend_available(name)]
    text = (
        f"{torch.__version__}, built with {', '.join(backends) or 'no torch.distributed'}; "
        f"unidist {unidist.__version__}, Python {platform.python_version()}"
    )
    return Finding("torch", "ok" if backends else "error", text, "" if backends else "install another build of torch")


def horovod() -> Iterator[Finding]:
    spec = find_spec("horovod")
    if spec is None or spec.origin is None:  # without an origin: a directory of that name
        yield Finding("Horovod", "none", "not installed", "unidist build-horovod --install")
        return
    built_for = built_for_torch()
    asked = run_python(CONTROLLERS_CODE)
    version = metadata.version("horovod")
    if asked.returncode:
        text = f"{version}, built for torch {built_for}, does not import: {last_line(asked)}"
        yield Finding("Horovod", "error", text, "unidist build-horovod --install --force")
    elif built_for != torch.__version__:
        text = f"{version} was built for torch {built_for}, {torch.__version__} is installed"
        yield Finding("Horovod", "warning", text, "unidist build-horovod --install")
    else:
        yield Finding("Horovod", "ok", f"{version} for torch {built_for}, with {asked.stdout.strip()}")


def built_for_torch() -> str:
    """Return the torch that the installed Horovod was compiled against, from its own record."""
    spec = find_spec("horovod")
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin).with_name("metadata.json")
    found = json.loads(path.read_text()).get("pytorch") if path.exists() else None
    return str(found or "(unknown)")


def mpi(env: Mapping[str, str]) -> Iterator[Finding]:
    found = []
    for name in ("mpirun.openmpi", "mpiexec.mpich", "mpiexec.hydra", "mpirun"):
        if shutil.which(name):
            said = re.search(r"Open ?(?:MPI|RTE)\D*([\d.]+)|Version:\s*([\d.]+)", output_of(name, "--version"))
            kind = "Open MPI" if said and said[1] else "MPICH" if said else "unknown MPI"
            found.append(f"{kind} {(said and (said[1] or said[2])) or ''} ({name})".replace("  ", " "))
    libraries = list(dict.fromkeys(line.rsplit(" (", 1)[0] for line in found))
    if not libraries:
        yield Finding("MPI", "none", "no mpirun or mpiexec on PATH", "apt-get install openmpi-bin")
    else:
        yield Finding("MPI", "ok", "; ".join(found[: len(libraries)]))
    if not find_spec("mpi4py"):
        state: State = "warning" if libraries else "none"
        text = "not installed: under mpirun, rank 0's address cannot be broadcast"
        yield Finding("mpi4py", state, text, "pip install 'unidist-torch[mpi]', or set MASTER_ADDR and MASTER_PORT")
        return
    asked = run_python(
        "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    )
    version = metadata.version("mpi4py")
    if asked.returncode:
        text = f"{version} finds no MPI library: {last_line(asked)}"
        yield Finding("mpi4py", "error", text, "apt-get install libopenmpi3, or set MPI4PY_LIBMPI to a library's path")
    else:
        library = re.split("[,\\n]", asked.stdout)[0].strip()
        yield Finding("mpi4py", "ok", f"{version} loads {library}")
    if shutil.which("mpiexec.mpich") and not _loads("libmpi.so.12") and "MPI4PY_LIBMPI" not in env:
        text = "MPICH is installed, but mpi4py's wheel looks for libmpi.so.12, which is not found"
        remedy = "link libmpich.so.12 to that name on LD_LIBRARY_PATH: docs/launchers.md"
        yield Finding("mpi4py", "warning", text, remedy)


def gpus(env: Mapping[str, str]) -> Finding:
    visible = env.get("CUDA_VISIBLE_DEVICES")
    seen = f"CUDA_VISIBLE_DEVICES={visible}" if visible is not None else "CUDA_VISIBLE_DEVICES is not set"
    if not torch.version.cuda:
        physical = list(Path("/dev").glob("nvidia[0-9]*"))
        if physical:
            text = f"{len(physical)} GPUs in /dev, but this torch is built for CPUs"
            return Finding("GPU", "warning", text, "install a CUDA build of torch")
        return Finding("GPU", "none", "none; this torch is built for CPUs")
    count = torch.cuda.device_count()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if count and dist.is_nccl_available() else "none"  # type: ignore[no-untyped-call]  # fmt: skip
    text = f"CUDA {torch.version.cuda}, NCCL {nccl}, {count} visible; {seen}"
    with suppress(UnidistError):
        launch = detect(env)
        ranks = launch.local_size or 1
        if count > 1 and launch.local_rank is not None and launch.local_rank >= count:
            text = f"{text}; local rank {launch.local_rank} of {ranks} has none of its own"
            return Finding("GPU", "error", text, "start as many processes on a node as it has GPUs")
        if count == 1 and ranks > 1 and visible is None:
            remedy = "give each task its own: srun --gpus-per-task=1, or torchrun --virtual-local-rank"
            return Finding("GPU", "warning", f"{text}; {ranks} local ranks would share one GPU", remedy)
    if count:
        return Finding("GPU", "ok", text)
    return Finding("GPU", "warning", text, "is the driver installed (nvidia-smi), and CUDA_VISIBLE_DEVICES not empty?")


def launchers() -> Iterator[Finding]:
    reasons = {name: missing(name) for name in COMMANDS}
    yield Finding("launchers", "ok", ", ".join(name for name, why in reasons.items() if why is None))
    if absent := [f"{name} ({why.split(':')[0]})" for name, why in reasons.items() if why]:
        yield Finding("launchers", "none", "not installed: " + ", ".join(absent))


# ---------------------------------------------------------------------------- this process's launch
def here(env: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what ``detect`` makes of the environment, and what init() would start."""
    try:
        launch = detect(env)
    except UnidistError as error:
        yield Finding("launched by", "error", str(error))
        return
    if launch.launcher is NONE:
        yield Finding("launched by", "ok", "no launcher: init() starts one process")
    else:
        rank = f"rank {launch.rank} of {launch.world_size}"
        forced = f", forced by {settings.LAUNCHER}" if env.get(settings.LAUNCHER) else ""
        yield Finding("launched by", "ok", f"{launch.launcher.name}: {rank} ({launch.evidence}{forced})")
        others = [
            row.name
            for row in LAUNCHERS
            if row.name not in ("env", "pmi", "pmix") and row.rank != launch.launcher.rank and row.started(env)
        ]
        if others and not forced:
            yield Finding(
                "launched by", "ok", f"variables of {', '.join(others)} are set too; the inner launcher is used"
            )
        if launch.local_rank == 0 and (launch.local_size or 1) > 1 and launch.rank % (launch.local_size or 1):
            text = f"LOCAL_RANK=0 on rank {launch.rank} (torchrun --virtual-local-rank): "
            yield Finding("launched by", "warning", text + "one GPU must be visible to each rank")
    if launch.launcher is NONE and env.get("SLURM_JOB_ID"):
        text = "this is a batch script or a shell of Slurm, one process"
        yield Finding("launched by", "warning", text, "start the ranks with srun")
    wanted = settings.backend(env)
    if wanted not in ("auto", *BACKENDS):
        yield Finding("backend", "error", f"{settings.BACKEND}={wanted} is unknown", f"use auto, {', '.join(BACKENDS)}")
    elif wanted == "horovod" and launch.launcher is NONE:
        text = f"{settings.BACKEND}=horovod needs a launcher"
        yield Finding("backend", "error", text, "horovodrun -np 2 python script.py, or torchrun")
    elif wanted != "auto":
        yield Finding("backend", "ok", f"{settings.BACKEND}={wanted}")
    try:
        settings.timeout(env)
    except UnidistError as error:
        yield Finding("timeout", "error", str(error))


# --------------------------------------------------------------------------------------- network
def network(env: Mapping[str, str]) -> Iterator[Finding]:
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    shown = [
        f"{name} {address.address}"
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if name in up and address.family in (socket.AF_INET, socket.AF_INET6) and not address.address.startswith("fe80")
    ]
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE")
    chosen = {name: env[name] for name in names if env.get(name)}
    chosen_here = [f"{name}={value}" for name, value in chosen.items()]
    yield Finding(
        "network", "ok" if shown else "error", "; ".join([", ".join(shown) or "no interface is up", *chosen_here])
    )
    for name, value in chosen.items():
        # NCCL: a list of prefixes, "=" before it for exact names, "^" for those to leave out.
        parts = value.lstrip("=").split(",")
        exact = name != "NCCL_SOCKET_IFNAME" or value.startswith("=")
        if not value.startswith("^") and not any(
            one == part or (not exact and one.startswith(part)) for one in up for part in parts
        ):
            text = f"{name}={value}, but no such interface is up"
            yield Finding("network", "error", text, f"unset {name}, or use one of {', '.join(sorted(up))}")
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
        local = " (enough on one host; over several, set GLOO_SOCKET_IFNAME)" if address.startswith("127.") else ""
        yield Finding("host name", "ok", f"{host} is {address}{local}")
    except OSError:
        text = f"{host} has no address: gloo and Horovod may not find their own interface"
        interface = next((name for name in sorted(up) if name != "lo"), "lo")
        yield Finding("host name", "warning", text, f"add it to /etc/hosts, or set GLOO_SOCKET_IFNAME={interface}")
    yield _port(env)


def _port(env: Mapping[str, str]) -> Finding:
    """Return whether the port at which the ranks of this launch meet is free; without one, torchrun's default port."""
    text = env.get("MASTER_PORT")
    port = tcp_port(text) if text else None
    if text and port is None:
        return Finding("ports", "error", f"MASTER_PORT={text} is not a TCP port", "use a free one from 1024 to 65535")
    with suppress(UnidistError):
        port = port or detect(env).master_port
    name = f"{port} (of this launch)" if port else f"{_TORCHRUN_PORT} (torchrun's, for static rendezvous)"
    try:
        with socket.create_server(("", port or _TORCHRUN_PORT)):
            return Finding("ports", "ok", f"{name} is free")
    except OSError:
        if port:
            return Finding("ports", "ok", f"{name} is in use: by this job's own launcher or rank 0, if it has started")
    remedy = "torchrun --master-port with another, or --standalone"
    return Finding("ports", "warning", f"{name} is in use: another job of this host?", remedy)


# ---------------------------------------------------------------------------------------- limits
def limits(env: Mapping[str, str]) -> Iterator[Finding]:
    cores = usable_cores()
    memory = psutil.virtual_memory().total / 2**30
    threads = env.get("OMP_NUM_THREADS")
    setting = f"= {threads}" if threads else "is not set"
    text = f"{cores} of {psutil.cpu_count()} usable, {memory:.0f} GiB; OMP_NUM_THREADS {setting}"
    if threads and not (threads.isdigit() and 0 < int(threads) <= cores):
        text = f"{text}, which is not a number from 1 to {cores}"
        yield Finding("cores", "warning", text, "set it to cores / ranks")
    elif threads or cores == 1:
        yield Finding("cores", "ok", text)
    else:
        text = f"{text}: every rank would use {cores} threads, which is slow when ranks share cores"
        yield Finding("cores", "warning", text, "set it to cores / ranks (torchrun sets 1)")
    if cores < (psutil.cpu_count() or 1):
        yield Finding("cores", "warning", "this process is bound to some of the cores", "if by mpirun: --bind-to none")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files < 4096:
        text = f"at most {files}: a rank needs one for each peer and loader worker"
        yield Finding("open files", "warning", text, "ulimit -n 65536")
    with suppress(OSError):
        free = shutil.disk_usage("/dev/shm").free
        if not os.access("/dev/shm", os.W_OK):
            text = "not writable: data loader workers pass batches through it"
            yield Finding("/dev/shm", "warning", text, "mount it read-write")
        elif free < 2**30:
            text = f"{free / 2**20:.0f} MiB free: data loader workers pass batches through it"
            yield Finding("/dev/shm", "warning", text, "docker run --shm-size=8g, or --ipc=host")
    if os.geteuid() == 0 and missing("openmpi") is None and "OMPI_ALLOW_RUN_AS_ROOT" not in env:
        remedy = "set OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
        yield Finding("root", "warning", "Open MPI does not start as root", remedy)


# --------------------------------------------------------------------------------------- helpers
def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new process, outside any launcher: what it loads or breaks stays there."""
    env = environment(os.environ, 1)
    command = [sys.executable, "-c", code]
    try:
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, cwd=sys.prefix)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", "did not end within 60 s")


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
