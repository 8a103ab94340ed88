"""The watch of one rank: it answers what the rank does, and asks the others when something does not go on."""

from __future__ import annotations

import atexit
import faulthandler
import functools
import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

from unidist.diagnosis.operations import OperationRecord
from unidist.diagnosis.watch import jobs, locations
from unidist.diagnosis.watch.rank_state import RankState
from unidist.diagnosis.watch.report import explanation, report
from unidist.diagnosis.watch.server import Peer, Server, ask, listen
from unidist.diagnosis.watch.signals import ReportSignal
from unidist.errors import BackendError
from unidist.launch import membership
from unidist.network.processes import Process

if TYPE_CHECKING:
    from unidist.backends.base import Backend

_log = logging.getLogger("unidist")
#: Time for the answers of all ranks, and for that of one: an error waits for them.
_ALL_S, _ONE_S = 0.9, 0.4
#: How long what the others have answered explains further errors of one failure.
_REMEMBERED_S = 2.0
#: Ranks to which this one reports how it has ended, until one listens.
_TRIED = 3
#: Operations of a rank that ends of which it tells.
_TOLD = 8
#: Characters of an error.
_LONGEST_ERROR = 300

Source = Callable[[], Sequence[OperationRecord]]
#: What is said of a process that is not there any more, and of those that will not answer.
_ENDED = "has ended"
_STOPPED, _UNREACHABLE = "is stopped", "does not answer"
_open_watches: WeakSet[Watch] = WeakSet()


class _Failure(NamedTuple):
    error: str
    #: The line of the user's code.
    place: str
    #: Whether it is one of a collective call, so that another rank may have failed first.
    follows: bool
    #: Time of ``time.monotonic()``.
    at: float


class Watch:
    """Of one rank, from ``init`` to ``shutdown``. Collective.

    Args:
        backend: the running backend, of several ranks.
        stall: seconds that an operation may be pending until all ranks' states are reported; 0: for ever.
    """

    #: What a rank that cannot listen sends as its host and port.
    NO_ADDRESS = ("", 0)

    def __init__(self, backend: Backend, stall: float) -> None:
        self._backend = backend
        self._rank = backend.topology.rank
        self._stall = stall
        #: What makes calls; its line is this rank's.
        self._caller = threading.get_ident()
        locations.find_libraries()
        #: Further operations, of a layer above the backend.
        self.sources: list[Source] = []
        #: The error with which this rank has failed.
        self._failure: _Failure | None = None
        #: How it leaves the world without one.
        self._ending = ""
        self._last_state: RankState | None = None
        #: How ranks have ended, by their own report.
        self._exits: dict[int, dict[str, Any]] = {}
        self._explained: tuple[float, list[RankState]] = (-math.inf, [])
        self._reported = -math.inf
        self._secret = backend.secret
        self._peers, listening = self._exchange_addresses()
        #: Operations that began before are those of the start.
        self._since = time.monotonic()
        self._signal: ReportSignal | None = None
        self._file = None
        self._server: Server | None = None
        if listening is not None:
            self._server = Server(listening, self._secret, self._answer, self._check, stall or math.inf)
            with suppress(OSError):  # too many open files
                self._signal = ReportSignal.open()
            if self._signal is not None:
                self._server.call_when_readable(self._signal.pipe, self._signalled)
            self._file = jobs.write(self._rank, backend.name, self._secret, self._peers)
            self._server.start()
        backend.watch = self
        _open_watches.add(self)
        atexit.register(self.announce_end)  # before the libraries' own

    def announce_end(self) -> None:
        """Tell the others, which may go on, that this rank leaves without an exception. A second call has no effect."""
        if self._failure is None and not self._ending and os.getpid() == self._peers[self._rank].process.pid:
            state = self.own_state()
            last = state.last_done
            self._ending = f"{_ENDED} without an exception" + (f", after {last}" if last else "")
            with suppress(Exception):  # as in a process that has no more open files
                self._tell({"silence": self._ending, "operations": state.to_row()["operations"][-_TOLD:]})
            self._last_state = replace(state, silence=self._ending, place="")

    def close(self) -> None:
        """End it."""
        atexit.unregister(self.announce_end)
        self._backend.watch = None
        _open_watches.discard(self)
        if self._file is not None:
            with suppress(OSError):
                self._file.unlink()
        if self._server is not None:
            self._server.close()
        if self._backend.lock_timeout is not None:
            faulthandler.cancel_dump_traceback_later()
        if self._signal is not None:
            self._signal.close()

    # -------------------------------------------------------------------------------- what ranks do
    def own_state(self, stacks: bool = False) -> RankState:
        """Return what this rank does."""
        if self._last_state is not None:  # the library forgets its operations
            return self._last_state
        operations: list[OperationRecord] = []
        for source in (self._backend.operations, *self.sources):
            with suppress(Exception):  # of a library in its last moments
                operations += [each for each in source() if time.monotonic() - each.seconds >= self._since]
        process = self._peers[self._rank].process
        newest = min((each.seconds for each in operations), default=math.inf)
        failure = self._failure
        if failure is not None and failure.follows and newest < time.monotonic() - failure.at:
            failure = None  # the error was handled, and calls go on
        error, place, follows, _ = failure or _Failure("", "", False, 0.0)
        return RankState(
            self._rank,
            process.host.name,
            process.pid,
            silence=self._ending,
            place=place or locations.location_of(self._caller),
            operations=tuple(operations),
            error=error,
            follows=follows,
            stacks=locations.stacks() if stacks else "",
        )

    def states(self) -> list[RankState]:
        """Return what all ranks do. Takes 0.9 s if one does not answer."""
        own = self.own_state()
        return states(self._peers, self._secret, own=own, exits=self._exits)

    def explain(self, call: str, error: BaseException, operation: OperationRecord | None = None) -> tuple[str, str]:
        """Return what has failed, and which rank is missing; empty: that is not known.

        Args:
            call: what the user has called.
            error: of the library.
            operation: what has failed. Default: the oldest that is pending, else the newest.
        """
        own = self.own_state()
        self._failure = _Failure(f"{call} failed: {_one_line(error)}", own.place, True, time.monotonic())
        if time.monotonic() - self._explained[0] > _REMEMBERED_S:
            self._explained = time.monotonic(), self.states()
        return explanation(call, own, self._explained[1], operation)

    # -------------------------------------------------------------------------------- reports
    def report_soon(self, title: str) -> None:
        """Print what all ranks do to stderr, or the log. Any thread; returns at once."""
        threading.Thread(target=self._print, args=[title], name="unidist-report", daemon=True).start()

    def _print(self, title: str) -> list[RankState]:
        found = self.states()
        _say(report(f"{title} All {len(self._peers)} ranks ({self._backend.name}):", found))
        return found

    def _check(self) -> float:
        """Look for an operation that is pending for too long; seconds until that is possible again."""
        self._end_without_lock()
        pending = (each for each in self._backend.operations() if not each.done)
        longest = max(pending, key=lambda each: each.seconds, default=None)
        if longest is None:
            return self._stall
        if longest.seconds < self._stall:
            return self._stall - longest.seconds
        title = f"unidist: rank {self._rank} has waited {longest.seconds:.0f} s in {longest}."
        threading.Thread(target=self._ask_for_report, args=[title], name="unidist-report", daemon=True).start()
        return self._stall

    def _end_without_lock(self) -> None:
        """End the process, with all threads' lines, if no thread of Python can run until the timeout, nor this one."""
        if self._backend.lock_timeout is not None:
            faulthandler.dump_traceback_later(self._backend.lock_timeout + 2 * self._stall, exit=True, file=2)

    def _ask_for_report(self, title: str) -> None:
        """Let the lowest rank that answers report: one for all that wait."""
        if self._rank == 0 or self._is_answered(0, title):
            if self._rank == 0:
                self._report_once(title)
            return
        lowest = min(state.rank for state in self.states() if not state.silence)
        if lowest == self._rank:
            self._report_once(title)
        else:
            self._is_answered(lowest, title)

    def _is_answered(self, rank: int, title: str) -> bool:
        answer = ask({rank: self._peers[rank]}, self._secret, {"what": "report", "title": title}, _ONE_S)[rank]
        return not isinstance(answer, Exception)

    def _report_once(self, title: str) -> None:
        now = time.monotonic()
        if now - self._reported > 0.9 * self._stall:
            self._reported = now
            threading.Thread(target=self._report_stall, args=[title], name="unidist-report", daemon=True).start()

    def _report_stall(self, title: str) -> None:
        """Print what all ranks do; an elastic run ends those that are stopped."""
        silent = [state.rank for state in self._print(title) if state.silence.startswith((_STOPPED, _UNREACHABLE))]
        member = membership.current()
        if member is not None and silent:
            member.report_silent(silent)

    def _signalled(self) -> None:
        assert self._signal is not None
        self._signal.clear()
        self.report_soon(f"unidist: rank {self._rank} has got SIGUSR1.")

    # -------------------------------------------------------------------------------- the server
    def _answer(self, request: Mapping[str, Any]) -> object:
        if request["what"] == "report":
            self._report_once(request["title"])
            return {}
        if request["what"] == "exit":
            self._exits[request["rank"]] = request["exit"]
            return {}
        return {"state": self.own_state(request["stacks"]).to_row(), "exits": self._exits}

    def _exchange_addresses(self) -> tuple[dict[int, Peer], Any]:
        """Return where all ranks' servers are, and the socket on which this one listens. Collective."""
        listening, address, processes = None, self.NO_ADDRESS, self._backend.processes
        try:
            listening = listen(processes[self._rank], processes)
            address = listening.getsockname()[:2]
        except (BackendError, OSError) as error:
            _log.warning("rank %d cannot tell the other ranks what it does: %s", self._rank, error)
        found = [json.loads(text) for text in self._backend.exchange(json.dumps(address))]
        return {rank: Peer(process, *found[rank]) for rank, process in enumerate(processes)}, listening

    def close_in_child(self) -> None:
        """Close the watch in a forked child, which is no rank."""
        self._backend.watch = None
        if self._signal is not None:
            self._signal.close()
        if self._server is not None:
            self._server.close_sockets()
        _open_watches.discard(self)

    # -------------------------------------------------------------------------------- the end
    def failing(self, error: BaseException, trace: TracebackType | None) -> Callable[[], None]:
        """Tell the others of an uncaught error, before it is shown; call the result when it is."""
        report = self._fail(error, trace)
        tell = functools.partial(self._tell, report)
        if report["follows"]:  # nobody waits for it
            return tell
        tell()
        return lambda: None

    def _fail(self, error: BaseException, trace: TracebackType | None) -> dict[str, Any]:
        """Remember an uncaught error; what to tell the others of it."""
        follows = self._backend.follows(error, trace)
        failure = self._failure
        if failure is None or not follows:  # else the error of the call says more
            failure = _Failure(
                f"{type(error).__name__}: {_one_line(error)}", locations.location_in(trace), follows, 0.0
            )
        self._failure = failure._replace(at=math.inf)
        return {"silence": _ENDED, "error": f"{failure.error}, at {failure.place}", "follows": follows}

    def _tell(self, report: dict[str, Any]) -> None:
        """Tell the lowest other rank that listens how this one ends: soon nobody can ask it."""
        others = [(rank, peer) for rank, peer in self._peers.items() if rank != self._rank]
        request = {"what": "exit", "rank": self._rank, "exit": report}
        for rank, peer in others[:_TRIED]:
            if not isinstance(ask({rank: peer}, self._secret, request, _ONE_S)[rank], Exception):
                return


def running_watch() -> Watch | None:
    """Return the one of this process."""
    return next(iter(_open_watches), None)


def states(
    peers: Mapping[int, Peer],
    secret: bytes,
    *,
    own: RankState | None = None,
    exits: Mapping[int, Mapping[str, Any]] | None = None,
    stacks: bool = False,
    seconds: float = _ALL_S,
) -> list[RankState]:
    """Return what all ranks of a job do, in rank order.

    Args:
        peers: where all ranks' servers are.
        secret: the job's.
        own: the state of the rank that asks.
        exits: how ranks have ended, as far as that rank knows.
        stacks: whether to ask for Python stacks.
        seconds: how long to wait for the answers.
    """
    others = {rank: peer for rank, peer in peers.items() if own is None or rank != own.rank}
    answers = ask(others, secret, {"what": "state", "stacks": stacks}, seconds)
    known = dict(exits or {})
    for answer in answers.values():
        if not isinstance(answer, Exception):
            known |= {int(rank): report for rank, report in answer["exits"].items()}
    found = {} if own is None else {own.rank: own}
    for rank, answer in answers.items():
        if not isinstance(answer, Exception):
            found[rank] = RankState.from_row(answer["state"])
            continue
        process = peers[rank].process
        silence = _silence(answer, process)
        exit_of = known.get(rank, {}) if silence == _ENDED else {}
        row = {"rank": rank, "host": process.host.name, "pid": process.pid, "silence": silence, "operations": []}
        found[rank] = RankState.from_row({**row, **exit_of})
    return [found[rank] for rank in sorted(found)]


def _silence(error: Exception, process: Process) -> str:
    """Return why a rank has not answered."""
    state = process.state()
    if isinstance(error, ConnectionError) or state in ("X", "Z"):
        return _ENDED
    if state in ("T", "t"):
        return f"{_STOPPED} (by SIGSTOP, or a debugger)"
    if state:
        return "runs, and does not answer: a call of C++ keeps Python's lock, or the host is overloaded"
    return "does not answer (it has stopped, or its host cannot be reached)" + f": {error}" * bool(str(error))


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]} ..."


def _say(text: str) -> None:
    """Log a report, and write it to stderr if the log does not go there."""
    logger: logging.Logger | None = _log
    handlers: list[logging.Handler] = []
    while logger is not None:
        handlers += logger.handlers
        logger = logger.parent if logger.propagate else None
    if handlers:
        _log.warning("%s", text)
    terminals = (sys.stderr, sys.stdout, sys.__stderr__, sys.__stdout__)
    if not any(getattr(handler, "stream", None) in terminals for handler in handlers):
        os.write(2, f"{text}\n".encode())


def _close_in_child() -> None:
    for watch in list(_open_watches):
        watch.close_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
