"""What ranks say of each other, on made-up answers; the server, the files of jobs, the line of the user's code."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from unidist.backends.base import Backend, ComparedCall
from unidist.cli import main
from unidist.diagnosis.operations import JOIN, OperationRecord, RecentOperations, format_ranks
from unidist.diagnosis.watch import flight_recorder, jobs, locations
from unidist.diagnosis.watch.rank_state import RankState
from unidist.diagnosis.watch.report import findings, report
from unidist.diagnosis.watch.server import Peer, Server, ask
from unidist.diagnosis.watch.signals import ReportSignal
from unidist.diagnosis.watch.watch import states
from unidist.network.connection import frame, new_secret
from unidist.network.processes import Process, start_time

pytestmark = pytest.mark.unit


def operation(number: int, name: str = "all_reduce", *, done: bool = False, **more: object) -> OperationRecord:
    return OperationRecord(
        **{"name": name, "number": number, "dtype": "float32", "shape": (4,), "seconds": 60.0, "done": done, **more}  # type: ignore[arg-type]
    )


def state(rank: int, *operations: OperationRecord, **more: object) -> RankState:
    return RankState(rank, f"host{rank // 32}", 100 + rank, operations=operations, **{"place": "train.py:41", **more})  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------ reports
def test_ranks_that_do_the_same_are_one_line() -> None:
    waiting = [state(rank, operation(16, done=True), operation(17)) for rank in range(64) if rank != 40]
    late = state(40, operation(16, "broadcast", done=True), place="evaluate.py:12 (evaluate)")
    lines = report("title", sorted([*waiting, late], key=lambda each: each.rank)).splitlines()
    assert lines == [
        "title",
        "  ranks 0 to 39, 41 to 63 (hosts host0, host1): at train.py:41 in all_reduce of float32 [4], operation 17, "
        "for 60 s; done before: all_reduce of float32 [4], operation 16",
        "  rank 40 (host host1, pid 140): at evaluate.py:12 (evaluate); its last operation was broadcast of float32 "
        "[4], operation 16",
        # operation 16 was another call on rank 40
        lines[3],
    ]
    assert "mismatch in operation 16" in lines[3].lower()


def test_a_late_rank_is_named_with_its_line() -> None:
    late = state(1, operation(16, done=True), place="data.py:7 (__getitem__)")
    found = findings([state(0, operation(16, done=True), operation(17)), late, state(2, operation(17))])
    assert found == [
        "rank 1 (host host0, pid 101) is at data.py:7 (__getitem__), after all_reduce of float32 [4], operation 16, "
        "and has not come to all_reduce of float32 [4], operation 17"
    ]
    # One that is in another operation, and several.
    found = findings([state(0, operation(17)), *(state(rank, operation(16)) for rank in (1, 2))])
    assert found[0].startswith(
        "ranks 1, 2 (host host0, pids 101, 102) are at train.py:41 in all_reduce of float32 [4], op"
    )
    assert "and have not come to" in found[0]


def test_nobody_is_late_for_an_operation_that_has_just_begun_or_of_other_ranks() -> None:
    assert not findings([state(0, operation(17, seconds=0.2)), state(1, operation(16, done=True))])
    pair = {"ranks": (0, 1), "group": "pair"}
    assert not findings([state(0, operation(1, **pair)), state(1, operation(1, **pair)), state(2)])
    assert "rank 1 " in findings([state(0, operation(1, **pair)), state(1), state(2)])[0]
    # A message between two ranks is no operation of the others.
    assert not findings([state(0, operation(1, "recv", is_message=True)), state(1)])


def test_operations_without_numbers_are_matched_by_name() -> None:
    waiting = state(0, operation(0, "allreduce.loss", executed=7))
    assert "has not come to allreduce.loss" in findings([waiting, state(1, operation(0, "allreduce.other"))])[0]
    # The same name comes in each step.
    assert not findings([waiting, state(1, operation(0, "allreduce.loss", done=True, executed=8))])
    last = operation(0, "allreduce.loss", done=True, executed=7, seconds=59.0)  # asked later than rank 0
    assert "and has not come to" in findings([waiting, state(1, last)])[0]
    # An operation that fails here where others have done it.
    assert not findings([state(0, last).waiting_in(last), state(1, last)])
    assert not findings([waiting, state(1, operation(0, JOIN))])


def test_an_operation_to_which_all_ranks_have_come() -> None:
    def conclusion(*states: RankState) -> str:
        last = report("title", states).splitlines()[-1]
        return last if "=>" in last else ""

    network = "  => All ranks are in it, and it does not complete: look at the network between them."
    assert conclusion(state(0, operation(17)), state(1, operation(17))) == network
    assert not conclusion(state(0, operation(17, seconds=0.2)), state(1, operation(17, seconds=0.2)))
    # A rank that has answered later than the others, or whose last message to them is lost.
    completed = (
        "  => All ranks have come to it, and rank 1 (host host0, pid 101) has completed it: if the others do not, "
    )
    waiting = state(0, operation(17))
    assert conclusion(waiting, state(1, operation(17, done=True))).startswith(completed)
    next_one = operation(18, "broadcast", seconds=0.2)
    assert conclusion(waiting, state(1, operation(17, done=True), next_one)).startswith(completed)
    named = state(0, operation(0, "allreduce.loss", executed=7))
    done = operation(0, "allreduce.loss", done=True, executed=8)
    assert conclusion(named, state(1, done)).startswith(completed)
    # It takes part in what the others do.
    assert conclusion(named, state(1, operation(0, JOIN, seconds=0.0))) == network
    # One that has failed by another rank, and one that is not of the group.
    failed = state(1, error="CollectiveError: lost", follows=True)
    assert conclusion(waiting, failed) == network
    pair = {"ranks": (0, 1), "group": "pair"}
    assert conclusion(state(0, operation(1, **pair)), state(1, operation(1, **pair)), state(2)) == network


@pytest.mark.parametrize(
    ("mine", "other", "differ"),
    [
        (operation(5), operation(5, "broadcast"), True),
        (operation(5), operation(5, shape=(8,)), True),
        (operation(5), operation(5, dtype="int64"), True),
        (operation(5), operation(5, done=True), False),
        # A comparison of calls which has failed, and one that is pending.
        (operation(5, dtype="int64", shape=(2,), done=True), operation(5, shape=(7,)), False),
        # Gathered tensors may have different sizes.
        (operation(5, "all_gather"), operation(5, "all_gather", shape=(8,)), False),
        (operation(5, group="a"), operation(5, "broadcast", group="b"), False),
        (operation(5, "send", is_message=True), operation(5, "recv", is_message=True), False),
    ],
)
def test_mismatches(mine: OperationRecord, other: OperationRecord, differ: bool) -> None:
    found = findings([state(0, mine), state(1, other, place="train.py:50")])
    assert any(each.startswith("mismatch in operation 5: ") for each in found) == differ, found


def test_a_mismatch_shows_both_calls_and_lines() -> None:
    swapped = state(1, operation(5, "broadcast", done=True), operation(6), place="train.py:50")
    (found,) = findings([state(0, operation(5)), swapped])
    assert found == (
        "mismatch in operation 5: rank 0 (host host0, pid 100) called all_reduce of float32 [4] at train.py:41; rank 1 "
        "(host host0, pid 101) called broadcast of float32 [4], now at train.py:50"
    )


def test_who_fails_by_another_rank_is_not_blamed() -> None:
    killed = RankState(2, "host0", 102, silence="has ended")
    failed = state(1, error="all_reduce failed: Connection closed by peer", follows=True)
    gone = RankState(3, "host0", 103, silence="has ended", error="CollectiveError: lost, at train.py:41", follows=True)
    waiting = state(0, operation(17))
    assert findings([waiting, failed, killed, gone]) == ["rank 2 (host host0, pid 102) has ended"]
    # If no other is known, those that have ended are named.
    assert findings([waiting, failed, gone])[0].startswith("rank 3 (host host0, pid 103) has ended: CollectiveError")
    cause = state(2, error="ValueError: boom", place="data.py:3")
    assert (
        findings([waiting, failed, cause])[0]
        == "rank 2 (host host0, pid 102) has failed at data.py:3: ValueError: boom"
    )


def test_a_rank_that_has_ended_after_its_part_is_not_blamed() -> None:
    gone = {"silence": "has ended without an exception"}
    others = [state(rank, operation(2, done=rank == 0), **gone) for rank in (0, 2)]
    assert not findings([others[0], state(1, operation(2)), others[1]])
    found = findings([others[0], state(1, operation(2, shape=(5,))), others[1]])
    assert found[0].startswith("mismatch in operation 2: ranks 0, 2") and len(found) == 1
    found = findings([state(0, operation(1, done=True), **gone), state(1, operation(2))])
    assert found == ["rank 0 (host host0, pid 100) has ended without an exception"]


def test_only_the_last_of_a_chain_is_blamed() -> None:
    """Rank 2 waits for rank 0, which waits in a group's first call for rank 1."""
    first = OperationRecord("the first call", ranks=(0, 1), seconds=9.0)
    chain = [state(0, operation(1, done=True), first), state(1, operation(1, done=True)), state(2, operation(2))]
    (found,) = findings(chain)
    assert found.startswith("rank 1 ") and found.endswith("not come to the first call of ranks 0, 1")
    circle = [state(0, operation(1, ranks=(0, 1), group="a")), state(1, operation(1, ranks=(0, 1), group="b"))]
    assert len(findings(circle)) == 2


def test_an_operation_that_all_are_in_is_said_to_be_so() -> None:
    text = report("title", [state(0, operation(3)), state(1, operation(3))])
    assert text.splitlines()[-1].startswith("  => All ranks are in it, and it does not complete")


def test_a_state_survives_json() -> None:
    one = state(1, operation(3, ranks=(0, 1)), operation(0, "join", shape=None), error="x", follows=True)
    assert RankState.from_row(json.loads(json.dumps(one.to_row()))) == one


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((3,), "3"),
        ((0, 1), "0, 1"),
        ((0, 1, 2, 5), "0 to 2, 5"),
        (tuple(range(0, 40, 2)), "0, 2, 4, 6, 8, 10, 12, 14, ... (20 in all)"),
    ],
)
def test_format_ranks(ranks: tuple[int, ...], text: str) -> None:
    assert format_ranks(ranks) == text


# ------------------------------------------------------------------------------------ operations
def test_recent_operations_are_numbered_by_group_and_keep_no_tensor() -> None:
    recent = RecentOperations()
    first = recent.begin("all_reduce", (), torch.ones(2, 3))
    recent.begin("broadcast", (0, 2), torch.ones(1, dtype=torch.int64))
    first.done = True
    one, two = recent.records()
    assert (str(one), one.done) == ("all_reduce of float32 [2, 3], operation 1", True)
    assert (str(two), two.done) == ("broadcast of int64 [1], operation 1 of ranks 0, 2", False)
    for _ in range(100):
        recent.begin("all_reduce", (), torch.ones(1))
    assert recent.records()[-1].number == 101 and len(recent.records()) == 32


def entry(number: int, **more: object) -> dict[str, object]:
    return {
        "collective_seq_id": number, "input_dtypes": ["Long"], "input_sizes": [[2]], "is_p2p": False, "p2p_seq_id": 0,
        "process_group": ["0", "default_pg"], "profiling_name": "gloo:all_gather", "retired": True,
        "state": "scheduled", "time_created_ns": 10**9, **more,
    }  # fmt: skip


@pytest.mark.parametrize("begin", ["", " "])  # another version may write it otherwise
def test_the_newest_entries_of_the_flight_recorder_are_read(begin: str) -> None:
    rows = [json.dumps(entry(number), separators=(",", ":")) for number in range(1, 101)]
    dump = '{"comm_lib_version":"","entries":[' + begin.join(["", *[f"{row}," for row in rows]])[:-1]
    dump += '],"pg_status":{"0":{"last_completed_collective":"8"}}}'
    if begin:
        dump = dump.replace('{"collective_seq_id"', '{ "collective_seq_id"')
    found = flight_recorder._entries(dump.encode())
    assert [each["collective_seq_id"] for each in found] == list(range(37, 101))
    assert flight_recorder._entries(b'{"entries":[],"version":"2"}') == []


def test_an_entry_of_the_flight_recorder() -> None:
    record = flight_recorder.record_of(entry(7, retired=False), (0, 2), 3 * 10**9)
    assert str(record) == "all_gather of int64 [2], operation 7 of ranks 0, 2"
    assert not record.done and record.seconds == 2.0 and record.group == "0"


# ------------------------------------------------------------------------------------ the user's line
def test_the_line_is_the_users_own() -> None:
    found: list[str] = []
    layer = torch.nn.Linear(1, 1)
    layer.register_forward_hook(lambda *_: found.append(locations.location_of(threading.get_ident())))

    def step() -> None:
        torch.nn.Sequential(layer)(torch.ones(1))  # inside torch's modules the hook is the innermost line

    step()
    assert found[0].startswith("tests/test_watch.py:") and found[0].endswith("(<lambda>)")
    waiting = threading.Event()
    thread = threading.Thread(target=waiting.wait, daemon=True)
    thread.start()
    time.sleep(0.05)
    # Nothing in it is the user's.
    assert thread.ident is not None and "threading.py" in locations.location_of(thread.ident)
    assert "in wait" in locations.stacks() and "test_the_line_is_the_users_own" not in locations.stacks()
    waiting.set()
    try:
        json.loads("{")
    except ValueError as error:
        assert "test_the_line_is_the_users_own" in locations.location_in(error.__traceback__)


# ------------------------------------------------------------------------------------ the server
def peer(port: int, pid: int | None = None) -> Peer:
    own = Process.current()
    return Peer(own if pid is None else own._replace(pid=pid), "127.0.0.1", port)


@contextmanager
def serving(answer: Callable[[Mapping[str, Any]], object]) -> Iterator[tuple[Peer, bytes]]:
    listening, key = socket.create_server(("127.0.0.1", 0)), new_secret()
    server = Server(listening, key, answer, lambda: 60.0, 60.0)
    at = peer(listening.getsockname()[1])
    server.start()
    try:
        yield at, key
    finally:
        server.close()


@pytest.fixture
def server() -> Iterator[tuple[Peer, bytes]]:
    with serving(lambda request: {"echo": request}) as found:
        yield found


def test_a_comparison_has_the_name_of_what_is_compared() -> None:
    """And no operation of the user's, nor an earlier comparison; also where the library counts it as done."""
    call = {"name": "reduce_scatter", "dtype": "float32", "shape": (6,)}
    backend = SimpleNamespace(comparing=ComparedCall(call, 0, time.monotonic() - 1.0))
    pair: dict[str, object] = {"dtype": "int64", "shape": (2,)}
    before, compared = operation(3, seconds=2.0, done=True, **pair), operation(4, seconds=0.5, done=True, **pair)
    user = operation(5, seconds=0.5, dtype="float32", shape=(2,))
    found = Backend.as_called(backend, [before, compared, user])  # type: ignore[arg-type]
    assert found == [before, compared._replace(name="reduce_scatter", dtype="float32", shape=(6,)), user]


def test_only_who_knows_the_secret_is_answered(server: tuple[Peer, bytes]) -> None:
    at, key = server
    assert ask({3: at}, key, {"what": "state"}, 2.0) == {3: {"echo": {"what": "state"}}}
    assert isinstance(ask({3: at}, new_secret(), {"what": "state"}, 2.0)[3], ConnectionError)


def test_strangers_delay_nobody(server: tuple[Peer, bytes]) -> None:
    at, key = server
    strangers = [socket.create_connection(("127.0.0.1", at.port)) for _ in range(20)]
    strangers[0].sendall(b"GET / HTTP/1.0\n")
    strangers[1].sendall(frame(key + b"no hello"))
    began = time.monotonic()
    assert isinstance(ask({0: at}, key, {}, 20.0)[0], dict) and time.monotonic() - began < 4
    for stranger in strangers:
        stranger.close()


def test_many_are_asked_at_once_and_who_does_not_answer_costs_the_time_once(server: tuple[Peer, bytes]) -> None:
    at, key = server
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as ended:
        closed = peer(ended.getsockname()[1])
        ended.close()
        peers = dict.fromkeys(range(300), at) | {300: closed, 301: peer(silent.getsockname()[1])}
        peers[302] = Peer(at.process, "", 0)
        began = time.monotonic()
        answers = ask(peers, key, {}, 2.0)
        assert time.monotonic() - began < 4
    assert all(isinstance(answers[rank], dict) for rank in range(300))
    assert isinstance(answers[300], ConnectionError)
    assert isinstance(answers[301], TimeoutError) and isinstance(answers[302], TimeoutError)


def test_a_stopped_process_is_told_from_one_that_has_ended() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        try:
            os.kill(process.pid, signal.SIGSTOP)
            at = peer(silent.getsockname()[1], process.pid)
            while at.process.state() != "T":
                time.sleep(0.01)
            (one,) = states({0: at}, new_secret())
            assert one.silence.startswith("is stopped")
        finally:
            process.kill()
            process.communicate()
        words = {0: {"silence": "has ended", "error": "ValueError: boom", "follows": False}}
        (one,) = states({0: at}, new_secret(), exits=words)
        assert (one.silence, one.error) == ("has ended", "ValueError: boom")


# ------------------------------------------------------------------------------------ the files of jobs
@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(jobs, "_SHARED", tmp_path)
    monkeypatch.setattr(jobs, "_directories", lambda: [tmp_path / "unidist"])
    return tmp_path / "unidist"


def test_the_file_of_a_rank_is_the_users_alone_and_goes_with_it(directory: Path) -> None:
    key = new_secret()
    path = jobs.write(1, "gloo", key, {0: peer(1), 1: peer(2)})
    assert path is not None and path.stat().st_mode & 0o777 == 0o600 and directory.stat().st_mode & 0o777 == 0o700
    (job,) = jobs.running()
    assert (job.pid, job.rank, job.backend, job.key, job.peers[1].port) == (os.getpid(), 1, "gloo", key, 2)
    # A process that has ended, whose pid another one may have.
    path.write_text(json.dumps(json.loads(path.read_text()) | {"start": "1"}))
    assert jobs.running() == [] and not path.exists()
    # Of a container that shares the directory; there it runs.
    elsewhere = directory / "1-4194303.json"
    elsewhere.write_text(path.name)
    assert jobs.write(1, "gloo", key, {}) and [job.pid for job in jobs.running()] == [os.getpid()]
    assert elsewhere.exists()
    directory.chmod(0o777)
    assert jobs.running() == []


def test_a_directory_that_another_user_made_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(jobs, "_SHARED", tmp_path)
    theirs = tmp_path / f"unidist-{os.getuid()}"
    theirs.mkdir()
    if os.getuid():
        theirs.chmod(0o777)
    else:
        os.chown(theirs, 65534, 65534)
    path = jobs.write(1, "gloo", new_secret(), {0: peer(1), 1: peer(2)})
    assert path is not None and path.parent.stat().st_mode & 0o777 == 0o700 and not list(theirs.iterdir())
    assert os.getpid() in [job.pid for job in jobs.running()]
    path.unlink()


def test_where_without_a_job_and_with_several(directory: Path, server: tuple[Peer, bytes]) -> None:
    none = CliRunner().invoke(main, ["where"])
    assert none.exit_code == 1 and "no job of yours runs on this host" in none.output
    path = jobs.write(0, "gloo", new_secret(), {0: peer(1), 1: peer(1)})
    assert path is not None
    other = json.loads(path.read_text()) | {"pid": os.getppid(), "start": start_time(os.getppid()), "key": "00"}
    path.with_name(path.name.replace(str(os.getpid()), str(os.getppid()))).write_text(json.dumps(other))
    several = CliRunner().invoke(main, ["where"])
    assert several.exit_code == 1 and "2 jobs of yours run on this host. Which one?" in several.output
    assert f"unidist where {os.getpid()}   (gloo, 2 ranks, here 0)" in several.output
    stranger = CliRunner().invoke(main, ["where", "1"])
    assert stranger.exit_code == 1 and "process 1 is no rank" in stranger.output
    chosen = CliRunner().invoke(main, ["where", str(os.getpid())])
    assert chosen.exit_code == 0 and "has ended" in chosen.output, chosen.output
    as_json = json.loads(CliRunner().invoke(main, ["where", str(os.getpid()), "--json"]).output)
    assert len(as_json["ranks"]) == 2 and as_json["findings"]


def test_where_waits_for_a_rank_of_an_overloaded_host(directory: Path) -> None:
    def late(request: Mapping[str, Any]) -> object:
        time.sleep(1.2)
        return {"state": state(0, place="train.py:7 (step)").to_row(), "exits": {}}

    with serving(late) as (at, key):
        assert jobs.write(0, "gloo", key, {0: at}) is not None
        result = CliRunner().invoke(main, ["where", str(os.getpid())])
    assert "at train.py:7 (step)" in result.output and "does not answer" not in result.output, result.output


# ------------------------------------------------------------------------------------ SIGUSR1
def test_sigusr1_reaches_the_pipe_and_has_its_default_action_afterwards() -> None:
    waited = ReportSignal.open()
    assert waited is not None
    os.kill(os.getpid(), signal.SIGUSR1)
    assert select.select([waited.pipe], [], [], 2.0)[0]
    waited.clear()
    assert not select.select([waited.pipe], [], [], 0.0)[0]
    waited.close()
    code = "import os, signal; from unidist.diagnosis.watch.signals import ReportSignal; ReportSignal.open().close(); "
    ended = subprocess.run([sys.executable, "-c", code + "os.kill(os.getpid(), signal.SIGUSR1)"])
    assert ended.returncode == -signal.SIGUSR1


def test_a_users_handler_of_sigusr1_stays() -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: got.append(number))
    try:
        assert ReportSignal.open() is None
        os.kill(os.getpid(), signal.SIGUSR1)
        assert got == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)
