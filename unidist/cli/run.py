"""``unidist run``."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from importlib.util import find_spec

import click

from unidist import __version__, settings
from unidist.errors import LaunchError
from unidist.launchers.table import BACKENDS, COMMANDS, missing, unavailable
from unidist.run import driver, elastic_driver, hosts, mpirun, options
from unidist.run.output import say
from unidist.run.transport import Ssh


@click.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("argv", nargs=-1, type=click.UNPROCESSED)
def command(argv: tuple[str, ...]) -> None:
    """Start a command on this and other hosts, with horovodrun's options."""
    given = options.parse(argv)
    if given.version:
        click.echo(f"unidist {__version__}")
        return
    if given.check_build:
        check_build()
        return
    if not given.command:
        raise LaunchError("there is no command to start: unidist run -np 2 python train.py")
    elastic = options.is_elastic(given)
    job = _job(given, [] if elastic else _placements(given))
    unused = options.without_effect(given)
    if unused and (given.hvd or find_spec("horovod") is None):
        say(f"{', '.join(unused)}: these tune Horovod itself. They become HOROVOD_* variables, without effect.")
    if given.use_mpi:
        line = mpirun.command_line(job, given.mpi_args, given.binding_args)
        if not given.dry_run:
            mpirun.execute(line, job)
        click.echo(shlex.join(line))
    elif elastic:
        _run_elastic(given, job)
    elif given.dry_run:
        click.echo(driver.describe(job))
    else:
        status = driver.run(job)
        # Not through the interpreter's end, which would wait for an import of torch that nobody needs any more.
        os._exit(status)


def _run_elastic(given: argparse.Namespace, job: driver.Job) -> None:
    limits = options.elastic_limits(given, os.environ)
    script = given.host_discovery_script
    found = [] if script else _hosts(given)
    if not script and not found:
        found = [hosts.HostSlots("localhost", given.num_proc or limits.min_np)]
    if given.dry_run:
        where = script or ", ".join(f"{host.name}:{host.slots}" for host in found)
        most = limits.max_np or "any number of"
        click.echo(f"{limits.min_np} to {most} workers on {where}: {shlex.join(job.command)}")
        return
    discovery = elastic_driver.Discovery(found, script, given.slots or 1)
    os._exit(elastic_driver.run(job, limits, discovery))


def check_build() -> None:
    """Print which backends and launchers can be used here, as horovodrun does."""
    backends = {name: unavailable(launcher, name, 1) for name, launcher in BACKENDS.items()}
    launchers = {each.typed: missing(name) for name, each in COMMANDS.items()}
    click.echo(f"unidist v{__version__}:")
    for title, rows in (("Backends", backends), ("Launchers", launchers)):
        click.echo(f"\nAvailable {title}:")
        for name, lack in rows.items():
            click.echo(f"    [{' ' if lack else 'X'}] {name}")


def _placements(given: argparse.Namespace) -> list[hosts.Placement]:
    found = _hosts(given)
    count = sum(host.slots for host in found) if given.num_proc is None else given.num_proc
    if count < 1:
        raise LaunchError(f"-np {count} is not a number of ranks from 1 up.")
    return hosts.place(found or [hosts.HostSlots("localhost", count)], count)


def _job(given: argparse.Namespace, placements: list[hosts.Placement]) -> driver.Job:
    variables = options.variables(given)
    if given.hvd:
        from unidist.hvd import names

        path = os.environ.get("PYTHONPATH")
        variables["PYTHONPATH"] = os.pathsep.join([names.directory(), *([path] if path else [])])
    timeout = given.start_timeout or int(os.environ.get("HOROVOD_START_TIMEOUT") or 30)
    return driver.Job(
        command=given.command,
        placements=placements,
        env=os.environ,
        variables=variables,
        ssh=Ssh(given.ssh_port, given.ssh_identity_file, timeout, shlex.split(given.rsh or "")),
        start_timeout=timeout,
        interfaces=sorted(given.nics or ()),
        output_directory=given.output_filename,
        timestamps=given.prefix_output_with_timestamp,
        verbose=given.verbose,
        grace_period=given.grace_period,
        heartbeat_timeout=given.heartbeat_timeout,
        horovod=not given.hvd
        and settings.backend(os.environ) in ("auto", "horovod")
        and find_spec("horovod") is not None,
    )


def _hosts(given: argparse.Namespace) -> list[hosts.HostSlots]:
    """Return the hosts of the options or of the allocation, or none."""
    if given.hosts:
        return hosts.parse_hosts(given.hosts)
    if given.hostfile:
        return hosts.read_hostfile(given.hostfile)
    found = hosts.allocated_hosts(os.environ)
    if not found and given.num_proc is None and given.min_num_proc is None:
        raise LaunchError("-np is missing: the number of ranks, such as unidist run -np 2 python train.py")
    return found


def run_commandline() -> None:
    """Run the command, by Horovod's name: ``horovod.runner.launch`` is this module in the drop-in."""
    from unidist.cli import main

    main(["run", *sys.argv[1:]], prog_name="unidist")


if __name__ == "__main__":
    run_commandline()
