"""Ranks that wait for another one: reports and errors name the rank, the operation and the line, on every engine."""

import re
import socket
from datetime import timedelta
from pathlib import Path

import pytest

from tests.support.worlds import ROOT, load, run_world, scaled

#: Seconds of UNIDIST_STALL_S; a report comes at most one second later.
STALL_S = 2
PROGRAM = "tests/programs/stalls.py"
LINES = (ROOT / PROGRAM).read_text().splitlines()
#: A line of the program, as it is shown.
AT = PROGRAM.replace(".", r"\.")
HOST = re.escape(socket.gethostname())


def line(text: str) -> int:
    return next(number for number, each in enumerate(LINES, 1) if text in each)


def clean(output: str) -> str:
    """Without the prefixes of launchers."""
    return re.sub(r"^(\[\d+\]<std\w+>:|\[rank\d+\]: )", "", output, flags=re.MULTILINE)


ENGINES = [
    ("torchrun", "gloo", "unidist", "backward"),
    ("openmpi", "mpi", "unidist", "swapped"),
    ("horovodrun", "horovod", "unidist", "shape"),
    ("torchrun", "gloo", "hvd", "SIGKILL"),
]


@pytest.mark.parametrize(("launcher", "backend", "how", "last"), ENGINES)
def test_the_rank_the_call_and_the_line_are_named_in_time(
    launcher: str, backend: str, how: str, last: str, tmp_path: Path
) -> None:
    # Python may start slowly where a user asks.
    env = {"UNIDIST_STALL_S": str(STALL_S), "UNIDIST_TIMEOUT": scaled(20 if last == "backward" else 7)}
    argv = [PROGRAM, how, last, *([str(tmp_path / "asked")] if last == "backward" else [])]
    result = run_world(launcher, 3, argv, backend=backend, env=env, fresh=True)
    output = clean(result.output)
    assert result.returncode != 0, output
    reports = re.findall(r"^unidist: (?!rank \d has got).*?(?=^(?!  ))", output, re.MULTILINE | re.DOTALL)
    call = r"allreduce\.loop of float32 \[1000\]" if how == "hvd" else r"all_reduce of float32 \[1000\], operation \d+"
    slow = line("time.sleep(LATE_S)  # a slow disk")
    assert reports, output
    looping = re.search(
        rf"=> Rank 1 \(host {HOST}, pid (\d+)\) is at {AT}:(\d+) \(endless_loop\).*, and has not come to {call}",
        reports[0],
    )
    # The first report of it: a longer stall is reported again, and ranks may then answer from the next one.
    found = (re.search(rf"=> Rank 2 .* is at {AT}:{slow} \(__getitem__\)", each) for each in reports)
    loading = next(filter(None, found), None)
    assert looping and loading, output
    for report in (looping.string, loading.string):
        waited = re.search(r"has waited (\d+) s", report)
        assert waited and int(waited[1]) in (STALL_S, STALL_S + 1), output
    assert re.search(rf"ranks 0, 2 \(host {HOST}, .*\): at {AT}:\d+ \(reduce\) in {call}, for [23] s", reports[0]), (
        output
    )
    assert f"rank 1 is {looping[1]}" in output, output
    assert int(looping[2]) in range(line("def endless_loop"), line("def ask")), output
    {"backward": killed_in_backward, "swapped": swapped, "shape": shapes, "SIGKILL": killed}[last](output)


def killed_in_backward(output: str) -> None:
    """The errors of DDP's backward pass, which calls no code of this package; and what a user asks meanwhile."""
    at = line("model(torch.ones(3, 10)).sum().backward()")
    error = (
        rf"rank [02] of 3 \(gloo\): backward \(all_reduce of float32 \[110\], operation \d+\), at {AT}:{at} \(last\): "
    )
    assert re.search(error + rf"rank 1 \(host {HOST}, pid \d+\) has ended", output), output
    shown = re.search(r"WHERE\n(.*)END", output, re.DOTALL)
    assert shown and re.search(rf"=> Rank 1 .* is at {AT}:\d+ \(endless_loop\)", shown[1]), output
    # Stacks, of ranks that wait in C++ too.
    assert shown[1].count("thread MainThread:") == 3 and shown[1].count("in endless_loop") == 1, output
    assert "work.wait()" in shown[1], output
    assert output.count("unidist: rank 2 has got SIGUSR1. All 3 ranks (gloo):") == 1, output


def swapped(output: str) -> None:
    """An error of MPI, or a timeout."""
    calls = (
        rf"mismatch in operation \d+: rank 0 \(host {HOST}, pid \d+\) called all_reduce of float32 \[4\],?( now)? at "
        rf"{AT}:\d+ \(\w+\); ranks 1, 2 \(host {HOST}, pids .*\) called all_reduce of float32 \[1\]"
    )
    assert re.search(rf"rank \d of 3 \(mpi\): .*operation \d+.*, at {AT}:\d+ \(\w+\).*: {calls}", output), output


def shapes(output: str) -> None:
    error = (
        r"rank [012] of 3 \(horovod\): all_reduce of float32 \[\d\], operation \d+, at .*: mismatch in operation \d+: "
    )
    assert re.search(error + r".*rank 1 .* called all_reduce of float32 \[5\]", output), output


def killed(output: str) -> None:
    # Two ranks print a traceback at once; its last line is not written in one piece.
    assert re.search(rf"allreduce\.last: rank 1 \(host {HOST}\) is gone", output), output
    assert "HorovodInternalError" in output, output


def test_a_call_of_one_rank_alone_is_told_from_late_ones(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT / 'tests/programs')!r})\n"
        "sys.argv[1:] = ['unidist', 'rank 0 only']\n"
        "import stalls, unidist\n"
        "unidist.init()\n"
        "stalls.last()\n"
    )
    env = {"UNIDIST_STALL_S": "1", "UNIDIST_TIMEOUT": scaled(3)}
    result = run_world("torchrun", 2, [str(program)], backend="gloo", env=env, fresh=True)
    calls = (
        rf"ismatch in operation 2: rank 0 \(host {HOST}, pid \d+\) called all_reduce of float32 \[4\] at {AT}:\d+ "
        rf"\(reduce\); rank 1 \(host {HOST}, pid \d+\) called all_reduce of float32 \[1\]"
    )
    assert re.search(f"=> M{calls}", result.output), result.output
    assert re.search(rf"rank 0 of 2 \(gloo\): .*m{calls}", result.output), result.output


CHECKED = """
import os, torch, unidist
from unidist import context

unidist.init()
rank = unidist.rank()
group = unidist.new_group([0, 1])

def told(call):
    try:
        call()
    except unidist.MismatchError as error:
        os.write(1, f"rank {rank}: {error}\\n".encode())

context.current().calls[None] = 1000
model = torch.nn.Linear(2, 1)
told(lambda: (unidist.broadcast_model_state if rank else unidist.assert_in_sync)(model))  # the same collectives inside
told(unidist.barrier if rank else lambda: unidist.save_checkpoint("never", model=model))  # call
told(lambda: unidist.all_reduce(torch.ones(3, dtype=torch.float32 if rank else torch.float64)))  # dtype
told(lambda: unidist.broadcast(torch.ones(3), src=rank))  # root
told(lambda: unidist.all_reduce(torch.ones(3), "sum" if rank else "max", group))  # op
# Calls that match, from different lines too.
total = unidist.all_reduce(torch.ones(3)) if rank else unidist.all_reduce(
    torch.ones(3))
assert total.tolist() == [2.0] * 3 and unidist.all_gather(torch.ones(rank + 1)).numel() == 3
assert unidist.all_gather_object("x" * rank) == ["", "x"] and unidist.allreduce_metric(2.0) == 2.0
model = unidist.wrap_model(torch.nn.Linear(2, 1))
model(torch.ones(1, 2)).sum().backward()
with unidist.join(model):
    for _ in range(rank + 1):
        unidist.all_reduce(torch.ones(1))
unidist.barrier(group)
unidist.shutdown()
os.write(1, f"rank {rank} is done\\n".encode())
"""


def test_unidist_check_compares_calls_before_they_are_made(tmp_path: Path) -> None:
    program = tmp_path / "checked.py"
    program.write_text(CHECKED)
    result = run_world("torchrun", 2, [str(program)], backend="gloo", env={"UNIDIST_CHECK": "1"})
    assert result.returncode == 0 and result.output.count("is done") == 2, result.output
    for calls in (
        r"rank 0: assert_in_sync at .*checked\.py:\d+ \(<lambda>\); rank 1: broadcast_model_state at",
        r"rank 0: save_checkpoint at .*?; rank 1: barrier at .*checked\.py:\d+ \(told\)",
        r"rank 0: all_reduce \(sum\) of float64 \(3,\) at .*?; rank 1: all_reduce \(sum\) of float32 \(3,\)",
        r"rank 0: broadcast \(from rank 0\) of float32 \(3,\) at .*?; rank 1: broadcast \(from rank 1\)",
        r"rank 0: all_reduce \(max\) of float32 \(3,\) at .*?; rank 1: all_reduce \(sum\)",
    ):
        found = re.findall(
            rf"rank (\d): rank \1 of 2 \(gloo\): the ranks do not make the same call: {calls}", result.output
        )
        assert sorted(found) == ["0", "1"], f"{calls}\n{result.output}"


def test_ranks_that_wait_with_pythons_lock_end() -> None:
    """As all ranks may do in Horovod when one is stopped: none of them can report."""
    code = """
import ctypes, time, unidist
unidist.init()
unidist.barrier()
time.sleep(1)
ctypes.PyDLL(None).sleep(600)
"""
    timeout = scaled(3)
    env = {"UNIDIST_STALL_S": "0.5", "UNIDIST_TIMEOUT": timeout}
    result = run_world("horovodrun", 2, ["-c", code], backend="horovod", env=env)
    assert result.returncode != 0 and result.seconds < 45 * load(), result.output
    expected = rf'Timeout \({timedelta(seconds=int(timeout) + 1)}\)!(.*\n)*.*File "<string>", line 6'
    assert re.search(expected, result.output), result.output
