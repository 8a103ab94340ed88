"""The driver's side of the agents: one for each host."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from unidist.network.addresses import Host
from unidist.run.agent import BEAT_S, GRACE_S
from unidist.run.output import say

if TYPE_CHECKING:
    from unidist.run.driver import Driver

#: The largest message of an agent: lines are passed on in pieces of 1 MiB.
MESSAGE = 1 << 24
#: Seconds that an agent's process has to end.
_CLOSE_S = 5.0


class HostAgent:
    """The driver's side of an agent.

    Args:
        name: of the host.
        process: by which the agent is reached.
        listener: receives what the agent reports.
        source: the agent's program.
        heartbeat_timeout: seconds without any message after which the host is lost.
    """

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        listener: Driver,
        source: bytes,
        heartbeat_timeout: float,
    ) -> None:
        self.name = name
        self.process = process
        self.listener = listener
        self.heartbeat_timeout = heartbeat_timeout
        self.host: Host | None = None
        #: How many files a process there may open.
        self.files = 0
        #: It has sent its first message, or is gone.
        self.answered = asyncio.Event()
        self.errors: list[str] = []
        self.done = False
        #: Where it is lost: until when its ranks have ended, by ``time.monotonic()``.
        self.ranks_end = 0.0
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
        """Return why there is no agent."""
        said = " ".join(self.errors[-3:]).strip()
        return said or f"ssh or Python ended there with status {self.process.returncode}"

    async def close(self) -> None:
        """End it. Its ranks end with it."""
        self.send(leave=True)
        for task in (self.reading, *self.others):
            task.cancel()
        with suppress(ConnectionError, BrokenPipeError):
            self._stdin().close()
        await asyncio.wait({asyncio.ensure_future(self.process.wait())}, timeout=_CLOSE_S)
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
            await asyncio.wait({reading}, timeout=self.heartbeat_timeout if self.host else None)
            if not reading.done():  # this process may have been held up, by an import: what has come is read first
                await asyncio.wait({reading}, timeout=BEAT_S)
            if not reading.done():
                reading.cancel()
                self._lost(f"no message for {self.heartbeat_timeout:g} s")
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
            self.files = message["files"]
            self.answered.set()
        elif "stream" in message:
            await self.listener.print(message["rank"], message["stream"], message["text"])
        elif "status" in message and "rank" in message:
            self.listener.rank_ended(self, message["rank"], message["status"])
        elif "error" in message:
            self.listener.not_started(self, message["error"], message["status"], message["ranks"])
        elif "signal" in message:
            self.listener.signalled(message["signal"])
        elif "warning" in message:
            self._say(message["warning"])
        self.done = message.get("done", False)

    def _lost(self, why: str) -> None:
        self.answered.set()
        if not self.done:
            self.done = True
            # It hears nothing from here for as long, at most a heartbeat later.
            self.ranks_end = time.monotonic() + BEAT_S + GRACE_S if self.host else 0.0
            self.listener.agent_lost(self, why)
        with suppress(ProcessLookupError):
            self.process.kill()

    async def _read_errors(self, stream: asyncio.StreamReader) -> None:
        while line := await stream.readline():
            self.errors.append(line.decode(errors="replace").rstrip())
            if self.host:
                self._say(self.errors[-1])

    def _say(self, text: str) -> None:
        say(f"host {self.name}: {text}")


def how_ended(status: int) -> str:
    """Return what to say of a rank that has failed: ``ended with status 1``, or by which signal."""
    if status > 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
