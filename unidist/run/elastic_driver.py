"""The driver of an elastic job: it starts and ends workers, and tells them their places, as ``elastic.py`` decides.

Each worker has a connection to it (``launch.membership``). Each generation has a key-value store of its own: when it
ends by a loss, the store is closed, so that no worker waits in it for one that is lost.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from unidist import settings
from unidist.errors import LaunchError, UnidistError
from unidist.launch.membership import PURPOSE
from unidist.network import open_files
from unidist.network.addresses import create_server
from unidist.network.connection import Accepted, Acceptor, Connection, frame, new_secret
from unidist.run.agent import GRACE_S
from unidist.run.agents import HostAgent, how_ended
from unidist.run.driver import FILES, Driver, Job
from unidist.run.elastic import Elastic, Limits, Worker
from unidist.run.hosts import HostSlots, discovered_hosts, rank_variables
from unidist.run.output import say

#: Seconds between two looks at the hosts, and after which a worker that has failed is started again at the earliest.
_TICK_S = 1.0
#: Workers that may connect at the same time.
_MOST_WORKERS = 4096
#: Seconds that a worker has for its end when it is not needed any more.
_LEAVE_S = 30.0


class Discovery:
    """Which hosts there are.

    Args:
        fixed: the hosts, unless there is a script.
        script: prints them, a host in each line.
        slots: of hosts for which the script prints none.
    """

    def __init__(self, fixed: list[HostSlots], script: str | None = None, slots: int = 1) -> None:
        self.fixed = fixed
        self.script = script
        self.slots = slots

    async def find(self) -> list[HostSlots]:
        """Return the hosts now.

        Raises:
            LaunchError: the script failed, or did not print hosts.
        """
        if self.script is None:
            return self.fixed
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_shell(self.script, stdin=asyncio.subprocess.DEVNULL, stdout=pipe)
        try:
            text, _ = await process.communicate()
        finally:
            with suppress(ProcessLookupError):
                process.kill()
        if process.returncode:
            raise LaunchError(f"--host-discovery-script {self.script} {how_ended(process.returncode)}")
        return discovered_hosts(text.decode(errors="replace"), self.slots)


def run(job: Job, limits: Limits, discovery: Discovery) -> int:
    """Start workers on the hosts that there are, and watch them to their end.

    Returns:
        0, or the status of the worker with whose failure the job ended: 128 + n for signal n.

    Raises:
        LaunchError: the discovery script failed at the start.
    """
    try:
        return asyncio.run(ElasticDriver(job, limits, discovery).run())
    except KeyboardInterrupt:  # before the workers have started
        return 128 + signal.SIGINT


class ElasticDriver(Driver):
    """An elastic job.

    Args:
        job: what to start; its placements are not used.
        limits: how many workers, and how long to wait for them.
        discovery: which hosts there are.
    """

    #: The default: the job goes on without a host.
    HEARTBEAT_TIMEOUT_S = 5.0

    def __init__(self, job: Job, limits: Limits, discovery: Discovery) -> None:
        super().__init__(job)
        self.discovery = discovery
        self.elastic = Elastic(limits)
        self.secret = new_secret()
        self.something = asyncio.Event()
        self.by_host: dict[str, asyncio.Task[HostAgent]] = {}
        #: The port on which this process listens, by address; the connections, by worker.
        self.ports: dict[str, int] = {}
        self.links: dict[int, Connection] = {}
        self.store: asyncio.Future[Any] | None = None
        self.tasks: set[asyncio.Task[Any]] = set()
        #: The last failure: what to say, and the status.
        self.last_failure: tuple[str, int] | None = None
        #: How many checks each member has made, once they are asked.
        self.checks: dict[int, int] | None = None
        self.told_of_loss = False
        #: The first worker that has ended well.
        self.finished: int | None = None

    async def work(self) -> None:
        found = await self.discovery.find()
        self.require_files(len(found), self.elastic.limits.min_np, elastic=True)
        self.elastic.set_hosts(found)
        self.handle_signals()
        # Before an agent waits for heartbeats: loading torch's libraries holds the GIL, on a busy machine for long.
        # Its error is not raised here: the store's, of the same import, is reported.
        await asyncio.wait({_in_thread(_import_torch)})
        looking = asyncio.ensure_future(self._look_for_hosts())
        try:
            while not self.ending and (self.elastic.workers or not self.elastic.finishing):
                self._decide(time.monotonic())
                waiting = asyncio.ensure_future(self.something.wait())
                await asyncio.wait({waiting}, timeout=_TICK_S)
                waiting.cancel()
                self.something.clear()
        finally:
            looking.cancel()
        end = time.monotonic() + (self.job.grace_period if self.signal else GRACE_S) + GRACE_S
        while self.elastic.workers and time.monotonic() < end:
            await asyncio.sleep(0.05)

    async def _look_for_hosts(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                self.elastic.set_hosts(await self.discovery.find())
            except LaunchError as error:
                say(f"{error}; the hosts stay as they were")

    def _decide(self, now: float) -> None:
        """Do what follows from what has happened."""
        elastic = self.elastic
        for worker in elastic.dismiss():
            self._dismiss(worker)
        if why := elastic.why_over(now):
            text, status = self.last_failure or ("", 1)
            self.failed(f"{why}. The last failure: {text}" if text else f"{why}.", status)
            return
        for worker in elastic.start(now):
            self._in_background(self._start_worker(worker))
        for worker in elastic.hung(now):
            say(f"worker {worker.number} on host {worker.place.host} does not come while the others wait: it is killed")
            self._signal(worker, signal.SIGKILL)
        if elastic.changes(now) and self.checks is None:
            self.checks = {}
            self._tell_members(hold=True)
        if (members := elastic.form(now)) is not None:
            self._begin(members)

    # ----------------------------------------------------------------------------------- generations
    def _begin(self, members: list[Worker]) -> None:
        open_files.raise_limit(FILES)
        self._close_store()
        self.checks, self.told_of_loss = None, False
        hosts = [host for worker in members if (host := self.by_host[worker.place.host].result().host) is not None]
        address = self.listen_address(hosts)
        listening = create_server(address)
        port = listening.getsockname()[1]
        self.store = _in_thread(partial(_serve_store, address, listening))
        self.store.add_done_callback(self._store_served)
        shared = {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": str(self.elastic.generation - 1),
        }
        numbers = [worker.number for worker in members]
        for worker, env in zip(members, rank_variables([worker.place for worker in members])):
            place = {"generation": self.elastic.generation, "members": numbers, "env": {**env, **shared}}
            self._tell(worker.number, place=place)
        count = Counter(worker.place.host for worker in members)
        where = ", ".join(f"{host}:{slots}" for host, slots in count.items())
        say(f"generation {self.elastic.generation}: {len(members)} workers on {where}")

    def _store_served(self, task: asyncio.Future[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failed(f"cannot serve torch's key-value store: {error}", 1)

    def _close_store(self) -> None:
        store, self.store = self.store, None
        if store is not None:
            self._in_background(_drop(store))

    def _lose(self, why: str) -> None:
        """End the calls of the members that wait: the generation is over."""
        if not self.told_of_loss:
            self.told_of_loss = True
            self._tell_members(lost=why)
            self._close_store()

    # --------------------------------------------------------------------------------------- workers
    async def _start_worker(self, worker: Worker) -> None:
        name = worker.place.host
        if name not in self.by_host:
            self.by_host[name] = asyncio.ensure_future(self._new_agent(name))
        starting = self.by_host[name]
        try:
            agent = await asyncio.shield(starting)
            assert agent.host is not None
            endpoint = self._listen(self.listen_address([agent.host]))
        except (UnidistError, OSError) as error:
            if self.by_host.get(name) is starting:
                del self.by_host[name]
            self._worker_ended(worker.number, 1, f"cannot be started on host {name}: {error}")
            return
        slots = max(other.place.local_rank for other in self.elastic.workers.values() if other.place.host == name) + 1
        # Its place until init(), and the one that it gets there if nobody fails before.
        news = [other for other in self.elastic.workers.values() if other not in self.elastic.members]
        everyone = [*self.elastic.members, *news]
        place = rank_variables([other.place for other in everyone])[everyone.index(worker)]
        env = {
            **place,
            "HOROVOD_ELASTIC": "1",
            settings.ELASTIC: f"{endpoint[0]} {endpoint[1]} {worker.number} {self.secret.hex()}",
        }
        message = self.start_message(self.variables(), endpoint, [agent.host])
        agent.send(start={**message, "ranks": [(worker.number, env)], "slots": slots, "stay": True})
        if self.job.verbose:
            say(f"worker {worker.number} is started on host {name}")

    def _listen(self, address: str) -> tuple[str, int]:
        """Return where workers connect that reach this host at an address."""
        if address not in self.ports:
            server = create_server(address)
            self.ports[address] = server.getsockname()[1]
            acceptor = Acceptor(server, self.secret, PURPOSE, _MOST_WORKERS)
            _in_thread(partial(self._accept, acceptor, asyncio.get_running_loop()))
        return address, self.ports[address]

    async def _new_agent(self, name: str) -> HostAgent:
        agent = await self.start_agent(name)
        await asyncio.wait({asyncio.ensure_future(agent.answered.wait())}, timeout=self.job.start_timeout)
        if not agent.answered.is_set():
            raise LaunchError(
                f"no answer of host {name} within {self.job.start_timeout:g} s: {self.job.start_timeout_option} gives "
                "slow hosts more time"
            )
        if agent.host is None:
            raise LaunchError(agent.why_gone())
        return agent

    def rank_ended(self, agent: HostAgent, rank: int, status: int) -> None:
        """See ``Driver``."""
        if self.signal is not None:
            self.last_statuses[rank] = status
        self._worker_ended(rank, status, f"{how_ended(status)}.{self.last_lines(rank)}" if status else "has ended.")

    def not_started(self, agent: HostAgent, text: str, status: int, ranks: list[int]) -> None:
        """See ``Driver``."""
        for number in ranks:
            self._worker_ended(number, status, f"was not started: {text}")

    def agent_lost(self, agent: HostAgent, why: str) -> None:
        """See ``Driver``."""
        task = self.by_host.get(agent.name)
        if agent.host is None or task is None or not task.done() or self.ending:
            return  # who waits for its answer says so
        del self.by_host[agent.name]
        for worker in list(self.elastic.workers.values()):
            if worker.place.host == agent.name:
                self._worker_ended(worker.number, 1, f"is lost with its host: {why}")

    def _worker_ended(self, number: int, status: int, how: str) -> None:
        worker = self.elastic.workers.get(number)
        if worker is None:
            return
        rank = self.elastic.members.index(worker) if worker in self.elastic.members else None
        now, host = time.monotonic(), worker.place.host
        was_blacklisted = self.elastic.is_blacklisted(host, now)
        failed = self.elastic.end(number, status, now)
        if self.elastic.finishing and self.finished is None:
            self.finished = number
            if self.checks is not None:  # it will not say how many it has made: nobody waits for a last one
                self.checks = None
                self._tell_members(last_check=sys.maxsize)
        self._disconnect(number)
        if failed and not self.ending:
            who = f"worker {number}" + f", rank {rank} of generation {self.elastic.generation}," * (rank is not None)
            text = f"{who} on host {host} {how}"
            self.last_failure = (text.split(" Its last lines")[0], status if status > 0 else 128 - status or 1)
            if self.elastic.finishing:
                self.failed(f"{text} The others have ended well, or are ending.", self.last_failure[1])
            else:
                say(text)
            if self.elastic.is_blacklisted(host, now) and not was_blacklisted:
                say(f"host {host} is blacklisted: no worker is started there{self.elastic.how_long(host, now)}")
            if rank is not None:
                self._lose(self.last_failure[0])
        self.something.set()

    def _signal(self, worker: Worker, number: int) -> None:
        self._tell_agent(worker, signal=int(number), ranks=[worker.number], grace=GRACE_S)

    def _tell_agent(self, worker: Worker, **message: Any) -> None:
        task = self.by_host.get(worker.place.host)
        if task is not None and task.done():
            task.result().send(**message)

    def _dismiss(self, worker: Worker) -> None:
        well = worker.leaving or worker not in self.elastic.members
        why = (
            f"worker {self.finished} has ended with status 0, so the training is over: there is no next generation for "
            "this one."
        )
        self._tell(worker.number, dismissed=why, well=well)
        asyncio.get_running_loop().call_later(_LEAVE_S, self._signal, worker, signal.SIGTERM)

    # ----------------------------------------------------------------------------------- connections
    def _accept(self, acceptor: Acceptor, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(RuntimeError):  # the loop has ended
            while True:
                try:
                    for worker in acceptor.wait(None):
                        loop.call_soon_threadsafe(self._connected, worker)
                except OSError:  # too many open files
                    time.sleep(_TICK_S)

    def _connected(self, worker: Accepted) -> None:
        number = int(worker.content["worker"])
        self._disconnect(number)
        self.links[number] = worker.connection
        worker.answer({})
        asyncio.get_running_loop().add_reader(worker.connection.fileno(), self._receive, number, worker.connection)

    def _receive(self, number: int, link: Connection) -> None:
        try:
            for data in link.receive():
                self._take(number, json.loads(data))
        except (EOFError, OSError):
            self._disconnect(number)

    def _disconnect(self, number: int) -> None:
        if (link := self.links.pop(number, None)) is not None:
            asyncio.get_running_loop().remove_reader(link.fileno())
            link.close()

    def _take(self, number: int, message: dict[str, Any]) -> None:
        if "ask" in message:
            worker = self.elastic.workers.get(number)
            failed = message["failed"]
            is_member = worker is not None and worker in self.elastic.members
            if is_member and message["ask"] == self.elastic.generation and failed:
                self._lose(f"rank {self.elastic.members.index(worker)}: {failed}")  # type: ignore[arg-type]
            self.elastic.ask(number, time.monotonic(), failed=bool(failed))
        elif message["generation"] != self.elastic.generation:
            return
        elif "silent" in message:
            for member in [each for each in self.elastic.members if each.number in message["silent"]]:
                self._tell_agent(member, kill_stopped=[member.number])
        elif self.checks is not None:
            self.checks[number] = message["checks"]
            members = {worker.number for worker in self.elastic.members}
            if members <= self.checks.keys():
                self._tell_members(last_check=max(self.checks[number] for number in members) + 1)
        self.something.set()

    def _tell_members(self, **message: Any) -> None:
        for worker in self.elastic.members:
            self._tell(worker.number, generation=self.elastic.generation, **message)

    def _tell(self, number: int, **message: Any) -> None:
        if (link := self.links.get(number)) is not None:
            try:
                link.flush()
                link.send(frame(json.dumps(message).encode()))
            except OSError:
                self._disconnect(number)

    def _in_background(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


def _import_torch() -> None:
    from unidist.backends import rendezvous  # noqa: F401


def _serve_store(address: str, listening: socket.socket) -> Any:
    from unidist.backends import rendezvous

    return rendezvous.serve(address, listening)


async def _drop(store: asyncio.Future[Any]) -> None:
    """Close a store. Not in the loop's thread: it joins one of the store's."""
    with suppress(Exception):
        held = [await store]
        del store
        await _in_thread(held.clear)


def _in_thread(call: Callable[[], Any]) -> asyncio.Future[Any]:
    """Return the result of a call in a thread, for whose end nobody waits at the end of the process."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def run() -> None:
        try:
            finish = partial(done.set_result, call())
        except Exception as error:
            finish = partial(done.set_exception, error)
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(finish)

    threading.Thread(target=run, daemon=True).start()
    return done
