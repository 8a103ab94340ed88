"""The driver: starts an agent on each host, and watches the ranks to their end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from unidist.backends.addresses import LOOPBACK, Host, create_server, listen_address, this_host
from unidist.errors import LaunchError
from unidist.launchers.world import OUTER
from unidist.run import transport
from unidist.run.agent import BEAT_S, SILENCE_S
from unidist.run.hosts import Placement
from unidist.run.output import Output, say
from unidist.topology import EXPORTED, RUN_ID

#: Variables that other hosts do not get: of the shell, of this host, of its GPUs and of its ssh session.
_OF_THIS_HOST = re.compile(r"BASH_FUNC_.*|OLDPWD|PWD|_|SHLVL|HOSTNAME|SSH_.*|.*CUDA_VISIBLE_DEVICES")
#: Seconds between two messages about the hosts that have not answered.
_PROGRESS_S = 5.0
#: The largest message of an agent: lines are passed on in pieces of 1 MiB.
_MESSAGE = 1 << 24


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
    #: Network interfaces that the ranks use; empty: those through which the hosts reach each other.
    interfaces: Sequence[str] = ()
    output_directory: str | None = None
    timestamps: bool = False
    verbose: bool = False

    @property
    def ranks(self) -> int:
        """The size of the world."""
        return sum(placement.count for placement in self.placements)

    def environment(self) -> dict[str, str]:
        """The variables of all ranks, beside those of their host and rank."""
        env = {name: text for name, text in self.env.items() if not OUTER.fullmatch(name)}
        env = {name: text for name, text in env.items() if not _OF_THIS_HOST.fullmatch(name)}
        if self.interfaces:
            names = ",".join(self.interfaces)
            env.update(GLOO_SOCKET_IFNAME=names, HOROVOD_GLOO_IFACE=self.interfaces[0], NCCL_SOCKET_IFNAME=names)
        return {"PYTHONUNBUFFERED": "1", **env, **self.variables}

    def rank_variables(self, node: int) -> list[tuple[int, dict[str, str]]]:
        """The ranks of a host, each with its own variables: torchrun's and horovodrun's."""
        placement = self.placements[node]
        found = []
        for local in range(placement.count):
            rank = placement.first + local
            # Among the hosts that have this local rank.
            across = [other for other, each in enumerate(self.placements) if each.count > local]
            values = {
                "RANK": rank,
                "WORLD_SIZE": self.ranks,
                "LOCAL_RANK": local,
                "LOCAL_WORLD_SIZE": placement.count,
                "GROUP_RANK": node,
                "GROUP_WORLD_SIZE": len(self.placements),
                "HOROVOD_HOSTNAME": placement.name,
                "HOROVOD_RANK": rank,
                "HOROVOD_SIZE": self.ranks,
                "HOROVOD_LOCAL_RANK": local,
                "HOROVOD_LOCAL_SIZE": placement.count,
                "HOROVOD_CROSS_RANK": across.index(node),
                "HOROVOD_CROSS_SIZE": len(across),
            }
            found.append((rank, {name: str(value) for name, value in values.items()}))
        return found


def run(job: Job) -> int:
    """Start the job's ranks, print what they print, and wait for their end.

    Returns:
        0, or the status of the first rank that failed: 128 + n for signal n.

    Raises:
        LaunchError: a host cannot be reached, or the command cannot be started on one.
    """
    try:
        return asyncio.run(_Driver(job).run())
    except KeyboardInterrupt:  # before the ranks have started
        return 128 + signal.SIGINT


def describe(job: Job) -> str:
    """What would be started, for ``--dry-run``."""
    lines = []
    for node, placement in enumerate(job.placements):
        command = transport.command(placement.name, job.env, job.ssh)
        shown = "this process" if command[0] == sys.executable else shlex.join(command[:-1])
        lines.append(f"{placement.name}, started by {shown}:")
        for rank, variables in job.rank_variables(node):
            values = " ".join(f"{name}={shlex.quote(text)}" for name, text in {**job.variables, **variables}.items())
            lines.append(f"  rank {rank}: {values} {shlex.join(job.command)}")
    return "\n".join(lines)


class _Driver:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.output = Output(job.ranks, job.output_directory, timestamps=job.timestamps)
        self.printing = asyncio.Lock()
        self.agents: list[_Agent] = []
        #: The first failure: what to say of it, and the status.
        self.failure: tuple[str, int] | None = None
        self.ending = False
        self.running = job.ranks

    async def run(self) -> int:
        try:
            await self._start_agents()
            self._handle_signals()
            await self._start_ranks()
            await asyncio.gather(*(agent.reading for agent in self.agents))
        except BaseException:
            self.end(signal.SIGTERM)
            raise
        finally:
            await asyncio.gather(*(agent.close() for agent in self.agents))
            self.output.close()
        if self.failure is None:
            return 0
        text, status = self.failure
        say(text)
        return status

    # ------------------------------------------------------------------------------------- the start
    async def _start_agents(self) -> None:
        source = transport.program()
        for placement in self.job.placements:
            command = transport.command(placement.name, self.job.env, self.job.ssh)
            try:
                process = await asyncio.create_subprocess_exec(
                    *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                    stderr=None if command[0] == sys.executable else asyncio.subprocess.PIPE,
                    start_new_session=True, limit=_MESSAGE,
                )  # fmt: skip
            except OSError as error:
                raise LaunchError(f"host {placement.name}: cannot start {command[0]}: {error.strerror}") from error
            self.agents.append(_Agent(placement.name, process, self, source))
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
        job = self.job
        hosts = [agent.host for agent in self.agents if agent.host]
        own = this_host()
        others = any(host.id != own.id for host in hosts)
        # Interfaces that are named are those of the ranks' hosts.
        env = job.environment() if own.id in {host.id for host in hosts} else {}
        address = listen_address(own, hosts, env) if others else LOOPBACK
        try:
            directory = os.getcwd()
        except FileNotFoundError as error:
            raise LaunchError("the current directory has been deleted: start from another one") from error
        listening = create_server(address)
        port = listening.getsockname()[1]
        variables = {
            **job.environment(),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            RUN_ID: f"{EXPORTED}unidist-run",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            # To torch this says: the launcher serves the store, so rank 0 connects to it.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            **self._horovod(address),
        }
        if job.verbose:
            for placement in job.placements:
                say(f"{placement.name}: ranks {placement.first} to {placement.first + placement.count - 1}")
            say(f"the ranks meet at {address}, port {port}")
        for node, agent in enumerate(self.agents):
            message = {
                "command": list(job.command) if "=" not in job.command[0] else ["env", *job.command],
                "cwd": directory,
                "env": variables,
                "without": OUTER.pattern,
                "ranks": job.rank_variables(node),
                "store": [address, port],
                "hosts": hosts,
            }
            agent.send(start=message)
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
        """What Horovod itself needs, where it is installed."""
        if find_spec("horovod") is None:
            return {}
        from unidist.run.rendezvous_server import RendezvousServer

        self.horovod = RendezvousServer(address)
        return {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self.horovod.server_port),
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
        }

    # --------------------------------------------------------------------------------------- the end
    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                loop.add_signal_handler(number, self._interrupted, number)
        # The agents would take a driver that is suspended for lost.
        signal.signal(signal.SIGTSTP, signal.SIG_IGN)

    def _interrupted(self, number: int) -> None:
        self.end(signal.SIGKILL if self.ending else number)
        self.failed(f"ended by {signal.Signals(number).name}", 128 + number)

    def end(self, number: int) -> None:
        """Send a signal to all ranks; SIGKILL follows."""
        self.ending = True
        for agent in self.agents:
            agent.send(signal=int(number))

    def failed(self, text: str, status: int) -> None:
        """Note a failure, if it is the first one, and end all ranks."""
        if self.failure is not None:
            return
        self.failure = (text, status)
        if not self.ending:
            self.end(signal.SIGTERM)

    async def print(self, rank: int, stream: str, text: str) -> None:
        """Print in a thread: a terminal that is stopped must not stop the heartbeats."""
        async with self.printing:
            try:
                await asyncio.get_running_loop().run_in_executor(None, self.output.write, rank, stream, text)
            except BrokenPipeError:
                self.failed(f"nobody reads this process's {stream} any more", 128 + signal.SIGPIPE)
            except OSError as error:
                self.failed(f"what rank {rank} prints cannot be written: {error}", 1)


class _Agent:
    """The driver's side of an agent."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, driver: _Driver, source: bytes) -> None:
        self.name = name
        self.process = process
        self.driver = driver
        self.host: Host | None = None
        #: It has sent its first message, or is gone.
        self.answered = asyncio.Event()
        self.errors: list[str] = []
        self.done = False
        self._stdin().write(source)
        self.reading = asyncio.ensure_future(self._read())
        self.others = [asyncio.ensure_future(self._beat())]
        if process.stderr is not None:
            self.others.append(asyncio.ensure_future(self._read_errors(process.stderr)))

    def send(self, **message: Any) -> None:
        """Queue a message; one to a process that has ended is dropped."""
        if not self._stdin().is_closing():
            self._stdin().write(json.dumps(message).encode() + b"\n")

    def why_gone(self) -> str:
        """Why there is no agent."""
        said = " ".join(self.errors[-3:]).strip()
        return said or f"ssh or Python ended there with status {self.process.returncode}"

    async def close(self) -> None:
        """End it. Its ranks end with it."""
        self.send(leave=True)
        for task in (self.reading, *self.others):
            task.cancel()
        with suppress(ConnectionError, BrokenPipeError):
            self._stdin().close()
        await asyncio.wait({asyncio.ensure_future(self.process.wait())}, timeout=SILENCE_S)
        if self.process.returncode is None:
            self.process.kill()

    # ---------------------------------------------------------------------------------------------
    def _stdin(self) -> asyncio.StreamWriter:
        assert self.process.stdin is not None
        return self.process.stdin

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            if self._stdin().transport.get_write_buffer_size() == 0:
                self.send()

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while not self.done:
            reading = asyncio.ensure_future(self.process.stdout.readline())
            await asyncio.wait({reading}, timeout=SILENCE_S if self.host else None)
            if not reading.done():
                reading.cancel()
                self._lost(f"no message for {SILENCE_S:g} s")
                return
            if not (line := reading.result()):
                await self.process.wait()
                self._lost(self.why_gone())
                return
            try:
                message = json.loads(line)
            except ValueError:  # what a login shell prints
                message = None
            if isinstance(message, dict):
                await self._take(message)
            else:
                self._say(line.decode(errors="replace").rstrip())

    async def _take(self, message: dict[str, Any]) -> None:
        if "host" in message:
            id, name, addresses = message["host"]
            self.host = Host(id, name, tuple(addresses))
            self.answered.set()
        elif "stream" in message:
            await self.driver.print(message["rank"], message["stream"], message["text"])
        elif "status" in message and "rank" in message:
            self._ended(message["rank"], message["status"])
        elif "error" in message:
            self.driver.failed(f"host {self.name} {message['error']}", message.get("status", 1))
        elif "warning" in message:
            self._say(message["warning"])
        self.done = message.get("done", False)

    def _ended(self, rank: int, status: int) -> None:
        self.driver.running -= 1
        if status == 0 or self.driver.ending:
            return
        how = f"was ended by {_signal_name(-status)}" if status < 0 else f"ended with status {status}"
        last = "".join(f"\n  {line}" for line in self.driver.output.last_lines(rank))
        others = (
            f" Ranks that were still running, and were ended: {self.driver.running}." if self.driver.running else ""
        )
        printed = f" Its last lines:{last}" if last else " It printed nothing."
        self.driver.failed(
            f"rank {rank} on host {self.name} {how}, the first to fail.{others}{printed}",
            status if status > 0 else 128 - status,
        )

    def _lost(self, why: str) -> None:
        self.answered.set()
        if self.host is not None and not self.done:
            self.driver.failed(f"host {self.name} is lost: {why}. Its ranks end by themselves.", 1)
        with suppress(ProcessLookupError):
            self.process.kill()

    async def _read_errors(self, stream: asyncio.StreamReader) -> None:
        while line := await stream.readline():
            self.errors.append(line.decode(errors="replace").rstrip())
            if self.host:
                self._say(self.errors[-1])

    def _say(self, text: str) -> None:
        say(f"host {self.name}: {text}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
