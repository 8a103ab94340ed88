"""Processes of a launcher: run to their end, or ended."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil


@dataclass
class Result:
    """How a world ended."""

    #: The first status other than 0 of its launchers.
    returncode: int
    #: What all ranks printed, on either stream.
    output: str
    seconds: float


def run(
    commands: Sequence[Sequence[str]],
    env: Mapping[str, str],
    *,
    timeout: float,
    cwd: str | os.PathLike[str] | None = None,
    on_line: Callable[[str], None] = lambda line: None,
) -> Result:
    """Run the commands of one world together, and wait for their end.

    Args:
        commands: one, or one for each node's agent.
        env: the whole environment of each.
        timeout: seconds after which all are killed.
        cwd: the directory that they run in. Default: this process's.
        on_line: called with each line of output as it comes.

    Raises:
        TimeoutError: the world did not end in time; it says what was printed until then.
    """
    start = time.monotonic()
    lines: list[str] = []
    running = [
        subprocess.Popen(
            command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", start_new_session=True,
        )
        for command in commands
    ]  # fmt: skip

    def read(process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                lines.append(line)
                on_line(line)

    readers = [threading.Thread(target=read, args=(process,), daemon=True) for process in running]
    for reader in readers:
        reader.start()
    late = False
    try:
        for process in running:
            process.wait(max(0.1, start + timeout - time.monotonic()))
    except subprocess.TimeoutExpired:
        late = True
    finally:
        for process in running:
            kill(process)
    for reader in readers:
        reader.join(10)
    output = "".join(lines)
    if late:
        raise TimeoutError(f"{' '.join(commands[0][:8])} ... did not end within {timeout:.0f} s:\n{output}")
    codes = [process.returncode for process in running]
    return Result(next((code for code in codes if code), 0), output, time.monotonic() - start)


def kill(launcher: subprocess.Popen[str]) -> None:
    """End a launcher and all that it started, politely first."""
    started = []
    with suppress(psutil.NoSuchProcess):
        # Workers may be in sessions of their own, so the family tree is asked while it stands.
        started = psutil.Process(launcher.pid).children(recursive=True)
    if launcher.poll() is None:
        launcher.terminate()
        with suppress(subprocess.TimeoutExpired):
            launcher.wait(5)
    for process in started:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    launcher.kill()
    launcher.wait()


def output_of(*command: str) -> str:
    """Return what the command prints, or an empty string where there is no such command."""
    with suppress(OSError):
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout
    return ""
