"""``unidist run --mpi``: the job as a command of Open MPI's mpirun."""

from __future__ import annotations

import os
import re
import shlex
import sys
from typing import NoReturn

from unidist.errors import LaunchError
from unidist.launchers.table import COMMANDS, missing
from unidist.run.driver import Job


def command_line(job: Job, mpi_args: str | None = None, binding_args: str | None = None) -> list[str]:
    """Return the command. Variables are named in it; their values are in mpirun's own environment.

    Args:
        job: what to start.
        mpi_args: more arguments of mpirun, in one string.
        binding_args: how mpirun binds and maps ranks. Default: ``--bind-to none --map-by slot``.

    Raises:
        LaunchError: Open MPI's mpirun is not installed.
    """
    if lack := missing("openmpi"):
        raise LaunchError(f"--mpi: {lack}: install Open MPI, or leave --mpi out.")
    program = COMMANDS["openmpi"].prefix(1)[0]
    hosts = ",".join(f"{f'[{p.name}]' if ':' in p.name else p.name}:{p.count}" for p in job.placements)
    line = [program, *["--allow-run-as-root"] * (os.geteuid() == 0), "--tag-output"]
    line += ["-np", str(job.ranks), "-H", hosts, *shlex.split(binding_args or "--bind-to none --map-by slot")]
    if job.interfaces:
        names = ",".join(job.interfaces)
        line += ["-mca", "btl_tcp_if_include", names, "-mca", "oob_tcp_if_include", names]
    ssh = [*(["-p", str(job.ssh.port)] if job.ssh.port else []), *(["-i", f] if (f := job.ssh.identity_file) else [])]
    if ssh:
        line += ["-mca", "plm_rsh_args", shlex.join(ssh)]
    if job.output_directory is not None:
        line += ["--output-filename", job.output_directory]
    for name in sorted(job.environment()):
        if re.fullmatch(r"\w+", name):
            line += ["-x", name]
    return [*line, *shlex.split(mpi_args or ""), *job.command]


def execute(line: list[str], job: Job) -> NoReturn:
    """Become mpirun."""
    sys.stdout.flush()
    os.execvpe(line[0], line, {**job.env, **job.environment()})
