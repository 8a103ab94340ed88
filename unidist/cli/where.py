"""``unidist where``."""

from __future__ import annotations

import json

import click

from unidist.diagnosis.watch import jobs
from unidist.diagnosis.watch.report import findings, report
from unidist.diagnosis.watch.watch import states

#: Time for the answers of all ranks: on an overloaded host some come late.
_ANSWERS_S = 3.0


@click.command("where", short_help="Show what each rank of a running job does.")
@click.argument("pid", type=int, required=False)
@click.option("--stacks", is_flag=True, help="Also the Python stacks of all threads of all ranks.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def command(pid: int | None, stacks: bool, as_json: bool) -> None:
    """Show what each rank of a running job does, and who keeps it waiting.

    On any host of the job, as its user. PID is the process of any of the job's ranks on this host, needed where several
    jobs run. Works while ranks are in calls of C++. Takes 3 seconds if a rank does not answer.
    """
    job = _job(pid)
    found = states(job.peers, job.key, stacks=stacks, seconds=_ANSWERS_S)
    if as_json:
        click.echo(json.dumps({"ranks": [state.to_row() for state in found], "findings": findings(found)}))
    else:
        click.echo(report(f"{len(job.peers)} ranks ({job.backend}):", found))


def _job(pid: int | None) -> jobs.RunningRank:
    running = jobs.running()
    if pid is not None:
        chosen = next((job for job in running if job.pid == pid), None)
        if chosen is None:
            here = ", ".join(str(job.pid) for job in running) or "none"
            raise click.ClickException(f"process {pid} is no rank of a job of yours on this host; ranks are: {here}.")
        return chosen
    if not running:
        raise click.ClickException(
            "no job of yours runs on this host: a job is found from unidist.init() on, in worlds of 2 ranks and more. "
            "Run this on one of its hosts, as its user."
        )
    by_job: dict[str, list[jobs.RunningRank]] = {}
    for job in running:
        by_job.setdefault(job.id, []).append(job)
    if len(by_job) > 1:
        listed = "\n".join(
            f"  unidist where {ranks[0].pid}   ({ranks[0].backend}, {len(ranks[0].peers)} ranks, here "
            f"{', '.join(str(job.rank) for job in ranks)})"
            for ranks in by_job.values()
        )
        raise click.ClickException(f"{len(by_job)} jobs of yours run on this host. Which one?\n{listed}")
    return running[0]
