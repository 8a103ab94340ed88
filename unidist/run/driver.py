"""The driver: starts an agent on each host, and watches the ranks to their end."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from unidist.diagnosis.operations import format_ranks
from unidist.errors import LaunchError
from unidist.launch.topology import EXPORTED, RUN_ID
from unidist.launchers.world import OUTER
from unidist.network import open_files
from unidist.network.addresses import LOOPBACK, Host, create_server, listen_address, this_host
from unidist.run import hosts, transport
from unidist.run.agent import GRACE_S, HEARTBEAT_TIMEOUT_S
from unidist.run.agents import MESSAGE, HostAgent, how_ended
from unidist.run.hosts import Place, Placement
from unidist.run.output import Output, say

#: Variables that other hosts do not get: of the shell, of this host, of its GPUs and of its ssh session.
_OF_THIS_HOST = re.compile(r"BASH_FUNC_.*|OLDPWD|PWD|_|SHLVL|HOSTNAME|SSH_.*|.*CUDA_VISIBLE_DEVICES")
#: Open files that are allowed to the driver where the system permits, so that idle connections of others do not matter.
FILES = 2**16
#: Seconds between two messages about the hosts that have not answered.
_PROGRESS_S = 5.0


@dataclass(frozen=True)
class Job:
    """What to start, and how."""

    command: Sequence[str]
    placements: Sequence[Placement]
    #: The variables of this process.
    env: Mapping[str, str]
    #: Variables that the options add.
    variables: Mapping[str, str] = field(default_factory=dict)
    ssh: transport.Ssh = field(default_factory=transport.Ssh)
    #: Seconds for all hosts to answer.
    start_timeout: float = 30.0
    #: What sets it, for errors.
    start_timeout_option: str = "--start-timeout"
    #: Network interfaces that the ranks use; empty: those through which the hosts reach each other.
    interfaces: Sequence[str] = ()
    output_directory: str | None = None
    timestamps: bool = False
    verbose: bool = False
    #: Seconds that the ranks have for their end when this process is sent SIGTERM, SIGINT or SIGHUP.
    grace_period: float = 30.0
    #: Seconds without a message of a host's agent after which the host is lost; None: that of the driver.
    heartbeat_timeout: float | None = None
    #: Whether the ranks may use Horovod itself.
    horovod: bool = False

    @property
    def ranks(self) -> int:
        """The size of the world."""
        return sum(placement.count for placement in self.placements)

    def environment(self) -> dict[str, str]:
        """Return the variables of all ranks, beside those of their host and rank."""
        env = {name: text for name, text in self.env.items() if not OUTER.fullmatch(name)}
        env = {name: text for name, text in env.items() if not _OF_THIS_HOST.fullmatch(name)}
        if self.interfaces:
            names = ",".join(self.interfaces)
            env.update(GLOO_SOCKET_IFNAME=names, HOROVOD_GLOO_IFACE=self.interfaces[0], NCCL_SOCKET_IFNAME=names)
        return {"PYTHONUNBUFFERED": "1", **env, **self.variables}

    def rank_variables(self, node: int) -> list[tuple[int, dict[str, str]]]:
        """Return the ranks of a host, each with its own variables: torchrun's and horovodrun's."""
        places = [Place(each.name, local) for each in self.placements for local in range(each.count)]
        first, count = self.placements[node].first, self.placements[node].count
        return list(enumerate(hosts.rank_variables(places)))[first : first + count]


def run(job: Job) -> int:
    """Start the job's ranks, print what they print, and wait for their end.

    Returns:
        0, or the status of the first rank that failed: 128 + n for signal n.

    Raises:
        LaunchError: a host cannot be reached, or the command cannot be started on one.
    """
    try:
        return asyncio.run(_FixedDriver(job).run())
    except KeyboardInterrupt:  # before the ranks have started
        return 128 + signal.SIGINT


def describe(job: Job) -> str:
    """Return what would be started, for ``--dry-run``."""
    lines = []
    for node, placement in enumerate(job.placements):
        command = transport.command(placement.name, job.env, job.ssh)
        shown = "this process" if command[0] == sys.executable else shlex.join(command[:-1])
        lines.append(f"{placement.name}, started by {shown}:")
        for rank, variables in job.rank_variables(node):
            values = " ".join(f"{name}={shlex.quote(text)}" for name, text in {**job.variables, **variables}.items())
            lines.append(f"  rank {rank}: {values} {shlex.join(job.command)}")
    return "\n".join(lines)


class Driver(ABC):
    """What is the same for all jobs: agents, signals, what is printed, and the first failure."""

    #: The default: the job ends with a host.
    HEARTBEAT_TIMEOUT_S = HEARTBEAT_TIMEOUT_S

    def __init__(self, job: Job) -> None:
        self.job = job
        self.heartbeat_timeout = job.heartbeat_timeout or self.HEARTBEAT_TIMEOUT_S
        self.output = Output(job.ranks, job.output_directory, timestamps=job.timestamps)
        self.printing = asyncio.Lock()
        self.agents: list[HostAgent] = []
        #: The first failure: what to say of it, and the status.
        self.failure: tuple[str, int] | None = None
        self.ending = False
        #: The signal that this process was sent; what ranks had for statuses after it.
        self.signal: signal.Signals | None = None
        self.last_statuses: dict[int, int] = {}

    async def run(self) -> int:
        """Start the job and watch it to its end; its status."""
        try:
            await self.work()
        except BaseException:
            self.end(signal.SIGTERM, GRACE_S)
            raise
        finally:
            await asyncio.sleep(max((agent.ranks_end for agent in self.agents), default=0.0) - time.monotonic())
            await asyncio.gather(*(agent.close() for agent in self.agents))
            self.output.close()
        if self.failure is None and self.signal is not None:
            self.failure = self._after_signal(self.signal)
        if self.failure is None:
            return 0
        text, status = self.failure
        say(text)
        return status

    def _after_signal(self, number: signal.Signals) -> tuple[str, int] | None:
        """Return what the job's end was, if not all ranks have ended with status 0 after a signal."""
        killed = sorted(rank for rank, status in self.last_statuses.items() if status == -signal.SIGKILL)
        failed = {rank: status for rank, status in self.last_statuses.items() if status > 0}
        if killed:
            who = f"rank {format_ranks(killed)}" if len(killed) == 1 else f"ranks {format_ranks(killed)}"
            return f"ended by {number.name}; killed: {who}", 128 + number
        if failed:
            rank, status = next(iter(failed.items()))
            return f"ended by {number.name}; rank {rank} {how_ended(status)}", status
        if any(self.last_statuses.values()) or not self.last_statuses:
            return f"ended by {number.name}", 128 + number
        return None

    @abstractmethod
    async def work(self) -> None:
        """Start the ranks, and wait until all have ended."""

    # ------------------------------------------------------------------------------------- the start
    async def start_agent(self, name: str) -> HostAgent:
        """Start the agent of a host; ``answered`` is set when it is there, or has failed.

        Raises:
            LaunchError: there is no ssh.
        """
        command = transport.command(name, self.job.env, self.job.ssh)
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                stderr=None if command[0] == sys.executable else asyncio.subprocess.PIPE,
                start_new_session=True, limit=MESSAGE,
            )  # fmt: skip
        except OSError as error:
            raise LaunchError(f"host {name}: cannot start {command[0]}: {error.strerror}") from error
        agent = HostAgent(name, process, self, transport.program(), self.heartbeat_timeout)
        self.agents.append(agent)
        return agent

    def variables(self) -> dict[str, str]:
        """Return the variables of all ranks, beside their own and those of torch's key-value store."""
        return {
            **self.job.environment(),
            RUN_ID: f"{EXPORTED}unidist-run",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            # To torch this says: the launcher serves the store, so rank 0 connects to it.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    def start_message(self, env: dict[str, str], endpoint: tuple[str, int], hosts: list[Host]) -> dict[str, Any]:
        """Return what is the same for all agents in the message that starts ranks.

        Args:
            env: variables of all ranks.
            endpoint: to which the ranks must be able to connect.
            hosts: those of all ranks.
        """
        command = self.job.command
        interpreter = ["env"] if "=" in command[0] else [sys.executable] if command[0].endswith(".py") else []
        return {
            "command": [*interpreter, *command],
            "cwd": current_directory(),
            "env": env,
            "without": OUTER.pattern,
            "store": endpoint,
            "hosts": hosts,
            "stay": False,
            "grace": self.job.grace_period,
            "heartbeat_timeout": self.heartbeat_timeout,
        }

    def listen_address(self, hosts: list[Host]) -> str:
        """Return the address on which this process listens for the ranks of some hosts."""
        own = this_host()
        if all(host.id == own.id for host in hosts):
            return LOOPBACK
        # Interfaces that are named are those of the ranks' hosts.
        return listen_address(own, hosts, self.job.environment() if own.id in {host.id for host in hosts} else {})

    # --------------------------------------------------------------------------------------- the end
    def handle_signals(self) -> None:
        """Pass signals on to the ranks."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                loop.add_signal_handler(number, self.signalled, number, True)
        # The agents would take a driver that is suspended for lost.
        signal.signal(signal.SIGTSTP, signal.SIG_IGN)

    def signalled(self, number: int, here: bool = False) -> None:
        """Handle a signal that an agent, or this process (``here``), and its ranks got; a second one here kills all."""
        if self.signal is not None or self.failure is not None:
            if here:
                self.end(signal.SIGKILL, 0.0)
            return
        self.signal = signal.Signals(number)
        say(
            f"{self.signal.name} goes to the ranks, which have {self.job.grace_period:g} s to end (--grace-period); "
            "another signal ends them at once"
        )
        self.end(number, self.job.grace_period)

    def end(self, number: int, grace: float) -> None:
        """Send a signal to all ranks; SIGKILL follows after some seconds."""
        self.ending = True
        for agent in self.agents:
            agent.send(signal=int(number), grace=grace)

    def require_files(self, hosts: int, ranks: int, *, elastic: bool = False) -> None:
        """Raise this process's limit of open files as far as the job needs.

        Raises:
            LaunchError: it is too small.
        """
        output_files = self.job.output_directory is not None
        wanted = open_files.of_driver(ranks, hosts, output_files=output_files, elastic=elastic)
        _require_files(wanted, open_files.hard_limit(), f"this process needs {wanted} open files for {ranks} ranks")
        open_files.raise_limit(wanted)

    def failed(self, text: str, status: int) -> None:
        """Note a failure, if it is the first one, and end all ranks."""
        if self.failure is not None:
            return
        self.failure = (text, status)
        if not self.ending:
            self.end(signal.SIGTERM, GRACE_S)

    async def print(self, rank: int, stream: str, text: str) -> None:
        """Print in a thread: a terminal that is stopped must not stop the heartbeats."""
        async with self.printing:
            try:
                await asyncio.get_running_loop().run_in_executor(None, self.output.write, rank, stream, text)
            except BrokenPipeError:
                self.failed(f"nobody reads this process's {stream} any more", 128 + signal.SIGPIPE)
            except OSError as error:
                self.failed(f"what rank {rank} prints cannot be written: {error}", 1)

    def last_lines(self, rank: int) -> str:
        """Return what a rank printed last, for the message of its failure."""
        last = "".join(f"\n  {line}" for line in self.output.last_lines(rank))
        return f" Its last lines:{last}" if last else " It printed nothing."

    @abstractmethod
    def rank_ended(self, agent: HostAgent, rank: int, status: int) -> None:
        """Handle the end of a rank; a negative status is that of a signal."""

    @abstractmethod
    def not_started(self, agent: HostAgent, text: str, status: int, ranks: list[int]) -> None:
        """Handle ranks that could not be started."""

    @abstractmethod
    def agent_lost(self, agent: HostAgent, why: str) -> None:
        """Handle an agent that has ended, or does not answer any more. Its ranks end by themselves."""


class _FixedDriver(Driver):
    """A job of a fixed number of ranks, which ends when one fails."""

    async def work(self) -> None:
        self.running = self.job.ranks
        self.require_files(len(self.job.placements), self.job.ranks)
        await self._start_agents()
        for agent, placement in zip(self.agents, self.job.placements):
            wanted = open_files.of_agent(placement.count)
            what = f"host {agent.name}: unidist run needs {wanted} open files there for {placement.count} ranks"
            _require_files(wanted, agent.files, what)
        self.handle_signals()
        await self._start_ranks()
        await asyncio.gather(*(agent.reading for agent in self.agents))

    async def _start_agents(self) -> None:
        for placement in self.job.placements:
            await self.start_agent(placement.name)
        deadline = time.monotonic() + self.job.start_timeout
        report = time.monotonic() + _PROGRESS_S
        waiting = {asyncio.ensure_future(agent.answered.wait()) for agent in self.agents}
        while waiting:
            left = min(deadline, report) - time.monotonic()
            _, waiting = await asyncio.wait(waiting, timeout=max(0, left), return_when=asyncio.FIRST_COMPLETED)
            silent = [agent for agent in self.agents if not agent.answered.is_set()]
            gone = [agent for agent in self.agents if agent.answered.is_set() and not agent.host]
            if gone:
                raise LaunchError("; ".join(f"host {agent.name}: {agent.why_gone()}" for agent in gone))
            named = ", ".join(agent.name for agent in silent[:8])
            if silent and time.monotonic() >= deadline:
                raise LaunchError(
                    f"no answer of host {named} within {self.job.start_timeout:g} s: does 'ssh {silent[0].name} true' "
                    "work without a password? --start-timeout gives it more time."
                )
            if silent and time.monotonic() >= report:
                report += _PROGRESS_S
                say(f"{len(self.agents) - len(silent)} of {len(self.agents)} hosts have answered; waiting for {named}")

    async def _start_ranks(self) -> None:
        open_files.raise_limit(FILES)
        job = self.job
        hosts = [agent.host for agent in self.agents if agent.host]
        address = self.listen_address(hosts)
        listening = create_server(address)
        port = listening.getsockname()[1]
        store = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        env = {**self.variables(), **store, **self._horovod(address)}
        if job.verbose:
            for placement in job.placements:
                say(f"{placement.name}: ranks {placement.first} to {placement.first + placement.count - 1}")
            say(f"the ranks meet at {address}, port {port}")
        message = self.start_message(env, (address, port), hosts)
        for node, agent in enumerate(self.agents):
            ranks = job.rank_variables(node)
            agent.send(start={**message, "ranks": ranks, "slots": len(ranks)})
        # The ranks connect while torch is being imported here; the socket keeps them until then.
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._serve_store, args=(loop, address, listening), daemon=True).start()

    def _serve_store(self, loop: asyncio.AbstractEventLoop, address: str, listening: socket.socket) -> None:
        try:
            from unidist.backends import rendezvous

            self.store = rendezvous.serve(address, listening)
        except Exception as error:
            with suppress(RuntimeError):  # the loop has ended, with the ranks
                loop.call_soon_threadsafe(self.failed, f"cannot serve torch's key-value store: {error}", 1)

    def _horovod(self, address: str) -> dict[str, str]:
        """Return what Horovod itself needs, where the ranks may use it."""
        if not self.job.horovod:
            return {}
        from unidist.network.rendezvous_server import RendezvousServer

        self.horovod = RendezvousServer(address, self.job.ranks)
        return {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self.horovod.server_port),
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
        }

    def rank_ended(self, agent: HostAgent, rank: int, status: int) -> None:
        """See ``Driver``: the first failure ends the job."""
        self.running -= 1
        if self.signal is not None:
            self.last_statuses[rank] = status
        if status == 0 or self.ending:
            return
        others = ""
        if self.running:
            ranks = "other rank" if self.running == 1 else "other ranks"
            others = f" {self.running} {ranks} had not ended yet, and got SIGTERM if still running."
        self.failed(
            f"rank {rank} on host {agent.name} {how_ended(status)}, the first to fail.{others}{self.last_lines(rank)}",
            status if status > 0 else 128 - status,
        )

    def not_started(self, agent: HostAgent, text: str, status: int, ranks: list[int]) -> None:
        """See ``Driver``."""
        self.failed(f"host {agent.name} {text}", status)

    def agent_lost(self, agent: HostAgent, why: str) -> None:
        """See ``Driver``."""
        if agent.host is not None:  # else the start says so
            self.failed(f"host {agent.name} is lost: {why}. Its ranks end by themselves.", 1)


def _require_files(wanted: int, allowed: int, what: str) -> None:
    if wanted > allowed:
        raise LaunchError(f"{what}, and {allowed} are allowed (ulimit -Hn). Raise the limit: ulimit -n {wanted}")


def current_directory() -> str:
    """Return where the ranks start, too.

    Raises:
        LaunchError: it has been deleted.
    """
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        raise LaunchError("the current directory has been deleted: start from another one") from error
