"""A task of the barrier stage: it starts the process of one rank, and tells the driver what becomes of it."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

from pyspark import BarrierTaskContext, SparkFiles

from unidist.errors import UnidistError
from unidist.horovod_names import directory
from unidist.network.addresses import this_host
from unidist.network.connection import Connection, connect, frame

#: See ``connection.Hello``; its content: the number of the task, its host and its GPUs. Answered by variables.
PURPOSE = "spark"
_CONNECT_S = 30.0
#: Before each message in either direction: what it is, and its number of bytes.
HEAD = struct.Struct("<BQ")
#: To the task: how the function ended. In both directions: a commit of an elastic training.
FAILED, RETURNED, COMMIT = range(3)
#: To the rank: the function; in an elastic job the last commit comes before it.
FUNCTION = 3
#: Seconds in which Spark, told by the driver, ends the task; a task that raises fills the logs.
_CANCEL_S = 1.0
#: Bytes of a commit in one message, which begins so; others are JSON. Seconds until the rest of one is sent.
_PIECE = 1 << 24
PIECE_OF_COMMIT = b"\0"
_PAUSE_S = 0.005
#: Characters of a rank's errors in the message that it has ended.
_SHOWN = 1500


class SparkJob(NamedTuple):
    """What the tasks need of the driver."""

    #: Where the driver listens, and the job's secret.
    driver: tuple[str, int]
    secret: bytes
    #: The function and its arguments, pickled.
    payload: bytes
    env: dict[str, str]
    executable: str | None
    #: Where the driver's program finds its modules.
    path: list[str]
    #: The last commit of an elastic training, empty at its begin; None: it is none.
    commit: bytes | None = None


def own_path() -> list[str]:
    """Return where this process finds modules, beside those that are installed."""
    standard = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    found = [os.path.abspath(entry) for entry in sys.path]
    return [
        entry
        for entry in found
        if not entry.startswith(standard) and not {"site-packages", "dist-packages"} & set(Path(entry).parts)
    ]


def run_task(job: SparkJob, partition: object) -> Iterator[tuple[int, bytes]]:
    """Run a rank; yields it with what its function returned, pickled."""
    task = BarrierTaskContext.get()
    gpu = task.resources().get("gpu")
    try:
        content = {"task": task.partitionId(), "host": this_host(), "gpus": gpu.addresses if gpu else []}
        driver, hello = connect(job.driver, job.secret, PURPOSE, content, _CONNECT_S)
    except OSError as error:
        raise UnidistError(
            f"a task on host {socket.gethostname()} cannot connect to the driver at {job.driver[0]}, port "
            f"{job.driver[1]}: {error}. Set spark.driver.host to an address of the driver that executors reach; a "
            "firewall between them must let its ports through."
        ) from error
    try:
        variables = hello.answer(driver.receive_some()[0])  # when all tasks have connected
        result = _run_rank(job, _environment(job, variables), driver)
    finally:
        driver.close(_CONNECT_S)
    yield int(variables["RANK"]), result


def _environment(job: SparkJob, variables: Mapping[str, str]) -> dict[str, str]:
    files = [entry for entry in sys.path if entry.startswith(SparkFiles.getRootDirectory())]
    path = [job.env.get("PYTHONPATH", ""), directory(), *files, os.environ.get("PYTHONPATH", ""), *job.path]
    return {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        **variables,
        **job.env,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }


def _run_rank(job: SparkJob, env: Mapping[str, str], driver: Connection) -> bytes:
    """Start the process, pass on what it prints, and return what its function returned, pickled."""
    outcome, write = os.pipe()
    command = [job.executable or sys.executable, "-m", "unidist.hvd", "-m", "unidist.spark.rank", str(write)]
    try:
        process = subprocess.Popen(
            command, env=dict(env), pass_fds=[write], start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
    except OSError as error:
        os.close(outcome)
        with suppress(EOFError, OSError):
            _fail(driver, f" {command[0]} cannot be started: {error.strerror}.", vanished=False)
        time.sleep(_CANCEL_S)
        raise
    finally:
        os.close(write)
    assert process.stdin and process.stdout and process.stderr
    try:
        with suppress(BrokenPipeError):  # it has ended, and is asked why below
            if job.commit is not None:  # the job is elastic
                commit = job.commit if env["RANK"] == "0" else b""
                process.stdin.write(HEAD.pack(COMMIT, len(commit)) + commit)
            process.stdin.write(HEAD.pack(FUNCTION, len(job.payload)) + job.payload)
            process.stdin.flush()
        return _Rank(process, outcome, driver).follow()
    except (EOFError, OSError):  # the driver has closed the connection
        _kill(process)
        time.sleep(_CANCEL_S)
        raise
    finally:
        _kill(process)
        process.wait()
        os.close(outcome)
        for pipe in (process.stdin, process.stdout, process.stderr):
            with suppress(OSError):
                pipe.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the process and those that it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


class _Rank:
    """A process that runs.

    Args:
        process: it.
        outcome: the pipe to which it writes what its function returned.
        driver: the connection to the driver.
    """

    def __init__(self, process: subprocess.Popen[bytes], outcome: int, driver: Connection) -> None:
        assert process.stdout and process.stderr
        self._process, self._driver = process, driver
        self._python = str(cast(list[str], process.args)[0])
        self._names = {process.stdout.fileno(): "stdout", process.stderr.fileno(): "stderr", outcome: ""}
        self._data = {pipe: bytearray() for pipe in self._names}
        self._outcome = self._data[outcome]
        self._last_lines = ""  # of its errors

    def follow(self) -> bytes:
        """Follow it until it has ended."""
        with selectors.DefaultSelector() as selector:
            for each in (*self._names, self._driver.fileno()):
                selector.register(each, selectors.EVENT_READ)
            while len(selector.get_map()) > 1:
                for key, _ in selector.select(0.1):
                    if key.fd not in self._names:
                        self._driver.receive()  # nothing, but its end
                    elif not self._read(key.fd):
                        selector.unregister(key.fd)
                self._driver.flush()
                if self._process.poll() is not None:
                    _kill(self._process)  # what it has left holds the pipes
        status = self._process.wait()
        if status or not self._is_complete():
            last = f" Its last lines:\n\n{self._last_lines.rstrip()}" if self._last_lines else ""
            _fail(self._driver, f" its process of {self._python} {_ended(status)}.{last}", vanished=True)
        self._send(done=True)
        return bytes(self._outcome[HEAD.size :])

    def _read(self, pipe: int) -> bool:
        """Read what is there; False at the end."""
        chunk = os.read(pipe, 1 << 18)
        data = self._data[pipe]
        data += chunk
        if name := self._names[pipe]:
            # Whole lines, or steps of a progress bar.
            end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1 if chunk else len(data)
            if end:
                text = data[:end].decode(errors="replace")
                self._send(stream=name, text=text)
                if name == "stderr":
                    self._last_lines = (self._last_lines + text)[-_SHOWN:]
                del data[:end]
            return bool(chunk)
        while self._is_complete() and (kind := data[0]) != RETURNED:
            end = HEAD.size + HEAD.unpack_from(data)[1]
            if kind == FAILED:
                _fail(self._driver, f"\n\n{data[HEAD.size : end].decode()}", vanished=False)
            self._send_commit(bytes(data[HEAD.size : end]))
            del data[:end]
        return bool(chunk)

    def _is_complete(self) -> bool:
        data = self._outcome
        return len(data) >= HEAD.size and len(data) >= HEAD.size + HEAD.unpack_from(data)[1]

    def _send_commit(self, commit: bytes) -> None:
        """In pieces, as fast as the driver reads; the rank goes on meanwhile."""
        for start in range(0, len(commit), _PIECE):
            self._driver.send(frame(PIECE_OF_COMMIT + commit[start : start + _PIECE]))
            while self._driver.has_unsent:
                self._driver.flush()
                time.sleep(_PAUSE_S)
        self._send(committed=True)

    def _send(self, **message: Any) -> None:
        _send(self._driver, **message)


def _send(driver: Connection, **message: Any) -> None:
    driver.send(frame(json.dumps(message).encode()))


def _fail(driver: Connection, why: str, *, vanished: bool) -> NoReturn:
    """Tell the driver, which ends the job and closes the connection."""
    _send(driver, failed=why, vanished=vanished)
    while True:
        driver.flush()
        driver.receive_some(_CONNECT_S)


def _ended(status: int) -> str:
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
