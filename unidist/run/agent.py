"""The agent of one host: it starts that host's ranks, passes on what they print, and ends them.

The driver sends the source of this module, and of those that it imports, to a Python on the host, which needs nothing
else installed. Both write one JSON object per line: the driver to the agent's standard input, the agent to its standard
output. A side that hears nothing from the other one for the heartbeat timeout takes it for lost.
"""

from __future__ import annotations

import ctypes
import glob
import json
import os
import queue
import re
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from unidist.errors import BackendError
from unidist.network import open_files
from unidist.network.addresses import Host, interface_of, listen_address, this_host

#: Seconds between two heartbeats.
BEAT_S = 1.0
#: The heartbeat timeout, in seconds, where the driver gives no other one: networks stop for seconds, and recover.
HEARTBEAT_TIMEOUT_S = 30.0
#: Seconds that an agent has to connect to the driver's store, while its heartbeats wait.
_CONNECT_S = 2.0
#: Seconds from SIGTERM to SIGKILL for the other ranks when one has failed, or the driver is lost.
GRACE_S = 3.0
_libc = ctypes.CDLL(None)
#: A line that is longer is passed on in pieces.
_LINE = 1 << 20


class _Rank:
    """A process, and what it has printed of a line that is not complete."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self.rank = rank
        self.process = process
        #: The signals that it was sent.
        self.signals: set[int] = set()
        self.partial = {"stdout": b"", "stderr": b""}
        self.ended = False


class _Agent:
    def __init__(self) -> None:
        self.ranks: list[_Rank] = []
        self.selector = selectors.DefaultSelector()
        #: The driver's messages that the main thread is to answer, and whether it may start ranks more than once.
        self.messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.begun = self.stay = False
        self.wake_reader, self.wake_writer = os.pipe()
        self.selector.register(self.wake_reader, selectors.EVENT_READ)
        self.lock = threading.Lock()
        self.finished = False
        #: Seconds from a signal to SIGKILL, and until when ranks that were sent one have time.
        self.grace = GRACE_S
        self.until = 0.0
        self.heartbeat_timeout = HEARTBEAT_TIMEOUT_S
        #: A signal that this process was sent, of which the driver does not know.
        self.received = 0
        self.guard = _start_guard()
        # srun passes on what the job is sent.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._signalled)

    def run(self) -> None:
        """Run until all ranks have ended and the driver knows, or the driver is lost."""
        threading.Thread(target=self._listen, daemon=True).start()
        self._send(host=this_host(), files=open_files.hard_limit())
        beat = time.monotonic()
        while self.stay or not self.begun or self.ranks:
            for key, _ in self.selector.select(0.1 if self.ranks else BEAT_S):
                if key.data is None:
                    os.read(self.wake_reader, 1)
                    message = self.messages.get()
                    if "start" in message:
                        self._start_ranks(message["start"])
                    else:
                        self._kill_stopped(message["kill_stopped"])
                else:
                    self._read(*key.data)
            if number := self.received:
                self.received = 0
                self._send(signal=number)
            for rank in self.ranks:
                self._look_at(rank)
            self.ranks = [rank for rank in self.ranks if not rank.ended]
            if time.monotonic() - beat > BEAT_S:
                beat = time.monotonic()
                self._send()
        self._send(done=True)

    # ------------------------------------------------------------------------------ the driver's messages
    def _listen(self) -> None:
        data = b""
        while True:
            ready, _, _ = select.select([0], [], [], self.heartbeat_timeout)
            chunk = os.read(0, 65536) if ready else b""
            if not chunk:
                self._end(signal.SIGTERM, None, max(GRACE_S, self.until - time.monotonic()))
                os._exit(1)
            *lines, data = (data + chunk).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if "start" in message:
                    self.heartbeat_timeout = message["start"]["heartbeat_timeout"]
                if "start" in message or "kill_stopped" in message:
                    self.messages.put(message)
                    os.write(self.wake_writer, b"\n")
                if "signal" in message:
                    self._end_soon(message["signal"], message.get("ranks"), message["grace"])
                if "leave" in message:
                    os._exit(0)

    def _signalled(self, number: int, frame: object) -> None:
        self.received = number
        self._end_soon(number, None, self.grace)

    def _end_soon(self, number: int, only: list[int] | None, grace: float) -> None:
        threading.Thread(target=self._end, args=(number, only, grace), daemon=True).start()

    def _end(self, number: int, only: list[int] | None, grace: float) -> None:
        """Send a signal to all ranks, or to some, and SIGKILL to those that are left after some seconds."""
        end = time.monotonic() + grace
        with self.lock:
            if only is None:
                self.finished = True  # no rank starts any more
                self.until = end
            ranks = [rank for rank in self.ranks if only is None or rank.rank in only]
        for each, until in ((number, end), (signal.SIGKILL, 0.0)):
            with self.lock:
                left = [rank for rank in ranks if not rank.ended]
                for rank in left:
                    if each not in rank.signals:  # the driver and srun may send the same one
                        _signal_group(rank.process.pid, each)
                    rank.signals.add(each)
            while left and time.monotonic() < until and not all(rank.ended or _is_over(rank) for rank in ranks):
                time.sleep(0.02)
        if not self.begun:
            os._exit(1)

    # -------------------------------------------------------------------------------------- the ranks
    def _kill_stopped(self, numbers: list[int]) -> None:
        """Kill those of some ranks that are stopped: one that is busy does not answer other ranks either."""
        for rank in self.ranks:
            if rank.rank in numbers and _is_stopped(rank.process.pid):
                self._send(warning=f"worker {rank.rank} has stopped while others wait: it is killed")
                self._end_soon(signal.SIGKILL, [rank.rank], GRACE_S)

    def _start_ranks(self, start: dict[str, Any]) -> None:
        self.begun, self.stay, self.grace = True, start["stay"], start["grace"]
        open_files.raise_limit(open_files.of_agent(len(self.ranks) + len(start["ranks"])))
        left = dict(start["ranks"])
        error, status = _why_unreachable(start["store"]), 1
        if not error:
            error, status = self._start_each(start, left)
        if error:
            self._send(error=error, status=status, ranks=list(left))

    def _start_each(self, start: dict[str, Any], left: dict[int, dict[str, str]]) -> tuple[str, int]:
        """Return why not all have been started, which are ``left`` then, and the status for it."""
        own, hosts = this_host(), [Host(id, name, tuple(found)) for id, name, found in start["hosts"]]
        env = {name: text for name, text in os.environ.items() if not re.fullmatch(start["without"], name)}
        env.update(start["env"])
        if any(host.id != own.id for host in hosts):
            try:
                interface = interface_of(listen_address(own, hosts, env))
            except BackendError as error:
                return f"has no network in common with the others: {error}", 1
            env.setdefault("GLOO_SOCKET_IFNAME", interface)
            env.setdefault("HOROVOD_GLOO_IFACE", interface)
        if not start["stay"]:  # the other ranks may come from other hosts
            env.setdefault("HOROVOD_GLOO_IFACE", "lo")
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        env.setdefault("OMP_NUM_THREADS", str(max(1, cores // start["slots"])))
        directory = start["cwd"]
        if not os.path.isdir(directory):
            directory = os.path.expanduser("~")
            self._send(warning=f"has no directory {start['cwd']}: its ranks start in {directory}")
        for rank, variables in start["ranks"]:
            if failed := self._start_rank(rank, start["command"], {**env, **variables}, directory):
                return failed
            del left[rank]
        return "", 0

    def _start_rank(self, rank: int, command: list[str], env: dict[str, str], directory: str) -> tuple[str, int] | None:
        """Return why it has not been started, and the status for it; None if it has, or if all are being ended."""
        with self.lock:
            if self.finished:
                return None
            try:
                process = subprocess.Popen(
                    command, cwd=directory, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE, start_new_session=True, preexec_fn=_die_with_parent,
                )  # fmt: skip
            except OSError as error:
                return f"cannot start {command[0]}: {error.strerror}. {_remedy(error, command, directory)}", (
                    127 if isinstance(error, FileNotFoundError) else 126
                )
            os.write(self.guard, b"+%d\n" % process.pid)
            entry = _Rank(rank, process)
            self.ranks.append(entry)
        for name, pipe in (("stdout", process.stdout), ("stderr", process.stderr)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self.selector.register(pipe, selectors.EVENT_READ, (entry, name, pipe))
        return None

    def _read(self, rank: _Rank, name: str, pipe: Any) -> None:
        """Pass on the complete lines of what can be read now."""
        data, open_still = rank.partial[name], True
        while len(data) < _LINE:
            try:
                chunk = os.read(pipe.fileno(), 65536)
            except BlockingIOError:
                break
            data += chunk
            if not chunk:
                open_still = False
                self.selector.unregister(pipe)
                pipe.close()
                break
        # "\r" ends a line, too, for progress bars; the last byte may be the first one of "\r\n".
        end = max(data.rfind(b"\n"), data.rfind(b"\r", 0, -1)) + 1
        if not open_still or len(data) >= _LINE:
            end = end if open_still and end else len(data)
        text, rank.partial[name] = data[:end], data[end:]
        if text:
            self._send(rank=rank.rank, stream=name, text=text.decode("utf-8", "surrogateescape"))

    def _look_at(self, rank: _Rank) -> None:
        """If it has ended: pass on the rest of what it printed, then its status."""
        if not _is_over(rank):
            return
        for key in list(self.selector.get_map().values()):
            if key.data is not None and key.data[0] is rank:
                self._read(*key.data)
        with self.lock:
            pid = rank.process.pid
            failed = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            if failed is not None and failed.si_status != 0:
                _signal_group(pid, signal.SIGKILL)  # what it has started, while its id is still its own
            status = rank.process.wait()
            rank.ended = True
            os.write(self.guard, b"-%d\n" % pid)
        for name, text in rank.partial.items():
            if text:
                self._send(rank=rank.rank, stream=name, text=text.decode("utf-8", "surrogateescape"))
        self._send(rank=rank.rank, status=status)

    def _send(self, **message: Any) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            try:
                data = data[os.write(1, data) :]
            except OSError:  # the driver has gone, which _listen notices
                time.sleep(BEAT_S)


def _remedy(error: OSError, command: list[str], directory: str) -> str:
    if os.path.isdir(os.path.join(directory, command[0])):
        return "It is a directory: name the script or program in it."
    if isinstance(error, FileNotFoundError):
        return "For a shell's command line, use bash -c '...'." if " " in command[0] else "Is it on PATH there?"
    if isinstance(error, PermissionError):
        return "It is not executable: start it by its interpreter, or chmod +x it."
    return ""


def _is_over(rank: _Rank) -> bool:
    """Return whether its process has ended; it is not reaped."""
    flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, rank.process.pid, flags) is not None
    return True


def _is_stopped(group: int) -> bool:
    """Return whether a process of a group is stopped, by SIGSTOP for example."""
    for path in glob.glob("/proc/[0-9]*/stat"):
        with suppress(OSError), open(path) as file:
            state, _, of = file.read().rpartition(")")[2].split()[:3]
            if state == "T" and of == str(group):
                return True
    return False


def _signal_group(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _why_unreachable(endpoint: list[Any]) -> str:
    """Return why the ranks could not connect to the driver's store; empty if they can."""
    address, port = endpoint
    try:
        socket.create_connection((address, port), timeout=_CONNECT_S).close()
    except OSError as error:
        return (
            f"cannot connect to unidist run at {address}, port {port}: {error}. Is there a firewall? "
            "--network-interfaces names the interfaces of the network that the hosts have in common."
        )
    return ""


def _die_with_parent() -> None:
    """Linux: get SIGKILL when the agent ends, even if the guard was killed with it."""
    prctl, set_parent_death_signal = getattr(_libc, "prctl", None), 1
    if prctl is not None:
        prctl(set_parent_death_signal, signal.SIGKILL)


def _start_guard() -> int:
    """Start a process that kills all ranks when this one has ended, in whatever way; returns the pipe to it."""
    read, write = os.pipe()
    if os.fork():
        os.close(read)
        return write
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.dup2(read, 0)
    os.closerange(1, 256)
    groups: set[int] = set()
    with os.fdopen(0, "rb") as lines:
        for line in lines:
            (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
    for pid in groups:
        _signal_group(pid, signal.SIGKILL)
    os._exit(0)


def main() -> None:
    """Run the agent of this host."""
    _Agent().run()
    # The driver says when all is read.
    time.sleep(HEARTBEAT_TIMEOUT_S)
    sys.exit(0)
