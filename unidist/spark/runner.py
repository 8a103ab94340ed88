"""``run``: a function in the tasks of one barrier stage, and what the driver hears of them meanwhile."""

from __future__ import annotations

import functools
import json
import logging
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from contextlib import closing, suppress
from operator import index
from typing import Any, NamedTuple, TextIO

import cloudpickle
from pyspark import SparkContext

from unidist import settings
from unidist.errors import UnidistError
from unidist.launch.topology import EXPORTED, RUN_ID
from unidist.network.addresses import INTERFACES, LOOPBACK, Host, create_server, interface_names
from unidist.network.connection import Accepted, Acceptor, Connection, new_secret
from unidist.run.hosts import rank_order, worker_variables
from unidist.spark.barrier import PIECE_OF_COMMIT, PURPOSE, SparkJob, own_path, run_task
from unidist.spark.task import GPUS

_log = logging.getLogger("unidist")
#: Seconds for executors to register, and for tasks to start when the slots are there, where the caller says nothing.
_REGISTER_S, _START_S = 10.0, 600.0
#: Times that an elastic training may fail one after the other without a commit.
_IN_VAIN = 3
#: Seconds after the first report of a failure in which one that caused it may arrive.
_FIRST_S = 1.0


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: Iterable[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` in ``num_proc`` processes on the executors, each a rank of one world.

    On the driver only. The processes are started by the tasks of one barrier stage, so all of them run or none. In them
    ``unidist.init()`` joins the world, and ``import horovod.torch`` finds the drop-in. Ranks of one host follow each
    other. Where Spark assigns GPUs to tasks, a rank sees those of its host's ranks, and its own is the one of its local
    rank. When a rank fails, the others are ended at once, and Spark does not repeat the stage.

    Args:
        fn: what each rank runs; taken by cloudpickle, as are its arguments and what it returns.
        args, kwargs: what it is called with.
        num_proc: number of processes; default ``spark.default.parallelism``.
        start_timeout: seconds for the executors to register, and then for the tasks to start. Default:
            HOROVOD_SPARK_START_TIMEOUT, or 10 (0 in local mode), and 600.
        use_mpi, use_gloo, extra_mpi_args: Horovod's; of no effect.
        env: variables for the processes, beside those of the executors.
        stdout, stderr: files or streams of the driver for what the ranks print; default ``sys.stdout``, ``sys.stderr``.
        verbose: 0: what the ranks print is shown only where ``stdout`` or ``stderr`` is given.
        nics: network interfaces by which the ranks connect; default: found by the routing table.
        prefix_output_with_timestamp: put the time before each line.
        executable: Python of the executors; default: that of their tasks.

    Returns:
        What each rank returned, in rank order.

    Raises:
        ValueError: ``num_proc`` is no number from 1 up.
        UnidistError: no SparkContext, too few slots, ``fn`` or an argument does not pickle, the tasks did not start in
            time, or a rank failed: the message has the rank that failed first, and its traceback.
    """
    context = _context()
    count: int = context.defaultParallelism if num_proc is None else num_proc
    if not hasattr(count, "__index__") or index(count) < 1:
        raise ValueError(f"unidist.spark.run(num_proc={num_proc!r}) is not a number of processes from 1 up.")
    if start_timeout is None:
        start_timeout = settings.horovod_seconds(os.environ, "HOROVOD_SPARK_START_TIMEOUT")
    payload = _pickled(fn, args, kwargs or {})
    if (slots := _slots(context, count, _register_s(context, start_timeout))) < count:
        raise UnidistError(
            f"unidist.spark.run(num_proc={count}) needs {count} slots at once, and the cluster ({context.master}) "
            f"has {slots}: pass num_proc={slots}, or give the application more executors or cores. If executors "
            "are still to come, pass start_timeout=SECONDS."
        )
    write = _writer(stdout, stderr, verbose, prefix_output_with_timestamp)
    ranks = _Ranks(_driver_address(context), count, write, start_timeout)
    job = SparkJob(ranks.address, ranks.secret, payload, _variables(env, nics), executable, own_path())
    return _collect(context, count, job, ranks)


def run_elastic(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: Iterable[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` as ``run`` does, and again when a rank has failed, on the slots that there are then.

    On the driver only. The function trains with ``unidist.elastic`` or ``horovod.torch.elastic``, and goes on from the
    last commit. Rank 0 sends each commit to the driver, which holds the last one. Executors that come later are used
    from the next failure on.

    Args:
        num_proc: number of processes with which it begins, if so many slots come in time. Default:
            ``spark.default.parallelism``.
        min_num_proc: the least number of processes. Default: ``num_proc``.
        max_num_proc: the largest. Default: ``num_proc``.
        elastic_timeout: seconds to wait for ``min_num_proc`` slots after a failure. Default: HOROVOD_ELASTIC_TIMEOUT,
            or 600.
        reset_limit: how often it may begin again. Default: any number.
        min_np, max_np: the old names of ``min_num_proc`` and ``max_num_proc``.
        fn, args, kwargs, start_timeout, env, stdout, stderr, verbose, nics, prefix_output_with_timestamp: as for
            ``run``.

    Returns:
        What each rank returned, in rank order.

    Raises:
        ValueError: more processes at least than at most.
        UnidistError: as ``run``: too few slots; ``reset_limit`` is reached; or it failed three times without a commit
            in between.
    """
    context = _context()
    wanted = context.defaultParallelism if num_proc is None else num_proc
    min_num_proc = min_np if min_num_proc is None else min_num_proc
    max_num_proc = max_np if max_num_proc is None else max_num_proc
    most = max(wanted, min_num_proc or 0) if max_num_proc is None else max_num_proc
    least = min(wanted, most) if min_num_proc is None else min_num_proc
    if wanted < 1 or not 1 <= least <= most:
        raise ValueError(f"run_elastic: from {least} to {most} processes is not a range from 1 up.")
    if start_timeout is None:
        start_timeout = settings.horovod_seconds(os.environ, "HOROVOD_SPARK_START_TIMEOUT")
    if elastic_timeout is None:
        elastic_timeout = settings.horovod_seconds(os.environ, "HOROVOD_ELASTIC_TIMEOUT") or 600.0
    payload = _pickled(fn, args, kwargs or {})
    write = _writer(stdout, stderr, verbose, prefix_output_with_timestamp)
    commit, resets, in_vain = b"", 0, 0
    wait_s, option, wanted = _register_s(context, start_timeout), "start_timeout", max(least, min(wanted, most))
    while True:
        if (count := min(_slots(context, wanted, wait_s), most)) < least:
            raise UnidistError(
                f"unidist.spark.run_elastic(min_num_proc={least}) needs {least} slots at once, and the cluster "
                f"({context.master}) had {count} for {wait_s:.0f} s: give the application more executors or cores, or "
                f"pass {option}=SECONDS."
            )
        ranks = _Ranks(_driver_address(context), count, write, start_timeout)
        job = SparkJob(ranks.address, ranks.secret, payload, _variables(env, nics), None, own_path(), commit)
        try:
            return _collect(context, count, job, ranks)
        except _RankFailed as error:
            resets, in_vain = resets + 1, 0 if ranks.commit else in_vain + 1
            commit = ranks.commit or commit
            if in_vain == _IN_VAIN or (reset_limit is not None and resets > reset_limit):
                raise
            _log.warning("unidist.spark.run_elastic begins again, from the last commit: %s", error)
        wait_s, option, wanted = elastic_timeout, "elastic_timeout", least


class _RankFailed(UnidistError):
    """A rank, its task or its executor has failed."""


def _context() -> SparkContext:
    context: SparkContext | None = SparkContext._active_spark_context
    if context is None:
        raise UnidistError(
            "unidist.spark.run found no SparkContext in this process: call it on the driver, after "
            "SparkSession.builder.getOrCreate(); Spark Connect has none."
        )
    return context


def _collect(context: SparkContext, count: int, job: SparkJob, ranks: _Ranks) -> list[Any]:
    """Return the stage's results, in rank order; cancel it when a rank has failed or an exception interrupts."""
    tag = f"unidist-{uuid.uuid4()}"
    properties = context._jsc.sc().getLocalProperties().clone()  # the caller's: a pool, a job group

    # In a thread: a thread's connection to the JVM can cancel nothing while it waits for a result.
    def collect() -> list[tuple[int, bytes]]:
        context._jsc.sc().setLocalProperties(properties)
        context.addJobTag(tag)
        tasks = context.parallelize(range(count), count).barrier()
        found: list[tuple[int, bytes]] = tasks.mapPartitions(functools.partial(run_task, job)).collect()
        return found

    def cancel() -> None:
        while not stage.done():  # Spark forgets to cancel a job that is not submitted yet
            with suppress(Exception):  # the driver's JVM has ended, as when results are larger than its memory
                context.cancelJobsWithTag(tag)
            futures.wait([stage], timeout=0.1)

    try:
        with futures.ThreadPoolExecutor(1, "unidist-spark-job") as executor:
            stage = executor.submit(collect)
            ranks.start(cancel)
            with closing(ranks):
                return [cloudpickle.loads(result) for _, result in sorted(stage.result())]
    except Exception:
        if ranks.failure:
            raise (_RankFailed if ranks.reports else UnidistError)(ranks.failure) from None
        raise


def _pickled(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    parts = {f"the function {getattr(fn, '__qualname__', fn)}": fn}
    parts |= {f"argument {index} of {type(each).__name__}": each for index, each in enumerate(args)}
    parts |= {f"argument {name}= of {type(each).__name__}": each for name, each in kwargs.items()}
    for what, part in parts.items():
        try:
            cloudpickle.dumps(part)
        except Exception as error:
            raise UnidistError(
                f"unidist.spark.run cannot send {what} to the executors: {error}. Make in the function what does not "
                "pickle: locks, open files, SparkContext, models on a GPU."
            ) from error
    data: bytes = cloudpickle.dumps((fn, tuple(args), dict(kwargs)))
    return data


def _register_s(context: SparkContext, start_timeout: float | None) -> float:
    """Seconds for executors to register."""
    return 0.0 if context._jsc.sc().isLocal() else _REGISTER_S if start_timeout is None else start_timeout


def _slots(context: SparkContext, least: int, seconds: float) -> int:
    """Return the slots of the cluster, when there are so many or the time is over."""
    scala = context._jsc.sc()
    end = time.monotonic() + seconds
    while True:
        slots = int(scala.maxNumConcurrentTasks(scala.resourceProfileManager().defaultResourceProfile()))
        if slots >= least or time.monotonic() >= end:
            return slots
        time.sleep(0.1)


def _variables(env: Mapping[str, str] | None, nics: Iterable[str] | None) -> dict[str, str]:
    interfaces = ",".join(interface_names(nics))
    named = {name: interfaces if name != INTERFACES[2] else f"={interfaces}" for name in INTERFACES if interfaces}
    return {**named, **{name: str(value) for name, value in (env or {}).items()}}


def _driver_address(context: SparkContext) -> str:
    if str(context.master).startswith("local"):
        return LOOPBACK
    name = context.getConf().get("spark.driver.host") or socket.gethostname()
    return socket.gethostbyname(name)


def _writer(
    stdout: TextIO | None, stderr: TextIO | None, verbose: int, with_time: bool
) -> Callable[[int, str, str], None]:
    streams = {"stdout": stdout or (verbose and sys.stdout), "stderr": stderr or (verbose and sys.stderr)}

    def write(rank: int, stream: str, text: str) -> None:
        file = streams[stream]
        if file and not isinstance(file, int):
            stamp = time.strftime("%a %b %d %H:%M:%S %Y") if with_time else ""
            file.write("".join(f"{stamp}[{rank}]<{stream}>:{line}" for line in text.splitlines(keepends=True)))
            file.flush()

    return write


class _Report(NamedTuple):
    """Of a rank that failed."""

    rank: int
    host: str
    #: Whether its process ended without a word.
    vanished: bool
    text: str


class _Ranks:
    """The connections of the tasks: what the ranks print, and which one failed first.

    Args:
        address: of this host, where it listens.
        count: number of ranks.
        write: what to do with lines of a rank.
        start_timeout: seconds for the tasks to start. Default: 600.
    """

    def __init__(
        self, address: str, count: int, write: Callable[[int, str, str], None], start_timeout: float | None
    ) -> None:
        self.secret = new_secret()
        #: The last commit of an elastic training, if there was one.
        self.commit = b""
        self._pieces: list[bytes] = []
        #: Of the rank that failed first.
        self.failure = ""
        from unidist.backends import rendezvous  # it imports torch, and executors import this module

        self._store = rendezvous.open_on_free_port(address)
        self._server = create_server(address)
        self.address = self._server.getsockname()[:2]
        self._acceptor = Acceptor(self._server, self.secret, PURPOSE, count)
        self._count, self._write = count, write
        self._start_s = _START_S if start_timeout is None else start_timeout
        #: The open connections, each with its rank and host.
        self._open: dict[Connection, tuple[int, str]] = {}
        #: By their numbers, until all are there.
        self._tasks: dict[int, Accepted] = {}
        #: Of ranks that have failed, in the order in which that was noticed.
        self.reports: list[_Report] = []
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._listen, name="unidist-spark", daemon=True)

    def start(self, cancel: Callable[[], None]) -> None:
        """Listen, in a thread; ``cancel`` ends the Spark job, if it has not ended."""
        self._cancel = cancel
        self._thread.start()

    def close(self) -> None:
        """Cancel the job and close all connections, upon which the tasks end their ranks."""
        with suppress(OSError):
            self._wake.send(b"\n")
        self._thread.join()

    def _listen(self) -> None:
        try:
            self._follow()
        except Exception as error:  # of a stream of the user's, say
            self.failure = f"what the ranks print cannot be written on the driver: {error!r}"
        self._cancel()
        for connection in self._open:
            connection.close()
        self._acceptor.close()
        for each in (self._server, self._wake, self._woken):
            each.close()

    def _follow(self) -> None:
        """Until ``close``, or until it is clear which rank failed first."""
        is_over = threading.Event()
        self._acceptor.call_when_readable(self._woken.fileno(), is_over.set)
        end = time.monotonic() + self._start_s
        while not is_over.is_set() and time.monotonic() < end:
            for accepted in self._acceptor.wait(min(end - time.monotonic(), 1.0)):
                self._accept(accepted)
            if self.reports:
                end = min(end, time.monotonic() + _FIRST_S)
            elif len(self._tasks) == self._count:
                end = float("inf")
        if not is_over.is_set() or self.reports:
            self.failure = self._first_failure()

    def _accept(self, accepted: Accepted) -> None:
        connection, number = accepted.connection, accepted.content["task"]
        self._tasks[number] = accepted
        self._open[connection] = (number, accepted.content["host"][1])
        self._acceptor.call_when_readable(connection.fileno(), functools.partial(self._receive, connection))
        if len(self._tasks) == self._count:
            self._start_ranks()

    def _start_ranks(self) -> None:
        tasks = [self._tasks[number] for number in range(self._count)]
        tasks = [tasks[number] for number in rank_order([Host(*each.content["host"]).id for each in tasks])]
        hosts = [Host(*each.content["host"]) for each in tasks]
        store = (self.address[0], self._store.port)
        ranks = worker_variables([host.id for host in hosts], [each.content["gpus"] for each in tasks], store)
        for rank, (accepted, host, variables) in enumerate(zip(tasks, hosts, ranks)):
            self._open[accepted.connection] = (rank, host.name)
            # Variables of a launcher around the executor do not count.
            own = {GPUS: str(len(accepted.content["gpus"])), settings.LAUNCHER: "", RUN_ID: f"{EXPORTED}spark"}
            accepted.answer(variables | own)

    def _receive(self, connection: Connection) -> None:
        rank, host = self._open[connection]
        try:
            messages = connection.receive()
        except (EOFError, OSError):
            self._forget(connection)
            if rank not in [each.rank for each in self.reports]:
                text = " its task, or the executor, ended without a word: see the executor's log."
                self.reports.append(_Report(rank, host, True, text))
            return
        for data in messages:
            if data.startswith(PIECE_OF_COMMIT):
                self._pieces.append(data[len(PIECE_OF_COMMIT) :])
                continue
            message = json.loads(data)
            if "committed" in message:
                self.commit, self._pieces = b"".join(self._pieces), []
            elif "text" in message:
                self._write(rank, message["stream"], message["text"])
            elif "failed" in message:
                self.reports.append(_Report(rank, host, message["vanished"], message["failed"]))
            else:  # it is done
                self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        self._acceptor.selector.unregister(connection.fileno())
        del self._open[connection]
        connection.close()

    def _first_failure(self) -> str:
        if not self.reports:
            return (
                f"Spark has not started the {self._count} tasks within {self._start_s:.0f} s: other jobs may have the "
                "slots; wait for them, or pass start_timeout=SECONDS."
            )
        # The others notice within moments that a process is gone, and may be faster to say so.
        first = next((each for each in self.reports if each.vanished), self.reports[0])
        return f"rank {first.rank} of {self._count} (host {first.host}) failed first:{first.text}"
